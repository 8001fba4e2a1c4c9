/** One question and its answer: the state that the events build, and how it is shown. */
import { post, session } from "./api.js";
import { button, clear, copy, count, dialog, download, duration, field, h, icon, offsets, toast } from "./dom.js";
import { blockRanges, decoded, decorator, markdown } from "./markdown.js";
import { openPanel, openSource } from "./viewer.js";

const VERDICTS = {
  supported: { glyph: "✓", label: "Supported", text: "The sources say this." },
  partly: { glyph: "◐", label: "Partly supported", text: "The sources say a part of this." },
  unsupported: { glyph: "?", label: "Not supported", text: "No source says this." },
  contradicted: { glyph: "✕", label: "Contradicted", text: "A source says otherwise." },
};
const REASONS = {
  off: "checking is switched off",
  over_budget: "there was no time left to check it",
  not_english: "only English sentences are checked",
  no_claim: "it claims nothing",
  code: "it is code",
  unfinished: "the model did not finish it",
  unavailable: "the model that checks is not available",
};
const STATUSES = {
  asked: "asked",
  success: "answered",
  error: "failed",
  timeout: "too slow",
  payment_failed: "payment failed",
  access_denied: "no access",
  policy_violation: "refused by its policy",
  rate_limited: "rate limit",
  skipped: "paused after failures",
};
// No line is broken here.
const JOINER = "\u2060";
const MARK = /\[(\d{1,3})\]/g;
// Code, where the server escapes nothing; and the bracket that it escapes elsewhere, so that no renderer takes it for a tag.
const CODE_OR_BRACKET = /^ *(`{3,}|~{3,})[^]*?(?:^ *\1|$(?![^]))|(`+)[^\n]*?\2|&lt;/gm;

/** Builds the state of an answer from the events of /v1/query. */
export class AnswerState {
  constructor(question, request) {
    Object.assign(this, { question, request, text: "", sentences: [], replies: [], passages: [], done: null, error: null });
    Object.assign(this, { query_id: null, conversation_id: null, model: null, began: performance.now(), first_token_ms: null, fallback: null, stopped: false, lost: false, kept: false, rating: null });
  }

  apply({ event, data }) {
    const body = JSON.parse(data);
    const now = Math.round(performance.now() - this.began);
    switch (event) {
      case "started":
        Object.assign(this, { query_id: body.query_id, conversation_id: body.conversation_id });
        break;
      case "retrieval":
        this.replies = body.sources.map((source) => ({ source, status: "asked", latency_ms: null, results: 0, error: null }));
        break;
      case "source":
        this.replies[body.index] = body;
        break;
      case "retrieved":
        this.retrieved = body;
        break;
      case "generating":
        this.model = body.model;
        break;
      case "fallback":
        this.fallback = body;
        break;
      case "token":
        this.first_token_ms ??= now;
        this.text += body.text;
        break;
      case "sentence":
        this.sentences[body.index] = body.sentence;
        break;
      case "sources":
        this.passages = body.sources;
        break;
      case "done":
        this.finish(body);
        break;
      case "error":
        this.error = body;
        break;
    }
  }

  finish(done) {
    this.done = done;
    this.query_id = done.query_id ?? this.query_id;
    this.conversation_id = done.conversation_id ?? this.conversation_id;
    // A sentence that came before stays the same object, so that what shows it can stay.
    const known = new Map(this.sentences.filter(Boolean).map((one) => [JSON.stringify(one), one]));
    this.sentences = (done.sentences ?? []).map((one) => known.get(JSON.stringify(one)) ?? one);
    this.model = done.usage?.model ?? this.model;
    if (done.source_status?.length) this.replies = done.source_status;
  }

  /** The reader has stopped it: what came until then is the answer. */
  stop() {
    this.stopped = true;
    const sentences = this.sentences.filter(Boolean);
    this.finish({ sentences, citations: placedCitations(this.text, sentences), latency_ms: performance.now() - this.began });
  }

  reset() {
    Object.assign(this, new AnswerState(this.question, this.request));
  }

  get over() {
    return this.done !== null || this.error !== null;
  }

  /** A passage by its number. Before the passages are here, only its source is known, from the words that are quoted. */
  passage(index) {
    const found = this.passages.find((one) => one.citation_index === index);
    if (found) return found;
    const quote = this.sentences.flatMap((one) => one?.citations ?? []).find((one) => one.citation_index === index);
    const isRemote = quote && this.replies.some((one) => one.source === quote.source);
    return quote ? { citation_index: index, source: quote.source, title: "", collection: isRemote ? "" : quote.source } : null;
  }

