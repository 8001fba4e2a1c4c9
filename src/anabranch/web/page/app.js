/** The shell of the page: navigation, session, theme, and which screen is shown. */
import { ApiError, events, get, loadSession, post, remove, session } from "./api.js";
import { button, clear, closeDialogs, dialog, field, h, icon, keepFocus, problem, toast } from "./dom.js";
import { closePanel, initPanel, openSource } from "./viewer.js";

const SCREENS = [
  { name: "ask", title: "Ask", load: () => import("./ask.js").then((module) => module.askScreen) },
  { name: "library", title: "Library", load: () => import("./library.js").then((module) => module.libraryScreen) },
  { name: "sources", title: "Sources", load: () => import("./sources.js").then((module) => module.sourcesScreen) },
  { name: "streams", title: "Streams", load: () => import("./streams.js").then((module) => module.streamsScreen) },
  { name: "activity", title: "Activity", load: () => import("./activity.js").then((module) => module.activityScreen) },
];
const HIDDEN = [{ name: "answers", title: "Answer", load: () => import("./ask.js").then((module) => module.answerScreen) }];
const THEMES = ["auto", "light", "dark"];
const THEME = "anabranch.theme";

const main = document.getElementById("main");
let leave = () => {};

const links = SCREENS.map(({ name, title }) => h("a", { href: `#/${name}`, class: "nav-link" }, icon(name, 20), h("span", null, title)));

function markCurrent(name) {
  links.forEach((link, index) => {
    if (SCREENS[index].name === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  });
}

function drawAccount() {
  const theme = localStorage.getItem(THEME) ?? "auto";
  const who = session.signed_in ? (session.user ?? "Operator") : session.local ? "This machine" : "Not signed in";
  clear(
    document.getElementById("account"),
    button(`Theme: ${theme}`, nextTheme, { icon: "theme", hidden: true, kind: "quiet icon-only", "data-focus": "theme" }),
    session.signed_in
      ? button("Sign out", signOut, { icon: "key", kind: "quiet", title: `Signed in as ${who}` })
      : button("Sign in", () => signIn(), { icon: "key", kind: "quiet" }),
    h("span", { class: "who" }, who, session.signed_in && session.operator ? " (operator)" : ""),
  );
}

function applyTheme() {
  const theme = localStorage.getItem(THEME) ?? "auto";
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
}

function nextTheme() {
  const theme = THEMES[(THEMES.indexOf(localStorage.getItem(THEME) ?? "auto") + 1) % THEMES.length];
  localStorage.setItem(THEME, theme);
  applyTheme();
  drawAccount();
  toast(`Theme: ${theme === "auto" ? "as the system" : theme}`, { lasts_ms: 1500 });
}

let asking = null;

/** Asks for an API key. */
export function signIn(reason) {
  if (asking?.open) return;
  const key = h("input", { type: "password", autocomplete: "off", spellcheck: "false", required: true });
  const note = h("div", { role: "alert" });
  const submit = async (event) => {
    event.preventDefault();
    try {
      await post("/v1/session", { key: key.value.trim() });
      await loadSession();
      asking.close();
      drawAccount();
      show();
    } catch (error) {
      clear(note, h("p", { class: "problem" }, error.message));
      key.select();
    }
  };
  asking = dialog(
    "Sign in",
    h("p", null, reason ?? "Sign in with an API key. It is kept in a cookie that no script can read."),
    h(
      "form",
      { onSubmit: submit },
      field("API key", key, "The operator of this server makes keys: anabranch keys create --user NAME"),
      note,
      h("div", { class: "row end" }, h("button", { type: "submit", class: "button primary" }, "Sign in")),
    ),
  );
  key.focus();
}

async function signOut() {
  await remove("/v1/session").catch((error) => toast(error.message, { kind: "error" }));
  sessionStorage.clear();
  localStorage.removeItem("anabranch.scope");
  await loadSession().catch(() => {});
  location.reload();
}

/** The address: `#/screen/part/part?name=value`. */
function where() {
  const [address, query] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = address.split("/").filter(Boolean).map(decode);
  return { name: parts[0] || "ask", parts: parts.slice(1), query: new URLSearchParams(query ?? "") };
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/** Another screen: the keyboard begins there, and what was open over the last one is closed. */
function go() {
  closeDialogs();
  main.focus({ preventScroll: true });
  return show();
}

async function show() {
  let { name, parts, query } = where();
  const document_id = name === "documents" ? parts[0] : undefined;
  const [begin, end] = [Number(query.get("start")), Number(query.get("end"))];
  if (document_id) {
    // The link to the words of a document: the page has no screen of them, they open beside the questions.
    history.replaceState(null, "", "#/ask");
    ({ name, parts, query } = where());
  }
  const screen = [...SCREENS, ...HIDDEN].find((one) => one.name === name) ?? SCREENS[0];
  markCurrent(screen.name);
  document.title = `${screen.title} · Anabranch`;
  document.body.dataset.screen = screen.name;
  leave();
  leave = () => {};
  closePanel();
  // A screen that is drawn late, after another one was opened, draws where nobody sees it.
  const container = h("div", { class: "view" }, loading());
  clear(main, container);
  let draw = null;
  try {
    draw = await screen.load();
    const left = await draw(container, ...parts, query);
    if (typeof left !== "function") return;
    if (container.isConnected) leave = left;
    else left();
  } catch (error) {
    const known = error instanceof ApiError;
    if (draw && !known) console.error(error);
    const told = known ? error : new ApiError(draw ? `This screen could not be loaded: ${error.message}` : "The connection was interrupted.");
    // The browser keeps a module that it could not load as it is: only a reload loads it again.
    clear(container, h("div", { class: "screen" }, h("h1", null, screen.title), problem(told, known ? show : () => location.reload())));
  } finally {
    if (container.isConnected && document.activeElement === main) keepFocus();
    if (document_id && container.isConnected) openSource({ document_id, spans: end > begin ? [{ start: begin, end }] : [] });
  }
}

const loading = () => h("p", { class: "screen hint loading" }, "Loading…");

/** Another user may have signed in, in another tab: nothing of the last one stays, and nobody asks in another's name. */
async function checkUser() {
  if (document.hidden) return;
  const now = await get("/v1/session").catch(() => session);
  if (now.user !== session.user || now.signed_in !== session.signed_in) location.reload();
}

async function start() {
  applyTheme();
  // Shown from the beginning, so that a screen reader announces what is added to it.
  document.getElementById("toasts").showPopover();
  initPanel();
  clear(document.getElementById("nav"), links);
  markCurrent(where().name);
  events.addEventListener("needs-key", () => session.needs_key && signIn("This server asks for an API key."));
  addEventListener("hashchange", go);
  // The address of a document becomes that of the questions: going back from there changes no hash.
  addEventListener("popstate", closePanel);
  document.querySelector(".skip")?.addEventListener("click", (event) => {
    event.preventDefault();
    main.focus();
  });
  try {
    await loadSession();
  } catch (error) {
    clear(main, problem(error, () => location.reload()));
    return;
  }
  addEventListener("focus", checkUser);
  document.addEventListener("visibilitychange", checkUser);
  drawAccount();
  if (session.needs_key && !session.signed_in) {
    clear(main, h("div", { class: "screen" }, h("div", { class: "empty" }, h("h1", null, "Sign in to ask"), h("p", null, "This server holds documents, so it asks for an API key."), button("Sign in", () => signIn(), { icon: "key", kind: "primary" }))));
    signIn();
    return;
  }
  await show();
  // The other screens open without the network then, which may be worse by that time.
  for (const { load } of SCREENS) load().catch(() => {});
}

start();
