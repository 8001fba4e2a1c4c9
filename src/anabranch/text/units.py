"""Splits text into units of evidence: what can be judged and quoted by itself."""

# ruff: noqa: SIM905  word lists read better as words

import re
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, NamedTuple

from anabranch.text.blocks import (
    TextLine,
    after_blank,
    fence_end,
    indented_end,
    is_statement,
    item_end,
    looks_like_code,
    read_lines,
    spanned,
)
from anabranch.text.sentences import Span, sentences, trim
from anabranch.text.tables import TextTable, directive_table, grid_table, name_of, pipe_table, records, simple_table

Kind = Literal["sentence", "item", "row", "definition", "code"]

MAX_ITEM, MAX_DEFINITION, MAX_CODE = 600, 500, 1_500
MAX_TITLE, MAX_HEADING, MAX_TERM, MAX_LEAD = 80, 300, 100, 300
# Characters between a sentence and what it introduces: blank lines and comments.
MAX_GAP = 200
MAX_DEPTH = 12


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


# Kinds of units that make up a list.
LISTED = ("item", "definition", "row")


def are_of_one_list(one: Unit, other: Unit) -> bool:
    """Whether two neighbours are parts of the same list or table."""
    return one.kind == other.kind and one.kind in LISTED and (one.lead, one.heading) == (other.lead, other.heading)


def units(text: str) -> list[Unit]:
    """The units in order. Their bodies never overlap, and begin and end on something visible. Every sentence is in one;
    headings, list markers, comments, link targets and table borders are in none."""
    reader = _UnitReader(text)
    reader.read(_after_front_matter(text, reader.lines), len(reader.lines), _Context())
    return reader.found


class _Context(NamedTuple):
    """What is known of the text in a block: the kind of its units, what introduces its list, what it is about."""

    kind: Kind = "sentence"
    lead: Span | None = None
    subject: Span | None = None
    depth: int = 0


_FRONT_MATTER = re.compile(r"[\w-]+:|[-#\])}]")
_HEADING = re.compile(r"[`*\s]*+(?P<words>[^\n]*?)(?:[ \t]++#++|[ \t]*+\{[^}\n]*+\}|[`*:\s]++)*+\Z")
_TITLE = re.compile(r"[^\d:]*[^\W\d_]")
_BOLD = re.compile(r"\*\*[^*\n]*[^*\n.!]\*\*:?|__[^_\n]*[^_\n.!]__:?")
_QUESTION = re.compile(r"[?\uff1f]['\"\u201d)*_]*\Z")
_VERB = re.compile(r"\b(?:is|are|was|were|be|can|cannot|may|must|should|will|has|have|does|do)\b")
# A paragraph may begin with its own heading, in bold.
_RUN_IN = re.compile(r"\*\*([^*\n]{1,80}?)[.:!]\*\*")
_CUE = re.compile(r"\b(?:following|these|those|below|as follows|such as)\b", re.IGNORECASE)
# A complete sentence introduces code if it says so, or what to do.
_CODE_CUE = re.compile(
    r"(?:First|Then|Now|Next|Finally|Run|Use|Add|Set|Create|Install|Start|Call|Type|Write|Put|Define|Consider|Try|Import)"
    r"\b|.*\b(?:following|below|here|example|examples|like (?:this|so)|as follows|e\.g|for instance|snippet)\b",
    re.DOTALL | re.IGNORECASE,
)
_VISIBLE = re.compile(r"[^\W_]")
_GAP = re.compile(r"(?:[\s>]|::|\.\.[ \t][^\n]*+\n)*+")
_COMMENT_MARK = re.compile(r"(\n[ \t]*)#")
# The head of a list item: a code span, bold text or an option, and then a colon or a dash.
_ITEM_NAME = re.compile(
    r"\s*\[?(?:(?:``?|\*\*`?|__)(?P<marked>[^`*\n]{1,80}?)(?:``?|`?\*\*|__)|(?P<plain>--?\w[\w-]*|(?=\w+[_.]\w)[\w.]++))"
    r"(?:\]\([^)\n]{0,300}\))?(?:\s?\([^)\n]{0,80}\))?\s{0,4}(?::(?!:)|[\u2013\u2014]|--?\s|[=-]>|\Z)"
)
_FIELD = re.compile(r":(?:\w+[ \t]+)*(?P<field>[^:\s]+):|@\w+[ \t]+(?P<tag>\S+)")
_SIGNATURE = re.compile(r"(?:(?:\.\.|async|static|abstract|final|class|def)[ \t]+)*(?P<name>[^\s(,=\[]*[^\s(,=\[:])")
_ROW_ITEM = re.compile(r"[ \t]*[-*+](?:[ \t]|\n|\Z)")
_DIRECTIVE = re.compile(r"[ \t]*\.\.[ \t]+(\|[^|\n]+\|[ \t]+)?([\w:.+-]+?)::[ \t]*")

