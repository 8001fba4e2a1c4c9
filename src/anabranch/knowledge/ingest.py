"""Ingestion: what was accepted becomes documents that can be found, each on its own."""

import asyncio
import sqlite3
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
from anabranch.knowledge.model import Permissions, StoredDocument
from anabranch.knowledge.parsed import Chunking, Parsed, Piece, Unprocessable
from anabranch.knowledge.records import documents, facts, jobs
from anabranch.knowledge.records.database import Database
from anabranch.knowledge.records.documents import DocumentDraft
from anabranch.knowledge.records.jobs import Claim

# Changes when the same bytes would give other chunks than before, so that they are cut anew when they come again.
VERSION = 1
TITLE = 200


class Fetched(NamedTuple):
    data: bytes
    media_type: str | None


Parse = Callable[[bytes, str | None, str | None], Awaitable[Parsed]]
Fetch = Callable[[str], Awaitable[Fetched]]


class Ready(NamedTuple):
    """A document that only waits for its vectors."""

    draft: DocumentDraft
    pieces: tuple[Piece, ...]


class Settled(NamedTuple):
    """What became of a claim without any work: it was there already."""

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
        """Have the embedder loaded before anything is in hand. One that cannot be loaded fails each document alone."""
        with suppress(AnabranchError):
            await asyncio.to_thread(self._embedder.tokens, "")

    async def take(self, claims: Sequence[Claim]) -> None:
        """Process some documents and say in the records what became of each."""
        prepared = await asyncio.gather(*(self._prepared(claim) for claim in claims))
        ready = [one for one in prepared if isinstance(one, Ready)]
        texts = [one.draft.content[piece.start : piece.end] for one in ready for piece in one.pieces]
        try:
            embeddings = iter(await self._embedder.embed(texts) if texts else [])
        except AnabranchError as error:
            embeddings = iter(())
            prepared = [error if isinstance(one, Ready) else one for one in prepared]
        results = [
            (claim, one, [next(embeddings) for _ in one.pieces] if isinstance(one, Ready) else [])
            for claim, one in zip(claims, prepared, strict=True)
        ]

        def commit(db: sqlite3.Connection) -> None:
            if vectors_of_one := next((vectors for _, _, vectors in results if vectors), None):
                facts.require_embedder(db, self._embedder.name, len(vectors_of_one[0].vector) // 4)
            for claim, one, vectors in results:
                _settle(db, claim, one, vectors)

        await self._database.write(commit)

    async def _prepared(self, claim: Claim) -> Prepared:
        """Ready to be embedded, or a reason not to. Expected trouble is data: it is this document's alone."""
        try:
            data, media_type = claim.arrived.data, claim.arrived.media_type
            if claim.arrived.source == "url":
                data, media_type = await self._fetch(claim.arrived.url or "")
            content_hash = sha256(data).hexdigest()
            recipe = recipe_of(claim.chunking, self._embedder)
            known = await self._database.read(lambda db: _known(db, claim, content_hash, recipe))
            if known is not None:
                return known
            parsed = await self._parse(data, _named(claim), media_type)
            pieces = await chunk(parsed, claim.chunking, self._embedder)
            if not pieces:
                return Unprocessable("The document holds no text.")
            return Ready(_draft(claim, parsed, content_hash, recipe, len(data)), pieces)
        except AnabranchError as error:
            return error


def recipe_of(chunking: Chunking, embedder: Embedder) -> str:
    return f"{VERSION}/{chunking.strategy}/{chunking.size}/{chunking.overlap}/{embedder.name}"


def day_of(metadata: Mapping[str, Any], ingested: float | None = None) -> int:
    """The document's own day, else the day on which it came, as a number that can be compared."""
    for name in ("created_date", "date"):
        try:
            return date.fromisoformat(str(metadata[name])[:10]).toordinal()
        except (KeyError, ValueError):
            continue
    now = datetime.now(UTC) if ingested is None else datetime.fromtimestamp(ingested, UTC)
    return now.date().toordinal()


def _named(claim: Claim) -> str | None:
    """The name that tells the parser what it has before it."""
    if claim.arrived.source == "text":
        return claim.arrived.filename or "text.txt"
    return claim.arrived.filename or (claim.arrived.url or "").partition("?")[0].rpartition("/")[2] or None


def _known(db: sqlite3.Connection, claim: Claim, content_hash: str, recipe: str) -> Settled | None:
    """The document that is there already: the same content under the same identity, or the same in everything."""
    same = documents.by_identity(db, claim.collection.key, claim.arrived.identity or "")
    if same is not None:
        if (same.content_hash, same.recipe) != (content_hash, recipe):
            return None
        metadata = {**same.metadata, **claim.arrived.metadata}
        titled = _given_title(claim) not in (None, same.title)
        return Settled(same, titled or metadata != same.metadata or permissions_for(claim, same) != same.permissions)
    seen_by = (claim.owner, permissions_for(claim, None))
    for other in documents.alike(db, claim.collection.key, content_hash, recipe):
        said = {name: other.metadata.get(name) for name in claim.arrived.metadata}
        if (other.owner, other.permissions) == seen_by and said == claim.arrived.metadata:
            return Settled(other, changed=False)
    return None


def permissions_for(claim: Claim, kept: StoredDocument | None) -> Permissions:
    """The permissions given with the claim, else those of the document that is kept, else the collection's default."""
    default = claim.collection.settings.default_permissions if kept is None else kept.permissions
    return claim.arrived.permissions or default


def _draft(claim: Claim, parsed: Parsed, content_hash: str, recipe: str, size: int) -> DocumentDraft:
    arrived = claim.arrived
    found = {"author": parsed.author, "created_date": parsed.created_date, "tags": list(parsed.tags) or None}
    metadata = {name: value for name, value in found.items() if value is not None} | dict(arrived.metadata)
    title = _given_title(claim) or parsed.title or arrived.filename or arrived.url
    return DocumentDraft(
        id=claim.document_id,
        collection=claim.collection.key,
        owner=claim.owner,
        source=arrived.source,
        identity=arrived.identity or "",
        filename=arrived.filename,
        url=arrived.url,
        title=str(title or _first_words(parsed.text))[:TITLE],
        content=parsed.text,
        content_hash=content_hash,
        recipe=recipe,
        metadata=metadata,
        permissions=permissions_for(claim, None),
        day=day_of(metadata),
        pages=parsed.pages,
        size=size,
    )


def _given_title(claim: Claim) -> str | None:
    given = claim.arrived.title or claim.arrived.metadata.get("title")
    return str(given)[:TITLE] if given else None


def _first_words(text: str) -> str:
    line = next((line.strip(" #*\t") for line in text.splitlines() if line.strip(" #*\t")), "Untitled")
    return line if len(line) <= 80 else line[:79].rpartition(" ")[0] + "…"


def _settle(db: sqlite3.Connection, claim: Claim, prepared: Prepared, vectors: Sequence[Embedding]) -> None:
    if not jobs.is_wanted(db, claim):
        jobs.drop(db, claim.key)
        return
    match prepared:
        case Ready(draft=draft, pieces=pieces):
            old = documents.by_identity(db, draft.collection, draft.identity)
            draft = msgspec.structs.replace(draft, permissions=permissions_for(claim, old))
            kept = documents.insert(db, draft, pieces, vectors)
            jobs.complete(db, claim.key, kept.id, "replaced" if old else "added", kept.chunk_count)
        case Settled(document=document, changed=changed):
            # Its permissions may have changed since it was read, and what was not given must not undo that.
            if changed and (now := documents.by_key(db, document.key)) is not None:
                metadata = {**now.metadata, **claim.arrived.metadata}
                documents.describe(
                    db,
                    now.key,
                    title=_given_title(claim) or now.title,
                    metadata=metadata,
                    permissions=permissions_for(claim, now),
                    day=day_of(metadata, now.created_at),
                )
            outcome = "updated" if changed else "unchanged"
            jobs.complete(db, claim.key, document.id, outcome, document.chunk_count)  # type: ignore[arg-type]
        case AnabranchError():
            jobs.fail(db, claim.key, prepared.message)


def chunking_for(chosen: Chunking, **given: Any) -> Chunking:
    return msgspec.structs.replace(chosen, **{name: value for name, value in given.items() if value is not None})
