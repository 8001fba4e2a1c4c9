"""Splits text into units of evidence: what can be judged and quoted by itself."""

# ruff: noqa: SIM905  word lists read better as words

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Literal, NamedTuple

from anabranch.text.blocks import (
    TextLine,
    after_blank,
    fence_end,
    indented_end,
    is_statement,
    item_end,
    looks_like_code,
    read_lines,
)
from anabranch.text.sentences import Span, sentences, trim

Kind = Literal["sentence", "item", "row", "definition", "code"]

MAX_ITEM, MAX_DEFINITION, MAX_RECORD, MAX_CODE = 600, 500, 600, 1_500
MAX_HEADING, MAX_TERM, MAX_LEAD = 80, 100, 300
MAX_DEPTH = 12
# Blank lines and a marker line between a sentence and what it introduces.
MAX_GAP = 200


class Unit(NamedTuple):
    """A unit of evidence. The body text[start:end] is what is judged. `lead` is shown before it: a table's header, or
    the sentence that introduces a list. `heading` is the nearest one above it. `subject` is the option, setting or term
    that it is about."""

    kind: Kind
    start: int
    end: int
    lead: Span | None
    heading: Span | None
    subject: Span | None


def units(text: str) -> list[Unit]:
    """The units in order. Their bodies never overlap, and begin and end on something visible. Every sentence is in one;
    headings, comments, link targets and table borders are in none."""
    reader = _Reader(text)
    reader.read(_after_front_matter(text, reader.lines), len(reader.lines), _Block())
    return reader.found


class _Block(NamedTuple):
    """What is known of the text inside a block: the kind of its units, what introduces it, what it is about."""

    kind: Kind = "sentence"
    lead: Span | None = None
    subject: Span | None = None
    depth: int = 0


_FRONT_MATTER_LINE = re.compile(r"[\w-]+:|[-#]|[\])}]")


def _after_front_matter(text: str, lines: list[TextLine]) -> int:
    first = after_blank(lines, 0, len(lines))
    if first < len(lines) and text[lines[first].start : lines[first].end] == "---":
        for at in range(first + 1, min(len(lines), first + 200)):
            line = lines[at]
            if text[line.start : line.end] in ("---", "..."):
                return at + 1
            if line.indent == 0 and line.kind != "blank" and not _FRONT_MATTER_LINE.match(text, line.start):
                break
    return 0


_TITLE = re.compile(r"[^\d:]*[^\W\d_]")
_VERB = re.compile(r"\b(?:is|are|was|were|be|can|cannot|may|must|should|will|has|have|does|do)\b")
_BOLD_LINE = re.compile(r"(\*\*|__)(?=\S)[^*_\n]{1,100}\1:?")
_MARKS = "`*_#: \t"
_CODE_SPAN = re.compile(r"(``?)([^`\n]+)\1")
_CUE = re.compile(r"\b(?:following|these|those|below|as follows|such as)\b", re.IGNORECASE)
_SUBJECT = re.compile(
    r"\[?(?:(?:``?|\*\*`?|__)(?P<marked>[^`*\n]{1,80}?)(?:``?|`?\*\*|__)|(?P<plain>--?\w[\w-]*|\w+[_.]\w[\w.]*))"
    r"(?:\]\([^)\n]{0,300}\))?(?:\s?\([^)\n]{0,80}\))?\s{0,4}(?::(?!:)|[\u2013\u2014]|--?\s|[=-]>)"
)
# The term of a definition or a table's first cell: a code span or bold text at its head, else all of it.
_TERM = re.compile(
    r"[\[*_]{0,3}(?:``?(?P<code>[^`\n]{1,120})`|(?P<words>[^\n]{1,120}?)[*_]{0,2}(?:\s{0,4}:?\s{0,4}\Z|\s{1,4}:\s))"
)
_SIGNATURE = re.compile(r"(?:(?:\.\.|async|static|abstract|final|class|def)[ \t]+)*(?P<words>[^\s(,=\[]*[^\s(,=\[:])")
_COMMENT_MARK = re.compile(r"(\n[ \t]*)#")
_GAP = re.compile(r"(?:[\s>]|::|\.\.[ \t][^\n]*+\n)*+")
_CELL = re.compile(r"[|\s]*([^|\n]*[^|\s])")
_ROW_ITEM = re.compile(r"[ \t]*[-*+][ \t]")
_PAIRS = re.compile(r"([^\s:;|][^:;\n]{0,60}): [^\n]*?; [^:;\n]{1,60}: ")
_PAIR = re.compile(r"([^\W_][\w .\[\]/-]{0,40}): \S")
_QUESTION = re.compile(r"[?\uff1f]['\"\u201d)*_]*\Z")
_DIRECTIVE = re.compile(r"\.\.[ \t]+(\|[^|\n]+\|[ \t]+)?([\w:.+-]+?)::[ \t]*")
_FIELD_NAME = re.compile(r":(?:\w+[ \t]+)*(?P<field>[^:\s]+):|@\w+[ \t]+(?P<tag>\S+)")

