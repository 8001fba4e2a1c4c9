"""Reads reStructuredText into a tree whose leaves are spans of the source."""

# ruff: noqa: SIM905  word lists read better as words

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from anabranch.text.sentences import sentences, trim
from training.documentation.markup import plain


@dataclass(slots=True, eq=False)
class Leaf:
    """A piece of text that is never split: a sentence, a block of code, a cell, a term. `words` is it without
    markup."""

    start: int
    end: int
    words: str


@dataclass(slots=True)
class Paragraph:
    sentences: list[Leaf]


@dataclass(slots=True)
class Code:
    text: Leaf
    language: str = ""


@dataclass(slots=True)
class Items:
    """A list; each item is its blocks."""

    items: "list[list[Node]]"
    ordered: bool = False


@dataclass(slots=True)
class Thing:
    """Something that is described by name: a setting, an option, a parameter, a function, a term."""

    kind: str
    names: tuple[str, ...]
    term: Leaf
    body: "list[Node]"
    # Such as `type` and `default`.
    fields: dict[str, Leaf] = field(default_factory=dict)


@dataclass(slots=True)
class Version:
    """A note on a version: `kind` is added, changed or deprecated."""

    kind: str
    number: str
    text: Leaf


@dataclass(slots=True)
class Note:
    kind: str
    body: "list[Node]"


@dataclass(slots=True)
class Table:
    header: list[Leaf]
    rows: list[list[Leaf]]


@dataclass(slots=True)
class Section:
    level: int
    title: Leaf
    body: "list[Node]"


Node = Paragraph | Code | Items | Thing | Version | Note | Table | Section

THINGS = {
    **dict.fromkeys(("function", "py:function", "autofunction", "c:function"), "function"),
    **dict.fromkeys(("class", "py:class", "autoclass"), "class"),
    **dict.fromkeys(("method", "py:method", "classmethod", "staticmethod", "automethod"), "method"),
    **dict.fromkeys(("attribute", "py:attribute", "autoattribute", "property", "data", "autodata"), "attribute"),
    **dict.fromkeys(("exception", "py:exception", "autoexception"), "exception"),
    **dict.fromkeys(("option", "django-admin-option", "rst:directive:option", "cmdoption"), "option"),
    **dict.fromkeys(("setting", "confval"), "setting"),
    "envvar": "environment variable",
    "describe": "value",
    "object": "value",
    "rst:directive": "directive",
    "rst:role": "role",
    "templatefilter": "template filter",
    "templatetag": "template tag",
    "django-admin": "command",
    "command": "command",
    "signal": "signal",
    "fixture": "fixture",
    "event": "event",
    "fieldlookup": "field lookup",
    "hook": "hook",
    "reqmeta": "request meta key",
    "control": "command",
    "py:decorator": "decorator",
    "decorator": "decorator",
    "stat": "statistic",
    "state": "state",
}
CODE = frozenset("code-block sourcecode code console doctest testcode ipython literalinclude parsed-literal".split())
NOTES = frozenset(
    "note warning tip important caution attention hint danger admonition topic sidebar seealso rubric".split()
)
# What follows these in the first line is a title.
TITLED = frozenset("admonition topic sidebar rubric".split())
OPENED = frozenset("tab tabs only container rst-class compound glossary hlist program".split())
VERSIONS = {
    "versionadded": "added",
    "version-added": "added",
    "versionchanged": "changed",
    "version-changed": "changed",
    "deprecated": "deprecated",
    "versionremoved": "removed",
}

# Headings of Google's style of docstrings, which look like terms.
DOCSTRING_HEADINGS = frozenset(
    """Arguments,Args,Keyword Arguments,Parameters,Returns,Return,Raises,Yields,Example,Examples,Note,Notes,See Also,
    Warning,Warnings,Attributes,Todo,Usage,References""".replace("\n    ", "").split(",")
)
MAX_TABLE = 120

