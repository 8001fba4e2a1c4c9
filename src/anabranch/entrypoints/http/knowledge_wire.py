"""The types of spec 5's surface of collections and documents."""

import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from anabranch.app.publishing import OWNER_SLUG, EndpointPath
from anabranch.domain.errors import InvalidQuestion
from anabranch.domain.model import Value
from anabranch.entrypoints.http.operations import levels_of
from anabranch.knowledge.model import (
    Caller,
    ChunkView,
    Collection,
    DocumentStatus,
    ItemStatus,
    Job,
    JobStatus,
    Outcome,
    Permissions,
    SourceType,
    StoredDocument,
    Strategy,
    Visibility,
)

if TYPE_CHECKING:
    from anabranch.knowledge.collection_counts import CollectionCounts

MAX_DEPTH = 20
# The metadata of a document as JSON, which may be longer than what is stored, and the values in those of one request.
MAX_METADATA_JSON = 256 * 1024
MAX_METADATA_VALUES = 100_000
# Characters of a document; a millisecond or two.
ENCODED_AT_ONCE = 500_000
# Checked by `EndpointPath`, whose message says what a path has.
PATH_SCHEMA = {"pattern": f"^{OWNER_SLUG.pattern}$"}
PRINTABLE = {"allOf": [{"pattern": r"^[^\x00-\x1f\x7f]*$"}, {"pattern": r"\S"}]}

Name = Annotated[str, Meta(min_length=1, max_length=200)]
Names = Annotated[tuple[Name, ...], Meta(max_length=1_000)]
# Decoded by `MetadataReader`: a large one is refused before.
MetadataJson = Annotated[
    msgspec.Raw,
    Meta(
        description="A JSON object; `author`, `created_date` and `tags` have a meaning, filters find every value",
        extra_json_schema={"type": ["object", "null"]},
    ),
]
NO_METADATA = msgspec.Raw(b"null")


class PermissionsForm(Value):
    """`public`: every caller; `private`: the owner; `restricted`: the owner and the named users and groups;
    `collection`: whoever may see the collection of the document. Without a visibility, `restricted` if users or groups
    are named, else `private`."""

    visibility: Visibility | None = None
    allowed_users: Names = ()
    allowed_groups: Names = ()


class ChunkingForm(Value):
    """How documents are chunked; sizes are in tokens of the embedder, at most its window."""

    chunking_strategy: Strategy | None = None
    chunk_size: Annotated[int, Meta(ge=32, le=100_000)] | None = None
    chunk_overlap: Annotated[int, Meta(ge=0, le=100_000)] | None = None

    def given(self) -> dict[str, Any]:
        """The fields that were set, under the names of `Chunking`."""
        fields = {"strategy": self.chunking_strategy, "size": self.chunk_size, "overlap": self.chunk_overlap}
        return {name: value for name, value in fields.items() if value is not None}


class NewCollectionSettings(ChunkingForm):
    """`default_permissions` say who may see the collection, and its documents without permissions of their own; without
    them, only its owner, unless AGGREGATOR_DEFAULT_VISIBILITY is `public`."""

    embedding_model: str | None = None
    default_permissions: PermissionsForm | None = None


class NewCollection(Value):
    name: Annotated[str, Meta(min_length=1, max_length=100, extra_json_schema=PRINTABLE)]
    description: Annotated[str, Meta(max_length=10_000)] = ""
    settings: NewCollectionSettings | None = None


class CollectionChanges(Value):
    """Fields that are set replace the stored ones; others stay. Documents without permissions of their own follow
    `default_permissions` at once."""

    description: Annotated[str, Meta(max_length=10_000)] | None = None
    default_permissions: PermissionsForm | None = None


class SourceForm(Value):
    """`manual` (typed by a person) and `api` (sent by another program) hold text, as `text` does."""

    type: SourceType
    content: Annotated[str, Meta(description="Base64 of a file, a URL, or the text itself")]
    filename: Annotated[str, Meta(min_length=1, max_length=500)] | None = None
    connector_id: (
        Annotated[
            str,
            Meta(min_length=1, max_length=200, description="The connector that sends the document; filters find it"),
        ]
        | None
    ) = None


class DocumentForm(Value):
    """A document to ingest. It replaces the one with the same `id` (or file name, or URL), and without `permissions`
    keeps the permissions of that document; a new one follows its collection."""

    source: SourceForm
    id: Annotated[str, Meta(min_length=1, max_length=500)] | None = None
    title: Name | None = None
    metadata: MetadataJson = msgspec.field(default_factory=lambda: NO_METADATA)
    permissions: PermissionsForm | None = None


class IngestRequest(Value):
    collection_id: Annotated[str, Meta(min_length=1, description="A collection's id, name or address")]
    documents: Annotated[list[DocumentForm], Meta(min_length=1, max_length=1_000)]
    settings: ChunkingForm | None = None


class DocumentChanges(Value):
    """Fields that are set replace the stored ones; others stay."""

    title: Name | None = None
    metadata: MetadataJson = msgspec.field(default_factory=lambda: NO_METADATA)
    permissions: PermissionsForm | None = None


