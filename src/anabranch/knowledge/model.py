"""The values of the knowledge room: collections, documents, jobs, and who may see them."""

from collections.abc import Mapping
from typing import Any, Literal

from anabranch.domain.model import Context, Value
from anabranch.knowledge.text import Chunking

Visibility = Literal["public", "private", "restricted"]
SourceType = Literal["file", "url", "text"]
ItemStatus = Literal["pending", "processing", "completed", "failed", "cancelled"]
JobStatus = Literal["pending", "processing", "completed", "failed", "cancelled"]
Outcome = Literal["added", "replaced", "updated", "unchanged"]


# The name that means every collection at once, as far as filters and permissions go.
EVERYTHING = "collections"


class Caller(Value):
    """Who asks, for permissions. The operator ("" as an owner) sees and changes everything; `user` None is a guest.
    `key` is the id of the API key that they came with."""

    user: str | None = None
    groups: tuple[str, ...] = ()
    operator: bool = False
    key: str | None = None

    @classmethod
    def of(cls, context: Context) -> "Caller":
        return cls(user=context.user_id, groups=context.groups, operator=context.operator)

    @property
    def owner(self) -> str:
        """The name under which what this caller makes is kept."""
        return self.user or ""

    def owns(self, owner: str) -> bool:
        return self.operator or (self.user is not None and self.user == owner)


class Identified(Caller):
    """Who a token stands for, and to which audiences: one of the hub to those that it is meant for, a key to all."""

    audiences: tuple[str, ...] = ()


class Permissions(Value):
    """Who may see a document: everyone who may ask at all, its owner only, or its owner and those named."""

    visibility: Visibility = "public"
    allowed_users: tuple[str, ...] = ()
    allowed_groups: tuple[str, ...] = ()

    def permits(self, caller: Caller, owner: str) -> bool:
        if caller.owns(owner) or self.visibility == "public":
            return True
        return self.visibility == "restricted" and (
            caller.user in self.allowed_users or any(group in self.allowed_groups for group in caller.groups)
        )


class CollectionSettings(Value):
    """`requested` is what was asked for where the embedder's window made it smaller."""

    embedding_model: str
    chunking: Chunking = Chunking()
    requested: Chunking | None = None
    default_permissions: Permissions = Permissions()


class Collection(Value):
    key: int
    id: str
    owner: str
    name: str
    description: str
    settings: CollectionSettings
    created_at: float


class NewDocument(Value):
    """A document as it arrives: its bytes (or its address), what it is called, and what is said about it. `identity`
    tells whether it replaces one that is there."""

    source: SourceType
    data: bytes = b""
    filename: str | None = None
    url: str | None = None
    media_type: str | None = None
    title: str | None = None
    metadata: Mapping[str, Any] = {}
    permissions: Permissions | None = None
    identity: str | None = None


class Document(Value):
    """A document as it is kept; `content` only where it was asked for."""

    key: int
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
    chunk_count: int
    tokens: int
    size: int
    created_at: float
    updated_at: float
    filename: str | None = None
    url: str | None = None
    pages: int | None = None
    content: str | None = None


class Item(Value):
    """One document of a job, and what has become of it."""

    key: int
    ordinal: int
    document_id: str
    name: str
    status: ItemStatus
    outcome: Outcome | None
    chunk_count: int
    error: str | None


class Job(Value):
    key: int
    id: str
    collection_id: str
    owner: str
    status: JobStatus
    total: int
    processed: int
    failed: int
    created_at: float
    completed_at: float | None
    items: tuple[Item, ...] = ()
