"""Markdown: the text is the unchanged source, and the blocks are spans of it."""

import re
from collections.abc import Iterator
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

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


class FrontMatter(NamedTuple):
    """The metadata above a document, and where the document begins."""

    end: int = 0
    title: str | None = None
    author: str | None = None
    created_date: str | None = None
    tags: tuple[str, ...] = ()


class MarkdownPart(NamedTuple):
    """A block of the source, in lines; `heading` is its level and text."""

    first: int
    behind: int
    kind: BlockKind
    heading: tuple[int, str] | None = None
    rule: bool = False


def read_markdown(text: str, limits: ParseLimits) -> Parsed:
    check_text(len(text), limits)
    front = _front_matter(text)
    body = text[front.end :]
    starts = [0, *accumulate(len(each) + 1 for each in body.split("\n"))]
    headings = Headings()
    blocks: list[Block] = []
    for part in _parts(body):
        if part.heading:
            headings.enter(*part.heading)
        start, end = _trimmed(body, starts[part.first], min(starts[part.behind], len(body)), part.kind)
        if start >= end:
            continue
        if part.rule and blocks:  # a horizontal rule has no text of its own
            blocks[-1] = _until(blocks[-1], front.end + end)
            continue
        blocks.append(Block(start=front.end + start, end=front.end + end, kind=part.kind, headers=headings.path))
        check_blocks(len(blocks))
    return Parsed(
        text=text,
        blocks=tuple(blocks),
        title=front.title or headings.title,
        author=front.author,
        created_date=front.created_date,
        tags=front.tags,
    )


def _parts(body: str) -> Iterator[MarkdownPart]:
    """The top-level blocks, and the text between them that has no token, such as link definitions."""
    at = 0
    tokens = _blocks_of(body)
    for place, token in enumerate(tokens):
        if token.level != 0 or token.nesting < 0 or token.map is None:
            continue
        first, behind = max(token.map[0], at), token.map[1]
        if behind <= first:
            continue
        if first > at:
            yield MarkdownPart(at, first, "paragraph")
        kind = _KINDS.get(token.type, "paragraph")
        heading = (int(token.tag[1:]), _words(tokens[place + 1])) if kind == "heading" else None
        yield MarkdownPart(first, behind, kind, heading, token.type == "hr")
        at = behind
    yield MarkdownPart(at, body.count("\n") + 1, "paragraph")


def _blocks_of(body: str) -> "list[Token]":
    """Block tokens only: inline content is not parsed, except for headings."""
    markdown = _parser()
    return markdown.block.parse(body, markdown, {}, []) or []


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
    end = start + len(words.rstrip())
    if kind == "code":
        # An indented block keeps the indentation of its first line.
        return start + len(words) - len(words.lstrip("\n")), end
    return start + len(words) - len(words.lstrip()), end


def _until(block: Block, end: int) -> Block:
    return Block(start=block.start, end=end, kind=block.kind, headers=block.headers)


def _front_matter(text: str) -> FrontMatter:
    found = _FRONT_MATTER.match(text, 0, FRONT_MATTER_LIMIT)
    if found is None:
        return FrontMatter()
    try:
        # Composed, not constructed: values keep their notation, and aliases and tags build nothing.
        node = yaml.compose(found["yaml"], Loader=yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return FrontMatter()
    if not isinstance(node, yaml.MappingNode):
        return FrontMatter()
    words = {str(key.value).lower(): _scalars(value) for key, value in node.value}
    authors = words.get("author") or words.get("authors") or []
    return FrontMatter(
        end=found.end(),
        title=line(" ".join(words.get("title", []))),
        author=line(", ".join(authors)),
        created_date=day(" ".join(words.get("date") or words.get("created") or [])),
        tags=_tags(words.get("tags") or words.get("keywords") or []),
    )


def _scalars(node: object) -> list[str]:
    if isinstance(node, yaml.ScalarNode):
        return [] if node.tag == "tag:yaml.org,2002:null" else [str(node.value)]
    if isinstance(node, yaml.SequenceNode):
        return [str(item.value) for item in node.value if isinstance(item, yaml.ScalarNode)]
    return []


def _tags(words: list[str]) -> tuple[str, ...]:
    return keywords(words[0]) if len(words) == 1 else unique(words)
