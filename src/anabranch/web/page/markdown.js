/**
 * Renders Markdown as elements, and knows for every character where it stands in the source, so that spans of the source
 * can be highlighted. Nothing is ever parsed as HTML: tags in a text are shown as text, images as their description, and
 * only links to web addresses are links.
 */
import { h } from "./dom.js";

// A longer paragraph is shown without its inline markup: looking for the ends of emphasis would take too long.
const MAX_INLINE = 20_000;
const MAX_DEPTH = 8;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+|$)/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const ITEM = /^( {0,12})([-*+•]|\d{1,9}[.)])([ \t]+|$)/;
const QUOTE = /^ {0,3}> ?/;
const DELIMITER = /^:?-+:?$/;
// A line of more columns is shown as text, and so are the rows after so many cells: a short text could ask for millions.
const MAX_COLUMNS = 100;
const MAX_CELLS = 20_000;
const URL_START = /^https?:\/\/[^\s<>"'`]+/i;

/**
 * @param {string} source
 * @param {(start: number, end: number) => Node[]} decorate  the nodes for a span of the source
 * @param {{start?: number, end?: number}} [range]
 */
export function markdown(source, decorate, { start = 0, end = source.length } = {}) {
  const fragment = document.createDocumentFragment();
  new Renderer(source, decorate).blocks(fragment, lines(source, start, end), 0);
  return fragment;
}

/** The same for text that is not Markdown: paragraphs at blank lines, other line ends kept. A line of its own that is one
 * of the `headings` is shown as one. */
export function plain(source, decorate, { start = 0, end = source.length } = {}, headings = new Set()) {
  const fragment = document.createDocumentFragment();
  for (const paragraph of paragraphs(lines(source, start, end), source)) {
    const isHeading = paragraph.length === 1 && headings.has(source.slice(paragraph[0].start, paragraph[0].end).trim());
    const element = isHeading ? h("h3", { class: "level-2" }) : h("p", { class: "plain" });
    element.append(...decorate(paragraph[0].start, paragraph[paragraph.length - 1].end));
    fragment.append(element);
  }
  return fragment;
}

function lines(source, start, end) {
  const found = [];
  for (let at = start; at < end; ) {
    let stop = source.indexOf("\n", at);
    if (stop < 0 || stop > end) stop = end;
    found.push({ start: at, end: stop });
    at = stop + 1;
  }
  return found;
}

function* paragraphs(all, source) {
  let open = [];
  for (const line of all) {
    if (source.slice(line.start, line.end).trim()) open.push(line);
    else if (open.length) {
      yield open;
      open = [];
    }
  }
  if (open.length) yield open;
}

class Renderer {
  constructor(source, decorate) {
    this.source = source;
    this.decorate = decorate;
  }

  text(line) {
    return this.source.slice(line.start, line.end);
  }

  blocks(parent, all, depth) {
    let at = 0;
    let open = [];
    const flush = () => {
      if (open.length) parent.append(this.paragraph(open));
      open = [];
    };
    while (at < all.length) {
      const text = this.text(all[at]);
      const next = all[at + 1];
      let taken = 0;
      if (!text.trim()) {
        flush();
        at += 1;
        continue;
      }
      if (FENCE.test(text)) taken = this.fence(parent, all, at, flush);
      else if (HEADING.test(text)) taken = this.heading(parent, all[at], flush);
      else if (RULE.test(text) && !open.length) taken = this.append(parent, h("hr"), flush);
      else if (text.includes("|") && next && this.isTable(all[at], next))
        taken = this.table(parent, all, at, flush);
      else if (depth < MAX_DEPTH && QUOTE.test(text)) taken = this.quote(parent, all, at, depth, flush);
      else if (depth < MAX_DEPTH && ITEM.test(text)) taken = this.list(parent, all, at, depth, flush);
      if (taken) at += taken;
      else open.push(all[at++]);
    }
    flush();
  }

  append(parent, element, flush) {
    flush();
    parent.append(element);
    return 1;
  }

  paragraph(all) {
    const element = h("p");
    this.inline(element, all.map((line) => this.stripped(line)));
    return element;
  }

  /** Without the white space around. */
  stripped({ start, end }) {
    while (start < end && /\s/.test(this.source[start])) start += 1;
    while (end > start && /\s/.test(this.source[end - 1])) end -= 1;
    return { start, end };
  }

  fence(parent, all, at, flush) {
    flush();
    const [, mark] = FENCE.exec(this.text(all[at]));
    let last = at + 1;
    while (last < all.length && !this.text(all[last]).trim().startsWith(mark)) last += 1;
    const code = h("code");
    if (last > at + 1) code.append(...this.decorate(all[at + 1].start, all[last - 1].end));
    parent.append(h("pre", { tabindex: 0 }, code));
    return last - at + 1;
  }

  heading(parent, line, flush) {
    flush();
    const text = this.text(line);
    const [prefix, marks] = HEADING.exec(text);
    const closing = /[ \t]+#+[ \t]*$/.exec(text);
    const end = closing && closing.index >= prefix.length ? line.start + closing.index : line.end;
    // The page's own headings come first.
    const element = h(`h${Math.min(6, marks.length + 2)}`, { class: `level-${marks.length}` });
    this.inline(element, [this.stripped({ start: Math.min(line.start + prefix.length, end), end })]);
    parent.append(element);
    return 1;
  }

  quote(parent, all, at, depth, flush) {
    flush();
    const inner = [];
    while (at + inner.length < all.length) {
      const line = all[at + inner.length];
      const prefix = QUOTE.exec(this.text(line));
      if (!prefix) break;
      inner.push({ start: line.start + prefix[0].length, end: line.end });
    }
    const element = h("blockquote");
    this.blocks(element, inner, depth + 1);
    parent.append(element);
    return inner.length;
  }

  list(parent, all, at, depth, flush) {
    flush();
    const [, , marker] = ITEM.exec(this.text(all[at]));
    const ordered = /\d/.test(marker);
    const number = ordered ? Number.parseInt(marker, 10) : 1;
    const element = h(ordered ? "ol" : "ul", ordered && number !== 1 ? { start: number } : null);
    const begin = at;
    while (at < all.length) {
      const head = ITEM.exec(this.text(all[at]));
      if (!head || /\d/.test(head[2]) !== ordered) break;
      const indent = head[0].length;
      const own = [{ start: Math.min(all[at].start + indent, all[at].end), end: all[at].end }];
      at += 1;
      while (at < all.length) {
        const text = this.text(all[at]);
        const blank = !text.trim();
        const spaces = text.length - text.trimStart().length;
        if (blank) {
          const after = all[at + 1] && this.text(all[at + 1]);
          if (!after?.trim() || after.length - after.trimStart().length < Math.min(indent, 2)) break;
        } else if (spaces <= head[1].length && (ITEM.test(text) || HEADING.test(text) || FENCE.test(text) || QUOTE.test(text))) break;
        const cut = Math.min(spaces, indent);
        own.push({ start: all[at].start + (blank ? 0 : cut), end: all[at].end });
        at += 1;
      }
      const item = h("li");
      this.blocks(item, own, depth + 1);
      // An item of one paragraph needs no paragraph.
      if (item.childNodes.length && item.firstChild.tagName === "P") item.firstChild.replaceWith(...item.firstChild.childNodes);
      element.append(item);
      while (at + 1 < all.length && !this.text(all[at]).trim() && ITEM.test(this.text(all[at + 1]))) at += 1;
    }
    parent.append(element);
    return at - begin;
  }

  /** Whether a line with cells is followed by one of delimiters, as `|---|:-:|`. */
  isTable(line, next) {
    if (!this.text(next).includes("|") || !this.text(next).includes("-")) return false;
    const delimiters = this.cells(next);
    return delimiters.length <= MAX_COLUMNS && delimiters.every((one) => DELIMITER.test(this.text(one))) && this.cells(line).length <= MAX_COLUMNS;
  }

  table(parent, all, at, flush) {
    flush();
    const begin = at;
    const rows = [];
    const most = begin + 2 + MAX_CELLS / this.cells(all[at]).length;
    for (; at < all.length && at < most && this.text(all[at]).includes("|") && this.text(all[at]).trim(); at += 1)
      if (at !== begin + 1) rows.push(this.cells(all[at]));
    const [head, ...body] = rows;
    const row = (cells, tag) =>
      h("tr", null, head.map((_, index) => {
        const cell = h(tag, tag === "th" ? { scope: "col" } : null);
        if (cells[index]) this.inline(cell, [cells[index]]);
        return cell;
      }));
    const table = h("table", null, h("thead", null, row(head, "th")), h("tbody", null, body.map((cells) => row(cells, "td"))));
    parent.append(h("div", { class: "table", tabindex: 0, role: "region", "aria-label": "Table" }, table));
    return at - begin;
  }

  cells(line) {
    const found = [];
    let { start, end } = this.stripped(line);
    if (this.source[start] === "|") start += 1;
    if (end > start && this.source[end - 1] === "|" && this.source[end - 2] !== "\\") end -= 1;
    let from = start;
    for (let at = start; at <= end; at += 1) {
      if (at === end || (this.source[at] === "|" && this.source[at - 1] !== "\\")) {
        found.push(this.stripped({ start: from, end: at }));
        from = at + 1;
      }
    }
    return found;
  }

  /** Lines with their inline markup. `text` is what is parsed; `at` says where each of its characters stands. */
  inline(parent, all) {
    const spans = all.filter((line) => line.end > line.start);
    if (!spans.length) return;
    const pieces = [];
    let length = 0;
    spans.forEach((span, index) => {
      pieces.push({ from: length, start: span.start, end: span.end });
      length += span.end - span.start + (index < spans.length - 1 ? 1 : 0);
    });
    const text = spans.map((span) => this.source.slice(span.start, span.end)).join("\n");
    const emit = (target, from, to) => {
      for (const piece of pieces) {
        const size = piece.end - piece.start;
        const low = Math.max(from, piece.from);
        const high = Math.min(to, piece.from + size);
        if (low < high) target.append(...this.decorate(piece.start + low - piece.from, piece.start + high - piece.from));
        if (from <= piece.from + size && to > piece.from + size && piece !== pieces[pieces.length - 1]) target.append("\n");
      }
    };
    if (text.length > MAX_INLINE) emit(parent, 0, text.length);
    else new Inline(text, emit).parse(parent, 0, text.length, 0);
  }
}

class Inline {
  constructor(text, emit) {
    this.text = text;
    this.emit = emit;
    // For each mark, from where on it does not occur again: nobody looks twice.
    this.absent = new Map();
  }

  parse(parent, from, to, depth) {
    let plainFrom = from;
    let at = from;
    const flush = (end) => {
      if (end > plainFrom) this.emit(parent, plainFrom, end);
    };
    while (at < to) {
      const found = "\\`*_[!<h".includes(this.text[at]) && depth < MAX_DEPTH ? this.token(at, to) : null;
      if (!found) {
        at += 1;
        continue;
      }
      flush(at);
      if (found.element) {
        if (found.raw) this.emit(found.element, found.inner[0], found.inner[1]);
        else this.parse(found.element, found.inner[0], found.inner[1], depth + 1);
        parent.append(found.element);
      } else this.emit(parent, found.inner[0], found.inner[1]);
      at = found.end;
      plainFrom = at;
    }
    flush(to);
  }

  find(mark, from, to) {
    const known = this.absent.get(mark);
    if (known !== undefined && from >= known) return -1;
    const at = this.text.indexOf(mark, from);
    if (at < 0) this.absent.set(mark, from);
    return at >= 0 && at + mark.length <= to ? at : -1;
  }

  token(at, to) {
    const { text } = this;
    switch (text[at]) {
      case "\\":
        return at + 1 < to && /[!-/:-@[-`{-~]/.test(text[at + 1]) ? { inner: [at + 1, at + 2], end: at + 2 } : null;
      case "`": {
        const ticks = /^`+/.exec(text.slice(at, Math.min(to, at + 20)))[0];
        const close = this.find(ticks, at + ticks.length, to);
        if (close < 0) return null;
        return { element: h("code"), raw: true, inner: [at + ticks.length, close], end: close + ticks.length };
      }
      case "*":
      case "_":
        return this.emphasis(at, to);
      case "!":
        return text[at + 1] === "[" ? this.link(at + 1, to, true) : null;
      case "[":
        return this.link(at, to, false);
      case "<": {
        const found = URL_START.exec(text.slice(at + 1, Math.min(to, at + 2000)));
        const end = found ? at + 1 + found[0].length : 0;
        return found && text[end] === ">" ? { element: anchor(found[0]), raw: true, inner: [at + 1, end], end: end + 1 } : null;
      }
      default: {
        if (at > 0 && /[\w/]/.test(text[at - 1])) return null;
        const found = URL_START.exec(text.slice(at, Math.min(to, at + 2000)));
        if (!found) return null;
        const address = found[0].replace(/[).,;:!?\]*_]+$/, "");
        return { element: anchor(address), raw: true, inner: [at, at + address.length], end: at + address.length };
      }
    }
  }

  emphasis(at, to) {
    const { text } = this;
    const mark = text[at];
    const strong = text[at + 1] === mark;
    const close = strong ? mark + mark : mark;
    const begin = at + close.length;
    if (begin >= to || /\s/.test(text[begin])) return null;
    if (mark === "_" && at > 0 && /\w/.test(text[at - 1])) return null;
    for (let end = this.find(close, begin, to), tries = 0; end >= 0 && tries < 20; end = this.find(close, end + 1, to), tries += 1) {
      const after = text[end + close.length];
      if (end === begin || /\s/.test(text[end - 1])) continue;
      if (!strong && (after === mark || text[end - 1] === mark)) continue;
      if (mark === "_" && after && /\w/.test(after)) continue;
      return { element: h(strong ? "strong" : "em"), inner: [begin, end], end: end + close.length };
    }
    return null;
  }

  link(at, to, image) {
    const { text } = this;
    const close = this.find("](", at + 1, to);
    if (close < 0 || close - at > 1000 || text.slice(at + 1, close).includes("[")) return null;
    const target = /^\(<?([^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*)>?(?:\s+["'(][^"')]{0,200}["')])?\)/.exec(text.slice(close + 1, Math.min(to, close + 2100)));
    if (!target) return null;
    const end = close + 1 + target[0].length;
    const inner = [at + 1, close];
    if (image) return { element: h("span", { class: "image" }), inner, end };
    return URL_START.test(target[1]) ? { element: anchor(target[1]), inner, end } : { element: h("span", { class: "no-link" }), inner, end };
  }
}

function anchor(address) {
  return h("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow" });
}

/**
 * A `decorate` for ranges: text in a range is wrapped by its `wrap`, and `insertions` put nodes before a span of the
 * text, or in its place. Both are sorted; ranges do not overlap. `finish` inserts what stood between the spans that
 * were rendered, after the text before it.
 */
export function decorator(source, ranges, insertions = []) {
  const rendered = [];
  let first = 0;
  const decorate = (start, end) => {
    const nodes = [];
    let at = start;
    const add = (to) => {
      for (let from = at; from < to; ) {
        const range = ranges.find((one) => one.end > from && one.start < to);
        const low = range ? Math.max(range.start, from) : to;
        if (low > from) nodes.push(document.createTextNode(source.slice(from, low)));
        from = low;
        if (range) {
          from = Math.min(range.end, to);
          nodes.push(range.wrap(source.slice(low, from)));
        }
      }
      at = Math.max(at, to);
    };
    for (; first < insertions.length && insertions[first].start <= end; first += 1) {
      const insertion = insertions[first];
      // What takes the place of text belongs to the span that has the text.
      if (insertion.start === end && insertion.end > insertion.start) break;
      if (insertion.start < at) continue;
      add(insertion.start);
      nodes.push(...insertion.nodes());
      insertion.done = true;
      at = Math.max(at, Math.min(insertion.end, end));
    }
    add(end);
    if (nodes.length) rendered.push({ end, node: nodes[nodes.length - 1] });
    return nodes;
  };
  const finish = () => {
    for (const insertion of insertions.filter((one) => !one.done)) {
      const before = rendered.findLast((one) => one.end <= insertion.start) ?? rendered[0];
      if (!before) continue;
      let place = before.node;
      while (place.parentElement && place === place.parentElement.lastChild && /^(STRONG|EM|CODE|A|SPAN)$/.test(place.parentElement.tagName))
        place = place.parentElement;
      const nodes = insertion.nodes();
      place.after(...nodes);
      before.node = nodes[nodes.length - 1] ?? before.node;
    }
  };
  return { decorate, finish };
}