_CODE = frozenset(
    "code-block code sourcecode console parsed-literal prompt doctest testcode testoutput ipython math "
    "productionlist".split()
)
_IGNORED = frozenset(
    "toctree contents image index highlight include literalinclude meta raw module currentmodule py:module "
    "py:currentmodule graphviz digraph inheritance-diagram tabularcolumns default-domain sectionauthor codeauthor "
    "program role default-role plot rst-class testsetup testcleanup mermaid".split()
)
_TEXT = frozenset(
    "note warning tip hint important caution danger error attention seealso todo highlights epigraph compound".split()
)
# Directives with text, whose argument is a title or a name.
_TITLED = frozenset(
    "admonition topic sidebar container tabs tab group-tab code-tab only figure glossary hlist table dropdown grid "
    "grid-item card tab-set tab-item change changelog".split()
)
_VERSIONS = frozenset("versionadded versionchanged versionremoved deprecated".split())
_TABLES = frozenset("list-table csv-table flat-table".split())


def _after_front_matter(text: str, lines: Sequence[TextLine]) -> int:
    if text.startswith("---\n"):
        for at, line in enumerate(lines[1:200], 1):
            if text[line.start : line.end] in ("---", "..."):
                return at + 1
            if line.indent == 0 and line.kind != "blank" and not _FRONT_MATTER.match(text, line.start):
                break
    return 0


