/** The shell of the page: navigation, session, theme, and which screen is shown. */
import { ApiError, events, loadSession, post, remove, session } from "./api.js";
import { button, clear, dialog, field, h, icon, problem, toast } from "./dom.js";
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

function drawNavigation(current) {
  clear(
    document.getElementById("nav"),
    SCREENS.map(({ name, title }) =>
      h("a", { href: `#/${name}`, class: "nav-link", "aria-current": name === current ? "page" : null }, icon(name, 20), h("span", null, title)),
    ),
  );
}

function drawAccount() {
  const theme = localStorage.getItem(THEME) ?? "auto";
  const who = session.signed_in ? (session.user ?? "Operator") : session.local ? "This machine" : "Not signed in";
  clear(
    document.getElementById("account"),
    button(`Theme: ${theme}`, nextTheme, { icon: "theme", hidden: true, kind: "quiet icon-only" }),
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
  if (asking?.isConnected) return;
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
  drawNavigation(screen.name);
  document.title = `${screen.title} · Anabranch`;
  document.body.dataset.screen = screen.name;
  leave();
  leave = () => {};
  closePanel();
  // A screen that is drawn late, after another one was opened, draws where nobody sees it.
  const container = h("div", { class: "view" });
  clear(main, container);
  try {
    const draw = await screen.load();
    const left = await draw(container, ...parts, query);
    if (typeof left !== "function") return;
    if (container.isConnected) leave = left;
    else left();
  } catch (error) {
    const known = error instanceof ApiError ? error : new ApiError(`This screen could not be loaded: ${error.message}`);
    if (!(error instanceof ApiError)) console.error(error);
    clear(container, h("div", { class: "screen" }, h("h1", null, screen.title), problem(known, show)));
  } finally {
    if (document_id && container.isConnected) openSource({ document_id, spans: end > begin ? [{ start: begin, end }] : [] });
  }
}

async function start() {
  applyTheme();
  // Shown from the beginning, so that a screen reader announces what is added to it.
  document.getElementById("toasts").showPopover();
  initPanel();
  drawNavigation(where().name);
  events.addEventListener("needs-key", () => session.needs_key && signIn("This server asks for an API key."));
  addEventListener("hashchange", show);
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
  drawAccount();
  if (session.needs_key && !session.signed_in) {
    clear(main, h("div", { class: "screen" }, h("div", { class: "empty" }, h("h1", null, "Sign in to ask"), h("p", null, "This server holds documents, so it asks for an API key."), button("Sign in", () => signIn(), { icon: "key", kind: "primary" }))));
    signIn();
    return;
  }
  await show();
}

start();
