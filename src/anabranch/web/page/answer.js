/** One question and its answer: the state that the events build, and how it is shown. */
import { post, session } from "./api.js";
import { button, clear, copy, count, dialog, download, duration, field, h, icon, offsets, toast } from "./dom.js";
import { decorator, markdown } from "./markdown.js";
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
const MARK = /\[\d{1,3}\]/g;

/** Builds the state of an answer from the events of /v1/query. */
export class AnswerState {
  constructor(question, request) {
    Object.assign(this, { question, request, text: "", sentences: [], replies: [], passages: [], done: null, error: null });
    Object.assign(this, { query_id: null, conversation_id: null, model: null, began: performance.now(), first_token_ms: null, fallback: null });
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
    this.sentences = done.sentences ?? [];
    this.model = done.usage?.model ?? this.model;
    if (done.source_status?.length) this.replies = done.source_status;
  }

  reset() {
    Object.assign(this, new AnswerState(this.question, this.request));
  }

  get over() {
    return this.done !== null || this.error !== null;
  }

  passage(index) {
    return this.passages.find((one) => one.citation_index === index) ?? null;
  }

  /** As Markdown, with the list of its sources. */
  get asMarkdown() {
    const cited = [...new Set((this.done?.citations ?? []).map((one) => one.citation_index))].sort((a, b) => a - b);
    const list = cited.map((index) => {
      const passage = this.passage(index);
      const citation = this.done.citations.find((one) => one.citation_index === index);
      const quote = citation?.quoted_text ?? "";
      const where = [passage?.collection || passage?.source, pageOf(citation, passage), passage?.url].filter(Boolean).join(", ");
      return `[${index}] ${passage?.title ?? "Source"}${where ? ` (${where})` : ""}: “${quote.replace(/\s+/g, " ").trim()}”`;
    });
    return [`## ${this.question}`, this.text.trim(), ...(list.length ? ["### Sources", list.join("\n\n")] : [])].join("\n\n") + "\n";
  }

  get asJson() {
    return JSON.stringify({ query: this.question, answer: this.text, ...this.done, sources: this.passages }, null, 2);
  }
}

/** Shows an AnswerState; `update` draws it again, at most once a frame. */
export class AnswerView {
  /** @param {AnswerState} state  @param {{again?: () => void, stop?: () => void}} actions */
  constructor(state, actions = {}) {
    this.state = state;
    this.actions = actions;
    this.pending = false;
    this.chips = h("ul", { class: "chips", "aria-label": "Sources" });
    this.body = h("div", { class: "answer-text" });
    this.status = h("p", { class: "answer-status", role: "status" });
    this.foot = h("div", { class: "answer-foot" });
    this.element = h("article", { class: "turn" }, h("h2", { class: "question" }, state.question), this.chips, this.status, this.body, this.foot);
    this.draw();
  }