  /** The citation marks in the order of their places in the text: each number once at a place, with all words that it
   * quotes there. One without `citations` is a mark of the model: `pending` until it is checked, or else `unproven`. */
  get marks() {
    const { text } = this;
    const convert = offsets(text);
    const marks = new Map();
    for (const one of this.done?.citations ?? []) {
      const [start, end] = [convert(one.answer_start), convert(one.answer_end)];
      const key = `${start} ${end} ${one.citation_index}`;
      if (!marks.has(key)) marks.set(key, { start, end, index: one.citation_index, citations: [] });
      marks.get(key).citations.push(one);
    }
    const placed = new Set([...marks.values()].map((one) => one.start));
    const checked = this.sentences.filter((one) => one && one.reason !== "code").map((one) => [convert(one.start), convert(one.end)]);
    for (const { index: start, 0: { length }, 1: number } of text.matchAll(MARK)) {
      const [end, index] = [start + length, Number(number)];
      if (placed.has(start)) continue;
      const isChecked = checked.some(([from, to]) => from <= start && end <= to);
      const pending = !this.done || (this.stopped && !isChecked);
      // A kept answer knows only the passages that it cites.
      if (pending || (isChecked && (this.kept || this.passage(index)))) marks.set(start, { start, end, index, pending });
    }
    const sorted = [...marks.values()].sort((a, b) => a.start - b.start || a.end - b.end);
    // Of several marks in a row with one number, which is what corrected ones become, one is enough.
    return sorted.reduce((shown, one) => {
      const last = shown[shown.length - 1];
      const repeated = last?.citations && one.citations && last.index === one.index && !text.slice(last.end, one.start).trim();
      if (!repeated) return [...shown, one];
      last.end = Math.max(last.end, one.end);
      last.citations.push(...one.citations.filter((quote) => !last.citations.some((known) => known.start_char === quote.start_char && known.document_id === quote.document_id)));
      return shown;
    }, []);
  }

  /** As Markdown, with the list of its sources. Its marks are those that are shown, not those that the model wrote. */
  get asMarkdown() {
    let [written, at] = ["", 0];
    for (const { start, end, index, citations: proven } of this.marks) {
      written += this.text.slice(at, start);
      at = Math.max(at, end);
      if (!proven) written = written.trimEnd();
      else written += `${start < end || /[\s\]]$/.test(written) ? "" : " "}[${index}]`;
    }
    written += this.text.slice(at);
    const text = written.replace(CODE_OR_BRACKET, (found) => (found === "&lt;" ? "<" : found)).trim();
    const citations = this.done?.citations ?? [];
    const cited = [...new Set(citations.map((one) => one.citation_index))].sort((a, b) => a - b);
    const list = cited.map((index) => {
      const citation = citations.find((one) => one.citation_index === index);
      const passage = this.passage(index);
      const where = [passage?.collection || passage?.source, pageOf(citation, passage), passage?.url].filter(Boolean).join(", ");
      return `[${index}] ${titleOf(passage)}${where ? ` (${where})` : ""}: “${citation.quoted_text.replace(/\s+/g, " ").trim()}”`;
    });
    return [`## ${this.question}`, text, ...(list.length ? ["### Sources", list.join("\n\n")] : [])].join("\n\n") + "\n";
  }

  get asJson() {
    return JSON.stringify({ query: this.question, answer: this.text, ...this.done, sources: this.passages }, null, 2);
  }
}

/**
 * The citations of an answer of which only the sentences are known: each at its mark, at a mark of its sentence that no
 * other citation has, or else at the end of the sentence. Offsets count code points, as everywhere in the API.
 */
export function placedCitations(text, sentences) {
  const points = (from, to) => [...text.slice(from, to)].length;
  const marks = [];
  let [at, start] = [0, 0];
  for (const found of text.matchAll(MARK)) {
    start += points(at, found.index);
    at = found.index;
    marks.push({ start, end: start + found[0].length, index: Number(found[1]) });
  }
  return sentences.flatMap((sentence) => {
    const own = marks.filter((one) => sentence.start <= one.start && one.end <= sentence.end);
    const indexes = new Set(sentence.citations.map((one) => one.citation_index));
    const free = own.filter((one) => !indexes.has(one.index));
    return [...indexes].flatMap((index) => {
      const quotes = sentence.citations.filter((one) => one.citation_index === index);
      const places = own.filter((one) => one.index === index);
      if (!places.length) places.push(...(free.length ? free : [{ start: sentence.end, end: sentence.end }]));
      // One mark may have several quotes, and one quote several marks.
      return Array.from({ length: Math.max(quotes.length, places.length) }, (_, number) => {
        const [quote, place] = [quotes, places].map((all) => all[Math.min(number, all.length - 1)]);
        return { ...quote, answer_start: place.start, answer_end: place.end };
      });
    });
  });
}