class IngestForm(Value):
    """Files to ingest as `multipart/form-data`; metadata, permissions and settings are JSON and apply to all files."""

    collection_id: Annotated[str, Meta(min_length=1, description="Id, name or address of a collection")]
    files: Annotated[
        list[bytes], Meta(min_length=1, extra_json_schema={"items": {"type": "string", "format": "binary"}})
    ]
    metadata: Annotated[str, Meta(description="A JSON object")] = ""
    permissions: Annotated[str, Meta(description="PermissionsForm as JSON")] = ""
    settings: Annotated[str, Meta(description="ChunkingForm as JSON")] = ""


class RequestedChunking(Value):
    chunk_size: int
    chunk_overlap: int


class CollectionSettingsView(Value):
    """`requested` is set if the embedder's window made the sizes smaller than requested; `default_permissions` if the
    caller owns the collection."""

    embedding_model: str
    chunking_strategy: Strategy
    chunk_size: int
    chunk_overlap: int
    requested: RequestedChunking | None
    default_permissions: Permissions | None


class CollectionView(Value):
    """A collection, with the counts of documents that the caller can see. `address` names it whoever asks, also where
    several owners have a collection of its name. `published` are the paths of its endpoints; only its owner gets
    them."""

    id: str
    name: str
    address: str
    description: str
    owner: str | None
    settings: CollectionSettingsView
    document_count: int
    chunk_count: int
    created_at: datetime
    published: tuple[str, ...] | UnsetType = UNSET


class EndpointRequest(Value):
    path: Annotated[
        str, Meta(min_length=1, max_length=200, description="OWNER/SLUG", extra_json_schema=PATH_SCHEMA)
    ] = msgspec.field(name="as")


class EndpointView(Value):
    """Where a collection is published. `source` is what `anabranch ask --source` takes, `yaml` what another node writes
    into its anabranch.yaml. `public_documents` can be read without a key."""

    owner: str
    slug: str
    path: str
    url_path: str
    source: str
    yaml: str
    public_documents: int


class EndpointList(Value):
    endpoints: list[EndpointView]


class EndpointWithdrawn(Value):
    path: str
    withdrawn: bool


class CollectionList(Value):
    collections: list[CollectionView]


class CollectionStats(Value):
    """Counts what the caller can see; `query_count_30d` counts the answered questions of today and the 29 days before
    (UTC): all for the owner, else the caller's own. `storage_bytes` is the text and vectors in the records, and an
    estimate of their share of the index."""

    document_count: int
    chunk_count: int
    total_tokens: int
    storage_bytes: int
    query_count_30d: int


class CollectionDeleted(Value):
    """`erased_by`: until then the text of the documents is erased from everything but backups."""

    deleted: bool
    documents_removed: int
    erased_by: datetime


class IngestAccepted(Value):
    job_id: str
    status: Literal["accepted"]
    documents_queued: int


class JobProgressView(Value):
    total: int
    processed: int
    failed: int


class JobDocument(Value):
    """One document of a job; `error` and `code` are set if it failed."""

    id: str
    name: str
    status: ItemStatus
    outcome: Outcome | None
    chunk_count: int
    error: str | UnsetType = UNSET
    code: Literal["UNPROCESSABLE"] | UnsetType = UNSET


class JobView(Value):
    job_id: str
    collection_id: str
    status: JobStatus
    progress: JobProgressView
    documents: list[JobDocument]
    created_at: datetime
    completed_at: datetime | None


class DocumentSourceView(Value):
    type: SourceType
    filename: str | None
    url: str | None
    connector_id: str | None


class DocumentView(Value):
    """A document. `status`, `error` and `processed_at` are those of its newest version; `searchable` says whether a
    version is stored, and the other fields describe that one. Only the owner sees a version that is not `completed`.
    `collection_owner` is null for a collection of the operator. `permissions` are sent to its owner; the content (or
    the requested part of it, with its character offsets) only for a single document, with the offsets at which its
    pages begin. `content_hash` is null for a URL that has not been fetched."""

    id: str
    collection_id: str
    collection: str
    collection_owner: str | None
    title: str
    source: DocumentSourceView
    metadata: dict[str, Any]
    permissions: Permissions | None
    status: DocumentStatus
    error: str | None
    processed_at: datetime | None
    searchable: bool
    content_hash: str | None
    chunk_count: int
    token_count: int
    size_bytes: int
    pages: int | None
    created_at: datetime
    updated_at: datetime
    content: str | UnsetType = UNSET
    content_start: int | UnsetType = UNSET
    content_end: int | UnsetType = UNSET
    content_length: int | UnsetType = UNSET
    page_starts: tuple[int, ...] | UnsetType = UNSET


class DocumentPage(Value):
    """`total` counts what the caller can see; `next` is the `after` of the next page."""

    documents: list[DocumentView]
    total: int
    has_more: bool
    next: str | None


class ChunkPage(Value):
    """Chunks of a document in their order; `total` counts all of it, `next` is the `after` of the next page."""

    chunks: list[ChunkView]
    total: int
    has_more: bool
    next: str | None