_UNDERLINE = re.compile(r"([=\-~^\"'`#*+.:_])\1{2,}\s*$")
_DIRECTIVE = re.compile(r"\.\. +([a-zA-Z][\w:+.-]*?) ?::(?:\s+(.*))?$")
_BULLET = re.compile(r"([*+•-]|\d{1,3}[.)]|#\.|\([a-z0-9]\))(\s+)(?=\S)")
_FIELD = re.compile(r":([^:`\s][^:`]*?):(?:\s+(.*)|)$")
_SIMPLE_RULE = re.compile(r"=+(?:\s+=+)+\s*$")
_GRID_RULE = re.compile(r"\+(?:[-=]+\+)+\s*$")
_SIGNATURE = re.compile(r"[(\[=].*|\s.*")


class Line(NamedTuple):
    start: int
    text: str
    indent: int

    @property
    def blank(self) -> bool:
        return not self.text.strip()


class Reader:
    """Reads one document. Headings get their level from the order in which their underlines appear."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._underlines: list[str] = []
        # Names that a directive without text announces, and their kind; a heading of that name follows.
        self.anchors: dict[str, str] = {}
        self._lines: list[Line] = []
        at = 0
        for raw in text.split("\n"):
            self._lines.append(Line(at, raw, len(raw) - len(raw.lstrip())))
            at += len(raw) + 1

    def read(self) -> list[Node]:
        """The document as a tree of sections."""
        root: list[Node] = []
        sections: list[Section] = []
        for node in self._blocks(0, len(self._lines), 0):
            if isinstance(node, Section):
                while sections and sections[-1].level >= node.level:
                    sections.pop()
                (sections[-1].body if sections else root).append(node)
                sections.append(node)
            else:
                (sections[-1].body if sections else root).append(node)
        return root

    def leaf(self, start: int, end: int) -> Leaf | None:
        span = trim(self.text, start, end)
        return None if span is None else Leaf(*span, plain(self.text[span[0] : span[1]]))

    def _end(self, line: int) -> int:
        return self._lines[line].start + len(self._lines[line].text)

    def _inner(self, first: int, last: int, indent: int) -> int:
        """The line after the block whose lines are indented by more than `indent`."""
        at = first
        while at < last and (self._lines[at].blank or self._lines[at].indent > indent):
            at += 1
        while at > first and self._lines[at - 1].blank:
            at -= 1
        return at

    def _body(self, first: int, last: int) -> list[Node]:
        """The blocks of these lines, at whatever depth they begin."""
        first = next((at for at in range(first, last) if not self._lines[at].blank), last)
        return list(self._blocks(first, last, self._lines[first].indent)) if first < last else []

    def _blocks(self, at: int, last: int, indent: int) -> Iterator[Node]:
        literal = False
        while at < last:
            line = self._lines[at]
            if line.blank:
                at += 1
                continue
            if line.indent != indent:
                stop = max(at + 1, self._inner(at, last, min(indent, line.indent - 1)))
                if literal:
                    yield from self._code(at, stop, "")
                else:
                    yield from self._body(at, stop)
                at, literal = stop, False
                continue
            nodes, stop, literal = self._block(at, last, indent)
            yield from nodes
            at = max(stop, at + 1)

    def _block(self, at: int, last: int, indent: int) -> tuple[Sequence[Node], int, bool]:
        """The nodes of the block that begins here, the line after it, and whether literal text follows."""
        text = self._lines[at].text[indent:]
        if (heading := self._heading(at, last)) is not None:
            return [heading[0]], heading[1], False
        if text.startswith("..") and (len(text) == 2 or text[2] == " "):
            stop = self._inner(at + 1, last, indent)
            return self._explicit(at, stop, text), stop, False
        if _BULLET.match(text):
            node, stop = self._items(at, last, indent)
            return [node], stop, False
        if _SIMPLE_RULE.match(text) or _GRID_RULE.match(text):
            return self._table(at, last)
        if _FIELD.match(text):
            stop = self._inner(at + 1, last, indent)
            return self._field(at, stop), stop, False
        if text.startswith(">>> "):
            stop = next((row for row in range(at, last) if self._lines[row].blank), last)
            return self._code(at, stop, "python"), stop, False
        return self._paragraph(at, last, indent)

    def _heading(self, at: int, last: int) -> tuple[Section, int] | None:
        over = at + 2 < last and _UNDERLINE.match(self._lines[at].text) is not None
        title, rule = (at + 1, at + 2) if over else (at, at + 1)
        if rule >= last or self._lines[rule].indent or self._lines[title].blank or self._lines[at].indent:
            return None
        found = _UNDERLINE.match(self._lines[rule].text)
        words = self._lines[title].text.strip()
        if found is None or _UNDERLINE.match(words) or len(found[0].strip()) < min(len(words), 4):
            return None
        if over and self._lines[at].text.strip()[0] != found[1]:
            return None
        key = found[1] * (2 if over else 1)
        if key not in self._underlines:
            self._underlines.append(key)
        leaf = self.leaf(self._lines[title].start, self._end(title))
        assert leaf is not None
        return Section(self._underlines.index(key) + 1, leaf, []), rule + 1

    def _explicit(self, at: int, stop: int, text: str) -> Sequence[Node]:
        found = _DIRECTIVE.match(text)
        if found is None:
            return []
        name, argument = found[1], (found[2] or "").strip()
        begin = self._end(at) - len(found[2] or "") if argument else self._end(at)
        fields, first = self._options(at + 1, stop)
        if name in CODE:
            return self._code(first, stop, argument)
        if name in VERSIONS:
            return self._version(VERSIONS[name], argument, begin, stop)
        if name in THINGS:
            return self._thing(THINGS[name], argument, begin, at, stop, fields, first)
        if name in NOTES:
            gap = self._first_gap(at, stop) if argument and name not in TITLED else first
            told = self._sentences(begin, self._end(gap - 1)) if gap != first else ()
            return [Note(name, [*told, *self._body(gap, stop)])]
        if name == "list-table":
            return self._list_table(first, stop, fields)
        return self._body(first, stop) if name in OPENED else []

    def _options(self, at: int, stop: int) -> tuple[dict[str, Leaf], int]:
        """The options of a directive, and the line after them."""
        fields = {}
        while at < stop and not self._lines[at].blank:
            found = _FIELD.match(self._lines[at].text.strip())
            if found is None:
                break
            leaf = self.leaf(self._end(at) - len(found[2] or ""), self._end(at))
            if leaf is not None:
                fields[found[1]] = leaf
            at += 1
        return fields, at

    def _version(self, kind: str, argument: str, begin: int, stop: int) -> Sequence[Node]:
        number = argument.split(maxsplit=1)[0] if argument else ""
        leaf = self.leaf(begin, self._end(stop - 1))
        return [Version(kind, number, leaf)] if leaf and re.match(r"v?\d+(?:\.\d+)*", number) else []

    def _thing(
        self, kind: str, argument: str, begin: int, at: int, stop: int, fields: dict[str, Leaf], first: int
    ) -> Sequence[Node]:
        term = self.leaf(begin, self._end(at))
        if term is None:
            return []
        while not fields and first < stop and not self._lines[first].blank:  # further names, one a line
            first += 1
        _, first = self._options(first, stop)
        names = tuple(filter(None, (name_of(part, kind) for part in re.split(r", (?=-)", argument))))
        body = self._body(first, stop)
        if not body and not fields:
            self.anchors |= dict.fromkeys(names, kind)
            return []
        return [Thing(kind, names, term, body, fields)] if names else []

    def _code(self, at: int, stop: int, language: str) -> Sequence[Node]:
        leaf = self.leaf(self._lines[at].start, self._end(stop - 1)) if at < stop else None
        if leaf is None:
            return []
        return [Code(Leaf(leaf.start, leaf.end, self.text[leaf.start : leaf.end]), language)]

    def _items(self, at: int, last: int, indent: int) -> tuple[Items, int]:
        items: list[list[Node]] = []
        ordered = self._lines[at].text[indent].isdigit()
        while at < last:
            line = self._lines[at]
            if line.blank:
                at += 1
                continue
            found = _BULLET.match(line.text[indent:]) if line.indent == indent else None
            if found is None:
                break
            stop = self._inner(at + 1, last, indent)
            items.append(self._item(at, stop, indent + found.end()))
            at = stop
        return Items(items, ordered), at

    def _item(self, at: int, stop: int, text_indent: int) -> list[Node]:
        """The blocks of an item: its marker counts as white space."""
        line = self._lines[at]
        self._lines[at] = Line(line.start, " " * text_indent + line.text[text_indent:], text_indent)
        body = list(self._blocks(at, stop, text_indent))
        self._lines[at] = line
        return body

    def _field(self, at: int, stop: int) -> Sequence[Node]:
        text = self._lines[at].text
        found = _FIELD.match(text.strip())
        assert found is not None
        words = found[1].split()
        begin = self._end(at) - len(found[2] or "")
        if words[0] in ("param", "parameter", "arg", "keyword", "ivar", "cvar", "var") and len(words) > 1:
            term = self.leaf(self._lines[at].start, begin)
            assert term is not None
            name = words[-1].partition("=")[0].replace("\\", "").lstrip("*").rstrip(",")
            fields = {}
            if "=" in words[-1]:
                offset = self._lines[at].text.index("=", self._lines[at].indent) + 1
                value = self.leaf(self._lines[at].start + offset, begin - 2 if found[2] else self._end(at) - 1)
                fields = {"default": value} if value else {}
            body = [*self._sentences(begin, self._end(self._first_gap(at, stop) - 1))]
            return [Thing("parameter", (name,), term, [*body, *self._body(self._first_gap(at, stop), stop)], fields)]
        if words[0] in ("return", "returns", "raises", "raise", "rtype"):
            return list(self._sentences(begin, self._end(stop - 1)))
        return []

    def _first_gap(self, at: int, stop: int) -> int:
        return next((row for row in range(at, stop) if self._lines[row].blank), stop)

    def _paragraph(self, at: int, last: int, indent: int) -> tuple[Sequence[Node], int, bool]:
        stop = at + 1
        while stop < last and not self._lines[stop].blank and self._lines[stop].indent == indent:
            if self._lines[stop].text[indent:].startswith((".. ", ">>> ")):
                break
            stop += 1
        if stop == at + 1 and stop < last and not self._lines[stop].blank and self._lines[stop].indent > indent:
            inner = self._inner(stop, last, indent)
            return self._definition(at, stop, inner), inner, False
        text = self.text[self._lines[at].start : self._end(stop - 1)].rstrip()
        nodes = list(self._sentences(self._lines[at].start + indent, self._end(stop - 1)))
        return nodes, stop, text.endswith("::")

    def _definition(self, at: int, first: int, stop: int) -> Sequence[Node]:
        """A term and its text. numpydoc writes parameters as "name : type, default value"."""
        line = self._lines[at]
        term = self.leaf(line.start, self._end(at))
        assert term is not None
        if line.text.strip().startswith((":doc:`", ":ref:`")):  # an entry of a table of contents
            return []
        if line.text.strip().rstrip(":") in DOCSTRING_HEADINGS:
            return self._body(first, stop) if "Argument" not in line.text and "Arg" not in line.text else []
        name, colon, kinds = line.text.strip().partition(" : ")
        fields = {}
        if colon:
            offset = line.start + line.indent + len(name) + 3
            if (found := re.search(r"default(?:s to|:)? +(\S.*?)$", kinds)) and (
                value := self.leaf(offset + found.start(1), self._end(at))
            ):
                fields["default"] = value
            if kind := self.leaf(offset, offset + len(re.split(r",? ?\(?default", kinds)[0])):
                fields["type"] = kind
        names = tuple(filter(None, (name_of(part, "parameter" if colon else "term") for part in name.split(", "))))
        return [Thing("parameter" if colon else "term", names or (plain(name),), term, self._body(first, stop), fields)]

    def _sentences(self, start: int, end: int) -> Iterator[Node]:
        leaves = [
            leaf
            for span in sentences(self.text, start, end)
            if (leaf := self.leaf(*span)) and leaf.words not in ("", ":")
        ]
        if leaves:
            yield Paragraph(leaves)

    def _list_table(self, at: int, stop: int, fields: dict[str, Leaf]) -> Sequence[Node]:
        rows = []
        for node in self._body(at, stop):
            for item in node.items if isinstance(node, Items) else ():
                cells = [cell for part in item if isinstance(part, Items) for cell in part.items]
                rows.append([leaf for cell in cells if (leaf := self._joined(cell)) is not None])
        return _table(rows, has_header=fields["header-rows"].words != "0" if "header-rows" in fields else False)

    def _joined(self, nodes: Sequence[Node]) -> Leaf | None:
        leaves = [leaf for node in nodes for leaf in leaves_of(node)]
        return self.leaf(leaves[0].start, leaves[-1].end) if leaves else None

    def _table(self, at: int, last: int) -> tuple[Sequence[Node], int, bool]:
        stop = next((row for row in range(at, last) if self._lines[row].blank), last)
        if self._lines[at].text.lstrip().startswith("+"):
            return [], stop, False
        rules = [at]
        # Blank lines may stand between the rows; the last rule is before a blank line.
        for row in range(at + 1, min(last, at + MAX_TABLE)):
            if _SIMPLE_RULE.match(self._lines[row].text.strip()):
                rules.append(row)
                if row + 1 == last or self._lines[row + 1].blank:
                    return _table(self._simple_rows(rules), has_header=len(rules) == 3), row + 1, False
        return [], stop, False

    def _simple_rows(self, rules: Sequence[int]) -> list[list[Leaf]]:
        """The rows between rules of `=`; a line without text in its first column continues the row above."""
        columns = [(found.start(), found.end()) for found in re.finditer("=+", self._lines[rules[0]].text)]
        rows: list[list[list[tuple[int, int]]]] = []
        for number in range(rules[0] + 1, rules[-1]):
            line = self._lines[number]
            if line.blank or number in rules:
                continue
            ends = [*(low for low, _ in columns[1:]), len(line.text)]
            spans = [(low, min(end, len(line.text))) for (low, _), end in zip(columns, ends, strict=True)]
            if line.text[spans[0][0] : spans[0][1]].strip() or not rows:
                rows.append([[] for _ in columns])
            for cell, (low, high) in zip(rows[-1], spans, strict=True):
                if line.text[low:high].strip():
                    cell.append((line.start + low, line.start + high))
        return [[self._cell(cell) for cell in row] for row in rows]

    def _cell(self, spans: Sequence[tuple[int, int]]) -> Leaf:
        """A cell; if it is wrapped, the span is that of its first line."""
        first = trim(self.text, *spans[0]) if spans else None
        words = plain(" ".join(self.text[low:high].strip() for low, high in spans))
        return Leaf(*first, words) if first else Leaf(0, 0, "")


def _table(rows: list[list[Leaf]], *, has_header: bool) -> Sequence[Node]:
    rows = [row for row in rows if row]
    if not has_header or len(rows) < 2 or any(len(row) != len(rows[0]) for row in rows):
        return []
    return [Table(rows[0], rows[1:])]


def name_of(argument: str, kind: str) -> str:
    """The name in a directive's argument or a term: `f` of "f(x)", `--port` of "--port=N"."""
    name = plain(argument).strip().removeprefix("class ").removeprefix("async ").strip()
    if kind == "directive":
        name = name.removeprefix("..").split("::")[0].strip()
    if kind in ("option", "function", "method", "class", "exception", "command", "decorator", "parameter", "directive"):
        name = _SIGNATURE.sub("", name, count=1).strip()
    return name.strip(":*, ")