/** Shows an AnswerState; `update` draws it again, at most once a frame. */
export class AnswerView {
  /** @param {AnswerState} state  @param {{again?: () => void, changed?: () => void, shared?: boolean, may_share?: boolean}} actions */
  constructor(state, actions = {}) {
    this.state = state;
    this.actions = actions;
    this.pending = false;
    this.notBefore = 0;
    // The blocks of the text that are shown, each with what it was made of.
    this.blocks = [];
    this.chips = h("ul", { class: "chips", "aria-label": "Sources" });
    this.note = h("div", { class: "fallback" });
    this.body = h("div", { class: "answer-text" });
    this.caret = h("span", { class: "caret", "aria-hidden": "true" });
    this.status = h("p", { class: "answer-status", role: "status" });
    this.foot = h("div", { class: "answer-foot" });
    this.element = h("article", { class: "turn" }, h("h2", { class: "question" }, state.question), this.chips, this.note, this.body, this.status, this.foot);
    this.draw();
  }

  update() {
    if (this.pending) return;
    this.pending = true;
    const draw = () => {
      const began = performance.now();
      this.pending = false;
      this.draw();
      // The page stays usable, however long this takes: three quarters of the time are not spent on it. What comes after
      // the frame knows what its layout and painting took, too.
      setTimeout(() => {
        const now = performance.now();
        this.notBefore = now + 3 * (now - began);
      });
    };
    setTimeout(() => requestAnimationFrame(draw), Math.max(0, this.notBefore - performance.now()));
  }

  draw() {
    this.drawChips();
    this.drawStatus();
    this.drawText();
    if (this.state.over) this.drawFoot();
    this.element.setAttribute("aria-busy", String(!this.state.over));
    this.element.classList.toggle("over", this.state.over);
  }

  drawChips() {
    const { replies } = this.state;
    if (!replies.length) {
      clear(this.chips);
      return;
    }
    replies.forEach((reply, index) => {
      const key = `${sourceName(reply.source)} ${reply.status} ${reply.latency_ms}`;
      const known = this.chips.children[index];
      if (known?.dataset.key === key) return;
      const chip = sourceChip(reply, key, this.reasons ?? true);
      if (known) known.replaceWith(chip);
      else this.chips.append(chip);
    });
    while (this.chips.children.length > replies.length) this.chips.lastChild.remove();
    // An answer matters more than why a source did not help, and nothing moves it down.
    const open = !this.state.text || Boolean(this.state.done?.refused);
    if (this.reasons === open) return;
    this.reasons = open;
    for (const one of this.chips.querySelectorAll("details")) one.open = open;
  }

  drawStatus() {
    const { state } = this;
    this.wasRunning ||= !state.over;
    // The end is announced, and only to those who do not see it.
    const text = !state.over ? progress(state) : this.wasRunning ? ending(state) : "";
    if (this.status.textContent !== text) this.status.textContent = text;
    this.status.classList.toggle("unseen", state.over);
  }

  /** Draws the blocks that have changed, and leaves the others, so that the focus and a selection in them stay. */
  drawText() {
    const { state } = this;
    const note = fallbackText(state);
    if (this.note.textContent !== note) clear(this.note, note ? h("p", { class: "note" }, note) : null);
    if (state.over || state.lost) this.caret.remove();
    if (!state.text) return;
    const key = [state.text, state.sentences.filter(Boolean).length, state.over].join();
    if (this.drawn !== key) this.drawBlocks();
    this.drawn = key;
    this.body.classList.toggle("refusal", Boolean(state.done?.refused));
    if (!state.over && !state.lost) this.body.lastElementChild?.append(this.caret);
  }

  drawBlocks() {
    const { text } = this.state;
    const [sentences, insertions] = [this.sentenceRanges(), this.insertions()];
    const blocks = blockRanges(text);
    const focused = this.body.contains(document.activeElement) ? document.activeElement.dataset.place : null;
    blocks.forEach((block, index) => {
      const next = blocks[index + 1]?.start ?? Infinity;
      const ranges = sentences.filter((one) => one.start < block.end && one.end > block.start);
      const inserted = insertions.filter((one) => (index === 0 || one.start >= block.start) && one.start < next);
      const key = [block.start, block.end, ...ranges.map((one) => one.of), ...inserted.flatMap((one) => [one.start, one.end, ...one.of])];
      const known = this.blocks[index];
      if (known && isSame(known.key, key)) return;
      const nodes = this.blockNodes(block, ranges, inserted);
      if (known) known.nodes[0].before(...nodes);
      else this.body.append(...nodes);
      for (const node of known?.nodes ?? []) node.remove();
      this.blocks[index] = { key, nodes };
    });
    for (const { nodes } of this.blocks.splice(blocks.length)) for (const node of nodes) node.remove();
    if (tip && !tip.of.isConnected) hideTip();
    if (focused && !this.body.contains(document.activeElement)) this.body.querySelector(`[data-place="${focused}"]`)?.focus({ preventScroll: true });
  }

