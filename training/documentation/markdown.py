"""Writes a document as Markdown and remembers where each leaf came to stand. Most documentation is Markdown; its shapes
(settings as headings, as list items, as rows of a table) are drawn for each document."""

# ruff: noqa: RUF001  dashes are meant

import re
import textwrap
from collections.abc import Sequence
from itertools import groupby
from random import Random
from typing import assert_never

from training.documentation.markup import markdown
from training.documentation.structure import (
    Code,
    Items,
    Leaf,
    Node,
    Note,
    Paragraph,
    Section,
    Table,
    Thing,
    Version,
)

Spans = dict[Leaf, tuple[int, int]]

_NOTES = {"seealso": "See also", "admonition": "Note", "topic": "Note", "sidebar": "Note", "rubric": "Note"}
_VERSIONS = {
    "added": ("New in version {}", "Added in {}", "Since {}"),
    "changed": ("Changed in version {}", "Changed in {}"),
    "deprecated": ("Deprecated since version {}", "Deprecated in {}"),
    "removed": ("Removed in version {}", "Removed in {}"),
}
MAX_TABLE_CELL = 400


class Writer:
    """Writes one document."""

    def __init__(self, source: str, random: Random) -> None:
        self._source = source
        self._parts: list[str] = []
        self._size = 0
        # The next block continues a line: it follows a list marker or a name.
        self._goes_on = False
        self.spans: Spans = {}
        self._random = random
        self._bullet = random.choice("-*")
        self._things = random.choice(("heading", "item", "item", "table", "table"))
        self._separator = random.choice((": ", " - ", " – ", ": "))
        self._note = random.choice(("quote", "quote", "plain", "material"))
        self._bold = random.random() < 0.3
        self._fields = random.choice(("line", "sentence", "brackets"))

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def write(self, nodes: Sequence[Node], prefix: str = "", level: int = 1) -> None:
        """Write nodes as blocks. `prefix` begins each of their lines."""
        for rows, run in groupby(nodes, self._is_row):
            things = list(run)
            if rows and len(things) > 2 and not prefix:
                self._thing_table([thing for node in things if (thing := _as_thing(node)) is not None])
            else:
                for node in things:
                    self._block(node, prefix, level)

    def _put(self, text: str) -> None:
        self._parts.append(text)
        self._size += len(text)

    def _break(self, prefix: str) -> None:
        """Begin a block, unless it goes on in the line of a marker."""
        if self._size and not self._goes_on:
            self._put(f"\n{prefix.rstrip()}\n{prefix}")
        self._goes_on = False

    def _leaf(self, leaf: Leaf, text: str | None = None) -> None:
        words = markdown(self._source[leaf.start : leaf.end]) if text is None else text
        self.spans[leaf] = (self._size, self._size + len(words))
        self._put(words)

    def _block(self, node: Node, prefix: str, level: int) -> None:
        match node:
            case Section():
                self._break(prefix)
                self._put("#" * min(level, 5) + " ")
                self._leaf(node.title)
                self.write(node.body, prefix, level + 1)
            case Paragraph():
                self._break(prefix)
                self._sentences(node.sentences)
            case Code():
                self._code(node, prefix)
            case Items():
                self._items(node, prefix, level)
            case Version():
                self._break(prefix)
                self._version(node)
            case Note():
                self._write_note(node, prefix, level)
            case Table():
                self._break(prefix)
                self._table(node, prefix)
            case Thing():
                self._thing(node, prefix, level)
            case _:
                assert_never(node)

    def _sentences(self, leaves: Sequence[Leaf]) -> None:
        for number, leaf in enumerate(leaves):
            if number:
                self._put(" ")
            self._leaf(leaf)

    def _code(self, node: Code, prefix: str) -> None:
        self._break(prefix)
        lines = self._source[: node.text.start].rpartition("\n")[2] + self._source[node.text.start : node.text.end]
        self._put(f"```{node.language}\n{prefix}")
        self._leaf(node.text, textwrap.dedent(lines).replace("\n", f"\n{prefix}"))
        self._put(f"\n{prefix}```")

    def _items(self, node: Items, prefix: str, level: int) -> None:
        simple = all(len(item) == 1 and isinstance(item[0], Paragraph) for item in node.items)
        for number, item in enumerate(node.items):
            if number and simple:
                self._put(f"\n{prefix}")
            else:
                self._break(prefix)
            marker = f"{number + 1}. " if node.ordered else f"{self._bullet} "
            self._put(marker)
            self._goes_on = True
            self.write(item, prefix + " " * len(marker), level)
            self._goes_on = False

    def _version(self, node: Version) -> None:
        opening = self._random.choice(_VERSIONS[node.kind]).format(node.number)
        rest = markdown(self._source[node.text.start : node.text.end]).removeprefix(node.number).strip(" :")
        self._leaf(node.text, f"{opening}: {rest}" if rest else f"{opening}.")

    def _write_note(self, node: Note, prefix: str, level: int) -> None:
        if not node.body:
            return
        title = _NOTES.get(node.kind, node.kind.capitalize())
        self._break(prefix)
        if self._note == "material":
            self._put(f"!!! {title.lower()}")
            self.write(node.body, prefix + "    ", level)
        elif self._note == "quote":
            self._put(f"> **{title}**")
            self.write(node.body, prefix + "> ", level)
        else:
            self._put(f"**{title}:** ")
            self._goes_on = True
            self.write(node.body, prefix, level)
            self._goes_on = False

    def _table(self, node: Table, prefix: str) -> None:
        for number, row in enumerate((node.header, *node.rows)):
            if number:
                self._put(f"\n{prefix}")
            self._put("|")
            for cell in row:
                self._put(" ")
                self._leaf(cell, _cell(cell.words))
                self._put(" |")
            if not number:
                self._put(f"\n{prefix}|" + " --- |" * len(row))

    def _thing(self, node: Thing, prefix: str, level: int) -> None:
        """In the shape of this document. The heading of a section that names it is written already."""
        if node.term in self.spans:
            self._field_lines(node, prefix)
            self.write(node.body, prefix, level)
        elif self._things == "heading" and not prefix and node.kind not in ("term", "parameter"):
            self._break(prefix)
            self._put("#" * min(level, 5) + " ")
            self._leaf(node.term, f"`{node.term.words}`")
            self._field_lines(node, prefix)
            self.write(node.body, prefix, level)
        else:
            self._thing_item(node, prefix, level)

    def _thing_item(self, node: Thing, prefix: str, level: int) -> None:
        self._break(prefix)
        self._put(f"{self._bullet} ")
        mark = "**" if self._bold else ""
        name = _term(node)
        self._leaf(node.term, f"{mark}`{name}`{mark}" if node.kind != "term" or _is_code(name) else f"**{name}**")
        if self._fields == "brackets" and node.fields:
            self._put(" (")
            for number, (name, leaf) in enumerate(_written(node)):
                self._put((", " if number else "") + (f"{name} " if name != "type" else ""))
                self._leaf(leaf, f"`{leaf.words}`" if name == "default" else leaf.words)
            self._put(")")
        self._put(self._separator)
        self._goes_on = True
        inner = prefix + "  "
        self.write(node.body, inner, level)
        self._goes_on = False
        if self._fields == "sentence" and len(node.body) == 1 and isinstance(node.body[0], Paragraph):
            for name, leaf in _written(node):
                self._put(" ")
                self._leaf(leaf, _field_sentence(name, leaf.words))
        elif self._fields != "brackets":
            self._field_lines(node, inner)

    def _field_lines(self, node: Thing, prefix: str) -> None:
        for name, leaf in _written(node):
            self._break(prefix)
            if self._fields == "sentence":
                self._leaf(leaf, _field_sentence(name, leaf.words))
            else:
                self._leaf(leaf, f"{name.capitalize()}: {_value(leaf.words)}")

    def _is_row(self, node: Node) -> bool:
        if self._things != "table":
            return False
        thing = _as_thing(node)
        if thing is None or not thing.body:
            return False
        leaves = [leaf for each in thing.body for leaf in (each.sentences if isinstance(each, Paragraph) else ())]
        simple = all(isinstance(each, Paragraph) for each in thing.body)
        return simple and 0 < sum(leaf.end - leaf.start for leaf in leaves) < MAX_TABLE_CELL

    def _thing_table(self, things: Sequence[Thing]) -> None:
        """Things as rows: name, type and default where some have one, description."""
        columns = [name for name in ("type", "default") if any(name in thing.fields for thing in things)]
        kind = things[0].kind if things[0].kind != "term" else "name"
        last = self._random.choice(("Description", "Meaning", "What it does", "Description"))
        titles = [self._random.choice((kind.capitalize(), "Name")), *(name.capitalize() for name in columns), last]
        self._break("")
        self._put("| " + " | ".join(titles) + " |\n|" + " --- |" * len(titles))
        for thing in things:
            self._put("\n| ")
            self._leaf(thing.term, f"`{_cell(_term(thing))}`")
            self._put(" |")
            for name in columns:
                self._put(" ")
                if name in thing.fields:
                    self._leaf(thing.fields[name], f"`{_cell(thing.fields[name].words)}`")
                self._put(" |")
            for leaf in (leaf for each in thing.body if isinstance(each, Paragraph) for leaf in each.sentences):
                self._put(" ")
                self._leaf(leaf, _cell(markdown(self._source[leaf.start : leaf.end])))
            self._put(" |")


