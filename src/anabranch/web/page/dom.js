/** Builds elements without HTML strings, formats values, and shows short notices and dialogs. */

const SVG = "http://www.w3.org/2000/svg";

/**
 * An element. `on…` properties are listeners, `style` and `dataset` are objects; true is an empty attribute, and false
 * or null is none. Strings become text, so nothing in them is ever read as HTML.
 */
export function h(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2).toLowerCase(), value);
    else if (name === "dataset") Object.assign(element.dataset, value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...shown(children));
  return element;
}

// They turn the order of the letters after them round: a title with one reads "exe.png" and is "gnp.exe".
const OVERRIDES = /[\u202d\u202e]/g;

const shown = (children) =>
  children
    .flat(3)
    .filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (typeof child === "string" ? child.replace(OVERRIDES, "") : child));

export function svg(tag, properties, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(properties ?? {}))
    if (value !== null && value !== undefined) element.setAttribute(name, String(value));
  element.append(...children.flat(2).filter(Boolean));
  return element;
}

const ICONS = {
  ask: "M4 5h16v11H9l-5 4z",
  library: "M5 4h4v16H5zM11 4h4v16h-4zM17.2 4.6l3.4-.8 3 15-3.4.8z",
  sources: "M12 3v6M12 9c0 4-7 3-7 8M12 9c0 4 7 3 7 8M12 9v8M5 20h.01M12 20h.01M19 20h.01",
  streams: "M3 7c4-4 6 4 10 0s6 0 8-1M3 13c4-4 6 4 10 0s6 0 8-1M3 19c4-4 6 4 10 0s6 0 8-1",
  activity: "M3 12h4l3-8 4 16 3-8h4",
  send: "M4 12h15M13 6l6 6-6 6",
  stop: "M7 7h10v10H7z",
  copy: "M8 8h11v12H8zM5 16V4h11",
  download: "M12 4v11M7 11l5 5 5-5M5 20h14",
  link: "M10 14a4 4 0 0 0 6 0l3-3a4 4 0 0 0-6-6l-1 1M14 10a4 4 0 0 0-6 0l-3 3a4 4 0 0 0 6 6l1-1",
  up: "M7 11v9H4v-9zM7 11l4-8a2 2 0 0 1 2 2v4h6l-2 11H7",
  down: "M7 13V4H4v9zM7 13l4 8a2 2 0 0 0 2-2v-4h6L17 4H7",
  again: "M20 11a8 8 0 1 0-2 6M20 4v7h-7",
  close: "M6 6l12 12M18 6L6 18",
  plus: "M12 5v14M5 12h14",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  check: "M5 13l4 4L19 7",
  file: "M6 3h8l4 4v14H6zM14 3v4h4",
  theme: "M12 3a9 9 0 1 0 0 18zM12 3a9 9 0 0 1 0 18",
  key: "M14 10a4 4 0 1 1-4-4 4 4 0 0 1 4 4zM13 13l7 7M17 17l2-2",
  chevron: "M7 10l5 5 5-5",
  explain: "M4 6h16M4 12h10M4 18h6M18 12l3 3-3 3",
  play: "M8 5l11 7-11 7z",
  folder: "M3 6h7l2 2h9v11H3z",
  external: "M14 4h6v6M20 4l-9 9M18 14v6H4V6h6",
};

export function icon(name, size = 18) {
  return svg(
    "svg",
    { viewBox: "0 0 24 24", width: size, height: size, class: "icon", "aria-hidden": "true", focusable: "false" },
    svg("path", { d: ICONS[name] }),
  );
}

/** A button with an icon; its label is its text, or only its name where there is no room. */
export function button(label, onClick, { icon: name, kind = "", hidden = false, ...more } = {}) {
  const content = [name ? icon(name) : null, hidden ? null : h("span", null, label)];
  const title = hidden ? { "aria-label": label, title: label } : {};
  return h("button", { type: "button", class: `button ${kind}`, onClick, ...title, ...more }, content);
}

/** Replaces what is in an element. The focus stays on the same control, if there is one again. */
export function clear(element, ...children) {
  const focused = element.contains(document.activeElement) && element !== document.activeElement ? document.activeElement : null;
  const place = focused ? alike(element, focused).indexOf(focused) : -1;
  element.replaceChildren(...shown(children));
  if (focused) {
    alike(element, focused)[place]?.focus({ preventScroll: true });
    keepFocus(element);
  }
  return element;
}

/** The controls with the same name, or with the same key where names may be equal. */
function alike(element, control) {
  const name = (one) => one.dataset.focus ?? one.getAttribute("aria-label") ?? one.textContent;
  return [...element.querySelectorAll(control.localName)].filter((one) => name(one) === name(control));
}

const topDialog = () => [...document.querySelectorAll("dialog[open]")].at(-1);

/** If the element with the focus is gone, the heading of what is shown gets it: else the keyboard begins at the top of
 * the page again. */
export function keepFocus(near = null) {
  const main = document.getElementById("main");
  if (![null, document.body, main].includes(document.activeElement)) return;
  const place = topDialog() ?? near?.closest("#panel") ?? (main.inert ? document.getElementById("panel") : main);
  const heading = place.querySelector("h1, h2") ?? place;
  heading.tabIndex = -1;
  heading.focus({ preventScroll: true });
}

/** Runs `work` while a control is disabled. A browser takes the focus from a disabled control: it gets it back. */
export async function whileDisabled(control, work) {
  const focused = document.activeElement === control;
  control.disabled = true;
  try {
    await work();
  } finally {
    control.disabled = false;
    if (focused && control.isConnected && [null, document.body].includes(document.activeElement)) control.focus({ preventScroll: true });
  }
}