  blockNodes(block, ranges, insertions) {
    const { text } = this.state;
    const { decorate, finish } = decorator(text, ranges, insertions);
    const element = h("div", null, markdown(text, decorate, block));
    finish();
    keepMarksWithLastWord(element);
    // Marks of the block before, on a line of their own.
    if (!text.slice(block.start, block.end).replace(MARK, "").trim()) element.firstElementChild.classList.add("marks");
    return [...element.childNodes];
  }

  sentenceRanges() {
    const convert = offsets(this.state.text);
    return this.state.sentences.filter(Boolean).map((one) => ({ start: convert(one.start), end: convert(one.end), of: one, wrap: (words) => this.sentence(one, words) }));
  }

  /** Citation marks and verdicts, in the order of their places; those in place of the same characters are one insertion. */
  insertions() {
    const { text, marks } = this.state;
    const convert = offsets(text);
    const sentences = this.state.sentences.filter(Boolean);
    const places = new Map();
    // The space before a mark is left out, so that no line begins with the mark.
    const add = (start, end, of, node) => {
      while (end > start && start > 0 && text[start - 1] === " ") start -= 1;
      const key = `${start} ${end}`;
      const place = places.get(key) ?? { start, end, of: [], made: [], nodes: () => place.made.flatMap((make) => [document.createTextNode(JOINER), make()]) };
      places.set(key, place);
      place.of.push(...of);
      place.made.push(node);
    };
    for (const one of marks) {
      if (one.citations) add(one.start, one.end, one.citations, () => this.mark(one, sentences));
      else if (one.pending) add(one.start, one.end, ["pending"], () => h("span", { class: "cite pending" }, String(one.index)));
      else add(one.start, one.end, ["unproven"], () => this.unprovenMark(one));
    }
    for (const sentence of sentences) {
      if (sentence.verdict === "unchecked") continue;
      let at = convert(sentence.end);
      while (at > 0 && /\s/.test(text[at - 1])) at -= 1;
      add(at, at, [sentence], () => this.verdict(sentence, at));
    }
    return [...places.values()].sort((a, b) => a.start - b.start || a.end - b.end);
  }

  sentence(sentence, words) {
    const element = h("span", { class: `sentence ${sentence.verdict}`, onClick: () => this.open(sentence) }, ...this.withDoubts(sentence, words));
    hinted(element, () => evidence(sentence, this.state));
    return element;
  }

  /** Words that no source says are marked, if they are in this part of the sentence. */
  withDoubts(sentence, words) {
    const doubt = (sentence.doubted ?? []).map((one) => decoded(one.text)).find((one) => one && words.includes(one) && one !== words);
    if (!doubt) return [words];
    const at = words.indexOf(doubt);
    return [words.slice(0, at), h("span", { class: "doubted" }, doubt), words.slice(at + doubt.length)];
  }

  mark({ start, index, citations }, sentences) {
    const passage = this.state.passage(index);
    const [first] = citations;
    const sentence = sentences.find((one) => first.answer_start >= one.start && first.answer_start <= one.end + 1);
    const open = () => openSource({ document_id: first.document_id, passage, spans: citations.map((one) => spanOf(one, sentence?.verdict)) });
    const element = h(
      "button",
      { type: "button", class: `cite ${sentence?.verdict ?? ""}`, dataset: { place: `cite ${start}` }, "aria-label": `Citation ${index}: ${titleOf(passage)}`, onClick: withoutPropagation(open) },
      String(index),
    );
    hinted(element, () => citations.slice(0, 3).map((one, at) => quoteCard(passage, one, at ? null : sentence?.verdict)));
    return element;
  }

  /** A mark of the model on a passage that does not say the sentence. */
  unprovenMark({ start, index }) {
    const passage = this.state.passage(index);
    if (!passage) return h("span", { class: "cite unproven", title: "The model cites this passage, but it does not say this." }, String(index));
    const spans = [{ start: passage.start_char ?? 0, end: passage.end_char ?? [...(passage.text ?? "")].length, verdict: "unsupported" }];
    const element = h(
      "button",
      { type: "button", class: "cite unproven", dataset: { place: `cite ${start}` }, "aria-label": `Passage ${index}, which does not say this: ${titleOf(passage)}`, onClick: withoutPropagation(() => openSource({ document_id: passage.document_id, passage, spans })) },
      String(index),
    );
    hinted(element, () => [h("p", null, "The model cites this passage, but it does not say this."), h("p", { class: "tip-where" }, titleOf(passage))]);
    return element;
  }