class _UnitReader:
    """Reads a range of lines block by block. Each method reads the block that begins with the line `at`, and returns
    the index after it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = read_lines(text)
        self.found: list[Unit] = []
        self._heading: Span | None = None
        self._subject: Span | None = None
        self._label: Span | None = None
        self._has_fence = False
        self._comment_end = -1
        self._end = len(text.rstrip())

    def read(self, first: int, stop: int, context: _Context) -> None:
        at = after_blank(self.lines, first, stop)
        indent = self.lines[at].indent if at < stop else 0
        while at < stop:
            line = self.lines[at]
            if line.kind == "blank":
                at += 1
            elif line.indent > indent and line.kind not in ("fence", "directive", "comment"):
                at = self._indented(at, stop, indent, context)
            else:
                at = self._READERS.get(line.kind, _UnitReader._paragraph)(self, at, stop, context)

    def _inside(self, first: int, stop: int, context: _Context) -> None:
        if context.depth < MAX_DEPTH:
            self.read(first, stop, context._replace(depth=context.depth + 1))
        elif first < stop:
            self._add_sentences(spanned(self.lines[first:stop]), context)

    def _add(self, kind: Kind, span: Span | None, context: _Context, subject: Span | None = None) -> None:
        if span is not None and _VISIBLE.search(self.text, *span):
            lead = context.lead if kind in ("item", "row") else None
            self.found.append(Unit(kind, *span, lead, self._heading, subject or context.subject or self._subject))
            self._label = None

    def _add_sentences(self, span: Span, context: _Context) -> None:
        parts = list(sentences(self.text, *span))
        subject = None
        if len(parts) > 1 and (heading := _RUN_IN.fullmatch(self.text, *parts[0])):
            subject = heading.span(1)
            parts[:2] = [(parts[0][0], parts[1][1])]
        for part in parts:
            self._add(context.kind, part, context, subject)

    def _touches(self, end: int, start: int) -> bool:
        """Whether there are only blank lines and comments between."""
        return start - end <= MAX_GAP and _GAP.fullmatch(self.text, end, start) is not None

    # Headings

    def _enter(self, start: int, end: int) -> None:
        if span := name_of(self.text, start, min(end, start + MAX_HEADING), _HEADING):
            is_code = self.text[span[0] - 1 : span[0]] == "`" and self.text.find("`", *span) < 0
            self._heading = span
            self._subject = self._label or (span if is_code else None)
            self._label = None

    def _hash_heading(self, at: int, stop: int, context: _Context) -> int:
        line, end = self.lines[at], at + 1
        while end < stop and self.lines[end].kind == "heading" and _marks(self.lines[end]) == _marks(line) == 1:
            end += 1
        if end == at + 1:
            self._enter(line.body, line.end)
        else:  # several in a row are a comment in source code
            words = _COMMENT_MARK.sub(r"\1 ", self.text[line.body : self.lines[end - 1].end])
            for span in sentences(words):
                self._add(context.kind, (line.body + span[0], line.body + span[1]), context)
        return end

    def _is_underlined(self, at: int, stop: int) -> bool:
        if at + 1 >= stop or self.lines[at + 1].kind not in ("adornment", "fence"):
            return False
        title, line = self.lines[at], self.lines[at + 1]
        sign, length = self.text[line.start], title.end - title.start
        if line.body < line.end or length > MAX_HEADING or title.kind == "blank":
            return False
        return sign in "=-" or line.body - line.start >= max(4 if sign == "`" else 3, length - 1)

    def _adornment(self, at: int, stop: int, context: _Context) -> int:
        """The line above a title, a fence of tildes, or a horizontal rule."""
        if at + 2 < stop and self.lines[at + 2].kind == "adornment" and self._is_underlined(at + 1, stop):
            self._enter(self.lines[at + 1].start, self.lines[at + 1].end)
            return at + 3
        return self._fence(at, stop, context) if self.text[self.lines[at].start] in "~`" else at + 1

    def _is_title(self, line: TextLine) -> bool:
        """Whether a paragraph of one line is a title: short, in bold, a question, or no sentence."""
        if line.end >= self._end or line.end - line.start > MAX_TITLE:
            return False
        words = self.text[line.start : line.end]
        if _BOLD.fullmatch(words) or _QUESTION.search(words):
            return True
        is_name = not words[0].islower() or words.count(" ") < 3
        return is_name and _TITLE.fullmatch(words) is not None and not _VERB.search(words)

    # Paragraphs

    def _paragraph(self, at: int, stop: int, context: _Context) -> int:
        line, end = self.lines[at], at + 1
        if self._is_underlined(at, stop):
            self._enter(line.start, line.end)
            return at + 2
        if self._is_term(at, stop):
            return self._definition(at, stop, context)
        if end < stop and self.lines[end].kind == "separator":
            return self._marked_table(at, stop, context)
        while end < stop and self._continues(end, stop):
            end += 1
        if end < stop and self.lines[end].kind == "border":
            return self._simple_table(at, stop, context)
        if is_statement(self.text, line) and (end == at + 1 or looks_like_code(self.text, self.lines, at, end)):
            return self._unmarked_code(at, end, context)
        if end == at + 1 and self._is_title(line):
            self._enter(line.start, line.end)
        elif table := records(self.text, self.lines[at:end]):
            self._add_table(table, context)
        else:
            self._add_sentences((line.start, self.lines[end - 1].end), context)
        return end

    def _continues(self, at: int, stop: int) -> bool:
        """Whether a line goes on with the paragraph above it."""
        if self.lines[at].kind != "text":
            return False
        return not self._is_underlined(at, stop) or self.text[self.lines[at + 1].start] == "-"

    def _indented(self, at: int, stop: int, indent: int, context: _Context) -> int:
        """An indented block: code after "::" or if it looks like code, else text."""
        end = indented_end(self.lines, at, stop, indent)
        above = at - 1
        while above > 0 and self.lines[above].kind == "blank":
            above -= 1
        literal = above >= 0 and self._is_literal(above)
        plain = not any(line.kind in ("item", "row", "grid", "border", "fence") for line in self.lines[at : at + 2])
        if literal or (plain and looks_like_code(self.text, self.lines, at, end)):
            return self._unmarked_code(at, end, context)
        self._inside(at, end, context)
        return end

    def _is_literal(self, at: int) -> bool:
        """Whether a line says that code follows."""
        return self.text.endswith("::", self.lines[at].start, self.lines[at].end)

    # Code

    def _fence(self, at: int, stop: int, context: _Context) -> int:
        end = fence_end(self.text, self.lines, at, stop)
        is_first, self._has_fence = not self._has_fence, True
        if self.lines[at].body == self.lines[at].end and self._closes(at, end, stop, is_first=is_first):
            return at + 1
        return self._code(self.lines[at].start, at, end, context)

    def _closes(self, at: int, end: int, stop: int, *, is_first: bool) -> bool:
        """Whether a fence closes a block that began before this text."""
        if end < stop and self.lines[end - 1].kind not in ("fence", "adornment"):
            return True
        is_below_code = at > 0 and self.lines[at - 1].kind != "blank"
        return is_first and is_below_code and (at + 1 >= stop or self.lines[at + 1].kind == "blank")

    def _doctest(self, at: int, stop: int, context: _Context) -> int:
        end = at + 1
        while end < stop:
            following = after_blank(self.lines, end, stop)
            if following == stop or (following > end and self.lines[following].kind != "doctest"):
                break
            end = following + 1
        return self._code(self.lines[at].start, at, end, context)

    def _unmarked_code(self, first: int, stop: int, context: _Context) -> int:
        """Code that only its shape or indentation shows goes on after a blank line."""
        start, end = spanned(self.lines[first:stop])
        above = self.found[-1] if self.found else None
        if above is None or above.kind != "code" or end - above.start > MAX_CODE or not self._touches(above.end, start):
            return self._code(start, first, stop, context)
        self.found[-1] = above._replace(end=end)
        return stop

    def _code(self, mark: int, first: int, stop: int, context: _Context) -> int:
        """Adds code with the sentence that is directly above `mark`, the start of the code or of its directive."""
        start, end = spanned(self.lines[first:stop])
        if end - start > MAX_CODE:
            line_end = self.text.rfind("\n", start, start + MAX_CODE)
            end = line_end if line_end > 0 else start + MAX_CODE
        subject = context.subject
        if self.found and (above := self.found[-1]).kind not in ("code", "row") and self._touches(above.end, mark):
            *before, last = sentences(self.text, above.start, above.end)
            if self.text[above.end - 1] not in ".!?" or _CODE_CUE.match(self.text, *last):
                self.found.pop()
                if before:
                    self.found.append(above._replace(end=before[-1][1]))
                start, subject = last[0], above.subject
        self._add("code", trim(self.text, start, end), context, subject)
        return stop

    # Lists

    def _list(self, at: int, stop: int, context: _Context) -> int:
        if self._is_underlined(at, stop):
            return self._paragraph(at, stop, context)
        indent = self.lines[at].indent
        inside = context._replace(lead=self._lead_in(self.lines[at]) or context.lead)
        while at < stop and self.lines[at].kind == "item" and self.lines[at].indent >= indent:
            line, end = self.lines[at], item_end(self.lines, at, stop)
            if _ROW_ITEM.match(self.text, line.body):
                self._add_table(directive_table(self.text, [line], self.lines[at:end]), context)
            else:
                self._item(range(at, end), inside)
            at = after_blank(self.lines, end, stop)
            if self._is_underlined(at, stop):
                break
        return at

    def _item(self, lines: range, context: _Context) -> None:
        line = self.lines[lines.start]
        if directive := _DIRECTIVE.match(self.text, line.body, line.end):
            name = name_of(self.text, directive.end(), line.end, _SIGNATURE)
            self._entry("item", directive.end(), lines, context, name, lines.start + 1)
        else:
            name = name_of(self.text, line.body, line.end, _ITEM_NAME)
            is_term = name is not None and line.end - name[1] <= len("``")
            self._entry("item", line.body, lines, context, name, lines.start + 1 if is_term else 0)

    def _lead_in(self, line: TextLine) -> Span | None:
        """The sentence directly above, if it introduces the list that begins with this line."""
        if not self.found or not self._touches(self.found[-1].end, line.start):
            return None
        kind, start, end, *_ = self.found[-1]
        *_, (start, _) = sentences(self.text, start, end)
        is_open = self.text[end - 1] not in ".!?" or _CUE.search(self.text, start, end)
        if self.text[end - 1] != ":" and not (kind == "sentence" and is_open):
            return None
        return (start, end) if end - start <= MAX_LEAD else None

    def _entry(self, kind: Kind, start: int, lines: range, context: _Context, name: Span | None, head: int = 0) -> None:
        """An item or a definition: its own paragraphs are one unit if they are short; then what is nested in it. The
        lines before the index `head` are its term, which goes with the first sentence."""
        own = self._own_end(max(head, lines.start + 1), lines.stop)
        inside = context._replace(kind=kind, subject=name or context.subject)
        if span := trim(self.text, start, self.lines[own - 1].end):
            for part in self._parts(kind, span, self.lines[head - 1].end if head else start):
                self._add(kind, part, inside)
        first = after_blank(self.lines, own, lines.stop)
        if first < lines.stop and self._is_literal(own - 1) and self.lines[first].indent > self.lines[own - 1].indent:
            end = indented_end(self.lines, first, lines.stop, self.lines[own - 1].indent)
            own = self._unmarked_code(first, end, inside)
        self._inside(own, lines.stop, inside)

    def _parts(self, kind: Kind, span: Span, head: int) -> list[Span]:
        """All of an entry, or its sentences if it is long; the first one begins with its term."""
        if kind != "sentence" and span[1] - span[0] <= (MAX_ITEM if kind == "item" else MAX_DEFINITION):
            return [span]
        first, *rest = list(sentences(self.text, head, span[1])) or [span]
        return [(span[0], first[1]), *rest]

    def _own_end(self, end: int, stop: int) -> int:
        """The index after the paragraphs that an entry begins with, of which those before `end` are read."""
        indent = None
        for at in range(end, stop):
            line = self.lines[at]
            if line.kind == "blank":
                if self._is_literal(end - 1):
                    break
            elif line.kind != "text" or (indent is not None and line.indent > indent) or self._is_head(at, stop):
                break
            else:
                end, indent = at + 1, line.indent
        return end

    def _is_head(self, at: int, stop: int) -> bool:
        return self._is_underlined(at, stop) or self._is_term(at, stop)

    # Definitions

    def _is_term(self, at: int, stop: int) -> bool:
        """Whether a line is a term: its definition is indented below it, or comes after a colon."""
        if at + 1 >= stop:
            return False
        term, below = self.lines[at], self.lines[at + 1]
        if below.kind == "colon":
            return True
        if below.indent < term.indent + 2 or below.kind in ("blank", "item", "fence"):
            return False
        # The first line of a text may have lost its indentation.
        is_short = term.end - term.start <= (MAX_TERM if at else MAX_TERM // 2)
        return is_short and self.text[term.end - 1] not in ".,;" and not self._is_literal(at)

    def _definition(self, at: int, stop: int, context: _Context) -> int:
        term, end = self.lines[at], at + 2
        if self.lines[at + 1].kind == "colon":
            while end < stop and (self.lines[end].kind == "colon" or self._continues(end, stop)):
                end += 1
        else:
            end = indented_end(self.lines, at + 1, stop, term.indent)
            introduces = self.text[term.end - 1] == ":" and looks_like_code(self.text, self.lines, at + 1, end)
            if introduces or is_statement(self.text, term):
                return self._unmarked_code(at, end, context)
        name = name_of(self.text, term.start, term.end)
        self._entry("definition", term.start, range(at, end), context, name, at + 1)
        return end

    def _field(self, at: int, stop: int, context: _Context) -> int:
        line, end = self.lines[at], self._content_end(at, stop)
        if line.body == line.end and end == at + 1:
            return end
        name = name_of(self.text, line.start, line.end, _FIELD)
        self._entry("definition", line.start, range(at, end), context, name)
        return end

    # Tables

    def _add_table(self, table: TextTable, context: _Context) -> None:
        for span, name in table.rows:
            self._add("row", span, context._replace(lead=table.lead), name)

    def _marked_table(self, at: int, stop: int, context: _Context) -> int:
        end = at + 1
        while end < stop and self._is_row(self.lines[end]):
            end += 1
        table = self.lines[at:end]
        is_grid = any(line.kind == "grid" for line in table)
        self._add_table(grid_table(self.text, table) if is_grid else pipe_table(self.text, table), context)
        return end

    def _is_row(self, line: TextLine) -> bool:
        return line.kind in ("row", "separator", "grid") or (
            line.kind == "text" and self.text.find("|", line.start, line.end) > 0
        )

    def _simple_table(self, at: int, stop: int, context: _Context) -> int:
        """Ends with a border that is followed by a blank line."""
        indent, end = self.lines[at].indent, at
        while end < stop and (self.lines[end].kind == "blank" or self.lines[end].indent >= indent):
            end += 1
            is_border = self.lines[end - 1].kind == "border" and end - 1 > at
            if is_border and (end == stop or self.lines[end].kind == "blank"):
                break
        self._add_table(simple_table(self.text, self.lines[at:end]), context)
        return end

    # Directives, comments and marks

    def _content_end(self, at: int, stop: int) -> int:
        return max(at + 1, indented_end(self.lines, at + 1, stop, self.lines[at].indent))

    def _directive(self, at: int, stop: int, context: _Context) -> int:
        line, end = self.lines[at], self._content_end(at, stop)
        found = _DIRECTIVE.match(self.text, line.start, line.end)
        if found is None or found[1]:
            return end
        name, argument, content = found[2], found.end(), at + 1
        while content < end and self.lines[content].kind == "field":
            content += 1
        content = after_blank(self.lines, content, end)
        if name in _IGNORED or (name.startswith("auto") and content == end):
            self._label = None
        elif name in _CODE:
            return self._code(line.start, content, end, context) if content < end else end
        elif name == "rubric":
            self._enter(argument, line.end)
        elif name in _TABLES:
            if content < end:
                self._add_table(directive_table(self.text, self.lines[at:content], self.lines[content:end]), context)
        elif name in _VERSIONS:
            self._entry(context.kind, line.start, range(at, end), context, None, at + 1)
        elif name in _TITLED or argument >= line.end:
            self._inside(content, end, context)
        elif name in _TEXT:
            self._entry(context.kind, argument, range(at, end), context, None)
        else:
            self._description(argument, at, end, context)
        return end

    def _description(self, argument: int, at: int, end: int, context: _Context) -> None:
        """A directive such as `.. option:: --port`. Without content it is about the text or the section below it."""
        name = name_of(self.text, argument, self.lines[at].end, _SIGNATURE)
        if end == at + 1:
            self._label = self._subject = name
            return
        head = at + 1
        while head < end and self.lines[head].kind in ("text", "field"):
            head += 1
        self._entry("definition", argument, range(at, end), context, name, head)

    def _admonition(self, at: int, stop: int, context: _Context) -> int:
        end = self._content_end(at, stop)
        self._inside(at + 1, end, context)
        return end

    def _comment(self, at: int, stop: int, _context: _Context) -> int:
        return self._content_end(at, stop)

    def _html_comment(self, at: int, stop: int, _context: _Context) -> int:
        line, end = self.lines[at], at + 1
        if self._comment_end < line.start:
            # If there is none, it is not looked for again.
            self._comment_end = self.text.find("-->", line.start) % (len(self.text) + 1)
        while self._comment_end < len(self.text) and end < stop and self.lines[end].start < self._comment_end:
            end += 1
        return end

    def _mark(self, at: int, _stop: int, _context: _Context) -> int:
        return at + 1

    _READERS: ClassVar[dict[str, Callable[["_UnitReader", int, int, _Context], int]]] = {
        "heading": _hash_heading,
        "adornment": _adornment,
        "fence": _fence,
        "doctest": _doctest,
        "item": _list,
        "field": _field,
        "row": _marked_table,
        "separator": _marked_table,
        "grid": _marked_table,
        "border": _simple_table,
        "directive": _directive,
        "admonition": _admonition,
        "comment": _comment,
        "html": _html_comment,
        "mark": _mark,
    }


def _marks(line: TextLine) -> int:
    return line.body - line.start