_CODE_DIRECTIVES = frozenset(
    "code-block code sourcecode console parsed-literal prompt doctest testcode testoutput ipython math productionlist "
    "code-example testsetup literal".split()
)
_SKIPPED_DIRECTIVES = frozenset(
    "toctree contents image index highlight include literalinclude meta raw module currentmodule py:module "
    "py:currentmodule graphviz digraph inheritance-diagram tabularcolumns automodule autosummary autoclass "
    "autofunction automethod autodata autoexception autoattribute default-domain sectionauthor codeauthor program "
    "role default-role plot rst-class ifconfig testcleanup replace unicode date mermaid uml".split()
)
_OPEN_DIRECTIVES = frozenset(
    "note warning tip hint important caution danger error attention seealso todo highlights epigraph compound "
    "centered".split()
)
# Their argument is no text of theirs.
_TITLED_DIRECTIVES = frozenset(
    "admonition topic sidebar container tabs tab group-tab code-tab only figure glossary hlist table dropdown grid "
    "grid-item card tab-set tab-item change changelog".split()
)
_VERSIONS = frozenset(("versionadded", "versionchanged", "versionremoved", "deprecated"))
_NOT_IN_PARAGRAPH = frozenset(
    "blank fence heading adornment border grid separator row item directive comment field doctest html mark admonition "
    "colon".split()
)