  verdict(sentence, at) {
    const { glyph, label } = VERDICTS[sentence.verdict];
    const element = h("button", { type: "button", class: `verdict ${sentence.verdict}`, dataset: { place: `verdict ${at}` }, "aria-label": `${label}: show the evidence`, onClick: withoutPropagation(() => this.open(sentence)) }, glyph);
    hinted(element, () => evidence(sentence, this.state));
    return element;
  }

  open(sentence) {
    if (getSelection()?.toString()) return;
    const [first] = sentence.citations ?? [];
    if (!first) {
      if (sentence.verdict !== "unchecked") openPanel(VERDICTS[sentence.verdict].label, h("p", null, VERDICTS[sentence.verdict].text), h("blockquote", null, sentence.text));
      return;
    }
    const spans = sentence.citations.filter((one) => one.document_id === first.document_id && one.source === first.source).map((one) => spanOf(one, sentence.verdict));
    openSource({ document_id: first.document_id, passage: this.state.passage(first.citation_index), spans });
  }

  drawFoot() {
    if (this.footDrawn) return;
    this.footDrawn = true;
    const { state, actions } = this;
    const { done } = state;
    const isKept = done && !state.stopped && state.query_id && session.query_log;
    clear(
      this.foot,
      state.error ? h("div", { class: "problem", role: "alert" }, h("p", null, state.error.message || "The answer failed.")) : null,
      done ? summary(state) : null,
      done ? conflicts(state) : null,
      done?.citations?.length ? cited(state) : null,
      h(
        "div",
        { class: "row actions" },
        state.text ? button("Copy", () => copy(state.asMarkdown, "Copied as Markdown, with its sources."), { icon: "copy", kind: "quiet" }) : null,
        done && state.text ? button("Export", () => download(`answer-${(state.query_id ?? "").slice(0, 8)}.json`, state.asJson, "application/json"), { icon: "download", kind: "quiet" }) : null,
        isKept && (actions.may_share ?? true) ? button("Share", () => share(state), { icon: "link", kind: "quiet" }) : null,
        done?.explanation ? button("Explain", () => explain(state), { icon: "explain", kind: "quiet" }) : null,
        actions.again ? button("Ask again", actions.again, { icon: "again", kind: "quiet" }) : null,
        isKept && !actions.shared ? h("span", { class: "thumbs" }, ...thumbs(state, actions.changed)) : null,
      ),
      done && (done.timings || state.replies.length) ? runDetails(state) : null,
    );
  }
}

const isSame = (one, other) => one.length === other.length && one.every((part, index) => part === other[index]);
const spanOf = (citation, verdict) => ({ start: citation.start_char, end: citation.end_char, text: citation.quoted_text, document_id: citation.document_id, page: citation.page, verdict });
const titleOf = (passage) => passage?.title || (passage?.source ? sourceName(passage.source) : "Source");

/** What an answer is waiting for. */
function progress({ replies, text, model, retrieved, lost }) {
  const waiting = replies.filter((one) => one.status === "asked").length;
  if (lost) return "Connection lost, trying again…";
  if (text) return "";
  if (!replies.length) return "Sending the question…";
  if (waiting) return `Waiting for ${count(waiting, "source")}…`;
  return `${model && model !== "extractive" ? `${model} is reading` : "Reading"} ${count(retrieved?.passages ?? 0, "passage")}…`;
}

/** How an answer ended. An error speaks for itself. */
function ending({ error, stopped, done }) {
  if (error) return "";
  if (stopped) return "Stopped.";
  if (done.refused) return "There is no answer.";
  const { faithfulness_score: score } = done;
  return `Answer complete${typeof score === "number" ? `, ${percent(score)} supported` : ""}.`;
}

const percent = (share) => `${Math.round(share * 100)}%`;

function sourceChip(reply, key, open) {
  const failed = !["success", "asked"].includes(reply.status);
  const detail =
    reply.status === "success"
      ? `${count(reply.results, "passage")} · ${duration(reply.latency_ms)}`
      : failed && reply.latency_ms !== null
        ? `${STATUSES[reply.status] ?? reply.status} · ${duration(reply.latency_ms)}`
        : (STATUSES[reply.status] ?? reply.status);
  const line = [h("span", { class: "dot", "aria-hidden": "true" }), h("span", { class: "chip-name" }, sourceName(reply.source)), h("span", { class: "chip-detail" }, detail)];
  return h(
    "li",
    { class: `chip ${failed ? "failed" : reply.status}`, dataset: { key, status: reply.status } },
    failed && reply.error ? h("details", { open }, h("summary", null, line, icon("chevron", 14)), h("p", { class: "chip-error" }, reply.error)) : line,
  );
}

// The names that the operator gave to sources, by the paths that answers have.
const configured = new Map();

