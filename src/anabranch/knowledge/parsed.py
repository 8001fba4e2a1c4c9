"""The text and structure of a document, as the parser gives it and the chunker takes it."""

from typing import Literal

from anabranch.domain.errors import AnabranchError
from anabranch.domain.model import Value

BlockKind = Literal["paragraph", "heading", "code", "table", "list"]
Strategy = Literal["fixed", "sentence", "semantic"]


class Unprocessable(AnabranchError):
    """A document that cannot be ingested; the message says what to do about it."""

    code = "unprocessable"


class Block(Value, gc=False):
    """A span of the text of one kind. `headers` is the path of headings above it (a heading's own path ends with
    itself), `page` counts from 1."""

    start: int
    end: int
    kind: BlockKind = "paragraph"
    headers: tuple[str, ...] = ()
    page: int | None = None


class Parsed(Value):
    """The text of a file. The blocks are in order and do not overlap; only white space lies between them."""

    text: str
    blocks: tuple[Block, ...]
    title: str | None = None
    author: str | None = None
    created_date: str | None = None
    tags: tuple[str, ...] = ()
    pages: int | None = None


class Piece(Block, kw_only=True, gc=False):
    """The span of a future chunk: `text[start:end]` of its document, and its length in tokens."""

    tokens: int


class Chunking(Value):
    """How a document is split into chunks; sizes are in the embedder's tokens."""

    strategy: Strategy = "semantic"
    size: int = 512
    overlap: int = 50
