"""The values of collections, documents, chunks and parsed documents."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from anabranch.domain.audit import GROUP, USER
from anabranch.domain.errors import AnabranchError, Conflict
from anabranch.domain.model import COLLECTION_ADDRESS, ChunkType, Context, Value
from anabranch.domain.rights import UNRESTRICTED, Rights

BlockKind = ChunkType
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
    """The span of a future chunk: `text[start:end]` of its document, and its length in tokens. `page` is that of its
    first block; `later_pages` are the others, each with the offset at which it begins."""

    tokens: int
    later_pages: tuple[tuple[int, int], ...] = ()


class Chunking(Value):
    """How a document is split into chunks; sizes are in the embedder's tokens."""

    strategy: Strategy = "semantic"
    size: int = 512
    overlap: int = 50


# A document with the visibility `collection` is seen by whoever may see its collection.
Visibility = Literal["collection", "public", "private", "restricted"]
DefaultVisibility = Literal["private", "public"]
# `manual` and `api` hold text like `text`; they say who put it there: a person, or another program.
SourceType = Literal["file", "url", "text", "manual", "api"]
ItemStatus = Literal["pending", "processing", "completed", "failed", "cancelled"]
JobStatus = Literal["pending", "processing", "completed", "failed", "cancelled"]
DocumentStatus = Literal["pending", "processing", "completed", "failed"]
Outcome = Literal["added", "replaced", "updated", "unchanged"]
Rating = Literal["thumbs_up", "thumbs_down"]


# The reserved name that stands for all collections.
EVERYTHING = "collections"
# Why a search has found less than there is.
PARTIAL = "A part of the index is damaged and is being rebuilt, so passages may be missing."


class Caller(Value):
    """The identity that permissions are checked for. The operator (owner "") sees and changes everything; a guest has
    no `user`. `key` is the id of the API key of the request, `credential` identifies its secret."""

    user: str | None = None
    groups: tuple[str, ...] = ()
    operator: bool = False
    rights: Rights = UNRESTRICTED
    key: str | None = None
    credential: str | None = None

    @classmethod
    def of(cls, context: Context) -> "Caller":
        rights = UNRESTRICTED if context.collections is None else Rights(collections=context.collections)
        return cls(user=context.user_id, groups=context.groups, operator=context.operator, rights=rights)

    @property
    def owner(self) -> str:
        """The owner of what this caller creates."""
        return self.user or ""

    def sees(self, collection: int) -> bool:
        """Whether its key is not restricted to other collections. For one that it does not see, nothing of that
        collection exists: no document, job, question or stream."""
        return self.rights.collections is None or collection in self.rights.collections

    def owns(self, owner: str) -> bool:
        return self.operator or (self.user is not None and self.user == owner)


class Identified(Caller):
    """The caller that a token identifies, and its audiences: those of a hub token, all for an API key."""

    audiences: tuple[str, ...] = ()


class Permissions(Value):
    """Who may see a document or a collection: everyone, its owner, or its owner and the named users and groups."""

    visibility: Visibility
    allowed_users: tuple[str, ...] = ()
    allowed_groups: tuple[str, ...] = ()

    @property
    def granted(self) -> tuple[str, ...]:
        """The users and groups that are named, as the audit log has them."""
        return (*(f"{USER}{name}" for name in self.allowed_users), *(f"{GROUP}{name}" for name in self.allowed_groups))

    def permits(self, caller: Caller, owner: str) -> bool:
        if caller.owns(owner) or self.visibility == "public":
            return True
        return self.visibility == "restricted" and (
            caller.user in self.allowed_users or any(group in self.allowed_groups for group in caller.groups)
        )

    def without(self, user: str) -> "Permissions":
        return Permissions(
            visibility=self.visibility,
            allowed_users=tuple(one for one in self.allowed_users if one != user),
            allowed_groups=self.allowed_groups,
        )

    def of_document(self, collection: "Collection") -> "Permissions":
        """Those of the collection, if a document follows it."""
        return collection.settings.default_permissions if self.visibility == "collection" else self

    def narrowed(self, other: "Permissions") -> "Permissions":
        """Permissions that permit nobody whom one of the two does not permit."""
        if "private" in (self.visibility, other.visibility):
            return Permissions(visibility="private")
        if self.visibility == "public" or other.visibility == "public":
            return other if self.visibility == "public" else self
        return Permissions(
            visibility="restricted",
            allowed_users=tuple(user for user in self.allowed_users if user in other.allowed_users),
            allowed_groups=tuple(group for group in self.allowed_groups if group in other.allowed_groups),
        )