  update() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      this.draw();
    });
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
      const chip = sourceChip(reply, key);
      if (known) known.replaceWith(chip);
      else this.chips.append(chip);
    });
    while (this.chips.children.length > replies.length) this.chips.lastChild.remove();
  }

  drawStatus() {
    const { state } = this;
    const waiting = state.replies.filter((one) => one.status === "asked").length;
    let text = "";
    if (state.error) text = "";
    else if (state.done?.refused) text = "";
    else if (!state.over && !state.replies.length) text = "Sending the question…";
    else if (!state.over && waiting) text = `Waiting for ${count(waiting, "source")}…`;
    else if (!state.over && !state.text) text = state.model && state.model !== "extractive" ? `${state.model} is reading ${count(state.retrieved?.passages ?? 0, "passage")}…` : `Reading ${count(state.retrieved?.passages ?? 0, "passage")}…`;
    if (this.status.textContent !== text) this.status.textContent = text;
    this.status.hidden = !text;
  }

  drawText() {
    const { state } = this;
    if (state.error) {
      clear(
        this.body,
        state.text ? markdown(state.text, decorator(state.text, []).decorate) : null,
        h("div", { class: "problem", role: "alert" }, h("p", null, state.error.message || "The answer failed."), this.actions.again ? button("Ask again", this.actions.again, { icon: "again" }) : null),
      );
      return;
    }
    if (!state.text) return;
    const key = `${state.text.length}/${state.sentences.filter(Boolean).length}/${state.over}`;
    if (this.drawn === key) return;
    this.drawn = key;
    const { text } = state;
    const convert = offsets(text);
    const sentences = state.sentences.filter(Boolean);
    const ranges = sentences.map((sentence) => ({
      start: convert(sentence.start),
      end: convert(sentence.end),
      wrap: (words) => this.sentence(sentence, words),
    }));
    const insertions = this.insertions(text, convert, sentences);
    const { decorate, finish } = decorator(text, ranges, insertions);
    const rendered = markdown(text, decorate);
    clear(this.body, fallbackNote(state), rendered);
    if (tip && !tip.of.isConnected) hideTip();
    finish();
    keepMarksWithLastWord(this.body);
    this.body.classList.toggle("refusal", Boolean(state.done?.refused));
    if (!state.over) this.body.lastElementChild?.append(h("span", { class: "caret", "aria-hidden": "true" }));
  }

  /** Citation marks and verdicts, in the order of their places. */
  insertions(text, convert, sentences) {
    const places = [];
    const citations = this.state.done?.citations ?? [];
    // The space before a mark is left out, so that no line begins with the mark.
    const add = (start, end, order, node) => {
      while (end > start && start > 0 && text[start - 1] === " ") start -= 1;
      places.push({ start, end, order, nodes: () => [document.createTextNode(JOINER), node()] });
    };
    for (const one of citations) add(convert(one.answer_start), convert(one.answer_end), 0, () => this.mark(one, sentences));
    const placed = new Set(citations.map((one) => convert(one.answer_start)));
    for (const found of text.matchAll(MARK)) {
      const [start, end, index] = [found.index, found.index + found[0].length, found[0].slice(1, -1)];
      if (placed.has(start)) continue;
      if (!this.state.done) add(start, end, 0, () => h("span", { class: "cite pending" }, index));
      else if (this.state.passage(Number(index)) && sentences.some((one) => one.reason !== "code" && convert(one.start) <= start && end <= convert(one.end)))
        add(start, end, 0, () => this.unprovenMark(this.state.passage(Number(index))));
    }
    for (const sentence of sentences) {
      if (sentence.verdict === "unchecked") continue;
      let at = convert(sentence.end);
      while (at > 0 && /\s/.test(text[at - 1])) at -= 1;
      add(at, at, 1, () => this.verdict(sentence));
    }
    // The same mark for the same words is one.
    return places.sort((a, b) => a.start - b.start || a.end - b.end || a.order - b.order);
  }

  sentence(sentence, words) {
    const element = h("span", { class: `sentence ${sentence.verdict}`, onClick: () => this.open(sentence) }, ...this.withDoubts(sentence, words));
    hinted(element, () => evidence(sentence, this.state));
    return element;
  }

  /** Words that no source says are marked, if they are in this part of the sentence. */
  withDoubts(sentence, words) {
    const doubt = (sentence.doubted ?? []).find((one) => one.text && words.includes(one.text) && one.text !== words);
    if (!doubt) return [words];
    const at = words.indexOf(doubt.text);
    return [words.slice(0, at), h("span", { class: "doubted" }, doubt.text), words.slice(at + doubt.text.length)];
  }

  mark(citation, sentences) {
    const passage = this.state.passage(citation.citation_index);
    const sentence = sentences.find((one) => citation.answer_start >= one.start && citation.answer_start <= one.end + 1);
    const label = `Citation ${citation.citation_index}: ${passage?.title || passage?.source || "source"}`;
    const element = h(
      "button",
      { type: "button", class: `cite ${sentence?.verdict ?? ""}`, "aria-label": label, onClick: withoutPropagation(() => openSource({ document_id: citation.document_id, passage, spans: [{ start: citation.start_char, end: citation.end_char, verdict: sentence?.verdict }] })) },
      String(citation.citation_index),
    );
    hinted(element, () => quoteCard(passage, citation, sentence?.verdict));
    return element;
  }

  /** A mark of the model on a passage that does not say the sentence. */
  unprovenMark(passage) {
    const index = passage.citation_index;
    const spans = [{ start: passage.start_char ?? 0, end: passage.end_char ?? [...(passage.text ?? "")].length, verdict: "unsupported" }];
    const element = h(
      "button",
      { type: "button", class: "cite unproven", "aria-label": `Passage ${index}, which does not say this: ${passage.title || sourceName(passage.source)}`, onClick: withoutPropagation(() => openSource({ document_id: passage.document_id, passage, spans })) },
      String(index),
    );
    hinted(element, () => [h("p", null, "The model cites this passage, but it does not say this."), h("p", { class: "tip-where" }, passage.title || sourceName(passage.source))]);
    return element;
  }

  verdict(sentence) {
    const { glyph, label } = VERDICTS[sentence.verdict];
    const element = h("button", { type: "button", class: `verdict ${sentence.verdict}`, "aria-label": `${label}: show the evidence`, onClick: withoutPropagation(() => this.open(sentence)) }, glyph);
    hinted(element, () => evidence(sentence, this.state));
    return element;
  }

  open(sentence) {
    if (getSelection()?.toString()) return;
    const [first] = sentence.citations ?? [];
    const passage = first && this.state.passage(first.citation_index);
    // While the answer is written, the passages are not here yet.
    if (first && !passage && !first.document_id) return;
    if (!first) {
      if (sentence.verdict !== "unchecked") openPanel(VERDICTS[sentence.verdict].label, h("p", null, VERDICTS[sentence.verdict].text), h("blockquote", null, sentence.text));
      return;
    }
    const spans = sentence.citations.filter((one) => one.document_id === first.document_id && one.source === first.source).map((one) => ({ start: one.start_char, end: one.end_char, verdict: sentence.verdict }));
    openSource({ document_id: first.document_id, passage, spans });
  }

  drawFoot() {
    if (this.footDrawn) return;
    this.footDrawn = true;
    const { state } = this;
    if (!state.done) return;
    const { done } = state;
    clear(
      this.foot,
      summary(state),
      conflicts(state),
      done.citations?.length ? cited(state) : null,
      h(
        "div",
        { class: "row actions" },
        button("Copy", () => copy(state.asMarkdown, "Copied as Markdown, with its sources."), { icon: "copy", kind: "quiet" }),
        button("Export", () => download(`answer-${(state.query_id ?? "").slice(0, 8)}.json`, state.asJson, "application/json"), { icon: "download", kind: "quiet" }),
        state.query_id && session.query_log ? button("Share", () => share(state), { icon: "link", kind: "quiet" }) : null,
        done.explanation ? button("Explain", () => explain(state), { icon: "explain", kind: "quiet" }) : null,
        this.actions.again ? button("Ask again", this.actions.again, { icon: "again", kind: "quiet" }) : null,
        state.query_id && session.query_log && !this.actions.shared ? h("span", { class: "thumbs" }, ...thumbs(state)) : null,
      ),
      done.timings || state.replies.length ? runDetails(state) : null,
    );
  }
}