export function nameSources(sources) {
  for (const { kind, name, owner, slug } of sources) if (kind === "space") configured.set(owner ? `${owner}/${slug}` : slug, name);
}

export const sourceName = (source) => (source === "collections" ? "Your collections" : (configured.get(source) ?? source));
const modelName = (model) => (model === "extractive" ? "Quoted from the documents" : model);

function fallbackText({ done, fallback }) {
  if (!(done?.fallback ?? fallback)) return "";
  const { from, message } = done?.fallback ?? fallback;
  const reason = /[.!?]$/.test(message) ? message : `${message}.`;
  return `${from} did not answer: ${reason} ${done?.refused ? "The documents were searched for sentences to quote instead." : "The documents are quoted instead."}`;
}

function summary({ done, model, text, stopped }) {
  if (stopped) return h("p", { class: "meta" }, `Stopped after ${duration(done.latency_ms)}.`);
  if (done.refused) return h("p", { class: "meta" }, `No answer in ${duration(done.latency_ms)}.`);
  const parts = [modelName(model ?? ""), duration(done.latency_ms)];
  if (typeof done.faithfulness_score === "number") parts.push(`${percent(done.faithfulness_score)} supported`);
  if (done.left_out) parts.push(`${count(done.left_out, "sentence")} left out`);
  if (done.removed_links?.length) parts.push(`${count(done.removed_links.length, "link")} removed`);
  return text ? h("p", { class: "meta" }, parts.filter(Boolean).join(" · ")) : null;
}

function conflicts(state) {
  const { done } = state;
  if (!done.conflicts?.length) return null;
  const side = (words) => {
    const open = () => openSource({ document_id: words.document_id, passage: state.passage(words.citation_index), spans: [spanOf(words)] });
    return h("blockquote", null, words.quoted_text, h("cite", null, h("button", { type: "button", class: "text-button", onClick: open }, sourceName(words.source))));
  };
  return h(
    "section",
    { class: "conflicts", "aria-label": "Sources disagree" },
    h("h3", null, "Sources disagree"),
    done.conflicts.map((one) => h("div", { class: "pair" }, [one.claim, one.against].map(side))),
  );
}

/** The cited documents, each once. */
function cited(state) {
  const places = new Map();
  for (const citation of state.done.citations) {
    const spans = places.get(citation.citation_index) ?? [];
    spans.push(spanOf(citation));
    places.set(citation.citation_index, spans);
  }
  return h(
    "ol",
    { class: "cited", "aria-label": "Cited sources" },
    [...places.entries()]
      .sort(([a], [b]) => a - b)
      .map(([index, spans]) => {
        const passage = state.passage(index);
        const title = titleOf(passage);
        const where = [passage?.collection || sourceName(passage?.source ?? ""), passage?.section_title, pageOf(spans[0], passage)].filter((one) => one && one !== title).join(" · ");
        return h(
          "li",
          null,
          h(
            "button",
            { type: "button", class: "cited-source", onClick: () => openSource({ document_id: spans[0].document_id, passage, spans }) },
            h("span", { class: "cite", "aria-hidden": "true" }, String(index)),
            h("span", null, h("span", { class: "cited-title" }, title), h("span", { class: "cited-where" }, where)),
          ),
          passage?.suspected_instructions?.length ? h("p", { class: "note" }, "This passage contains sentences that look like instructions to a model. They were not followed.") : null,
          passage?.also_in_count ? h("p", { class: "hint" }, `Also in ${count(passage.also_in_count, "other document")}.`) : null,
        );
      }),
  );
}

function evidence(sentence, state) {
  if (sentence.verdict === "unchecked") return [h("p", null, `Not checked: ${REASONS[sentence.reason] ?? "no reason given"}.`)];
  const { label, text } = VERDICTS[sentence.verdict];
  return [
    h("p", { class: `tip-verdict ${sentence.verdict}` }, label),
    sentence.citations?.length
      ? sentence.citations.slice(0, 3).map((one) => quoteCard(state.passage(one.citation_index), one))
      : h("p", null, text),
  ];
}

/** A click on a mark is none on the sentence that it stands in. */
const withoutPropagation = (action) => (event) => {
  event.stopPropagation();
  action();
};

/** Puts the marks of each sentence on one line with its last word: a browser may break a line before every button. */
function keepMarksWithLastWord(body) {
  for (const sentence of body.querySelectorAll(".sentence")) {
    const last = sentence.lastChild;
    const isMark = (node) => node && (node.data === JOINER || (node.nodeType === Node.ELEMENT_NODE && node.matches(".cite, .verdict")));
    if (last?.nodeType !== Node.TEXT_NODE || !isMark(sentence.nextSibling)) continue;
    const group = h("span", { class: "nowrap" }, last.splitText(Math.max(0, last.data.search(/\S{1,24}\s*$/))));
    while (isMark(sentence.nextSibling)) group.append(sentence.nextSibling);
    sentence.append(group);
  }
}

