"""Spec 5's surface of collections, documents and ingestion, under /v1."""

import asyncio
import binascii
from base64 import b64decode
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args

import msgspec
from starlette.datastructures import FormData, Headers, QueryParams, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from anabranch.app.anabranch import Anabranch
from anabranch.app.publishing import EndpointPath, public_documents
from anabranch.configuration.settings import Settings
from anabranch.domain.errors import InvalidQuestion, NotFound, UpstreamError
from anabranch.entrypoints.http import knowledge_wire as wire
from anabranch.entrypoints.http.access import Access
from anabranch.entrypoints.http.decode_errors import described
from anabranch.entrypoints.http.errors import RequestTimedOut, RequestTooLarge
from anabranch.entrypoints.http.openapi import integer, parameter
from anabranch.entrypoints.http.operations import Call, Operation, Reply
from anabranch.entrypoints.http.v1_operations import opened, operation, utc
from anabranch.knowledge.model import Caller, Chunking, DocumentStatus, NewDocument, StoredDocument
from anabranch.knowledge.records.documents import LEAST_PAGE
from anabranch.network.addresses import parse

if TYPE_CHECKING:  # it imports numpy
    from anabranch.knowledge.knowledge import Knowledge

T = TypeVar("T")
At = Callable[..., Operation[Any]]

MAX_PAGE = 1_000
MAX_CHUNKS = 500
STATUSES = (*get_args(DocumentStatus), "all")
MAX_OFFSET = 1_000_000_000
# Characters of a document that are encoded between two other requests.
MAX_ENCODED = 1_000_000
# Base64 takes four bytes for three; the rest is for the JSON around it.
BASE64_RATIO = 1.4
MARGIN_BYTES = 1024 * 1024
UPLOAD_S = 600.0
WHITESPACE = str.maketrans("", "", " \t\r\n")
# Larger bodies are decoded in a thread: they would block the event loop.
LARGE_BYTES = 256 * 1024

decode_ingest = msgspec.json.Decoder(wire.IngestRequest).decode


class Upload(NamedTuple):
    collection: str
    documents: list[NewDocument]
    chunking: dict[str, Any]