class _Reader:
    """Reads a range of lines block by block: each method reads the block that begins at a line and returns the index
    after it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = read_lines(text)
        self.found: list[Unit] = []
        self._heading: Span | None = None
        self._subject: Span | None = None
        self._label: Span | None = None
        self._comment_end = -1
        self._has_cells = " | " in text
        self._last = max((line.end for line in self.lines), default=0)

    def read(self, first: int, stop: int, block: _Block) -> None:
        at = after_blank(self.lines, first, stop)
        if at == stop:
            return
        indent = self.lines[at].indent
        readers = self._readers
        while at < stop:
            line = self.lines[at]
            if line.kind == "blank":
                at += 1
            elif line.indent > indent and line.kind not in ("fence", "directive", "comment"):
                at = self._indented(at, stop, indent, block)
            else:
                at = readers.get(line.kind, _Reader._paragraph)(self, at, stop, block)

    def _add(self, kind: Kind, start: int, end: int, block: _Block, subject: Span | None = None) -> None:
        span = trim(self.text, start, end)
        if span is not None:
            about = subject or block.subject or self._subject
            self.found.append(Unit(kind, *span, block.lead, self._heading, about))

    def _inside(self, first: int, stop: int, block: _Block) -> None:
        if block.depth < MAX_DEPTH:
            self.read(first, stop, block._replace(depth=block.depth + 1))
        else:
            self._add_sentences(first, stop, block)

    def _add_sentences(self, first: int, stop: int, block: _Block) -> None:
        if first < stop:
            for span in sentences(self.text, self.lines[first].start, self.lines[stop - 1].end):
                self._add(block.kind, *span, block)

    # Headings

    def _enter(self, start: int, end: int) -> None:
        while start < end and self.text[end - 1] in _MARKS:
            end -= 1
        while start < end and self.text[start] in _MARKS:
            start += 1
        if start == end:
            return
        self._heading = (start, end)
        code = self.text[start - 1 : start] == "`" and "`" not in self.text[start:end]
        self._subject = self._label or ((start, end) if code else None)
        self._label = None

    def _marked_heading(self, at: int, stop: int, block: _Block) -> int:
        line, end = self.lines[at], at + 1
        while end < stop and self.lines[end].kind == "heading" and _marker(self.lines[end]) == _marker(line) == 1:
            end += 1
        if end == at + 1:
            self._enter(line.body, line.end)
            return end
        # Several in a row are a comment in source code.
        words = _COMMENT_MARK.sub(r"\1 ", self.text[line.body : self.lines[end - 1].end])
        for span in sentences(words):
            self._add(block.kind, line.body + span[0], line.body + span[1], block)
        return end

    def _is_underlined(self, at: int, stop: int) -> bool:
        if at + 1 >= stop or self.lines[at + 1].kind not in ("adornment", "fence"):
            return False
        title, under = self.lines[at], self.lines[at + 1]
        width = under.body - under.start
        if under.body != under.end or title.end - title.start > 200:
            return False
        return self.text[under.start] in "=-" or width >= max(4, title.end - title.start - 1)

    def _adornment(self, at: int, stop: int, block: _Block) -> int:
        """The line above a title, a fence of tildes, or a horizontal rule."""
        if at + 2 < stop and self.lines[at + 2].kind == "adornment" and self._is_underlined(at + 1, stop):
            self._enter(self.lines[at + 1].start, self.lines[at + 1].end)
            return at + 3
        return self._fence(at, stop, block) if self.text[self.lines[at].start] in "~`" else at + 1

    def _is_title(self, line: TextLine) -> bool:
        """Whether a paragraph of one line is a title: short, and no sentence."""
        start, end = line.start, line.end
        if end >= self._last or end - start > MAX_HEADING:
            return False
        words = self.text[start:end]
        if _BOLD_LINE.fullmatch(words) or _QUESTION.search(words):
            return True
        return _TITLE.fullmatch(words) is not None and not words[0].islower() and not _VERB.search(words)

    # Paragraphs, and what is recognised by its shape only

    def _paragraph(self, at: int, stop: int, block: _Block) -> int:
        line = self.lines[at]
        if self._is_underlined(at, stop):
            self._enter(line.start, line.end)
            return at + 2
        if self._is_term(at, stop):
            return self._definition(at, stop, block)
        end = at + 1
        while end < stop and not self._ends_paragraph(end, stop):
            end += 1
        if end < stop and self.lines[end].kind == "border":
            return self._simple_table(at, stop, block)
        if is_statement(self.text, line) and looks_like_code(self.text, self.lines, at, end):
            return self._code(line.start, at, end, block)
        if end == at + 1 and self._is_title(line):
            self._enter(line.start, line.end)
        elif not self._add_records(at, end, block):
            self._add_sentences(at, end, block)
        return end

    def _ends_paragraph(self, at: int, stop: int) -> bool:
        if self.lines[at].kind in _NOT_IN_PARAGRAPH:
            return True
        return self._is_underlined(at, stop) and self.text[self.lines[at + 1].start] != "-"

    def _add_records(self, first: int, stop: int, block: _Block) -> bool:
        """Adds lines that are the rows of a table, or the fields of a record."""
        text, lines = self.text, self.lines[first:stop]
        if self._has_cells and all(text.find(" | ", line.start, line.end) > 0 for line in lines):
            self._add_rows(lines, block._replace(lead=None))
            return True
        if stop - first > 2 and any(self._is_separated(lines, sign) for sign in "\t,;"):
            self._add_rows(lines, block._replace(lead=None))
            return True
        if ": " not in text[lines[0].start : lines[0].end]:
            return False
        if all(_PAIRS.match(text, line.start, line.end) for line in lines):
            for line in lines:
                self._add("row", line.start, line.end, block)
            return True
        names = [name and name[1] for name in (_PAIR.match(text, line.start, line.end) for line in lines)]
        if len(names) < 2 or None in names:
            return False
        if len(set(names)) > 1 and lines[-1].end - lines[0].start <= MAX_RECORD:
            self._add("row", lines[0].start, lines[-1].end, block)
        else:
            for line in lines:
                self._add("row", line.start, line.end, block)
        return True

    def _is_separated(self, lines: list[TextLine], sign: str) -> bool:
        """Whether all lines have the same number of separators, as in CSV."""
        counts = {self.text.count(sign, line.start, line.end) for line in lines}
        enough = len(counts) == 1 and counts.pop() >= (1 if sign == "\t" else 2)
        return enough and not any(self.text[line.end - 1] in ".,;" for line in lines)

    def _indented(self, at: int, stop: int, indent: int, block: _Block) -> int:
        """An indented block: code after "::" or if it looks like code, else quoted text."""
        end = indented_end(self.lines, at, stop, indent)
        above = next((line for line in reversed(self.lines[max(0, at - 4) : at]) if line.kind != "blank"), None)
        literal = above is not None and self.text.endswith("::", above.start, above.end)
        marked = any(line.kind in ("item", "row", "grid", "border", "fence") for line in self.lines[at : at + 2])
        if literal or (not marked and looks_like_code(self.text, self.lines, at, end)):
            return self._code(self.lines[at].start, at, end, block)
        self._inside(at, end, block)
        return end

    # Code

    def _fence(self, at: int, stop: int, block: _Block) -> int:
        end = fence_end(self.text, self.lines, at, stop)
        return self._code(self.lines[at].start, at, end, block)

    def _doctest(self, at: int, stop: int, block: _Block) -> int:
        end = at + 1
        while end < stop:
            following = after_blank(self.lines, end, stop)
            if following == stop or (following > end and self.lines[following].kind != "doctest"):
                break
            end = following + 1
        return self._code(self.lines[at].start, at, end, block)

    def _code(self, mark: int, first: int, stop: int, block: _Block) -> int:
        """Adds code together with the sentence directly above `mark`, the start of its marker line."""
        start, end = self.lines[first].start, self.lines[stop - 1].end
        if end - start > MAX_CODE:
            cut = self.text.rfind("\n", start, start + MAX_CODE)
            end = cut if cut > 0 else start + MAX_CODE
        begin, subject = start, block.subject
        if self.found and (above := self.found[-1]).kind not in ("code", "row") and self._touches(above.end, mark):
            self.found.pop()
            *before, last = sentences(self.text, above.start, above.end)
            if before:
                self.found.append(above._replace(end=before[-1][1]))
            begin, subject = last[0], above.subject
        self._add("code", begin, end, block, subject)
        return stop

    def _touches(self, end: int, start: int) -> bool:
        """Whether nothing but blank lines and comments is between."""
        return start - end <= MAX_GAP and _GAP.fullmatch(self.text, end, start) is not None

    # Lists

    def _list(self, at: int, stop: int, block: _Block) -> int:
        indent = self.lines[at].indent
        if self._is_underlined(at, stop):
            return self._paragraph(at, stop, block)
        inside = block._replace(kind="item", lead=self._lead_in(self.lines[at]) or block.lead)
        while at < stop and self.lines[at].kind == "item" and self.lines[at].indent >= indent:
            line, end = self.lines[at], item_end(self.lines, at, stop)
            if _ROW_ITEM.match(self.text, line.body):
                self._add("row", line.start, self.lines[end - 1].end, block, self._cell(line.body + 2, line.end))
            else:
                self._entry("item", line.body, range(at, end), inside, self._name(_SUBJECT, line.body + 1, line.end))
            at = after_blank(self.lines, end, stop)
            if self._is_underlined(at, stop):
                break
        return at

    def _lead_in(self, line: TextLine) -> Span | None:
        """The sentence directly above, if it introduces the list that begins at this line."""
        if not self.found or self.found[-1].kind != "sentence" or not self._touches(self.found[-1].end, line.start):
            return None
        _, start, end, *_ = self.found[-1]
        introduces = self.text[end - 1] == ":" or _CUE.search(self.text, start, end)
        adjacent = self.text.count("\n", end, line.start) == 1 and self.text[end - 1] not in ".!?"
        return (start, end) if introduces or adjacent else None

    def _entry(self, kind: Kind, start: int, lines: range, block: _Block, subject: Span | None, head: int = 0) -> None:
        """An item or a definition: its own paragraphs are one unit if they are short; then what is nested in it. The
        lines before the index `head` are its term, which goes with the first sentence."""
        own = self._own_end(lines, max(head, lines.start + 1))
        span = trim(self.text, start, self.lines[own - 1].end)
        inside = block._replace(kind=kind, subject=subject or block.subject)
        if span is not None:
            parts = self._parts(kind, span, self.lines[head - 1].end if head else start)
            for part in parts:
                self._add(kind, *part, inside)
            if self.text[span[1] - 1] == ":":
                inside = inside._replace(lead=span if span[1] - span[0] <= MAX_LEAD else parts[-1])
        self._inside(own, lines.stop, inside)

    def _parts(self, kind: Kind, span: Span, head: int) -> list[Span]:
        """All of an entry, or its sentences if it is long; the first one begins with its term."""
        if kind != "sentence" and span[1] - span[0] <= (MAX_ITEM if kind == "item" else MAX_DEFINITION):
            return [span]
        first, *rest = list(sentences(self.text, head, span[1])) or [span]
        return [(span[0], first[1]), *rest]

    def _own_end(self, lines: range, end: int) -> int:
        """The index after the paragraphs that an entry begins with, of which those before `end` are read."""
        indent = None
        for at in range(end, lines.stop):
            line = self.lines[at]
            if line.kind == "blank":
                if self.text.endswith("::", self.lines[end - 1].start, self.lines[end - 1].end):
                    break
            elif line.kind != "text" or (indent is not None and line.indent > indent) or self._is_head(at, lines.stop):
                break
            else:
                end, indent = at + 1, line.indent
        return end

    # Definitions

    def _is_head(self, at: int, stop: int) -> bool:
        return self._is_underlined(at, stop) or self._is_term(at, stop)

    def _is_term(self, at: int, stop: int) -> bool:
        """Whether a line is a term, with its definition indented below it or after a colon."""
        if at + 1 >= stop:
            return False
        term, text = self.lines[at], self.lines[at + 1]
        if text.kind == "colon":
            return True
        short = term.end - term.start <= (MAX_TERM if at else MAX_TERM // 2)
        unstopped = self.text[term.end - 1] not in ".,;" and not self.text.endswith("::", term.start, term.end)
        return short and unstopped and text.kind not in ("blank", "item", "fence") and text.indent > term.indent + 1

    def _definition(self, at: int, stop: int, block: _Block) -> int:
        term = self.lines[at]
        if self.lines[at + 1].kind == "colon":
            end = at + 2
            while end < stop and (self.lines[end].kind == "colon" or not self._ends_paragraph(end, stop)):
                end += 1
        else:
            end = indented_end(self.lines, at + 1, stop, term.indent)
            if is_statement(self.text, term) or (
                self.text[term.end - 1] == ":" and looks_like_code(self.text, self.lines, at + 1, end)
            ):
                return self._code(term.start, at, end, block)
        subject = self._name(_TERM, term.start, term.end)
        self._entry("definition", term.start, range(at, end), block, subject, at + 1)
        return end

    def _name(self, pattern: re.Pattern[str], start: int, end: int) -> Span | None:
        found = pattern.match(self.text, start, end)
        return trim(self.text, *found.span(found.lastgroup or 0)) if found else None

    def _field(self, at: int, stop: int, block: _Block) -> int:
        line = self.lines[at]
        end = max(at + 1, indented_end(self.lines, at + 1, stop, line.indent))
        subject = self._name(_FIELD_NAME, line.start, line.end)
        self._entry("definition", line.start, range(at, end), block, subject)
        return end

    # Tables

    def _cell(self, start: int, end: int) -> Span | None:
        found = _CELL.match(self.text, start, end)
        return self._name(_TERM, *found.span(1)) if found else None

    def _add_rows(self, lines: list[TextLine], block: _Block) -> None:
        for line in lines:
            self._add("row", line.start, line.end, block, self._cell(line.start, line.end))

    def _pipe_table(self, at: int, stop: int, block: _Block) -> int:
        end = at
        while end < stop and self.lines[end].kind in ("row", "separator"):
            end += 1
        table = self.lines[at:end]
        lead = None
        if len(table) > 1 and table[1].kind == "separator":
            lead = (table[0].start, table[1].end)
            table = table[2:]
        self._add_rows([line for line in table if line.kind == "row"], block._replace(lead=lead))
        return end

    def _simple_table(self, at: int, stop: int, block: _Block) -> int:
        """A table between lines of equals signs. A row goes on where its first column is empty."""
        indent, end = self.lines[at].indent, at
        borders = []
        while end < stop and (self.lines[end].kind == "blank" or self.lines[end].indent >= indent):
            end += 1
            if self.lines[end - 1].kind == "border" and self.text[self.lines[end - 1].start] == "=":
                borders.append(end - 1)
                if end - 1 > at and (end == stop or self.lines[end].kind == "blank"):
                    break
        lead, first = None, at
        if len(borders) > 2:
            lead, first = (self.lines[borders[0] + 1].start, self.lines[borders[1]].end), borders[1] + 1
        body = [line for line in self.lines[first:end] if line.kind not in ("blank", "border")]
        heads = [index for index, line in enumerate(body) if line.indent <= indent + 1]
        for head, following in pairwise([*heads, len(body)]):
            cell = re.compile(r"\S+(?: \S+)*").match(self.text, body[head].start, body[head].end)
            self._add("row", body[head].start, body[following - 1].end, block._replace(lead=lead), cell and cell.span())
        return max(end, at + 1)

    def _grid_table(self, at: int, stop: int, block: _Block) -> int:
        end = at
        while end < stop and self.lines[end].kind in ("grid", "row", "separator"):
            end += 1
        edges = [index for index in range(at, end) if self.lines[index].kind == "grid"]
        lead = None
        for above, below in pairwise(edges):
            if below - above < 2:
                continue
            start, finish = self.lines[above + 1].start, self.lines[below - 1].end
            if "=" in self.text[self.lines[below].start : self.lines[below].end]:
                lead = (start, self.lines[below].end)
            else:
                cell = self._cell(start, self.lines[above + 1].end)
                self._add("row", start, finish, block._replace(lead=lead), cell)
        return end

    # Directives

    def _directive(self, at: int, stop: int, block: _Block) -> int:
        line = self.lines[at]
        end = max(at + 1, indented_end(self.lines, at + 1, stop, line.indent))
        match = _DIRECTIVE.match(self.text, line.start, line.end)
        if match is None or match[1]:
            return end
        name, argument = match[2], match.end()
        content = at + 1
        while content < end and self.lines[content].kind == "field":
            content += 1
        if name in _CODE_DIRECTIVES:
            first = after_blank(self.lines, content, end)
            return self._code(line.start, first, end, block) if first < end else end
        if name in _SKIPPED_DIRECTIVES:
            return end
        if name == "rubric":
            self._enter(argument, line.end)
        elif name in ("list-table", "csv-table"):
            self._directive_table(at, content, end, block)
        elif name in _VERSIONS:
            self._entry(block.kind, line.start, range(at, end), block, None, at + 1)
        elif name in _TITLED_DIRECTIVES or argument >= line.end:
            self._inside(content, end, block)
        elif name in _OPEN_DIRECTIVES:
            self._entry(block.kind, argument, range(at, end), block, None)
        else:
            self._describe(argument, at, end, block)
        return end

    def _describe(self, argument: int, at: int, end: int, block: _Block) -> None:
        """A directive such as `.. option:: --port`. Without content it is about the section that follows."""
        line = self.lines[at]
        subject = self._name(_SIGNATURE, argument, line.end)
        if end == at + 1:
            self._label = subject
            return
        head = at + 1
        while head < end and self.lines[head].kind in ("text", "field"):
            head += 1
        self._entry("definition", argument, range(at, end), block, subject, head)

    def _directive_table(self, at: int, content: int, end: int, block: _Block) -> None:
        options = self.text[self.lines[at].start : self.lines[content - 1].end]
        rows = [index for index in range(content, end) if self.lines[index].kind != "blank"]
        if not rows:
            return
        indent = self.lines[rows[0]].indent
        heads = [index for index in rows if self.lines[index].indent <= indent]
        spans = [(self.lines[head].start, self.lines[following - 1].end) for head, following in pairwise([*heads, end])]
        count = re.search(r":header-rows:\s*(\d)", options)
        header = min(int(count[1]), len(spans) - 1) if count else 0
        lead = (spans[0][0], spans[header - 1][1]) if header else None
        if found := re.search(r":header:\s*(\S[^\n]*)", options):
            offset = self.lines[at].start
            lead = (offset + found.start(1), offset + found.end(1))
        for span in spans[header:]:
            self._add("row", *span, block._replace(lead=lead and trim(self.text, *lead)))

    def _skipped(self, at: int, _stop: int, _block: _Block) -> int:
        return at + 1

    def _comment(self, at: int, stop: int, _block: _Block) -> int:
        return max(at + 1, indented_end(self.lines, at + 1, stop, self.lines[at].indent))

    def _html_comment(self, at: int, stop: int, _block: _Block) -> int:
        start = self.lines[at].start
        if self._comment_end < start:
            # Looked for once for all comments that are not closed.
            close = self.text.find("-->", start)
            self._comment_end = close if close >= 0 else len(self.text) + 1
        end = at + 1
        while self._comment_end < len(self.text) and end < stop and self.lines[end].start < self._comment_end:
            end += 1
        return end

    def _admonition(self, at: int, stop: int, block: _Block) -> int:
        end = max(at + 1, indented_end(self.lines, at + 1, stop, self.lines[at].indent))
        self._inside(at + 1, end, block)
        return end

    _readers: dict[str, Callable[["_Reader", int, int, _Block], int]] = {
        "heading": _marked_heading,
        "adornment": _adornment,
        "fence": _fence,
        "doctest": _doctest,
        "item": _list,
        "field": _field,
        "row": _pipe_table,
        "separator": _pipe_table,
        "border": _simple_table,
        "grid": _grid_table,
        "directive": _directive,
        "comment": _comment,
        "mark": _skipped,
        "html": _html_comment,
        "admonition": _admonition,
    }


def _marker(line: TextLine) -> int:
    """The length of the line's marker."""
    return line.body - line.start
