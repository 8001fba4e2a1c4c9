/** The screen for questions: the conversation, the question field, and the choice of sources and model. */
import { followAnswer, askResumable } from "/web/stream.js";
import { collections, events, get, PAGE_HEADERS, path, remove, session } from "./api.js";
import { AnswerState, AnswerView, nameSources, placedCitations, sourceName } from "./answer.js";
import { button, clear, count, dialog, empty, h, icon, problem, toast } from "./dom.js";
import { closePanel } from "./viewer.js";

const KEPT = "anabranch.conversation";
const SCOPE = "anabranch.scope";
const EXTRACTIVE = "extractive";

/** The conversation outlives the screen, and a reload: finished answers are kept as they are, the running one by the id
 * of its stream. */
const conversation = { id: null, turns: [], running: null };
// Whose conversation it is: another user who signs in in the same tab sees nothing of it.
let owner;

function keep() {
  const kept = ({ state, stream, isLean }) => ({
    question: state.question,
    request: state.request,
    stream: state.over ? null : stream,
    finished: state.over ? { text: state.text, passages: state.passages, done: isLean ? { ...state.done, explanation: undefined } : state.done, error: state.error, replies: state.replies, stopped: state.stopped, rating: state.rating } : null,
  });
  do {
    const turns = conversation.turns.filter((turn) => !turn.isForgotten).map(kept);
    try {
      sessionStorage.setItem(KEPT, JSON.stringify({ user: session.user, id: conversation.id, turns }));
      return;
    } catch {
      // The storage is full.
    }
  } while (keepLess());
  sessionStorage.removeItem(KEPT);
}

/** Leaves out of what is kept first the explanations of the finished answers, which are half of it, then the oldest of
 * these answers, one at a time. False if there is nothing left to leave out. */
function keepLess() {
  const finished = conversation.turns.filter((turn) => turn.state.over && !turn.isForgotten);
  const rich = finished.filter((turn) => turn.state.done?.explanation && !turn.isLean);
  for (const turn of rich) turn.isLean = true;
  if (!rich.length && finished.length) finished[0].isForgotten = true;
  return finished.length > 0;
}

function restore() {
  owner = session.user;
  conversation.running?.abort.abort();
  Object.assign(conversation, { id: null, turns: [], running: null });
  let kept = null;
  try {
    kept = JSON.parse(sessionStorage.getItem(KEPT) ?? "null");
  } catch {
    return;
  }
  if (!kept) return;
  if (kept.user !== owner) {
    sessionStorage.removeItem(KEPT);
    localStorage.removeItem(SCOPE);
    return;
  }
  conversation.id = kept.id;
  for (const { question, request, stream, finished } of kept.turns) {
    const turn = { state: new AnswerState(question, request), stream };
    if (finished) {
      Object.assign(turn.state, finished, { error: finished.error });
      if (finished.done) turn.state.finish(finished.done);
      conversation.turns.push(turn);
    } else if (stream) {
      conversation.turns.push(turn);
      resume(turn);
    }
  }
}

export async function askScreen(main, ...address) {
  if (owner !== session.user) restore();
  const wanted = address.at(-1)?.get?.("q");
  const collection = address.at(-1)?.get?.("collection");
  const list = h("div", { class: "turns" });
  const screen = new AskScreen(list);
  clear(main, h("div", { class: "ask" }, h("h1", { class: "unseen" }, "Ask"), screen.welcome, list, screen.composer));
  for (const turn of conversation.turns) screen.show(turn);
  screen.refresh();
  if (collection) screen.scope = { ...screen.scope, collections: [collection], sources: [] };
  screen.loaded = screen.load();
  await screen.loaded;
  if (!list.isConnected) return;
  if (collection) screen.saveScope();
  // What the address brought along is here now; after a reload it would replace what was chosen and asked since.
  if (wanted || collection) history.replaceState(null, "", "#/ask");
  // A link may bring a question along, but only a person asks it.
  if (wanted) screen.input.value = wanted.slice(0, 10_000);
  screen.grow();
  screen.input.focus({ preventScroll: true });
  if (conversation.turns.length) scrollTo({ top: document.body.scrollHeight });
}

class AskScreen {
  constructor(list) {
    this.list = list;
    this.choices = { collections: [], sources: [], models: [] };
    this.scope = loadScope();
    this.welcome = h("div", { class: "welcome" });
    this.input = h("textarea", { rows: 1, placeholder: "Ask a question", "aria-label": "Question", maxlength: 10_000, onInput: () => this.grow(), onKeydown: (event) => this.key(event) });
    this.send = button("Ask", () => this.submit(), { icon: "send", kind: "primary" });
    this.stop = button("Stop", () => stopRunning(), { icon: "stop", kind: "" });
    this.scopeButton = button("All sources", () => this.choose(), { icon: "sources", kind: "quiet" });
    this.model = h("select", { "aria-label": "Model", onChange: () => this.saveScope() });
    this.fresh = button("New conversation", () => this.restart(), { icon: "plus", kind: "quiet fresh" });
    this.composer = h(
      "form",
      { class: "composer", onSubmit: (event) => event.preventDefault() },
      this.input,
      h("div", { class: "row" }, this.scopeButton, this.model, h("span", { class: "spring" }), this.fresh, this.stop, this.send),
    );
  }