@dataclass(frozen=True)
class KnowledgeSurface:
    """The operations on collections and documents."""

    anabranch: Anabranch
    access: Access

    def operations(self) -> list[Operation[Any]]:
        at = partial(operation, identify=self.access.caller)
        return [
            *self._collection_operations(at),
            *self._endpoint_operations(at),
            *self._ingest_operations(at),
            *self._document_operations(at),
        ]

    def _collection_operations(self, at: At) -> list[Operation[Any]]:
        every, one = "/v1/collections", "/v1/collections/{name}"
        view = wire.CollectionView
        return [
            at(
                *("GET", every, "list_collections", "List collections", self._collections, wire.CollectionList),
                scope="read",
            ),
            at(
                *("POST", every, "create_collection", "Create a collection", self._create, view),
                request_type=wire.NewCollection,
                statuses={201: "Created."},
                errors=(403, 409),
                scope="ingest",
            ),
            at(
                *("GET", one, "get_collection", "Get a collection by id, name or address", self._collection, view),
                errors=(409,),
                scope="read",
            ),
            at(
                *("PATCH", one, "change_collection", "Change description or permissions", self._describe_collection),
                view,
                request_type=wire.CollectionChanges,
                errors=(403, 409),
                scope="ingest",
            ),
            at(
                *("DELETE", one, "delete_collection", "Delete a collection and its documents"),
                *(self._delete_collection, wire.CollectionDeleted),
                errors=(403, 409),
                scope="ingest",
            ),
            at(
                *("GET", f"{one}/stats", "collection_stats", "Collection statistics"),
                *(self._stats, wire.CollectionStats),
                errors=(409,),
                scope="read",
            ),
        ]

    def _endpoint_operations(self, at: At) -> list[Operation[Any]]:
        path = "/v1/collections/{name}/endpoint"
        return [
            at(
                *("GET", path, "list_endpoints", "Where a collection is published"),
                *(self._endpoints, wire.EndpointList),
                errors=(403, 409),
                scope="read",
            ),
            at(
                *("PUT", path, "publish", "Publish a collection as owner/slug", self._publish, wire.EndpointView),
                request_type=wire.EndpointRequest,
                errors=(403, 409),
                scope="ingest",
            ),
            at(
                *("DELETE", path, "withdraw", "Withdraw a published collection"),
                *(self._withdraw, wire.EndpointWithdrawn),
                errors=(403, 409),
                parameters=(
                    {**parameter("as", {"type": "string", **wire.PATH_SCHEMA}, "OWNER/SLUG"), "required": True},
                ),
                scope="ingest",
            ),
        ]

    def _ingest_operations(self, at: At) -> list[Operation[Any]]:
        job = "/v1/ingest/{job}"
        return [
            at(
                *("POST", "/v1/ingest", "ingest", "Ingest documents", self._ingest, wire.IngestAccepted),
                request_type=wire.IngestRequest,
                form_type=wire.IngestForm,
                handler_reads=True,
                errors=(403, 409),
                scope="ingest",
            ),
            at("GET", job, "get_job", "Status of an ingestion job", self._job, wire.JobView, scope="read"),
            at("DELETE", job, "cancel_job", "Cancel the job", self._cancel, wire.JobView, scope="ingest"),
        ]

    def _document_operations(self, at: At) -> list[Operation[Any]]:
        one, view = "/v1/documents/{document}", wire.DocumentView
        return [
            at(
                *("GET", "/v1/documents", "list_documents", "List documents", self._documents, wire.DocumentPage),
                errors=(409,),
                parameters=(
                    parameter("collection", {"type": "string"}, "Id, name or address of a collection"),
                    parameter("status", {"enum": [*STATUSES]}, "Those in this state, also if no version is stored"),
                    parameter("connector_id", {"type": "string"}, "Those that this connector has sent"),
                    parameter("limit", integer(1, MAX_PAGE), "Page size"),
                    parameter("after", {"type": "string"}, "`next` of the previous page"),
                ),
                scope="read",
            ),
            at(
                *("GET", one, "get_document", "Get a document by id, file name or title", self._document, view),
                errors=(409,),
                parameters=(
                    parameter("start", integer(0, MAX_OFFSET), "Offset of the first character"),
                    parameter("end", integer(0, MAX_OFFSET), "Offset behind the last character"),
                ),
                scope="read",
            ),
            at(
                *("PATCH", one, "change_document", "Change title, metadata or permissions", self._describe, view),
                request_type=wire.DocumentChanges,
                errors=(403, 409),
                scope="ingest",
            ),
            at(
                *("DELETE", one, "delete_document", "Delete a document", self._delete_document, wire.DocumentDeleted),
                errors=(403, 409),
                scope="ingest",
            ),
            at(
                *("GET", f"{one}/chunks", "list_chunks", "List the chunks of a document", self._chunks, wire.ChunkPage),
                errors=(409,),
                parameters=(
                    parameter("limit", integer(1, MAX_CHUNKS), "Page size"),
                    parameter("after", {"type": "string"}, "`next` of the previous page"),
                ),
                scope="read",
            ),
            at(
                *("POST", f"{one}/retry", "retry_document", "Ingest a failed document again"),
                *(self._retry, wire.IngestAccepted),
                errors=(403, 409),
                scope="ingest",
            ),
        ]

    async def _create(self, call: Call[wire.NewCollection]) -> wire.CollectionView:
        request, knowledge = call.request, await self.anabranch.knowledge()
        settings = request.settings or wire.NewCollectionSettings()
        created = await knowledge.create_collection(
            call.caller,
            request.name,
            description=request.description,
            embedding_model=settings.embedding_model,
            chunking=msgspec.structs.replace(Chunking(), **settings.given()),
            default_permissions=wire.permissions(settings.default_permissions),
        )
        return wire.collection(await knowledge.collection(call.caller, created.id), call.caller)

    async def _collections(self, call: Call[None]) -> wire.CollectionList:
        knowledge = await self.anabranch.knowledge()
        found = await knowledge.collections(call.caller)
        own = [one.collection.key for one in found if call.caller.owns(one.collection.owner)]
        paths: defaultdict[int, list[str]] = defaultdict(list)
        for endpoint in await knowledge.published(keys=own):
            paths[endpoint.collection].append(endpoint.path)
        return wire.CollectionList(
            collections=[wire.collection(one, call.caller, paths[one.collection.key]) for one in found]
        )

    async def _collection(self, call: Call[None]) -> wire.CollectionView:
        knowledge = await self.anabranch.knowledge()
        return await self._collection_view(knowledge, call.caller, call.params["name"])

    async def _collection_view(self, knowledge: "Knowledge", caller: Caller, name: str) -> wire.CollectionView:
        found = await knowledge.collection(caller, name)
        published = await knowledge.published(keys=[found.collection.key])
        return wire.collection(found, caller, [endpoint.path for endpoint in published])

    async def _describe_collection(self, call: Call[wire.CollectionChanges]) -> wire.CollectionView:
        request, knowledge = call.request, await self.anabranch.knowledge()
        changed = await knowledge.describe_collection(
            *(call.caller, call.params["name"]),
            description=request.description,
            permissions=wire.permissions(request.default_permissions),
        )
        return await self._collection_view(knowledge, call.caller, changed.id)

    async def _endpoints(self, call: Call[None]) -> wire.EndpointList:
        knowledge = await self.anabranch.knowledge()
        found, published = await knowledge.endpoints(call.caller, call.params["name"])
        paths, public = (
            [EndpointPath(one.owner, one.slug) for one in published],
            await public_documents(knowledge, found),
        )
        origin = self.access.origin(call.scope) or "URL"
        return wire.EndpointList(endpoints=[wire.endpoint(path, origin, public) for path in paths])

    async def _publish(self, call: Call[wire.EndpointRequest]) -> wire.EndpointView:
        path = EndpointPath.parse(call.request.path)
        found = await self.anabranch.publishing.publish(call.caller, call.params["name"], path)
        public = await public_documents(await self.anabranch.knowledge(), found)
        return wire.endpoint(path, self.access.origin(call.scope) or "URL", public)

    async def _withdraw(self, call: Call[None]) -> wire.EndpointWithdrawn:
        path = EndpointPath.parse(call.query.get("as", ""))
        await (await self.anabranch.knowledge()).withdraw(call.caller, call.params["name"], *path)
        return wire.EndpointWithdrawn(path=str(path), withdrawn=True)

    async def _stats(self, call: Call[None]) -> wire.CollectionStats:
        knowledge = await self.anabranch.knowledge()
        found = await knowledge.collection(call.caller, call.params["name"])
        await self.anabranch.query_log.settled()
        return wire.CollectionStats(
            document_count=found.documents,
            chunk_count=found.chunks,
            total_tokens=found.tokens,
            storage_bytes=found.storage_bytes,
            query_count_30d=await knowledge.query_count(call.caller, found.collection, 30),
        )

    async def _delete_collection(self, call: Call[None]) -> wire.CollectionDeleted:
        knowledge = await self.anabranch.knowledge()
        removed, erasure = await knowledge.delete_collection(call.caller, call.params["name"])
        return wire.CollectionDeleted(deleted=True, documents_removed=removed, erased_by=utc(erasure.complete_by))

    async def _ingest(self, call: Call[None]) -> wire.IngestAccepted:
        upload = await read_upload(call, self.anabranch.settings)
        job = await (await self.anabranch.knowledge()).ingest(
            call.caller, upload.collection, upload.documents, upload.chunking
        )
        return wire.IngestAccepted(job_id=job, status="accepted", documents_queued=len(upload.documents))

    async def _job(self, call: Call[None]) -> wire.JobView:
        return wire.job(await (await self.anabranch.knowledge()).job(call.caller, call.params["job"]))

    async def _cancel(self, call: Call[None]) -> wire.JobView:
        return wire.job(await (await self.anabranch.knowledge()).cancel(call.caller, call.params["job"]))

    async def _documents(self, call: Call[None]) -> wire.DocumentPage:
        limit = _number(call.query, "limit", 50, least=1, most=MAX_PAGE)
        status = call.query.get("status")
        if status is not None and status not in STATUSES:
            raise InvalidQuestion(f"status takes {', '.join(STATUSES[:-1])} or {STATUSES[-1]}.")
        knowledge = await self.anabranch.knowledge()
        cursors = await knowledge.cursors("documents")
        after = opened(call.query.get("after"), cursors) or 0
        wanted: dict[str, Any] = {"status": status, "connector_id": call.query.get("connector_id")}
        found, total = await knowledge.documents(
            *(call.caller, call.query.get("collection"), after, limit + 1), **wanted
        )
        page, more = found[:limit], len(found) > limit
        if not more and len(page) >= LEAST_PAGE:  # it may have ended early
            rest, _ = await knowledge.documents(*(call.caller, call.query.get("collection"), page[-1].key, 1), **wanted)
            more = bool(rest)
        known = {one.key: one for one in await knowledge.chosen(call.caller, None)}
        return wire.DocumentPage(
            # A collection may have been deleted meanwhile, with its documents.
            documents=[
                wire.document(one, known[one.collection], call.caller) for one in page if one.collection in known
            ],
            total=total,
            has_more=more,
            next=cursors.sealed(page[-1].key) if more else None,
        )

    async def _document(self, call: Call[None]) -> wire.DocumentView | Reply:
        start = _number(call.query, "start", 0, least=0, most=MAX_OFFSET)
        end = _number(call.query, "end", MAX_OFFSET, least=0, most=MAX_OFFSET)
        knowledge = await self.anabranch.knowledge()
        found = await knowledge.document(call.caller, call.params["document"])
        if found.size > LARGE_BYTES:
            await call.replies.add(found.size)
        found = await knowledge.document(call.caller, found.id, content=True)
        content = found.content or ""
        begin, stop = min(start, len(content)), max(min(start, len(content)), min(end, len(content)))
        view = msgspec.structs.replace(
            await self._view(knowledge, call.caller, found),
            content="",
            content_start=begin,
            content_end=stop,
            content_length=len(content),
            page_starts=found.page_starts or msgspec.UNSET,
        )
        part = content[begin:stop]
        if len(part) < MAX_ENCODED:
            return msgspec.structs.replace(view, content=part)
        return Reply(await asyncio.to_thread(wire.encoded_document, view, part))

    async def _chunks(self, call: Call[None]) -> wire.ChunkPage:
        limit = _number(call.query, "limit", 100, least=1, most=MAX_CHUNKS)
        knowledge = await self.anabranch.knowledge()
        cursors = await knowledge.cursors("chunks")
        begin = min(opened(call.query.get("after"), cursors) or 0, MAX_OFFSET)
        found, total = await knowledge.chunks(call.caller, call.params["document"], begin, limit)
        more = begin + len(found) < total and bool(found)
        return wire.ChunkPage(
            chunks=found,
            total=total,
            has_more=more,
            next=cursors.sealed(begin + len(found)) if more else None,
        )

    async def _describe(self, call: Call[wire.DocumentChanges]) -> wire.DocumentView:
        request, knowledge = call.request, await self.anabranch.knowledge()
        changed = await knowledge.describe(
            call.caller,
            call.params["document"],
            title=request.title,
            metadata=wire.MetadataReader().read(request.metadata, "metadata"),
            permissions=wire.permissions(request.permissions),
        )
        return await self._view(knowledge, call.caller, changed)

    async def _delete_document(self, call: Call[None]) -> wire.DocumentDeleted:
        knowledge = await self.anabranch.knowledge()
        deleted, erasure = await knowledge.delete_document(call.caller, call.params["document"])
        return wire.DocumentDeleted(
            deleted=True, chunks_removed=deleted.chunk_count, erased_by=utc(erasure.complete_by)
        )

    async def _retry(self, call: Call[None]) -> wire.IngestAccepted:
        job = await (await self.anabranch.knowledge()).retry(call.caller, call.params["document"])
        return wire.IngestAccepted(job_id=job, status="accepted", documents_queued=1)

    async def _view(self, knowledge: "Knowledge", caller: Caller, document: StoredDocument) -> wire.DocumentView:
        where = next((one for one in await knowledge.chosen(caller, None) if one.key == document.collection), None)
        if where is None:
            raise NotFound(f"There is no document {document.id!r}.")
        return wire.document(document, where, caller)