/** The page of the quoted words; that of the passage where only it is known. */
function pageOf(citation, passage) {
  const page = citation?.page ?? passage?.page;
  return page ? `page ${page}` : null;
}

function quoteCard(passage, citation, verdict) {
  const quote = citation.quoted_text.replace(/\s+/g, " ").trim();
  const where = [passage?.title, pageOf(citation, passage)].filter(Boolean).join(", ");
  return [
    verdict && VERDICTS[verdict] ? h("p", { class: `tip-verdict ${verdict}` }, VERDICTS[verdict].label) : null,
    h("blockquote", null, quote.length > 320 ? `${quote.slice(0, 320)}…` : quote),
    where ? h("p", { class: "tip-where" }, where) : null,
  ].filter(Boolean);
}

let tip = null;

function hideTip() {
  tip?.of.removeAttribute("aria-describedby");
  tip?.remove();
  tip = null;
}

/** Shows a card while the element is hovered or has the focus. */
function hinted(element, content) {
  hints.set(element, content);
  const hide = () => tip?.of === element && hideTip();
  element.addEventListener("focus", () => element.matches(":focus-visible") && showTip(element));
  element.addEventListener("blur", hide);
  element.addEventListener("click", hide);
}

const hints = new WeakMap();
let pointed = null;

function showTip(element) {
  hideTip();
  tip = h("div", { class: "tip", role: "tooltip", id: "tip" }, ...[hints.get(element)()].flat(3).filter(Boolean));
  tip.of = element;
  document.getElementById("main").append(tip);
  const target = element.getClientRects()[0] ?? element.getBoundingClientRect();
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.max(8, Math.min(target.left, innerWidth - width - 8));
  const above = target.top - height - 8;
  tip.style.setProperty("left", `${left}px`);
  tip.style.setProperty("top", `${above > 8 ? above : Math.min(target.bottom + 8, innerHeight - height - 8)}px`);
  if (element.tagName === "BUTTON") element.setAttribute("aria-describedby", "tip");
}

/** Only a pointer that moves points at something: the page may move under one that rests. */
function point({ target, pointerType }) {
  let element = pointerType === "mouse" ? target : null;
  while (element && !hints.has(element)) element = element.parentElement;
  if (element === pointed) return;
  if (tip && tip.of === pointed) hideTip();
  pointed = element;
  if (element) showTip(element);
}

document.addEventListener("pointermove", point);
document.documentElement.addEventListener("pointerleave", () => point({ target: null }));
// The first Escape is for the card, wherever the focus is; the next one for what is under it.
document.addEventListener(
  "keydown",
  (event) => {
    if (event.key !== "Escape" || !tip) return;
    hideTip();
    event.stopPropagation();
  },
  true,
);

/** The run as a waterfall: when each source answered, and what each stage took. */
function runDetails(state) {
  const { timings = {}, latency_ms } = state.done;
  const total = Math.max(1, timings.total_ms ?? latency_ms, ...state.replies.map((one) => one.latency_ms ?? 0));
  const rows = state.replies.map((one) => ({ name: sourceName(one.source), from: 0, to: one.latency_ms ?? 0, kind: one.status === "success" ? "source" : "failed", note: one.status === "success" ? count(one.results, "passage") : (STATUSES[one.status] ?? one.status) }));
  let at = timings.retrieval_ms ?? 0;
  for (const [name, key] of [["Merge", "merge_ms"], ["Evidence", "evidence_ms"]]) {
    if (typeof timings[key] !== "number") continue;
    rows.push({ name, from: at, to: at + timings[key], kind: "stage" });
    at += timings[key];
  }
  if (typeof timings.first_token_ms === "number") {
    rows.push({ name: "First token", from: at, to: timings.first_token_ms, kind: "stage", note: `after ${duration(timings.first_token_ms)}` });
    rows.push({ name: "Answer, checked", from: timings.first_token_ms, to: timings.total_ms ?? total, kind: "stage" });
  }
  rows.push({ name: "Done", from: total, to: total, kind: "end", note: duration(total) });
  return h(
    "details",
    { class: "run" },
    h("summary", null, icon("chevron", 16), "Run: ", h("span", null, `${count(state.replies.length, "source")}, ${duration(total)}`)),
    h(
      "table",
      { class: "waterfall" },
      h("caption", { class: "unseen" }, "When each source and stage began and how long it took"),
      h("thead", { class: "unseen" }, h("tr", null, h("th", { scope: "col" }, "Step"), h("th", { scope: "col" }, "Time"), h("th", { scope: "col" }, "Duration"))),
      h(
        "tbody",
        null,
        rows.map((row) =>
          h(
            "tr",
            null,
            h("th", { scope: "row" }, row.name),
            h("td", null, h("div", { class: "track" }, h("div", { class: `bar ${row.kind}`, style: { left: `${(100 * Math.min(row.from, total)) / total}%`, width: `${(100 * Math.max(0, Math.min(row.to, total) - row.from)) / total}%` } }))),
            h("td", { class: "took" }, row.note ? `${row.kind === "source" || row.kind === "failed" ? `${duration(row.to - row.from)} · ` : ""}${row.note}` : duration(Math.max(0, row.to - row.from))),
          ),
        ),
      ),
    ),
  );
}

