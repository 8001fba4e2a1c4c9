"""The front door of the knowledge room: what a caller can do with collections and documents, and what they may."""

import re
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from anabranch.domain.contracts import Embedder
from anabranch.domain.errors import Conflict, Forbidden, InvalidQuestion, NotFound
from anabranch.domain.model import Filters, Passage, Query, Value
from anabranch.knowledge.chunking import effective
from anabranch.knowledge.index.catalog import Catalog
from anabranch.knowledge.index.reader import IndexReader, Moved
from anabranch.knowledge.ingest import TITLE, day_of
from anabranch.knowledge.model import (
    EVERYTHING,
    Caller,
    Collection,
    CollectionSettings,
    Job,
    NewDocument,
    Permissions,
    StoredDocument,
)
from anabranch.knowledge.parsed import Chunking
from anabranch.knowledge.records import collections, cursors, documents, jobs, queries
from anabranch.knowledge.records.cursors import Cursors
from anabranch.knowledge.records.database import Database
from anabranch.knowledge.records.queries import QueryRecord, Rating, Turn
from anabranch.knowledge.search import Searcher, SearchHits

T = TypeVar("T")

NAME = re.compile(r"[^\x00-\x1f\x7f]{1,100}")
MAX_DOCUMENTS = 1_000
MAX_METADATA = 64 * 1024


class CollectionCounts(Value):
    """A collection with what a caller can see of it."""

    collection: Collection
    documents: int
    chunks: int
    tokens: int
    size: int