/** Notices are in the dialog on top: everything outside of it can be neither clicked nor read aloud. */
function placeNotices() {
  const notices = document.getElementById("toasts");
  const place = topDialog() ?? document.body;
  if (notices.parentElement !== place) {
    place.append(notices);
    notices.showPopover();
  }
  return notices;
}

// How much longer a notice stays that is pointed at, or has the focus, when its time is over.
const NOTICED_MS = 2000;

/** A short notice, with one action at most; it waits while it is pointed at or has the focus. Resolves when it is gone: to
 * true if the action was taken. */
export function toast(text, { action, lasts_ms = 6000, kind = "" } = {}) {
  const { promise, resolve } = Promise.withResolvers ? Promise.withResolvers() : deferred();
  const taken = (value) => {
    clearTimeout(timer);
    const focused = note.contains(document.activeElement);
    note.remove();
    if (focused) keepFocus();
    resolve(value);
  };
  const end = () => {
    if (note.matches(":hover, :focus-within")) timer = setTimeout(end, NOTICED_MS);
    else taken(false);
  };
  const note = h(
    "div",
    { class: `toast ${kind}` },
    h("span", null, text),
    action ? button(action, () => taken(true), { kind: "quiet" }) : null,
    button("Dismiss", () => taken(false), { icon: "close", hidden: true, kind: "quiet icon-only" }),
  );
  placeNotices().append(note);
  let timer = setTimeout(end, lasts_ms);
  return promise;
}

function deferred() {
  let resolve;
  return { promise: new Promise((done) => (resolve = done)), resolve };
}

/** A modal dialog; closes with Escape, with its button, or when `close` is called. */
export function dialog(title, ...content) {
  const heading = h("h2", { id: `dialog-${Math.random().toString(36).slice(2)}` }, title);
  const element = h(
    "dialog",
    { "aria-labelledby": heading.id },
    h("div", { class: "dialog-head" }, heading, button("Close", () => element.close(), { icon: "close", hidden: true, kind: "quiet icon-only" })),
    h("div", { class: "dialog-body" }, ...content),
  );
  element.addEventListener("close", () => {
    placeNotices();
    element.remove();
    keepFocus();
  });
  // A click beside the dialog closes it; a selection that is drawn out of it does not.
  let pressed = null;
  element.addEventListener("pointerdown", (event) => (pressed = event.target));
  element.addEventListener("click", (event) => event.target === element && pressed === element && element.close());
  document.body.append(element);
  element.showModal();
  placeNotices();
  return element;
}

/** For a change of the screen: a dialog belongs to the one that opened it. */
export const closeDialogs = () => document.querySelectorAll("dialog[open]").forEach((one) => one.close());

let fieldCount = 0;

/** A labelled control. */
export function field(label, control, hint) {
  control.id ||= `field-${++fieldCount}`;
  const note = hint ? h("p", { class: "hint", id: `${control.id}-hint` }, hint) : null;
  if (note) control.setAttribute("aria-describedby", note.id);
  return h("div", { class: "field" }, h("label", { for: control.id }, label), control, note);
}

export function empty(title, text, ...actions) {
  return h("div", { class: "empty" }, h("h2", null, title), h("p", null, text), actions.length ? h("div", { class: "row" }, ...actions) : null);
}

/** An error as a person reads it, with what to do. */
export function problem(error, retry) {
  return h(
    "div",
    { class: "problem", role: "alert" },
    h("p", null, error.message || String(error)),
    retry ? button("Try again", retry, { icon: "again" }) : null,
  );
}

export const count = (number, one, many = `${one}s`) => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;

export function bytes(size) {
  if (size < 1000) return `${size} B`;
  const units = ["kB", "MB", "GB", "TB"];
  let unit = -1;
  do {
    size /= 1000;
    unit += 1;
  } while (size >= 999.5 && unit < units.length - 1);
  return `${size >= 100 ? Math.round(size) : size.toFixed(1)} ${units[unit]}`;
}

export const duration = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(ms < 10_000 ? 1 : 0)} s`);

const RELATIVE = [
  [60, "second"],
  [3600, "minute"],
  [86_400, "hour"],
  [86_400 * 30, "day"],
];

/** How long ago, as a <time> with the exact moment as its title. */
export function ago(moment) {
  const at = new Date(moment);
  const seconds = (Date.now() - at.getTime()) / 1000;
  let text = at.toLocaleDateString();
  let unit_s = 1;
  for (const [limit_s, unit] of RELATIVE) {
    if (seconds < limit_s) {
      text = seconds < 45 ? "just now" : new Intl.RelativeTimeFormat("en", { numeric: "auto" }).format(-Math.round(seconds / unit_s), unit);
      break;
    }
    unit_s = limit_s === 86_400 * 30 ? 86_400 : limit_s;
  }
  return h("time", { datetime: at.toISOString(), title: at.toLocaleString() }, text);
}

export async function copy(text, done = "Copied.") {
  try {
    await navigator.clipboard.writeText(text);
    toast(done, { lasts_ms: 2500 });
  } catch {
    const area = h("textarea", { rows: 8, readonly: true, "aria-label": "Text to copy" });
    area.value = text;
    dialog("Copy this text", area);
    area.select();
  }
}

export function download(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const anchor = h("a", { href: url, download: name });
  document.body.append(anchor);
  anchor.click();
  anchor.remove();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** Converts offsets in code points, as the server counts, to offsets in a JavaScript string. */
export function offsets(text) {
  if (!/[\ud800-\udbff][\udc00-\udfff]/.test(text)) return (offset) => Math.min(offset, text.length);
  const at = [0];
  for (const character of text) at.push(at[at.length - 1] + character.length);
  return (offset) => at[Math.min(offset, at.length - 1)];
}