const STAGES = {
  search: "found by the search",
  near_duplicates: "compared with near-duplicates",
  rerank: "reranked",
  variety: "varied",
  threshold: "similarity threshold",
  limit: "limit of the search",
  source: "returned by the source",
  merge: "merged with other sources",
  overlap: "overlap",
  evidence: "ordered by evidence",
  top_k: "number of passages",
  guard: "similar enough to answer",
  budget: "room in the prompt",
  prompt: "in the prompt",
  result: "in the result",
};

/** Each passage's way from its rank in the source to its place in the prompt. */
function explain(state) {
  const { passages, more } = state.done.explanation;
  openPanel(
    "How the passages were chosen",
    h("p", { class: "hint" }, "Each passage's way from its source to the prompt: its rank after each stage, and where others were left out."),
    passages.map((passage) =>
      h(
        "details",
        { class: "explained", open: passage.citation_index === 1 },
        h(
          "summary",
          null,
          passage.citation_index ? h("span", { class: "cite" }, String(passage.citation_index)) : h("span", { class: "cite none" }, "–"),
          h("span", null, passage.title || passage.source, h("span", { class: "cited-where" }, passage.citation_index ? `${sourceName(passage.source)} · in the prompt` : `${sourceName(passage.source)} · ${passage.left_out ? `left out: ${STAGES[passage.left_out]}` : "not used"}`)),
        ),
        h("p", { class: "clamped" }, state.passage(passage.citation_index)?.text ?? `${passage.text}…`),
        h(
          "ol",
          { class: "steps" },
          passage.steps.map((step) =>
            h(
              "li",
              { class: step.left_out ? "left-out" : "" },
              h("span", { class: "rank" }, step.rank ? `#${step.rank}` : ""),
              h("span", null, STAGES[step.stage] ?? step.stage, step.note ? `: ${step.note}` : "", step.other ? ` (${step.other.title})` : ""),
              h("span", { class: "values" }, Object.entries(step.values ?? {}).map(([name, value]) => `${name.replaceAll("_", " ")} ${Number(value.toPrecision(3))}`).join(", ")),
            ),
          ),
        ),
      ),
    ),
    more ? h("p", { class: "hint" }, `${count(more, "more passage")} were left out.`) : null,
  );
}

function thumbs(state, changed) {
  const buttons = [];
  const rate = async (rating, pressed) => {
    try {
      await post("/v1/feedback", { query_id: state.query_id, rating });
    } catch (error) {
      toast(error.message, { kind: "error" });
      return;
    }
    for (const one of buttons) one.setAttribute("aria-pressed", String(one === pressed));
    state.rating = rating;
    changed?.();
    if (await toast("Thank you. It was recorded.", { action: "Add a comment" })) comment(state, rating);
  };
  buttons.push(button("Good answer", () => rate("thumbs_up", buttons[0]), { icon: "up", hidden: true, kind: "quiet icon-only", "aria-pressed": String(state.rating === "thumbs_up") }));
  buttons.push(button("Bad answer", () => rate("thumbs_down", buttons[1]), { icon: "down", hidden: true, kind: "quiet icon-only", "aria-pressed": String(state.rating === "thumbs_down") }));
  return buttons;
}

function comment(state, rating) {
  const area = h("textarea", { rows: 4, maxlength: 10_000 });
  const send = async () => {
    try {
      await post("/v1/feedback", { query_id: state.query_id, rating, comment: area.value.trim() || null });
      box.close();
      toast("Thank you for the comment.");
    } catch (error) {
      toast(error.message, { kind: "error" });
    }
  };
  const box = dialog("Comment on this answer", field("What was right or wrong?", area), h("div", { class: "row end" }, button("Send", send, { kind: "primary" })));
  area.focus();
}

async function share(state) {
  const address = `${location.origin}/#/answers/${encodeURIComponent(state.query_id)}`;
  try {
    await post(`/v1/queries/${encodeURIComponent(state.query_id)}/share`, { shared: true });
    await copy(address, "Link copied. It opens for signed-in users who may read every cited document.");
  } catch (error) {
    toast(`It cannot be shared: ${error.message}`, { kind: "error" });
  }
}