def leaves_of(node: Node) -> Iterator[Leaf]:
    """All leaves below a node, in order of the source."""
    match node:
        case Paragraph():
            yield from node.sentences
        case Code() | Version():
            yield node.text
        case Items():
            yield from (leaf for item in node.items for inner in item for leaf in leaves_of(inner))
        case Table():
            yield from node.header
            yield from (leaf for row in node.rows for leaf in row)
        case Thing():
            yield node.term
            yield from node.fields.values()
            yield from (leaf for inner in node.body for leaf in leaves_of(inner))
        case Note():
            yield from (leaf for inner in node.body for leaf in leaves_of(inner))
        case Section():
            yield node.title
            yield from (leaf for inner in node.body for leaf in leaves_of(inner))


_DEFAULT = re.compile(r"default(?: value)?(?: is)?:? +(?=\S)", re.IGNORECASE)
_CODE_NAME = re.compile(r"-{0,2}[A-Za-z@_][\w.-]*(?:\(.*\))?$")


def read(text: str) -> list[Node]:
    """The tree of a reStructuredText document."""
    reader = Reader(text)
    nodes = reader.read()
    _name(nodes, reader.anchors, "")
    return nodes


def _name(nodes: list[Node], anchors: dict[str, str], above: str) -> None:
    """Sections that are named like a setting become things: a heading `DEBUG` below `.. setting:: DEBUG`. A paragraph
    "Default: x" becomes a field of its thing."""
    for node in nodes:
        match node:
            case Section():
                _name(node.body, anchors, node.title.words)
                if kind := _kind(node, anchors, above):
                    inner = [each for each in node.body if isinstance(each, Section)]
                    body: list[Node] = [each for each in node.body if not isinstance(each, Section)]
                    thing = Thing(kind, (name_of(node.title.words, kind),), node.title, body)
                    _take_default(thing)
                    node.body = [thing, *inner]
            case Thing():
                _name(node.body, anchors, above)
                _take_default(node)
            case Note():
                _name(node.body, anchors, above)
            case Items():
                for item in node.items:
                    _name(item, anchors, above)


