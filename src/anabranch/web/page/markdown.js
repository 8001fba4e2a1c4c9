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
// A single hyphen is none: while a list is written, its first mark would make a heading of the paragraph before it.
const UNDERLINE = /^ {0,3}(=+|-{2,})[ \t]*$/;
const TASK = /^\[([ xX])\][ \t]+(?=\S)/;
// An entry of a list, and a row of a table, as the text of documents that are not Markdown has them.
const PLAIN_ITEM = /^( {0,24})(?:-|(\d{1,9})\.) (?=\S)/;
const PLAIN_CELLS = / \| /;
const DELIMITER = /^:?-+:?$/;
// A line of more columns is shown as text, and so are the rows after so many cells: a short text could ask for millions.
const MAX_COLUMNS = 100;
const MAX_CELLS = 20_000;
const URL_START = /^https?:\/\/[^\s<>"'`]+/i;
const REFERENCE = /&(?:#(\d{1,7})|#[xX]([\da-fA-F]{1,6})|([A-Za-z]{2,8}\d{0,2}));/g;
// The names of the characters from U+00A0 on, and of others that texts use.
const LATIN =
  "nbsp iexcl cent pound curren yen brvbar sect uml copy ordf laquo not shy reg macr deg plusmn sup2 sup3 acute micro para middot cedil sup1 ordm raquo frac14 frac12 frac34 iquest Agrave Aacute Acirc Atilde Auml Aring AElig Ccedil Egrave Eacute Ecirc Euml Igrave Iacute Icirc Iuml ETH Ntilde Ograve Oacute Ocirc Otilde Ouml times Oslash Ugrave Uacute Ucirc Uuml Yacute THORN szlig agrave aacute acirc atilde auml aring aelig ccedil egrave eacute ecirc euml igrave iacute icirc iuml eth ntilde ograve oacute ocirc otilde ouml divide oslash ugrave uacute ucirc uuml yacute thorn yuml";
const NAMED = new Map([
  ...LATIN.split(" ").map((name, index) => [name, String.fromCharCode(0xa0 + index)]),
  ...Object.entries({ lt: "<", gt: ">", amp: "&", quot: '"', apos: "'", euro: "€", ndash: "–", mdash: "—", hellip: "…", bull: "•", lsquo: "‘", rsquo: "’", sbquo: "‚", ldquo: "“", rdquo: "”", bdquo: "„", ensp: "\u2002", emsp: "\u2003", thinsp: "\u2009", trade: "™", larr: "←", rarr: "→", uarr: "↑", darr: "↓", minus: "−", le: "≤", ge: "≥", ne: "≠", asymp: "≈", infin: "∞" }),
]);

/** Text with its character references, as `&lt;` or `&#8364;`, replaced by the characters. Unknown names stay. */
export const decoded = (text) =>
  text.includes("&")
    ? text.replace(REFERENCE, (all, decimal, hex, name) => {
        if (name) return NAMED.get(name) ?? all;
        const code = decimal ? Number(decimal) : Number.parseInt(hex, 16);
        return code > 0 && code <= 0x10ffff && !(code >= 0xd800 && code < 0xe000) ? String.fromCodePoint(code) : all;
      })
    : text;

/**
 * @param {string} source
 * @param {(start: number, end: number, raw?: boolean) => Node[]} decorate  the nodes for a span of the source; `raw` text
 *   has no character references
 * @param {{start?: number, end?: number}} [range]
 */
export function markdown(source, decorate, { start = 0, end = source.length } = {}) {
  const fragment = document.createDocumentFragment();
  new Renderer(source, decorate).blocks(fragment, lines(source, start, end), 0);
  return fragment;
}

/** The ranges of the paragraphs, lists and other blocks of a text. Each can be rendered by itself. */
export function blockRanges(source) {
  return [...new Renderer(source).split(lines(source, 0, source.length), 0)].map(({ start, end }) => ({ start, end }));
}

/** Renders text that is not Markdown: paragraphs at blank lines, other line ends kept. A line of its own that is one of
 * the `headings` is shown as one; lists and tables are found as our parsers write them, unless the lines are those of a `page`. */
export function plain(source, decorate, { start = 0, end = source.length } = {}, { headings = new Set(), page = false } = {}) {
  const fragment = document.createDocumentFragment();
  const text = (line) => source.slice(line.start, line.end);
  for (const paragraph of paragraphs(lines(source, start, end), source)) {
    const [first, second] = paragraph;
    let render = plainText;
    if (!second && headings.has(text(first).trim())) render = plainHeading;
    else if (!page && PLAIN_ITEM.test(text(first))) render = plainList;
    else if (!page && second && paragraph.every((line) => PLAIN_CELLS.test(text(line)))) render = plainTable;
    fragment.append(render(paragraph, decorate, text));
  }
  return fragment;
}

const plainHeading = ([line], decorate) => h("h3", { class: "level-2" }, ...decorate(line.start, line.end, true));
const plainText = (all, decorate) => h("p", { class: "plain" }, ...decorate(all[0].start, all[all.length - 1].end, true));

/** An entry may go on in further lines. */
function plainList(all, decorate, text) {
  const items = [];
  for (const line of all) {
    const found = PLAIN_ITEM.exec(text(line));
    if (found) items.push({ start: line.start + found[0].length, end: line.end, indent: found[1].length, value: found[2] });
    else items[items.length - 1].end = line.end;
  }
  const item = ({ start, end, indent, value }) => h("li", { class: "plain", value, style: { "margin-left": `${indent * 8}px` } }, ...decorate(start, end, true));
  return h("ul", null, items.map(item));
}

function plainTable(all, decorate, text) {
  const row = (line) => {
    let from = line.start;
    const cells = text(line)
      .split(" | ")
      .map((cell) => {
        const start = from;
        from += cell.length + " | ".length;
        return h("td", null, ...decorate(start, start + cell.length, true));
      });
    return h("tr", null, cells);
  };
  return tableRegion(h("tbody", null, all.map(row)));
}

const tableRegion = (...parts) => h("div", { class: "table", tabindex: 0, role: "region", "aria-label": "Table" }, h("table", null, ...parts));

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
    for (const block of this.split(all, depth)) parent.append(block.render());
  }

  /** The blocks that the lines consist of, each with its range in the source. */
  *split(all, depth) {
    let open = [];
    const ranged = (part, render) => ({ start: part[0].start, end: part[part.length - 1].end, render });
    const paragraph = () => {
      const own = open;
      open = [];
      return ranged(own, () => this.paragraph(own));
    };
    for (let at = 0; at < all.length; ) {
      const text = this.text(all[at]);
      if (open.length && UNDERLINE.test(text)) {
        const [own, level] = [open, text.includes("=") ? 1 : 2];
        open = [];
        yield ranged([...own, all[at]], () => this.heading(own, level));
        at += 1;
        continue;
      }
      const found = text.trim() ? this.block(all, at, depth) : null;
      if (open.length && (found || !text.trim())) yield paragraph();
      if (found) yield ranged(all.slice(at, at + found.size), found.render);
      else if (text.trim()) open.push(all[at]);
      at += found?.size ?? 1;
    }
    if (open.length) yield paragraph();
  }

  /** What begins at a line, if it is no paragraph: the number of its lines, and how it is rendered. */
  block(all, at, depth) {
    const text = this.text(all[at]);
    if (FENCE.test(text)) return this.fence(all, at);
    if (HEADING.test(text)) return { size: 1, render: () => this.marked(all[at]) };
    if (RULE.test(text)) return { size: 1, render: () => h("hr") };
    if (text.includes("|") && all[at + 1] && this.isTable(all[at], all[at + 1])) return this.table(all, at);
    if (depth < MAX_DEPTH && QUOTE.test(text)) return this.quote(all, at, depth);
    if (depth < MAX_DEPTH && ITEM.test(text)) return this.list(all, at, depth);
    return null;
  }

  paragraph(all) {
    const element = h("p");
    this.inline(element, all.map((line, index) => this.stripped(line, index < all.length - 1)));
    return element;
  }

  /** Without the white space around, and without the backslash that breaks a line where another one follows. */
  stripped({ start, end }, isFollowed = false) {
    while (start < end && /\s/.test(this.source[start])) start += 1;
    while (end > start && /\s/.test(this.source[end - 1])) end -= 1;
    if (isFollowed && /(^|[^\\])\\$/.test(this.source.slice(Math.max(start, end - 2), end))) end -= 1;
    return { start, end };
  }

  fence(all, at) {
    const [, mark] = FENCE.exec(this.text(all[at]));
    let last = at + 1;
    while (last < all.length && !this.text(all[last]).trim().startsWith(mark)) last += 1;
    const render = () => h("pre", { tabindex: 0 }, h("code", null, ...(last > at + 1 ? this.decorate(all[at + 1].start, all[last - 1].end, true) : [])));
    return { size: Math.min(last + 1, all.length) - at, render };
  }

  /** A heading with its marks before it. */
  marked(line) {
    const text = this.text(line);
    const [prefix, marks] = HEADING.exec(text);
    const closing = /[ \t]+#+[ \t]*$/.exec(text);
    const end = closing && closing.index >= prefix.length ? line.start + closing.index : line.end;
    return this.heading([{ start: Math.min(line.start + prefix.length, end), end }], marks.length);
  }

  heading(all, level) {
    // The page's own headings come first.
    const element = h(`h${Math.min(6, level + 2)}`, { class: `level-${level}` });
    this.inline(element, all.map((line) => this.stripped(line)));
    return element;
  }

  quote(all, at, depth) {
    const inner = [];
    while (at + inner.length < all.length) {
      const line = all[at + inner.length];
      const prefix = QUOTE.exec(this.text(line));
      if (!prefix) break;
      inner.push({ start: line.start + prefix[0].length, end: line.end });
    }
    const render = () => {
      const element = h("blockquote");
      this.blocks(element, inner, depth + 1);
      return element;
    };
    return { size: inner.length, render };
  }

  list(all, at, depth) {
    const [, , marker] = ITEM.exec(this.text(all[at]));
    const ordered = /\d/.test(marker);
    const number = ordered ? Number.parseInt(marker, 10) : 1;
    const begin = at;
    const items = [];
    while (at < all.length) {
      const text = this.text(all[at]);
      const head = ITEM.exec(text);
      if (!head || /\d/.test(head[2]) !== ordered || (items.length && RULE.test(text))) break;
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
        } else if (spaces <= head[1].length && [ITEM, HEADING, FENCE, QUOTE, RULE].some((one) => one.test(text))) break;
        const cut = Math.min(spaces, indent);
        own.push({ start: all[at].start + (blank ? 0 : cut), end: all[at].end });
        at += 1;
      }
      items.push(own);
      while (at + 1 < all.length && !this.text(all[at]).trim() && ITEM.test(this.text(all[at + 1]))) at += 1;
    }
    const render = () => h(ordered ? "ol" : "ul", ordered && number !== 1 ? { start: number } : null, items.map((own) => this.item(own, depth)));
    return { size: at - begin, render };
  }

  item([first, ...rest], depth) {
    const task = TASK.exec(this.text(first));
    const element = h("li", task ? { class: task[1] === " " ? "task" : "task done" } : null);
    this.blocks(element, [{ start: first.start + (task?.[0].length ?? 0), end: first.end }, ...rest], depth + 1);
    // An item of one paragraph needs no paragraph.
    if (element.firstChild?.tagName === "P") element.firstChild.replaceWith(...element.firstChild.childNodes);
    return element;
  }

  /** Whether a line with cells is followed by one of delimiters, as `|---|:-:|`. */
  isTable(line, next) {
    if (!this.text(next).includes("|") || !this.text(next).includes("-")) return false;
    const delimiters = this.cells(next);
    return delimiters.length <= MAX_COLUMNS && delimiters.every((one) => DELIMITER.test(this.text(one))) && this.cells(line).length <= MAX_COLUMNS;
  }

  table(all, at) {
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
    const render = () => tableRegion(h("thead", null, row(head, "th")), h("tbody", null, body.map((cells) => row(cells, "td"))));
    return { size: at - begin, render };
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
    const emit = (target, from, to, raw) => {
      for (const piece of pieces) {
        const size = piece.end - piece.start;
        const low = Math.max(from, piece.from);
        const high = Math.min(to, piece.from + size);
        if (low < high) target.append(...this.decorate(piece.start + low - piece.from, piece.start + high - piece.from, raw));
        if (from <= piece.from + size && to > piece.from + size && piece !== pieces[pieces.length - 1]) target.append(this.breaks(piece.end) ? h("br") : "\n");
      }
    };
    if (text.length > MAX_INLINE) emit(parent, 0, text.length);
    else new Inline(text, emit).parse(parent, 0, text.length, 0);
  }

  /** Whether the line that ends here is broken for the reader, too: by two spaces or a backslash. */
  breaks(end) {
    return this.source[end] === "\\" || this.source.startsWith("  ", end);
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
      const found = "\\`*_~[!<h".includes(this.text[at]) && depth < MAX_DEPTH ? this.token(at, to) : null;
      if (!found) {
        at += 1;
        continue;
      }
      flush(at);
      if (found.element) {
        const target = found.element.firstChild ?? found.element;
        if (found.raw) this.emit(target, found.inner[0], found.inner[1], found.element.tagName === "CODE");
        else this.parse(target, found.inner[0], found.inner[1], depth + 1);
        parent.append(found.element);
      } else this.emit(parent, found.inner[0], found.inner[1], true);
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
        return (text.startsWith(text[at].repeat(3), at) && this.emphasis(at, to, 3)) || this.emphasis(at, to, text[at + 1] === text[at] ? 2 : 1);
      case "~":
        return text[at + 1] === "~" ? this.emphasis(at, to, 2) : null;
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

  emphasis(at, to, count) {
    const { text } = this;
    const mark = text[at];
    const close = mark.repeat(count);
    const begin = at + count;
    if (begin >= to || /\s/.test(text[begin])) return null;
    if (mark === "_" && at > 0 && /\w/.test(text[at - 1])) return null;
    for (let end = this.find(close, begin, to), tries = 0; end >= 0 && tries < 20; end = this.find(close, end + 1, to), tries += 1) {
      const after = text[end + count];
      if (end === begin || /\s/.test(text[end - 1])) continue;
      if (count === 1 && (after === mark || text[end - 1] === mark)) continue;
      if (mark === "_" && after && /\w/.test(after)) continue;
      const element = mark === "~" ? h("del") : count === 1 ? h("em") : h("strong", null, count === 3 ? h("em") : null);
      return { element, inner: [begin, end], end: end + count };
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
  return h("a", { href: decoded(address), target: "_blank", rel: "noopener noreferrer nofollow" });
}

/**
 * A `decorate` for ranges: text in a range is wrapped by its `wrap`, and `insertions` put nodes before a span of the
 * text, or in its place. Both are sorted; ranges do not overlap. `finish` inserts what stood between the spans that
 * were rendered, after the text before it.
 */
export function decorator(source, ranges, insertions = []) {
  const rendered = [];
  let first = 0;
  const decorate = (start, end, raw = false) => {
    const nodes = [];
    const words = (from, to) => (raw ? source.slice(from, to) : decoded(source.slice(from, to)));
    let at = start;
    const add = (to) => {
      for (let from = at; from < to; ) {
        const range = ranges.find((one) => one.end > from && one.start < to);
        const low = range ? Math.max(range.start, from) : to;
        if (low > from) nodes.push(document.createTextNode(words(from, low)));
        from = low;
        if (range) {
          from = Math.min(range.end, to);
          nodes.push(range.wrap(words(low, from)));
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
      while (place.parentElement && place === place.parentElement.lastChild && /^(STRONG|EM|DEL|CODE|A|SPAN)$/.test(place.parentElement.tagName))
        place = place.parentElement;
      const nodes = insertion.nodes();
      place.after(...nodes);
      before.node = nodes[nodes.length - 1] ?? before.node;
    }
  };
  return { decorate, finish };
}
