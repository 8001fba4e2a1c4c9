"""A document's text and its structure, between the parser and the chunker."""

from typing import Literal

from anabranch.domain.errors import AnabranchError
from anabranch.domain.model import Value

BlockKind = Literal["paragraph", "heading", "code", "table", "list"]
Strategy = Literal["fixed", "sentence", "semantic"]


class Unprocessable(AnabranchError):
    """A document that cannot be taken in, and what a person can do about it."""

    code = "unprocessable"


class Block(Value, gc=False):
    """A stretch of the text of one kind. `headers` is the path of headings that it stands under (a heading's own path
    ends with itself), `page` counts from 1."""

    start: int
    end: int
    kind: BlockKind = "paragraph"
    headers: tuple[str, ...] = ()
    page: int | None = None


class Parsed(Value):
    """What a file says. The blocks are in order and do not overlap; what lies between them is white space."""

    text: str
    blocks: tuple[Block, ...]
    title: str | None = None
    author: str | None = None
    created_date: str | None = None
    tags: tuple[str, ...] = ()
    pages: int | None = None


class Piece(Value, gc=False):
    """A chunk to be: `text[start:end]` of its document, and what is known of the place."""

    start: int
    end: int
    tokens: int
    kind: BlockKind = "paragraph"
    headers: tuple[str, ...] = ()
    page: int | None = None

    @property
    def section_title(self) -> str | None:
        return self.headers[-1] if self.headers else None


class Chunking(Value):
    """How a document is cut: sizes in the embedder's tokens."""

    strategy: Strategy = "semantic"
    size: int = 512
    overlap: int = 50
