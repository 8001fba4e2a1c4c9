"""Ingestion: accepted items are parsed, chunked, embedded and stored; each succeeds or fails on its own."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec

from anabranch.domain.contracts import Embedder
from anabranch.domain.errors import AnabranchError
from anabranch.domain.model import Embedding
from anabranch.knowledge.chunking import chunk
from anabranch.knowledge.model import (
    Chunking,
    Collection,
    DocumentDraft,
    NewDocument,
    Parsed,
    Permissions,
    Piece,
    StoredDocument,
    Unprocessable,
)
from anabranch.knowledge.records import documents, embeddings, jobs
from anabranch.knowledge.records.database import Connection, Database
from anabranch.knowledge.records.jobs import Claim

# Raise it when the same bytes give other chunks than before, so that they are chunked again.
VERSION = 1
MAX_TITLE = 200


class Fetched(NamedTuple):
    data: bytes
    media_type: str | None


Parse = Callable[[bytes, str | None, str | None], Awaitable[Parsed]]
Fetch = Callable[[str], Awaitable[Fetched]]


class Ready(NamedTuple):
    """A parsed and chunked document that needs its vectors."""

    draft: DocumentDraft
    pieces: tuple[Piece, ...]


class Settled(NamedTuple):
    """A document that is stored already; `changed` if its title, metadata or permissions are to be updated."""

    document: StoredDocument
    changed: bool


Prepared = Ready | Settled | AnabranchError


class Ingestion:
    def __init__(self, database: Database, embedder: Embedder, parse: Parse, fetch: Fetch) -> None:
        self._database = database
        self._embedder = embedder
        self._parse = parse
        self._fetch = fetch

    async def warm(self) -> None:
        """Load the embedder before anything is claimed. If it cannot be loaded, each document fails on its own."""
        with suppress(AnabranchError):
            await asyncio.to_thread(self._embedder.tokens, "")

    async def take(self, claims: Sequence[Claim]) -> None:
        """Process some items and record the outcome of each."""
        prepared = await asyncio.gather(*(self._prepared(claim) for claim in claims))
        ready = [one for one in prepared if isinstance(one, Ready)]
        texts = [one.draft.content[piece.start : piece.end] for one in ready for piece in one.pieces]
        try:
            embedded = iter(await self._embedder.embed(texts) if texts else [])
        except AnabranchError as error:
            embedded = iter(())
            prepared = [error if isinstance(one, Ready) else one for one in prepared]
        results = [
            (claim, one, [next(embedded) for _ in one.pieces] if isinstance(one, Ready) else [])
            for claim, one in zip(claims, prepared, strict=True)
        ]

        def commit(db: Connection) -> None:
            if first_vectors := next((vectors for _, _, vectors in results if vectors), None):
                embeddings.require_embedder(db, self._embedder.name, len(first_vectors[0].vector) // 4)
            for claim, one, vectors in results:
                _settle(db, claim, one, vectors)

        await self._database.write(commit)

    async def _prepared(self, claim: Claim) -> Prepared:
        """The claim parsed and chunked, the document that is stored already, or the error that fails this document."""
        try:
            data, media_type = claim.arrived.data, claim.arrived.media_type
            if claim.arrived.source == "url":
                data, media_type = await self._fetch(claim.arrived.url or "")
            content_hash = sha256(data).hexdigest()
            recipe = recipe_of(claim.chunking, self._embedder)
            stored = await self._database.read(
                lambda db: find_stored(db, claim.collection, claim.owner, claim.arrived, content_hash, recipe)
            )
            if stored is not None:
                return stored
            parsed = await self._parse(data, _filename(claim), media_type)
            pieces = await chunk(parsed, claim.chunking, self._embedder)
            if not pieces:
                return Unprocessable("The document holds no text.")
            return Ready(_draft(claim, parsed, content_hash, recipe, len(data)), pieces)
        except AnabranchError as error:
            return error


def recipe_of(chunking: Chunking, embedder: Embedder) -> str:
    return f"{VERSION}/{chunking.strategy}/{chunking.size}/{chunking.overlap}/{embedder.name}"


def day_of(metadata: Mapping[str, Any], ingested: float | None = None) -> int:
    """The day number of the document's own date, else of its ingestion."""
    for name in ("created_date", "date"):
        try:
            return date.fromisoformat(str(metadata[name])[:10]).toordinal()
        except (KeyError, ValueError):
            continue
    now = datetime.now(UTC) if ingested is None else datetime.fromtimestamp(ingested, UTC)
    return now.date().toordinal()


