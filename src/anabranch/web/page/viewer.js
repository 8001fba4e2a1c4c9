/** Shows a source beside the answer, scrolled to the highlighted words: a document of a collection, or a passage. */
import { get, path } from "./api.js";
import { bytes, button, clear, count, h, keepFocus, offsets, problem } from "./dom.js";
import { decorator, markdown, plain } from "./markdown.js";

// Characters around the highlighted words that are fetched first; more on request.
const AROUND = 20_000;
const MARKDOWN = /\.(md|markdown|mdx)$/i;

const panel = () => document.getElementById("panel");
// As in style.css: on a narrow screen the panel is over the page.
const narrow = matchMedia("(max-width: 1100px)");
let opener = null;

/** What the panel covers can be neither reached by keyboard nor clicked. */
function cover() {
  const element = panel();
  const covered = narrow.matches && !element.hidden;
  for (const one of document.querySelectorAll(".rail, main")) one.inert = covered;
  if (covered && !element.contains(document.activeElement)) element.querySelector("h2").focus({ preventScroll: true });
}

export function closePanel() {
  const element = panel();
  if (element.hidden) return;
  element.hidden = true;
  element.replaceChildren();
  document.body.classList.remove("with-panel");
  cover();
  if (opener?.isConnected) opener.focus({ preventScroll: true });
  keepFocus();
  opener = null;
}

function open(title, ...content) {
  opener = document.activeElement;
  const element = panel();
  const heading = h("h2", { tabindex: -1 }, title);
  clear(
    element,
    h("div", { class: "panel-head" }, heading, button("Close", closePanel, { icon: "close", hidden: true, kind: "quiet icon-only" })),
    ...content,
  );
  element.hidden = false;
  document.body.classList.add("with-panel");
  cover();
  heading.focus({ preventScroll: true });
  return element;
}

/** Anything else that is shown beside the answer. */
export function openPanel(title, ...content) {
  return open(title, h("div", { class: "panel-body" }, ...content));
}

export function initPanel() {
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) closePanel();
  });
  // A click beside a panel that covers the page closes it, as with a dialog.
  document.addEventListener("click", (event) => event.target === document.body && narrow.matches && closePanel());
  narrow.addEventListener("change", cover);
}

/**
 * A quoted place. `spans` are `{start, end, verdict}` in the document's content, or in `passage.text`; their own `text` is
 * shown where neither can be had.
 * @param {{document_id: string, spans: {start: number, end: number, text?: string, verdict?: string}[], passage?: Object}} place
 */
export async function openSource({ document_id, spans, passage }) {
  if (!document_id || (passage && !passage.collection)) {
    showPassage(passage, spans);
    return;
  }
  const body = h("div", { class: "panel-body document", tabindex: 0, role: "region", "aria-label": "Document" }, h("p", { class: "hint" }, "Loading…"));
  const meta = h("p", { class: "panel-meta" });
  open(passage?.title ?? "Document", meta, body);
  const low = Math.min(...spans.map((span) => span.start));
  const high = Math.max(...spans.map((span) => span.end));
  try {
    await showDocument(meta, body, document_id, spans, Math.max(0, (Number.isFinite(low) ? low : 0) - AROUND), (Number.isFinite(high) ? high : 0) + AROUND, passage);
  } catch (error) {
    clear(body, problem(error));
    if (passage?.text || spans.some((one) => one.text)) body.append(h("p", { class: "hint" }, "The passage as it was found:"), quoted(passage ?? {}, spans));
  }
}

