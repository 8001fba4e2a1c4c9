"""Spec 5's dialect: collections, documents, ingestion and feedback under /v1."""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from anabranch.app import Anabranch
from anabranch.domain.errors import InvalidQuestion, NotFound
from anabranch.entrypoints.http import knowledge_wire as views
from anabranch.entrypoints.http import knowledge_wire as wire
from anabranch.entrypoints.http.access import Access
from anabranch.entrypoints.http.asgi import send_json
from anabranch.entrypoints.http.knowledge_errors import body_of
from anabranch.entrypoints.http.uploads import arrival
from anabranch.knowledge.model import Caller, Permissions, StoredDocument
from anabranch.knowledge.parsed import Chunking

if TYPE_CHECKING:  # it brings numpy along
    from anabranch.knowledge.knowledge import Knowledge

Handler = Callable[[Request, Caller], Awaitable[msgspec.Struct]]

DAYS = 30
PAGE = 50
MAX_PAGE = 1_000
MAX_OFFSET = 1_000_000_000


class Resource:
    """One address. Who asks comes first, whatever is asked; what a handler returns is sent as JSON."""

    def __init__(self, access: Access, handlers: Mapping[str, Handler]) -> None:
        self._access = access
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = await self._access.caller(scope)
        request = Request(scope, receive)
        answer = await self._handlers["GET" if request.method == "HEAD" else request.method](request, caller)
        created = isinstance(answer, wire.CollectionView) and request.method == "POST"
        with suppress(TimeoutError):  # a client that does not read is let go
            await send_json(send, 201 if created else 200, msgspec.json.encode(answer))


