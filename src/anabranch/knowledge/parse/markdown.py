"""Markdown: the text is the unchanged source, and the blocks are spans of it."""

import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import yaml

from anabranch.knowledge.model import Block, BlockKind, Parsed
from anabranch.knowledge.parse.builder import Headings, ParseLimits, check_blocks, check_text, day, line, unique
from anabranch.knowledge.parse.builder import tags as keywords

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

FRONT_MATTER_LIMIT = 65_536
_FRONT_MATTER = re.compile(r"\s*---[ \t]*\n(?P<yaml>.*?)^(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL | re.MULTILINE)
_KINDS: dict[str, BlockKind] = {
    "heading_open": "heading",
    "fence": "code",
    "code_block": "code",
    "table_open": "table",
    "bullet_list_open": "list",
    "ordered_list_open": "list",
}


class MarkdownPart(NamedTuple):
    """A block of the source, in lines; `heading` is its level and text."""

    first: int
    end: int
    kind: BlockKind
    heading: tuple[int, str] | None = None
    rule: bool = False


def read_markdown(text: str, limits: ParseLimits) -> Parsed:
    check_text(len(text), limits)
    front, metadata = _front_matter(text)
    body = text[front:]
    starts = [0, *accumulate(len(each) + 1 for each in body.split("\n"))]
    headings = Headings()
    blocks: list[Block] = []
    for part in _parts(body):
        if part.heading:
            headings.enter(*part.heading)
        start, end = _trimmed(body, starts[part.first], min(starts[part.end], len(body)), part.kind)
        if start < end and part.rule and blocks:  # a horizontal rule has no text of its own
            blocks[-1] = msgspec.structs.replace(blocks[-1], end=front + end)
        elif start < end:
            blocks.append(Block(start=front + start, end=front + end, kind=part.kind, headers=headings.path))
            check_blocks(len(blocks))
    title = metadata.pop("title", None) or headings.title
    return Parsed(text=text, blocks=tuple(blocks), title=title, **metadata)


def _parts(body: str) -> Iterator[MarkdownPart]:
    """The top-level blocks, and the text between them that has no token, such as link definitions."""
    at = 0
    # Only blocks: inline content is not parsed, except for headings.
    tokens = _parser().block.parse(body, _parser(), {}, []) or []
    for place, token in enumerate(tokens):
        first, end = token.map or (0, 0)
        if token.level != 0 or token.nesting < 0 or end <= max(first, at):
            continue
        if first > at:
            yield MarkdownPart(at, first, "paragraph")
        kind = _KINDS.get(token.type, "paragraph")
        heading = (int(token.tag[1:]), _words(tokens[place + 1])) if kind == "heading" else None
        yield MarkdownPart(max(first, at), end, kind, heading, token.type == "hr")
        at = end
    yield MarkdownPart(at, body.count("\n") + 1, "paragraph")


@cache
def _parser() -> "MarkdownIt":
    from markdown_it import MarkdownIt  # noqa: PLC0415

    return MarkdownIt("commonmark").enable("table")


def _words(inline: "Token") -> str:
    source = inline.content[:1000]
    words = "".join(child.content for parsed in _parser().parseInline(source) for child in parsed.children or ())
    return words or source


def _trimmed(text: str, start: int, end: int, kind: BlockKind) -> tuple[int, int]:
    words = text[start:end]
    # An indented code block keeps the indentation of its first line.
    indent = len(words) - len(words.lstrip("\n" if kind == "code" else None))
    return start + indent, start + len(words.rstrip())


def _front_matter(text: str) -> tuple[int, dict[str, Any]]:
    """Where the document begins, and the metadata above it."""
    found = _FRONT_MATTER.match(text, 0, FRONT_MATTER_LIMIT)
    node = None
    with suppress(yaml.YAMLError, ValueError, RecursionError):
        # Composed, not constructed: values keep their notation, and aliases and tags build nothing.
        node = yaml.compose(found["yaml"], Loader=yaml.SafeLoader) if found else None
    if found is None or not isinstance(node, yaml.MappingNode):
        return 0, {}
    words = {str(key.value).lower(): _scalars(value) for key, value in node.value}
    tags = words.get("tags") or words.get("keywords") or []
    return found.end(), {
        "title": line(" ".join(words.get("title", []))),
        "author": line(", ".join(words.get("author") or words.get("authors") or [])),
        "created_date": day(" ".join(words.get("date") or words.get("created") or [])),
        "tags": keywords(tags[0]) if len(tags) == 1 else unique(tags),
    }


def _scalars(node: object) -> list[str]:
    if isinstance(node, yaml.ScalarNode):
        return [] if node.tag == "tag:yaml.org,2002:null" else [str(node.value)]
    if isinstance(node, yaml.SequenceNode):
        return [str(item.value) for item in node.value if isinstance(item, yaml.ScalarNode)]
    return []