class Knowledge:
    def __init__(self, *, database: Database, reader: IndexReader, searcher: Searcher, embedder: Embedder) -> None:
        self.database = database
        self._reader = reader
        self._searcher = searcher
        self._embedder = embedder

    async def search(self, query: Query, caller: Caller, source: str | None = None) -> list[Passage]:
        return (await self.find(query, caller, source)).passages

    async def find(self, query: Query, caller: Caller, source: str | None = None) -> SearchHits:
        """What a search gives, and what stands for all that it could have found."""
        return await self._searcher.search(query, caller, source)

    async def seen(self, filters: Filters, caller: Caller) -> str:
        """What stands for all that the caller may find, as it is now: other documents or other rights, another one."""
        return await self._at_one_moment(lambda db: self._reader.view(db, filters, caller).seen)

    async def create_collection(
        self,
        caller: Caller,
        name: str,
        *,
        description: str = "",
        embedding_model: str | None = None,
        chunking: Chunking = Chunking(),  # noqa: B008  frozen
        default_permissions: Permissions = Permissions(),  # noqa: B008
    ) -> Collection:
        if _is_guest(caller):
            raise Forbidden("A guest can ask, but keep nothing here: come with a key or a token of your own.")
        if name.strip() == EVERYTHING:
            raise InvalidQuestion(f"{EVERYTHING!r} means all collections; choose another name.")
        if not NAME.fullmatch(name) or not name.strip():
            raise InvalidQuestion("name must have 1 to 100 characters, and no control characters.")
        if embedding_model not in (None, self._embedder.name):
            raise InvalidQuestion(
                f"embedding_model is {embedding_model!r}, but everything here is embedded with "
                f"{self._embedder.name!r}; leave it out."
            )
        chosen = effective(chunking, self._embedder)
        settings = CollectionSettings(
            embedding_model=self._embedder.name,
            chunking=chosen,
            requested=chunking if chunking != chosen else None,
            default_permissions=default_permissions,
        )
        made = await self.database.write(
            lambda db: collections.create(
                db, owner=caller.owner, name=name.strip(), description=description, settings=settings
            )
        )
        if made is None:
            raise Conflict(f"There is a collection named {name.strip()!r} already.")
        return made

    async def collections(self, caller: Caller) -> list[CollectionCounts]:
        def read(_: sqlite3.Connection, catalog: Catalog) -> list[CollectionCounts]:
            permitted = catalog.permitted(caller)
            return [_counted(one, catalog.totals(one.key, permitted)) for one in catalog.visible(caller, permitted)]

        return await self._look(read)

    async def collection(self, caller: Caller, name: str) -> CollectionCounts:
        """By id or by name; the caller's own before others'."""
        found = await self._look(lambda _, catalog: _find(catalog, caller, name))
        if found is None:
            raise NotFound(f"There is no collection {name!r}.")
        return found

    async def chosen(self, caller: Caller, names: Sequence[str] | None) -> list[Collection]:
        """The collections with these ids or names, or all that the caller can see."""

        def read(_: sqlite3.Connection, catalog: Catalog) -> list[Collection]:
            permitted = catalog.permitted(caller)
            if names is None:
                return catalog.visible(caller, permitted)
            meant = {name: catalog.named((name,), caller, permitted) for name in names}
            if missing := [name for name, keys in meant.items() if not keys]:
                raise NotFound(f"There is no collection {missing[0]!r}.")
            return [catalog.collections[key] for key in dict.fromkeys(key for keys in meant.values() for key in keys)]

        return await self._look(read)

    async def delete_collection(self, caller: Caller, name: str) -> int:
        found = (await self.collection(caller, name)).collection
        _may_change(caller, found.owner, "collection")
        return await self.database.write(lambda db: collections.delete(db, found.key))

    async def query_count(self, caller: Caller, collection: Collection, days: int) -> int:
        """How often a collection was asked: in all for its owner, else only by the caller."""
        if _is_guest(caller):
            return 0
        user = None if caller.owns(collection.owner) else queries.asker(caller)
        return await self.database.read(lambda db: queries.count(db, collection.key, days, user))

    async def ingest(
        self, caller: Caller, collection: str, arrived: Sequence[NewDocument], chunking: Mapping[str, Any] | None = None
    ) -> str:
        """Accept documents; the id of the job that takes them in."""
        found = (await self.collection(caller, collection)).collection
        _may_change(caller, found.owner, "collection")
        if not 1 <= len(arrived) <= MAX_DOCUMENTS:
            raise InvalidQuestion(f"documents holds {len(arrived)}; send 1 to {MAX_DOCUMENTS:,} at once.")
        for number, document in enumerate(arrived):
            check_metadata(document.metadata, f"documents[{number}].metadata")
        chosen = effective(msgspec.structs.replace(found.settings.chunking, **(chunking or {})), self._embedder)
        return await self.database.write(lambda db: jobs.create(db, found, caller.owner, arrived, chosen))

    async def job(self, caller: Caller, identifier: str) -> Job:
        found = await self.database.read(lambda db: jobs.by_id(db, identifier))
        if found is None or not caller.owns(found.owner):
            raise NotFound(f"There is no job {identifier!r}.")
        return found

    async def cancel(self, caller: Caller, identifier: str) -> Job:
        found = await self.job(caller, identifier)
        await self.database.write(lambda db: jobs.cancel(db, found.key))
        return await self.job(caller, identifier)

    async def documents(
        self, caller: Caller, collection: str | None, after: int, limit: int
    ) -> tuple[list[StoredDocument], int]:
        """A page of the documents that the caller may see, beginning behind a key, and how many there are in all."""
        key = (await self.collection(caller, collection)).collection.key if collection is not None else None

        def read(db: sqlite3.Connection, catalog: Catalog) -> tuple[list[StoredDocument], int]:
            keys = catalog.keys(key, catalog.permitted(caller))
            page = keys[keys > after][:limit].tolist()
            found = documents.by_keys(db, page)
            return [found[one] for one in page if one in found], len(keys)

        return await self._look(read)

    async def cursors(self) -> Cursors:
        """What makes keys into cursors, and cursors into keys."""
        found = await self.database.read(cursors.find)
        return found if found is not None else await self.database.write(cursors.make)

    async def document(self, caller: Caller, identifier: str, *, content: bool = False) -> StoredDocument:
        found = await self.database.read(lambda db: documents.by_id(db, identifier, content=content))
        return _seen(found, caller, identifier)

    async def describe(
        self,
        caller: Caller,
        identifier: str,
        *,
        title: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        permissions: Permissions | None = None,
    ) -> StoredDocument:
        """Change what is said about a document, or who may see it; it holds from the next question on."""
        if metadata is not None:
            check_metadata(metadata, "metadata")

        def write(db: sqlite3.Connection) -> StoredDocument:
            found = _seen(documents.by_id(db, identifier), caller, identifier)
            _may_change(caller, found.owner, "document")
            said = found.metadata if metadata is None else metadata
            documents.describe(
                db,
                found.key,
                title=(title or found.title)[:TITLE],
                metadata=said,
                permissions=permissions or found.permissions,
                day=day_of(said, found.created_at),
            )
            changed = documents.by_key(db, found.key)
            assert changed is not None
            return changed

        return await self.database.write(write)

    async def delete_document(self, caller: Caller, identifier: str) -> int:
        def write(db: sqlite3.Connection) -> int:
            found = _seen(documents.by_id(db, identifier), caller, identifier)
            _may_change(caller, found.owner, "document")
            return documents.remove(db, found.key)

        return await self.database.write(write)

    async def record(self, asked: QueryRecord) -> None:
        await self.database.write(lambda db: queries.record(db, asked))

    async def turns(self, caller: Caller, conversation: str, limit: int) -> list[Turn]:
        """The last turns of a conversation of the caller's own. Guests have none: nobody knows one from another."""
        if _is_guest(caller):
            return []
        return await self.database.read(lambda db: queries.turns(db, caller.owner, conversation, limit))

    async def rate(self, caller: Caller, query: str, rating: Rating, comment: str | None) -> bool:
        """Feedback on a question of the caller's own; False if there is none of that id."""
        return await self.database.write(lambda db: queries.rate(db, query, caller, rating, comment))

    async def _look(self, work: Callable[[sqlite3.Connection, Catalog], T]) -> T:
        """Read with the catalog and the records at the same moment."""

        return await self._at_one_moment(lambda db: work(db, self._reader.look(db)))

    async def _at_one_moment(self, read: Callable[[sqlite3.Connection], T]) -> T:
        while True:
            try:
                return await self.database.read(read)
            except Moved:
                continue

    def close(self) -> None:
        self.database.close()


def check_metadata(metadata: Mapping[str, Any], where: str) -> None:
    if len(msgspec.json.encode(metadata)) > MAX_METADATA:
        raise InvalidQuestion(f"{where} is larger than {MAX_METADATA:,} bytes.")


def _find(catalog: Catalog, caller: Caller, name: str) -> CollectionCounts | None:
    permitted = catalog.permitted(caller)
    keys = catalog.named((name,), caller, permitted)
    return _counted(catalog.collections[keys[0]], catalog.totals(keys[0], permitted)) if keys else None


def _counted(collection: Collection, totals: tuple[int, int, int, int]) -> CollectionCounts:
    count, chunks, tokens, size = totals
    return CollectionCounts(collection=collection, documents=count, chunks=chunks, tokens=tokens, size=size)


def _seen(document: StoredDocument | None, caller: Caller, identifier: str) -> StoredDocument:
    """A document that the caller may not see is one that is not there."""
    if document is None or not document.permissions.permits(caller, document.owner):
        raise NotFound(f"There is no document {identifier!r}.")
    return document


def _is_guest(caller: Caller) -> bool:
    return caller.user is None and not caller.operator


def _may_change(caller: Caller, owner: str, what: str) -> None:
    if not caller.owns(owner):
        raise Forbidden(f"You can see this {what}, but only its owner can change it.")