class KnowledgeSurface:
    """Every handler gets the request and who asks, and raises what is wrong."""

    def __init__(self, anabranch: Anabranch) -> None:
        self._anabranch = anabranch
        self._settings = anabranch.settings
        self._access = Access(anabranch)

    def routes(self) -> list[Route]:
        return [
            self._at("/v1/collections", GET=self._collections, POST=self._create),
            self._at("/v1/collections/{name}", GET=self._collection, DELETE=self._delete_collection),
            self._at("/v1/collections/{name}/stats", GET=self._stats),
            self._at("/v1/ingest", POST=self._ingest),
            self._at("/v1/ingest/{job}", GET=self._job, DELETE=self._cancel),
            self._at("/v1/documents", GET=self._documents),
            self._at(
                "/v1/documents/{document}", GET=self._document, PATCH=self._describe, DELETE=self._delete_document
            ),
            self._at("/v1/feedback", POST=self._feedback),
        ]

    def _at(self, path: str, **handlers: Handler) -> Route:
        return Route(path, Resource(self._access, handlers), methods=list(handlers))

    async def _room(self) -> "Knowledge":
        return await self._anabranch.knowledge()

    async def _create(self, request: Request, caller: Caller) -> wire.CollectionView:
        asked = msgspec.json.decode(await self._body(request), type=wire.NewCollection)
        settings = asked.settings or wire.NewCollectionSettings()
        shown = settings.default_permissions
        room = await self._room()
        made = await room.create_collection(
            caller,
            asked.name,
            description=asked.description,
            embedding_model=settings.embedding_model,
            chunking=msgspec.structs.replace(Chunking(), **settings.given()),
            default_permissions=shown.value() if shown is not None else Permissions(),
        )
        return views.collection(await room.collection(caller, made.id), caller)

    async def _collections(self, _request: Request, caller: Caller) -> wire.CollectionList:
        found = await (await self._room()).collections(caller)
        return wire.CollectionList(collections=[views.collection(one, caller) for one in found])

    async def _collection(self, request: Request, caller: Caller) -> wire.CollectionView:
        found = await (await self._room()).collection(caller, request.path_params["name"])
        return views.collection(found, caller)

    async def _stats(self, request: Request, caller: Caller) -> wire.CollectionStats:
        room = await self._room()
        found = await room.collection(caller, request.path_params["name"])
        await self._anabranch.query_log.settled()
        return wire.CollectionStats(
            document_count=found.documents,
            chunk_count=found.chunks,
            total_tokens=found.tokens,
            storage_bytes=found.size,
            query_count_30d=await room.query_count(caller, found.collection, DAYS),
        )

    async def _delete_collection(self, request: Request, caller: Caller) -> wire.CollectionDeleted:
        removed = await (await self._room()).delete_collection(caller, request.path_params["name"])
        return wire.CollectionDeleted(deleted=True, documents_removed=removed)

    async def _ingest(self, request: Request, caller: Caller) -> wire.IngestAccepted:
        came = await arrival(request, self._settings)
        job = await (await self._room()).ingest(caller, came.collection, came.documents, came.chunking)
        return wire.IngestAccepted(job_id=job, status="accepted", documents_queued=len(came.documents))

    async def _job(self, request: Request, caller: Caller) -> wire.JobView:
        return views.job(await (await self._room()).job(caller, request.path_params["job"]))

    async def _cancel(self, request: Request, caller: Caller) -> wire.JobView:
        return views.job(await (await self._room()).cancel(caller, request.path_params["job"]))

    async def _documents(self, request: Request, caller: Caller) -> wire.DocumentPage:
        limit = _number(request, "limit", PAGE, least=1, most=MAX_PAGE)
        collection, after = request.query_params.get("collection"), request.query_params.get("after")
        room = await self._room()
        cursors = await room.cursors()
        behind = 0 if after is None else cursors.opened(after)
        if behind is None:
            raise InvalidQuestion("after is no cursor of ours; send what the page before had as next.")
        found, total = await room.documents(caller, collection, behind, limit + 1)
        page, more = found[:limit], len(found) > limit
        known = {one.key: one for one in await room.chosen(caller, None)}
        return wire.DocumentPage(
            # A collection that was deleted just now has taken its documents with it.
            documents=[views.document(one, known[one.collection], caller) for one in page if one.collection in known],
            total=total,
            has_more=more,
            next=cursors.sealed(page[-1].key) if more else None,
        )

    async def _document(self, request: Request, caller: Caller) -> wire.DocumentView:
        start = _number(request, "start", 0, least=0, most=MAX_OFFSET)
        end = _number(request, "end", MAX_OFFSET, least=0, most=MAX_OFFSET)
        room = await self._room()
        found = await room.document(caller, request.path_params["document"], content=True)
        content = found.content or ""
        begin, stop = min(start, len(content)), max(min(start, len(content)), min(end, len(content)))
        return msgspec.structs.replace(
            await self._shown(room, caller, found),
            content=content[begin:stop],
            content_start=begin,
            content_end=stop,
            content_length=len(content),
        )

    async def _describe(self, request: Request, caller: Caller) -> wire.DocumentView:
        asked = msgspec.json.decode(await self._body(request), type=wire.DocumentChanges)
        room = await self._room()
        changed = await room.describe(
            caller,
            request.path_params["document"],
            title=asked.title,
            metadata=None if asked.metadata is None else wire.check_metadata(asked.metadata, "metadata"),
            permissions=None if asked.permissions is None else asked.permissions.value(),
        )
        return await self._shown(room, caller, changed)

    async def _delete_document(self, request: Request, caller: Caller) -> wire.DocumentDeleted:
        removed = await (await self._room()).delete_document(caller, request.path_params["document"])
        return wire.DocumentDeleted(deleted=True, chunks_removed=removed)

    async def _feedback(self, request: Request, caller: Caller) -> wire.FeedbackRecorded:
        asked = msgspec.json.decode(await self._body(request), type=wire.Feedback)
        if self._settings.query_log_days == 0:
            raise NotFound("Questions are not kept here (AGGREGATOR_QUERY_LOG_DAYS is 0), so none can be rated.")
        await self._anabranch.query_log.settled()  # the question may have been answered just now
        await (await self._room()).rate(caller, asked.query_id, asked.rating, asked.comment)
        return wire.FeedbackRecorded(recorded=True)

    async def _shown(self, room: "Knowledge", caller: Caller, document: StoredDocument) -> wire.DocumentView:
        where = next((one for one in await room.chosen(caller, None) if one.key == document.collection), None)
        if where is None:
            raise NotFound(f"There is no document {document.id!r}.")
        return views.document(document, where, caller)

    async def _body(self, request: Request) -> bytes:
        return await body_of(request.receive, self._settings.max_request_bytes)


def _number(request: Request, name: str, default: int, *, least: int, most: int) -> int:
    value = request.query_params.get(name)
    if value is None:
        return default
    if not (value.isascii() and value.isdecimal() and len(value) < 11 and least <= int(value) <= most):
        raise InvalidQuestion(f"{name} takes a whole number from {least:,} to {most:,}.")
    return int(value)