function sourceChip(reply, key) {
  const failed = !["success", "asked"].includes(reply.status);
  const detail =
    reply.status === "success"
      ? `${count(reply.results, "passage")} · ${duration(reply.latency_ms)}`
      : failed && reply.latency_ms !== null
        ? `${STATUSES[reply.status] ?? reply.status} · ${duration(reply.latency_ms)}`
        : (STATUSES[reply.status] ?? reply.status);
  return h(
    "li",
    { class: `chip ${failed ? "failed" : reply.status}`, dataset: { key, status: reply.status } },
    h("span", { class: "dot", "aria-hidden": "true" }),
    h("span", { class: "chip-name" }, sourceName(reply.source)),
    h("span", { class: "chip-detail" }, detail),
    failed && reply.error ? h("span", { class: "chip-error" }, reply.error) : null,
  );
}

// The names that the operator gave to sources, by the paths that answers have.
const configured = new Map();

export function nameSources(sources) {
  for (const { kind, name, owner, slug } of sources) if (kind === "space") configured.set(owner ? `${owner}/${slug}` : slug, name);
}

export const sourceName = (source) => (source === "collections" ? "Your collections" : (configured.get(source) ?? source));
export const modelName = (model) => (model === "extractive" ? "Quoted from the documents" : model);

function fallbackNote(state) {
  const note = state.done?.fallback ?? state.fallback;
  return note ? h("p", { class: "note" }, `${note.from} did not answer (${note.message}) The documents are quoted instead.`) : null;
}