/** Shows a part of a document; `shown` is where the part begins that is shown already, if it only becomes longer. */
async function showDocument(meta, body, id, spans, start, end, passage, shown = null) {
  const found = await get(`/v1/documents/${path(id)}?start=${start}&end=${end}`);
  const starts = found.page_starts ?? [];
  const headings = isMarkdown(found) ? new Set() : await headingsOf(id);
  if (!body.isConnected) return;
  const heading = panel().querySelector("h2");
  if (heading) heading.textContent = found.title;
  const page = starts.length ? starts.findLastIndex((one) => one <= (spans[0]?.start ?? 0)) + 1 : passage?.page;
  clear(
    meta,
    [
      found.collection,
      found.pages && page ? `page ${page} of ${found.pages}` : found.pages ? count(found.pages, "page") : null,
      found.source.filename,
      bytes(found.size_bytes),
    ]
      .filter(Boolean)
      .join(" · "),
    found.source.url && /^https?:/.test(found.source.url)
      ? [" · ", h("a", { href: found.source.url, target: "_blank", rel: "noopener noreferrer" }, "original")]
      : null,
  );
  const [height, top] = [body.scrollHeight, body.scrollTop];
  clear(body);
  const more = (label, from, to) =>
    body.append(button(label, () => showDocument(meta, body, id, spans, from, to, passage, start).catch((error) => body.append(problem(error))), { kind: "quiet" }));
  if (found.content_start > 0) more("Show what comes before", Math.max(0, start - 4 * AROUND), end);
  body.append(rendered(found, starts, spans, headings));
  if (found.content_end < found.content_length) more("Show what follows", start, end + 4 * AROUND);
  // More of the document does not move the words that are read.
  if (shown !== null) body.scrollTop = start < shown ? top + body.scrollHeight - height : top;
  else scrollToMark(body);
}

const isMarkdown = ({ source }) => MARKDOWN.test(source.filename ?? source.url ?? "") || source.type === "text";

/** The headings of a document, as its chunks name them: the text of other formats than Markdown does not mark them. */
async function headingsOf(id) {
  const { chunks } = await get(`/v1/documents/${path(id)}/chunks?limit=200`).catch(() => ({ chunks: [] }));
  return new Set(chunks.flatMap((chunk) => chunk.headers));
}

/** The content, page by page where the document has pages. */
function rendered(found, starts, spans, headings) {
  const convert = offsets(found.content);
  const place = (offset) => convert(Math.max(0, Math.min(offset, found.content_end) - found.content_start));
  const ranges = joined(spans)
    .filter((span) => span.end > found.content_start && span.start < found.content_end)
    .map((span) => ({ start: place(span.start), end: place(span.end), wrap: (text) => h("mark", { class: span.verdict ?? "" }, text) }));
  const { decorate } = decorator(found.content, ranges);
  const render = isMarkdown(found) ? markdown : (source, mark, range) => plain(source, mark, range, { headings, page: starts.length > 0 });
  const fragment = document.createDocumentFragment();
  if (!starts.length) fragment.append(render(found.content, decorate));
  starts.forEach((from, index) => {
    const [start, end] = [place(from), place(starts[index + 1] ?? found.content_length)];
    if (end > start)
      fragment.append(h("section", { class: "page" }, h("h3", { class: "page-number" }, `Page ${index + 1}`), render(found.content, decorate, { start, end })));
  });
  return fragment;
}

/** Sorted, and without overlaps. */
function joined(spans) {
  const sorted = [...spans].sort((a, b) => a.start - b.start);
  const result = [];
  for (const span of sorted) {
    const last = result[result.length - 1];
    if (last && span.start <= last.end) last.end = Math.max(last.end, span.end);
    else result.push({ ...span });
  }
  return result;
}

function showPassage(passage, spans) {
  const meta = h(
    "p",
    { class: "panel-meta" },
    `From ${passage.source}`,
    passage.url && /^https?:/.test(passage.url) ? [" · ", h("a", { href: passage.url, target: "_blank", rel: "noopener noreferrer" }, "original")] : null,
  );
  const body = h("div", { class: "panel-body document", tabindex: 0, role: "region", "aria-label": "Passage" }, quoted(passage, spans));
  open(passage.title || "Passage", meta, body);
  scrollToMark(body);
}

function quoted(passage, spans) {
  const text = passage.text ?? passage.content_snippet ?? "";
  if (!text) return h("div", { class: "passage" }, spans.map((span) => h("blockquote", null, h("mark", { class: span.verdict ?? "" }, span.text))));
  const convert = offsets(text);
  const base = passage.collection ? passage.start_char : 0;
  const ranges = joined(spans).map((span) => ({
    start: convert(Math.max(0, span.start - base)),
    end: convert(Math.max(0, span.end - base)),
    wrap: (words) => h("mark", { class: span.verdict ?? "" }, words),
  }));
  return h("div", { class: "passage" }, markdown(text, decorator(text, ranges).decorate));
}

function scrollToMark(body) {
  const mark = body.querySelector("mark");
  if (mark) requestAnimationFrame(() => mark.scrollIntoView({ block: "center" }));
}