def encoded_document(view: DocumentView, content: str) -> bytes:
    """A view as JSON with this content. A large one is encoded in parts: nothing else runs while one is encoded."""
    mark = secrets.token_hex(16)
    before, after = msgspec.json.encode(msgspec.structs.replace(view, content=mark)).split(mark.encode())
    parts = (content[at : at + ENCODED_AT_ONCE] for at in range(0, len(content), ENCODED_AT_ONCE))
    return b"".join((before, *(msgspec.json.encode(part)[1:-1] for part in parts), after))


class DocumentDeleted(Value):
    """`erased_by`: until then the text of the document is erased from everything but backups."""

    deleted: bool
    chunks_removed: int
    erased_by: datetime


def permissions(form: PermissionsForm | None) -> Permissions | None:
    if form is None:
        return None
    unsaid: Visibility = "restricted" if form.allowed_users or form.allowed_groups else "private"
    return Permissions(
        visibility=form.visibility or unsaid, allowed_users=form.allowed_users, allowed_groups=form.allowed_groups
    )


class MetadataReader:
    """Decodes the metadata of the documents of one request, unless it is too large, or nested too deeply for those who
    read it later."""

    def __init__(self) -> None:
        self._values = MAX_METADATA_VALUES

    def read(self, raw: bytes | msgspec.Raw, where: str) -> dict[str, Any] | None:
        if len(memoryview(raw)) > MAX_METADATA_JSON:
            raise InvalidQuestion(f"{where} is larger than {MAX_METADATA_JSON:,} bytes.")
        try:
            found = msgspec.json.decode(raw, type=dict[str, Any] | None)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InvalidQuestion(f"{where} takes an object: {error}") from None
        for depth, level in enumerate(levels_of(found)):
            self._values -= len(level)
            if self._values < 0:
                raise InvalidQuestion(
                    f"The metadata up to {where} has more than {MAX_METADATA_VALUES:,} values; send fewer documents at "
                    "once."
                )
            if depth >= MAX_DEPTH:
                raise InvalidQuestion(f"{where} is nested more than {MAX_DEPTH} levels deep.")
        return found


def collection(counted: "CollectionCounts", caller: Caller, paths: Sequence[str] = ()) -> CollectionView:
    """`paths` are those at which it is published, for its owner."""
    one = counted.collection
    settings, requested = one.settings, one.settings.requested
    return CollectionView(
        id=one.id,
        name=one.name,
        address=one.address,
        description=one.description,
        owner=one.owner or None,
        settings=CollectionSettingsView(
            embedding_model=settings.embedding_model,
            chunking_strategy=settings.chunking.strategy,
            chunk_size=settings.chunking.size,
            chunk_overlap=settings.chunking.overlap,
            requested=(
                RequestedChunking(chunk_size=requested.size, chunk_overlap=requested.overlap) if requested else None
            ),
            default_permissions=settings.default_permissions if caller.owns(one.owner) else None,
        ),
        document_count=counted.documents,
        chunk_count=counted.chunks,
        created_at=_moment(one.created_at),
        published=tuple(paths) if caller.owns(one.owner) else UNSET,
    )


def endpoint(path: EndpointPath, origin: str, public_documents: int) -> EndpointView:
    return EndpointView(
        owner=path.owner,
        slug=path.slug,
        path=str(path),
        url_path=path.url_path,
        source=path.source(origin),
        yaml=path.yaml(origin),
        public_documents=public_documents,
    )


def job(found: Job) -> JobView:
    return JobView(
        job_id=found.id,
        collection_id=found.collection_id,
        status=found.status,
        progress=JobProgressView(total=found.total, processed=found.processed, failed=found.failed),
        documents=[
            JobDocument(
                id=item.document_id,
                name=item.name,
                status=item.status,
                outcome=item.outcome,
                chunk_count=item.chunk_count,
                error=item.error if item.error is not None else UNSET,
                code="UNPROCESSABLE" if item.status == "failed" else UNSET,
            )
            for item in found.items
        ],
        created_at=_moment(found.created_at),
        completed_at=_moment(found.completed_at) if found.completed_at is not None else None,
    )


def document(found: StoredDocument, where: Collection, caller: Caller) -> DocumentView:
    return DocumentView(
        id=found.id,
        collection_id=where.id,
        collection=where.name,
        collection_owner=where.owner or None,
        title=found.title,
        source=DocumentSourceView(
            type=found.source, filename=found.filename, url=found.url, connector_id=found.connector_id
        ),
        metadata=dict(found.metadata),
        permissions=found.permissions if caller.owns(found.owner) else None,
        status=found.status,
        error=found.error,
        processed_at=None if found.processed_at is None else _moment(found.processed_at),
        searchable=found.searchable,
        content_hash=found.content_hash or None,
        chunk_count=found.chunk_count,
        token_count=found.tokens,
        size_bytes=found.size,
        pages=found.pages,
        created_at=_moment(found.created_at),
        updated_at=_moment(found.updated_at),
    )


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