def _kind(section: Section, anchors: dict[str, str], above: str) -> str:
    """What a section describes, if it is named like a thing."""
    name = section.title.words
    if not section.body or isinstance(section.body[0], Section | Thing) or not _CODE_NAME.match(name):
        return ""
    if (kind := anchors.get(name_of(name, "function"))) is not None:
        return kind
    if name.isalpha() and not name.isupper() and section.title.end - section.title.start == len(name):
        return ""
    heading = above.lower()
    kinds = ("setting", "option", "attribute", "method", "function", "field", "argument", "command", "signal", "filter")
    return next(
        (kind for kind in kinds if kind in heading),
        ("method" if "." in name else "function")
        if name.endswith(")")
        else "setting"
        if name.isupper()
        else "class"
        if name[0].isupper()
        else "option",
    )


def _take_default(thing: Thing) -> None:
    for node in thing.body[:3]:
        if (
            isinstance(node, Paragraph)
            and len(node.sentences) == 1
            and (found := _DEFAULT.match(node.sentences[0].words))
        ):
            leaf = node.sentences[0]
            value = leaf.words[found.end() :].rstrip(".").strip()
            if value and len(value) < 120 and not value.lower().startswith("see "):
                thing.fields["default"] = Leaf(leaf.start, leaf.end, value)
                thing.body.remove(node)
            return