def _number(query: QueryParams, name: str, default: int, *, least: int, most: int) -> int:
    value = query.get(name)
    if value is None:
        return default
    if not (value.isascii() and value.isdecimal() and len(value) < 11 and least <= int(value) <= most):
        raise InvalidQuestion(f"{name} takes a whole number from {least:,} to {most:,}.")
    return int(value)


async def read_upload(call: Call[Any], settings: Settings) -> Upload:
    """The documents of an ingest request, sent as JSON or as a form with files."""
    limit = int(settings.max_document_bytes * BASE64_RATIO) + MARGIN_BYTES
    headers = Headers(scope=call.scope)
    if headers.get("content-type", "").lower().startswith("multipart/form-data"):
        upload = await _from_form(headers, call.parts(limit))
    else:
        body = await call.whole(limit, UPLOAD_S)
        if not body:
            raise InvalidQuestion("The body is empty; send JSON.")
        upload = await asyncio.to_thread(_from_json, body) if len(body) > LARGE_BYTES else _from_json(body)
    most = settings.max_document_bytes
    for number, document in enumerate(upload.documents):
        if len(document.data) > most:
            name = document.filename or f"documents[{number}]"
            raise RequestTooLarge(f"{name} is larger than {most:,} bytes (AGGREGATOR_MAX_DOCUMENT_BYTES).")
    return upload