def _as_thing(node: Node) -> Thing | None:
    """A thing, or the one thing that a section is no more than the heading of."""
    only = node.body[0] if isinstance(node, Section) and len(node.body) == 1 else node
    return only if isinstance(only, Thing) else None


def _written(node: Thing) -> list[tuple[str, Leaf]]:
    return [(name, node.fields[name]) for name in ("type", "default") if name in node.fields]


def _term(node: Thing) -> str:
    """The name alone, where the fields say the rest; else the signature."""
    return ", ".join(node.names) if node.kind in ("parameter", "setting") else node.term.words


def _is_code(words: str) -> bool:
    return re.fullmatch(r"\S+", words) is not None and not re.fullmatch(r"[A-Z]?[a-z]+", words)


def _value(words: str) -> str:
    return f"`{words}`" if _is_code(words) else words


def _field_sentence(name: str, words: str) -> str:
    return f"Defaults to {_value(words)}." if name == "default" else f"Must be of type {_value(words)}."


def _cell(words: str) -> str:
    return words.replace("|", "\\|")


def written(source: str, nodes: Sequence[Node], random: Random) -> tuple[str, Spans]:
    """The document in Markdown, and where its leaves are."""
    writer = Writer(source, random)
    writer.write(nodes)
    return writer.text + "\n", writer.spans