PRIVATE = Permissions(visibility="private")
FOLLOWS_COLLECTION = Permissions(visibility="collection")


class CollectionSettings(Value):
    """`requested` is the requested chunking, if the embedder's window limits it. `default_permissions` say who may see
    the collection, and its documents that have none of their own."""

    embedding_model: str
    chunking: Chunking = Chunking()
    requested: Chunking | None = None
    default_permissions: Permissions = PRIVATE


class Collection(Value):
    key: int
    id: str
    owner: str
    name: str
    description: str
    settings: CollectionSettings
    created_at: float

    @property
    def address(self) -> str:
        """What names it whoever asks: `collection:owner/name`; the operator's collections have an empty owner. A slash
        of the name is escaped: an owner's name may have one, too."""
        name = self.name.replace("%", "%25").replace("/", "%2F")
        return f"{COLLECTION_ADDRESS}{self.owner}/{name}"

    def permits(self, caller: Caller) -> bool:
        return self.settings.default_permissions.permits(caller, self.owner)


def path_taken(path: str) -> Conflict:
    """What is said of a path under which something else is published; not what, since the caller may not see it."""
    return Conflict(
        f"{path} is taken by another collection or model; choose another path, or withdraw the collection: "
        f"anabranch unpublish {path}"
    )


class NewDocument(Value):
    """A document to ingest: its bytes or URL, name, metadata and permissions. It replaces the stored document with the
    same `identity`. If its permissions are `overruled`, others were chosen for that one since the upload; a retry does
    not know."""

    source: SourceType
    data: bytes = b""
    filename: str | None = None
    url: str | None = None
    connector_id: str | None = None
    media_type: str | None = None
    title: str | None = None
    metadata: Mapping[str, Any] = {}
    permissions: Permissions | None = None
    identity: str | None = None
    overruled: bool = msgspec.field(name="retried", default=False)


class DocumentFields(Value):
    """What a document has before and after it is stored. `recipe` names everything besides the content that determines
    its chunks."""

    id: str
    collection: int
    owner: str
    source: SourceType
    identity: str
    title: str
    content_hash: str
    recipe: str
    metadata: Mapping[str, Any]
    permissions: Permissions
    day: int
    size: int
    filename: str | None = None
    url: str | None = None
    connector_id: str | None = None
    pages: int | None = None


class DocumentDraft(DocumentFields, kw_only=True):
    """A document to be stored. `page_starts` are the offsets in its text at which its pages begin."""

    content: str
    page_starts: tuple[int, ...] = ()


class StoredDocument(DocumentFields, kw_only=True):
    """A document in the records; `content` and `page_starts` only if they were requested. `status`, `error` and
    `processed_at` are those of its newest version. `searchable` says whether a version is stored: the newest, or, while
    that is not `completed`, the one before it. `key` orders lists."""

    key: int
    chunk_count: int
    tokens: int
    created_at: float
    updated_at: float
    content: str | None = None
    page_starts: tuple[int, ...] = ()
    status: DocumentStatus = "completed"
    error: str | None = None
    processed_at: float | None = None
    searchable: bool = True


class ChunkView(Value):
    """A chunk of a document; `index` counts from 0, `start_char` and `end_char` are offsets in its content."""

    id: str
    index: int
    start_char: int
    end_char: int
    tokens: int
    type: ChunkType
    headers: tuple[str, ...]
    page: int | None
    text: str


class JobItem(Value):
    """One document of a job, and its outcome."""

    key: int
    document_id: str
    name: str
    status: ItemStatus
    outcome: Outcome | None
    chunk_count: int
    error: str | None


class Erased(Value):
    """What is erased: the text of documents, by their ids, and all that users have stored, asked and been given."""

    documents: tuple[str, ...] = ()
    users: tuple[str, ...] = ()


class Job(Value):
    key: int
    id: str
    collection: int
    collection_id: str
    owner: str
    status: JobStatus
    total: int
    processed: int
    failed: int
    created_at: float
    completed_at: float | None
    items: tuple[JobItem, ...] = ()