def _from_json(body: bytes) -> Upload:
    request = decode_ingest(body)
    metadata = wire.MetadataReader()
    documents = [_document(one, metadata, f"documents[{number}]") for number, one in enumerate(request.documents)]
    return Upload(request.collection_id, documents, (request.settings or wire.ChunkingForm()).given())


def _document(form: wire.DocumentForm, metadata: wire.MetadataReader, where: str) -> NewDocument:
    source = form.source
    data, url = b"", None
    match source.type:
        case "text" | "manual" | "api":
            data = source.content.encode()
        case "file":
            data = _decoded(source.content, f"{where}.source.content")
        case "url":
            url = _address(source.content, f"{where}.source.content")
    return NewDocument(
        source=source.type,
        data=data,
        filename=source.filename,
        url=url,
        connector_id=source.connector_id,
        title=form.title,
        metadata=metadata.read(form.metadata, f"{where}.metadata") or {},
        permissions=wire.permissions(form.permissions),
        identity=form.id,
    )


def _decoded(content: str, where: str) -> bytes:
    try:
        return b64decode(content.translate(WHITESPACE), validate=True)
    except (binascii.Error, ValueError):
        raise InvalidQuestion(f"{where} is not base64; send a text as it is, with type text.") from None


def _address(content: str, where: str) -> str:
    address = content.strip()
    try:
        parse(address)
    except UpstreamError as error:
        raise InvalidQuestion(f"{where} cannot be fetched. {error.message}") from None
    return address