  async load() {
    try {
      const [found, sources] = await Promise.all([collections(), session.may_use_configured ? get("/v1/sources").catch(() => ({ sources: [] })) : { sources: [] }]);
      this.choices.collections = found.map((one) => ({ ...one, name: one.called }));
      nameSources(sources.sources);
      this.choices.sources = sources.sources.filter((one) => (one.kind === "space" || one.kind === "mcp") && one.health !== "disabled");
      this.choices.models = sources.sources.filter((one) => one.kind === "model").map((one) => one.name);
    } catch (error) {
      if (error.status !== 401) clear(this.welcome, problem(error, () => this.load()));
      this.failed = true;
      return;
    }
    this.failed = false;
    for (const turn of conversation.turns) turn.view?.update();
    this.forgetUnknown();
    this.drawModels();
    this.drawScope();
    this.drawWelcome();
  }

  drawModels() {
    const names = this.choices.models.filter((name) => name !== EXTRACTIVE);
    const options = [h("option", { value: "" }, names.length ? "Default model" : "Quoted answers"), ...names.map((name) => h("option", { value: name }, name))];
    if (names.length) options.push(h("option", { value: EXTRACTIVE }, "Quotes only"));
    clear(this.model, options);
    this.model.value = [...this.model.options].some((one) => one.value === this.scope.model) ? this.scope.model : "";
    this.model.hidden = !names.length;
  }

  /** What was chosen may be gone by now, or not for this user. */
  forgetUnknown() {
    const known = (kind) => this.scope[kind]?.map((chosen) => this.choices[kind].find(({ id, name }) => chosen === name || chosen === id)?.name).filter(Boolean) ?? null;
    const [collections, sources] = [known("collections"), known("sources")];
    const isEmpty = !collections?.length && !sources?.length;
    Object.assign(this.scope, isEmpty ? { collections: null, sources: null } : { collections, sources });
  }

  drawScope() {
    const { collections, sources } = this.scope;
    const chosen = [...(collections ?? []), ...(sources ?? [])];
    this.scopeButton.querySelector("span").textContent = collections === null && sources === null ? "All sources" : chosen.length === 1 ? chosen[0] : count(chosen.length, "source");
  }

  /** Whether there is neither a document nor a source that could answer. */
  get isEmpty() {
    return !this.failed && !this.choices.sources.length && this.choices.collections.every((one) => !one.document_count);
  }

  drawWelcome() {
    if (conversation.turns.length) {
      clear(this.welcome);
      return;
    }
    if (this.isEmpty) {
      clear(
        this.welcome,
        empty(
          "Nothing to ask yet",
          "Add documents of your own, or connect a source. They stay on this machine.",
          h("a", { class: "button primary", href: "#/library" }, icon("plus"), h("span", null, "Add documents")),
          h("a", { class: "button", href: "#/sources" }, icon("sources"), h("span", null, "Connect a source")),
        ),
      );
      return;
    }
    const chips = [
      ...this.choices.collections.map((one) => [one.name, count(one.document_count, "document")]),
      ...this.choices.sources.map((one) => [one.name, one.kind === "mcp" ? "MCP server" : "remote source"]),
    ];
    clear(
      this.welcome,
      h("p", { class: "hello" }, "Ask all your sources at once"),
      h("p", { class: "lead" }, "Your question goes to every source in parallel. Each sentence of the answer shows the words that support it."),
      h("ul", { class: "chips still", "aria-label": "What is asked" }, chips.slice(0, 12).map(([name, detail]) => h("li", { class: "chip" }, h("span", { class: "dot", "aria-hidden": "true" }), h("span", { class: "chip-name" }, name), h("span", { class: "chip-detail" }, detail)))),
      chips.length > 12 ? h("p", { class: "hint" }, `and ${chips.length - 12} more`) : null,
    );
  }

  refresh() {
    const running = conversation.running !== null;
    // The button that was pressed goes; by touch, the focus would only bring the keyboard up.
    const hadFocus = [this.send, this.stop].some((one) => one.matches(":focus-visible"));
    this.send.hidden = running;
    this.stop.hidden = !running;
    if (hadFocus) this.input.focus({ preventScroll: true });
    this.fresh.hidden = !conversation.turns.length;
    document.body.classList.toggle("asked", conversation.turns.length > 0);
  }