function summary({ done, model, text }) {
  if (done.refused) return h("p", { class: "meta" }, `No answer in ${duration(done.latency_ms)}.`);
  const parts = [modelName(model ?? ""), duration(done.latency_ms)];
  if (typeof done.faithfulness_score === "number") parts.push(`${Math.round(done.faithfulness_score * 100)}% supported`);
  if (done.left_out) parts.push(`${count(done.left_out, "sentence")} left out`);
  if (done.removed_links?.length) parts.push(`${count(done.removed_links.length, "link")} removed`);
  return text ? h("p", { class: "meta" }, parts.filter(Boolean).join(" · ")) : null;
}

function conflicts(state) {
  const { done } = state;
  if (!done.conflicts?.length) return null;
  const side = (words) => {
    const open = () => openSource({ document_id: words.document_id, passage: state.passage(words.citation_index), spans: [{ start: words.start_char, end: words.end_char }] });
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
    spans.push({ start: citation.start_char, end: citation.end_char, document_id: citation.document_id, page: citation.page });
    places.set(citation.citation_index, spans);
  }
  return h(
    "ol",
    { class: "cited", "aria-label": "Cited sources" },
    [...places.entries()]
      .sort(([a], [b]) => a - b)
      .map(([index, spans]) => {
        const passage = state.passage(index);
        const where = [passage?.collection || sourceName(passage?.source ?? ""), passage?.section_title, pageOf(spans[0], passage)].filter(Boolean).join(" · ");
        return h(
          "li",
          null,
          h(
            "button",
            { type: "button", class: "cited-source", onClick: () => openSource({ document_id: spans[0].document_id, passage, spans }) },
            h("span", { class: "cite", "aria-hidden": "true" }, String(index)),
            h("span", null, h("span", { class: "cited-title" }, passage?.title || "Source"), h("span", { class: "cited-where" }, where)),
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
  const show = () => {
    hideTip();
    tip = h("div", { class: "tip", role: "tooltip", id: "tip" }, ...[content()].flat(3).filter(Boolean));
    tip.of = element;
    document.getElementById("main").append(tip);
    const target = element.getClientRects()[0] ?? element.getBoundingClientRect();
    const { width, height } = tip.getBoundingClientRect();
    const left = Math.max(8, Math.min(target.left, innerWidth - width - 8));
    const above = target.top - height - 8;
    tip.style.setProperty("left", `${left}px`);
    tip.style.setProperty("top", `${above > 8 ? above : Math.min(target.bottom + 8, innerHeight - height - 8)}px`);
    if (element.tagName === "BUTTON") element.setAttribute("aria-describedby", "tip");
  };
  const hide = () => tip?.of === element && hideTip();
  element.addEventListener("pointerenter", (event) => event.pointerType === "mouse" && show());
  element.addEventListener("pointerleave", hide);
  element.addEventListener("focus", () => element.matches(":focus-visible") && show());
  element.addEventListener("blur", hide);
  element.addEventListener("click", hide);
  element.addEventListener("keydown", (event) => event.key === "Escape" && hide());
}

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

function thumbs(state) {
  const buttons = [];
  const rate = async (rating, pressed) => {
    try {
      await post("/v1/feedback", { query_id: state.query_id, rating });
    } catch (error) {
      toast(error.message, { kind: "error" });
      return;
    }
    for (const one of buttons) one.setAttribute("aria-pressed", String(one === pressed));
    if (await toast("Thank you. It was recorded.", { action: "Add a comment" })) comment(state, rating);
  };
  buttons.push(button("Good answer", () => rate("thumbs_up", buttons[0]), { icon: "up", hidden: true, kind: "quiet icon-only", "aria-pressed": "false" }));
  buttons.push(button("Bad answer", () => rate("thumbs_down", buttons[1]), { icon: "down", hidden: true, kind: "quiet icon-only", "aria-pressed": "false" }));
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