async def _from_form(headers: Headers, parts: AsyncGenerator[bytes, None]) -> Upload:
    parser = MultiPartParser(headers, parts, max_files=1_000, max_fields=20, max_part_size=MARGIN_BYTES)
    try:
        async with asyncio.timeout(UPLOAD_S):
            form = await parser.parse()
    except MultiPartException as error:
        raise InvalidQuestion(f"The form cannot be read. {error.message}") from None
    except TimeoutError:
        raise RequestTimedOut("The request took too long to arrive.") from None
    try:
        return await _read_form(form)
    finally:
        await form.close()


async def _read_form(form: FormData) -> Upload:
    files = [one for _, one in form.multi_items() if isinstance(one, UploadFile) and (one.filename or one.size)]
    if not files:
        raise InvalidQuestion("The form holds no file; send one or more as files.")
    if any(len(one.filename or "") > 500 for one in files):
        raise InvalidQuestion("A file's name has more than 500 characters.")
    collection = form.get("collection_id")
    if not isinstance(collection, str) or not collection.strip():
        raise InvalidQuestion("The form needs collection_id, a collection's id, name or address.")
    given = form.get("metadata")
    described = given.encode() if isinstance(given, str) and given.strip() else b"null"
    metadata = wire.MetadataReader().read(described, "metadata") or {}
    permissions = wire.permissions(_field(form, "permissions", wire.PermissionsForm))
    chunking = _field(form, "settings", wire.ChunkingForm) or wire.ChunkingForm()
    documents = [
        NewDocument(
            source="file",
            data=await one.read(),
            filename=one.filename or None,
            media_type=one.content_type,
            metadata=metadata,
            permissions=permissions,
        )
        for one in files
    ]
    return Upload(collection.strip(), documents, chunking.given())


def _field(form: FormData, name: str, kind: type[T]) -> T | None:
    """A field of the form: JSON of that type."""
    value = form.get(name)
    if not isinstance(value, str) or not value.strip():
        return None
    try:
        return msgspec.json.decode(value, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidQuestion(f"{name} is not valid: {described(str(error), kind)}") from None