  show(turn) {
    turn.view = new AnswerView(turn.state, { again: () => this.askAgain(turn), changed: keep });
    turn.screen = this;
    this.list.append(turn.view.element);
  }

  grow() {
    this.input.style.setProperty("height", "auto");
    this.input.style.setProperty("height", `${Math.min(this.input.scrollHeight, 220)}px`);
  }

  key(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      this.submit();
    }
  }

  async submit() {
    const question = this.input.value.trim();
    if (!question) return;
    if (conversation.running) {
      toast("The last question is still being answered. Wait for the answer, or stop it.");
      return;
    }
    this.input.value = "";
    this.grow();
    // What may be asked, and by which model, has to be known. Documents may have been added since.
    await this.loaded;
    if (this.isEmpty) await this.load();
    if (this.isEmpty) {
      this.input.value = question;
      this.grow();
      if (await toast("There are no documents yet.", { action: "Add documents" })) location.hash = "#/library";
      return;
    }
    this.ask(question);
  }

  /** The new answer takes the place of one that failed or was stopped; a complete one stays. */
  askAgain(turn) {
    if (conversation.running) return;
    if (turn.state.error || turn.state.stopped) {
      conversation.turns = conversation.turns.filter((one) => one !== turn);
      turn.view.element.remove();
    }
    this.ask(turn.state.question);
    if (document.activeElement === document.body) this.input.focus({ preventScroll: true });
  }

  ask(question) {
    if (conversation.running) return;
    const turn = { state: new AnswerState(question, this.request(question)), stream: null };
    conversation.turns.push(turn);
    clear(this.welcome);
    this.show(turn);
    begin(turn);
    this.refresh();
    turn.view.element.scrollIntoView({ block: "start", behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
  }

  request(question) {
    const { collections, sources } = this.scope;
    const request = { query: question, explain: true, settings: { progress: true, include_text: true } };
    if (conversation.id) request.conversation_id = conversation.id;
    if (this.model.value) request.model = this.model.value;
    if (collections === null && sources === null) {
      if (session.may_use_configured) request.sources = "all";
    } else {
      if (collections?.length) request.collections = collections;
      if (sources?.length) request.sources = sources;
    }
    return request;
  }

  restart() {
    stopRunning();
    conversation.id = null;
    conversation.turns = [];
    keep();
    closePanel();
    clear(this.list);
    this.refresh();
    this.drawWelcome();
    this.input.focus();
  }

  choose() {
    const boxes = [];
    const known = { collections: this.choices.collections.map((one) => one.name), sources: this.choices.sources.map((one) => one.name) };
    const row = (kind, name, detail) => {
      const chosen = this.scope[kind];
      const box = h("input", { type: "checkbox", checked: chosen === null && this.scope[kind === "sources" ? "collections" : "sources"] === null ? true : (chosen ?? []).includes(name) });
      boxes.push({ box, kind, name });
      return h("label", { class: "option" }, box, h("span", null, name), h("span", { class: "hint" }, detail));
    };
    const group = (title, rows) => (rows.length ? h("fieldset", null, h("legend", null, title), rows) : null);
    const apply = () => {
      const picked = (kind) => boxes.filter((one) => one.kind === kind && one.box.checked).map((one) => one.name);
      const [collections, sources] = [picked("collections"), picked("sources")];
      if (!collections.length && !sources.length) {
        toast("Choose at least one source.", { kind: "error" });
        return;
      }
      const all = collections.length === known.collections.length && sources.length === known.sources.length;
      Object.assign(this.scope, all ? { collections: null, sources: null } : { collections, sources });
      this.saveScope();
      this.drawScope();
      box.close();
    };
    const box = dialog(
      "Which sources to ask",
      group("Collections", this.choices.collections.map((one) => row("collections", one.name, count(one.document_count, "document")))),
      group("Other sources", this.choices.sources.map((one) => row("sources", one.name, one.kind === "mcp" ? "MCP server" : "remote source"))),
      boxes.length ? null : h("p", null, "There is nothing to choose from yet."),
      h(
        "div",
        { class: "row end" },
        button("All", () => boxes.forEach((one) => (one.box.checked = true)), { kind: "quiet" }),
        button("None", () => boxes.forEach((one) => (one.box.checked = false)), { kind: "quiet" }),
        button("Use these", apply, { kind: "primary" }),
      ),
    );
  }

  saveScope() {
    this.scope.model = this.model.value;
    localStorage.setItem(SCOPE, JSON.stringify(this.scope));
  }
}

function loadScope() {
  try {
    const { collections = null, sources = null, model = "" } = JSON.parse(localStorage.getItem(SCOPE) ?? "{}");
    return { collections, sources, model };
  } catch {
    return { collections: null, sources: null, model: "" };
  }
}

function following(turn) {
  const abort = new AbortController();
  conversation.running = { turn, abort };
  turn.screen?.refresh();
  return {
    signal: abort.signal,
    onEvent: (frame) => {
      turn.state.apply(frame);
      turn.view?.update();
      if (frame.event === "started" && conversation.turns.includes(turn)) {
        conversation.id = turn.state.conversation_id;
        keep();
      }
    },
    onReset: () => {
      turn.state.reset();
      turn.view?.update();
    },
    onRetry: (cut) => {
      turn.state.lost = cut !== null;
      turn.view?.update();
    },
  };
}

async function followed(turn, promise) {
  try {
    const end = await promise;
    if (end.aborted && !turn.state.over) turn.state.stop();
    else if (!turn.state.over) turn.state.error = { message: "The answer ended before it was complete. Ask again." };
  } catch (error) {
    if (error.status === 401) events.dispatchEvent(new Event("needs-key"));
    const isGone = error.status === 404 && turn.stream;
    // The reason of a lost connection is in the browser's words ("Failed to fetch").
    const said = error.code === "stream_unavailable" ? error.message.replace(/: .*$/, ". Is the server running?") : error.message;
    turn.state.error = { message: isGone ? "This answer is no longer kept. Ask again." : said };
  }
  if (conversation.running?.turn === turn) conversation.running = null;
  if (conversation.turns.includes(turn)) {
    conversation.id = turn.state.conversation_id ?? conversation.id;
    keep();
  }
  turn.view?.update();
  turn.screen?.refresh();
}

function begin(turn) {
  const onStream = (id) => {
    turn.stream = id;
    keep();
  };
  followed(turn, askResumable({ path: "/v1/query", question: turn.state.request, headers: PAGE_HEADERS, onStream, ...following(turn) }));
}

function resume(turn) {
  followed(turn, followAnswer({ streamId: turn.stream, ...following(turn) }));
}

function stopRunning() {
  const { running } = conversation;
  if (!running) return;
  if (running.turn.stream) remove(`/v1/streams/${path(running.turn.stream)}`).catch(() => {});
  running.abort.abort();
}

/** An answer by its link. */
export async function answerScreen(main, id) {
  clear(main, h("p", { class: "hint" }, "Loading…"));
  const ask = h("a", { class: "button", href: "#/ask" }, icon("ask"), h("span", null, "Ask a question"));
  let detail;
  try {
    detail = await get(`/v1/queries/${path(id)}`);
  } catch (error) {
    if (error.status !== 404) throw error;
    clear(main, h("div", { class: "ask shared" }, empty("There is no answer here", "This answer does not exist, or you may not read it.", ask)));
    return;
  }
  const state = new AnswerState(detail.query ?? "A question whose text was not kept", {});
  Object.assign(state, { kept: true, text: detail.answer ?? "", passages: keptPassages(detail) });
  const citations = detail.sentences ? placedCitations(state.text, detail.sentences) : placedCitations(state.text, [{ start: 0, end: [...state.text].length, citations: detail.citations }]);
  state.finish({ ...detail, query_id: detail.id, conversation_id: null, citations, usage: { model: detail.model }, faithfulness_score: detail.faithfulness ?? undefined });
  if (!detail.answer) state.error = { message: detail.answer_withheld ? "You may not read every document that this answer quotes, so it is not shown." : "There is no answer, or its text was not kept." };
  const moment = new Date(detail.created_at);
  const asked = h("p", { class: "meta" }, detail.user ? `Asked by ${detail.user}, ` : "Asked ", h("time", { datetime: moment.toISOString(), title: moment.toLocaleString() }, moment.toLocaleDateString("en-GB", { day: "numeric", month: "short", year: "numeric" })));
  const view = new AnswerView(state, { shared: true, may_share: detail.may_share });
  view.element.firstChild.after(asked);
  clear(main, h("div", { class: "ask shared" }, h("h1", { class: "unseen" }, "Answer"), view.element, h("div", { class: "row" }, ask)));
}

/** The passages that a kept answer cites. The log has those of collections; of others it has only the quoted words. */
function keptPassages({ passages, citations, sentences = [] }) {
  const quotes = new Map(sentences.flatMap((one) => one.citations).map((one) => [one.chunk_id, one]));
  const index = (chunk) => quotes.get(chunk)?.citation_index ?? citations.find((one) => one.chunk_id === chunk)?.citation_index ?? null;
  const own = passages.map((one) => ({ ...one, citation_index: index(one.chunk_id), collection: quotes.get(one.chunk_id)?.source ?? sourceName("collections") }));
  const known = new Set([...passages, ...citations].map((one) => one.chunk_id));
  const remote = [...quotes.values()].filter((one) => !known.has(one.chunk_id)).map((one) => ({ citation_index: one.citation_index, source: one.source, title: "", collection: "" }));
  return [...own, ...remote];
}