def _filename(claim: Claim) -> str | None:
    """The file name by which the parser recognises the format."""
    if claim.arrived.source == "text":
        return claim.arrived.filename or "text.txt"
    return claim.arrived.filename or (claim.arrived.url or "").partition("?")[0].rpartition("/")[2] or None


def find_stored(
    db: Connection, collection: Collection, owner: str, arrived: NewDocument, content_hash: str, recipe: str
) -> Settled | None:
    """The stored document with the same identity and content, else one that equals it in all but its identity."""
    same = documents.by_identity(db, collection.key, arrived.identity or "")
    if same is not None:
        if (same.content_hash, same.recipe) != (content_hash, recipe):
            return None
        updated = (
            _given_title(arrived) or same.title,
            {**same.metadata, **arrived.metadata},
            permissions_for(collection, arrived, same),
        )
        return Settled(same, updated != (same.title, same.metadata, same.permissions))
    seen_by = (owner, permissions_for(collection, arrived, None))
    for other in documents.with_content(db, collection.key, content_hash, recipe):
        common = {name: other.metadata.get(name) for name in arrived.metadata}
        if (other.owner, other.permissions) == seen_by and common == arrived.metadata:
            return Settled(other, changed=False)
    return None


def permissions_for(collection: Collection, arrived: NewDocument, stored: StoredDocument | None) -> Permissions:
    """The permissions given with a document, else those of the stored document, else the collection's default."""
    default = collection.settings.default_permissions if stored is None else stored.permissions
    return arrived.permissions or default


def _draft(claim: Claim, parsed: Parsed, content_hash: str, recipe: str, size: int) -> DocumentDraft:
    arrived = claim.arrived
    found = {"author": parsed.author, "created_date": parsed.created_date, "tags": list(parsed.tags) or None}
    metadata = {name: value for name, value in found.items() if value is not None} | dict(arrived.metadata)
    title = _given_title(claim.arrived) or parsed.title or arrived.filename or arrived.url
    return DocumentDraft(
        id=claim.document_id,
        collection=claim.collection.key,
        owner=claim.owner,
        source=arrived.source,
        identity=arrived.identity or "",
        filename=arrived.filename,
        url=arrived.url,
        title=str(title or _first_words(parsed.text))[:MAX_TITLE],
        content=parsed.text,
        content_hash=content_hash,
        recipe=recipe,
        metadata=metadata,
        permissions=permissions_for(claim.collection, claim.arrived, None),
        day=day_of(metadata),
        pages=parsed.pages,
        size=size,
    )


def _given_title(arrived: NewDocument) -> str | None:
    given = arrived.title or arrived.metadata.get("title")
    return str(given)[:MAX_TITLE] if given else None


def _first_words(text: str) -> str:
    line = next((line.strip(" #*\t") for line in text.splitlines() if line.strip(" #*\t")), "Untitled")
    return line if len(line) <= 80 else line[:79].rpartition(" ")[0] + "…"


def _settle(db: Connection, claim: Claim, prepared: Prepared, vectors: Sequence[Embedding]) -> None:
    if not jobs.is_wanted(db, claim):
        jobs.drop(db, claim.key)
        return
    match prepared:
        case Ready(draft=draft, pieces=pieces):
            old = documents.by_identity(db, draft.collection, draft.identity)
            draft = msgspec.structs.replace(draft, permissions=permissions_for(claim.collection, claim.arrived, old))
            kept = documents.insert(db, draft, pieces, vectors)
            jobs.complete(db, claim.key, kept.id, "replaced" if old else "added", kept.chunk_count)
        case Settled(document=document, changed=changed):
            # Its permissions may have changed since it was read, and what was not given must not undo that.
            if changed and (now := documents.by_key(db, document.key)) is not None:
                metadata = {**now.metadata, **claim.arrived.metadata}
                documents.describe(
                    db,
                    now.key,
                    title=_given_title(claim.arrived) or now.title,
                    metadata=metadata,
                    permissions=permissions_for(claim.collection, claim.arrived, now),
                    day=day_of(metadata, now.created_at),
                )
            outcome = "updated" if changed else "unchanged"
            jobs.complete(db, claim.key, document.id, outcome, document.chunk_count)  # type: ignore[arg-type]
        case AnabranchError():
            jobs.fail(db, claim.key, prepared.message)
