"""Collections, documents, jobs and the query log as callers use them, with permission checks."""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Collection as AnyCollection
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from anabranch.domain.audit import Actor, AuditEntry, AuditFilter, AuditRecord
from anabranch.domain.contracts import Embedder
from anabranch.domain.errors import Conflict, Forbidden, InvalidQuestion, NotFound
from anabranch.domain.model import Filters, Passage, Query
from anabranch.domain.shares import Limit
from anabranch.knowledge import key_requests, lookup
from anabranch.knowledge.chunking import effective
from anabranch.knowledge.collection_counts import CollectionCounts, counts
from anabranch.knowledge.collection_names import checked_name
from anabranch.knowledge.index.catalog import Catalog
from anabranch.knowledge.index.contract import Index
from anabranch.knowledge.ingest import MAX_TITLE, day_of, find_stored, recipe_of
from anabranch.knowledge.model import (
    Caller,
    Chunking,
    ChunkView,
    Collection,
    CollectionSettings,
    DefaultVisibility,
    DocumentStatus,
    Erased,
    Job,
    NewDocument,
    Permissions,
    Rating,
    StoredDocument,
    path_taken,
)
from anabranch.knowledge.owner_limits import OwnerLimits
from anabranch.knowledge.records import (
    audit,
    collections,
    cursors,
    documents,
    erasures,
    facts,
    jobs,
    keys,
    logged_queries,
    nodes,
    queries,
)
from anabranch.knowledge.records.collections import PublishedEndpoint
from anabranch.knowledge.records.cursors import Cursors, ListName
from anabranch.knowledge.records.database import Database, Session
from anabranch.knowledge.records.erasures import Erasure, ErasureTimes
from anabranch.knowledge.records.logged_queries import LoggedAnswer, LoggedQuery, QueryFilter, Turn
from anabranch.knowledge.records.nodes import Cluster
from anabranch.knowledge.search import Searcher, SearchHits

T = TypeVar("T")

MAX_DOCUMENTS = 1_000
MAX_METADATA = 64 * 1024
ADDED_SOURCES = "added_sources"


class Knowledge:
    """What is stored on this node. Every method checks what its caller may see and change."""

    def __init__(
        self,
        *,
        database: Database,
        index: Index,
        searcher: Searcher,
        embedder: Embedder,
        default_visibility: DefaultVisibility | None = None,
        erasure_times: ErasureTimes = ErasureTimes(),  # noqa: B008  frozen
        limits: Mapping[str, Limit] | None = None,
    ) -> None:
        self._default_visibility = default_visibility
        self._database = database
        self._index = index
        self._searcher = searcher
        self._embedder = embedder
        self._erasure_times = erasure_times
        self._limits = OwnerLimits(limits or {})

    async def search(self, query: Query, caller: Caller) -> list[Passage]:
        return (await self.find(query, caller)).passages

    async def find(self, query: Query, caller: Caller, source: str | None = None) -> SearchHits:
        """The passages, with a hash of all documents that could have been found."""
        return await self._searcher.search(query, caller, source)

    async def seen(self, filters: Filters, caller: Caller) -> str:
        """A hash of the documents that the caller may find now; it changes with documents and permissions."""
        return await self._with_catalog(lambda _, catalog: catalog.seen(filters, caller))

    async def is_empty(self, names: tuple[str, ...] | None, caller: Caller) -> bool:
        """Whether the caller can see no document in these collections, or in all."""
        within = Filters(collections=names)

        def read(_: Session, catalog: Catalog) -> bool:
            return not any(catalog.totals(one.key, caller).documents for one in catalog.chosen(within, caller))

        return await self._with_catalog(read)

    async def create_collection(
        self,
        caller: Caller,
        name: str,
        *,
        description: str = "",
        embedding_model: str | None = None,
        chunking: Chunking = Chunking(),  # noqa: B008  frozen
        default_permissions: Permissions | None = None,
    ) -> Collection:
        """Without permissions, the caller alone sees it, unless the settings or the data folder say otherwise."""
        if _is_guest(caller):
            raise Forbidden("Guests cannot create collections. Send an API key or a token.")
        if caller.rights.collections is not None:
            raise Forbidden("This API key is for some collections only, so it cannot create others.")
        name = checked_name(name)
        _check_permissions(default_permissions)
        if embedding_model not in (None, self._embedder.name):
            raise InvalidQuestion(
                f"embedding_model is {embedding_model!r}, but this installation embeds everything with "
                f"{self._embedder.name!r}; leave it out. To change it for all collections, the operator sets "
                f"AGGREGATOR_EMBEDDING_URL and AGGREGATOR_EMBEDDING_MODEL, stops the server, and runs: "
                f"anabranch index rebuild"
            )
        limited = effective(chunking, self._embedder)

        def write(db: Session) -> Collection | None:
            self._limits.check_collection(db, caller.owner)
            unsaid = Permissions(visibility=self._default_visibility or collections.default_visibility(db))
            settings = CollectionSettings(
                embedding_model=self._embedder.name,
                chunking=limited,
                requested=chunking if chunking != limited else None,
                default_permissions=default_permissions or unsaid,
            )
            return collections.create(db, owner=caller.owner, name=name, description=description, settings=settings)

        created = await self._database.write(write)
        if created is None:
            raise Conflict(f"There is a collection named {name!r} already.")
        return created

    async def describe_collection(
        self, caller: Caller, name: str, *, description: str | None = None, permissions: Permissions | None = None
    ) -> Collection:
        """Change the description or the permissions of a collection; its documents without permissions of their own
        follow it at once."""
        _check_permissions(permissions)
        key = (await self.collection(caller, name)).collection.key

        def write(db: Session) -> Collection:
            found = collections.by_key(db, key)
            if found is None:
                raise NotFound(f"There is no collection {name!r}.")
            _may_change(caller, found.owner, "collection")
            settings = msgspec.structs.replace(
                found.settings, default_permissions=permissions or found.settings.default_permissions
            )
            described = found.description if description is None else description
            return collections.describe(db, found, described, settings)

        return await self._database.write(write)

    async def collections(self, caller: Caller) -> list[CollectionCounts]:
        return await self._with_catalog(lambda db, catalog: counts(db, catalog, caller))

    async def collection(self, caller: Caller, name: str) -> CollectionCounts:
        """The collection with this id, address or name; the caller's own takes precedence. Conflict if several have the
        name."""
        found = await self._with_catalog(lambda db, catalog: counts(db, catalog, caller, name))
        if not found:
            raise NotFound(f"There is no collection {name!r}.")
        return found[0]

    async def _own_collection(self, caller: Caller, name: str) -> Collection:
        """The same, if the caller may change it."""
        found = (await self.collection(caller, name)).collection
        _may_change(caller, found.owner, "collection")
        return found

    async def chosen(self, caller: Caller, names: Sequence[str] | None) -> list[Collection]:
        """The collections with these ids, addresses or names, or all that the caller can see."""

        def read(_: Session, catalog: Catalog) -> list[Collection]:
            if names is None:
                return catalog.visible(caller)
            by_name = {name: catalog.named((name,), caller) for name in names}
            if missing := [name for name, found in by_name.items() if not found]:
                raise NotFound(f"There is no collection {missing[0]!r}.")
            return list({one.key: one for found in by_name.values() for one in found}.values())

        return await self._with_catalog(read)

    async def delete_collection(self, caller: Caller, name: str) -> tuple[int, Erasure]:
        """Delete a collection with its documents; returns how many the caller could see, and how the rest is erased."""
        counted = await self.collection(caller, name)
        found = counted.collection
        _may_change(caller, found.owner, "collection")

        def write(db: Session) -> Erasure:
            sent = (*documents.ids_in(db, found.key), *jobs.documents_in(db, found.key))
            erased = Erased(documents=tuple(dict.fromkeys(sent)))
            collections.delete(db, found.key)
            return erasures.request(db, "collection", erased, self._erasure_times)

        return counted.documents, await self._database.write(write, deleting=True)

    async def query_count(self, caller: Caller, collection: Collection, days: int) -> int:
        """How many questions a collection answered: all of them for its owner, else only the caller's."""
        if _is_guest(caller):
            return 0
        user = None if caller.owns(collection.owner) else queries.asker(caller)
        return await self._database.read(lambda db: queries.count(db, collection.key, days, user))

    async def ingest(
        self, caller: Caller, collection: str, arrived: Sequence[NewDocument], chunking: Mapping[str, Any] | None = None
    ) -> str:
        """Accept documents; returns the id of the job that ingests them."""
        found = await self._own_collection(caller, collection)
        if not 1 <= len(arrived) <= MAX_DOCUMENTS:
            raise InvalidQuestion(f"documents holds {len(arrived)}; send 1 to {MAX_DOCUMENTS:,} at once.")
        for number, document in enumerate(arrived):
            check_metadata(document.metadata, f"documents[{number}].metadata")
        chosen = self._chunking(found, chunking)

        def write(db: Session) -> str:
            self._limits.check_documents(db, found, caller, arrived)
            return jobs.create(db, found, caller, arrived, chosen)

        return await self._database.write(write)

    async def held(self, owner: str) -> Mapping[str, float]:
        """What an owner has in the records, by the names of its limits."""
        return await self._database.read(lambda db: self._limits.held(db, owner))

    async def job(self, caller: Caller, identifier: str) -> Job:
        found = await self._database.read(lambda db: jobs.by_id(db, identifier))
        if found is None or not caller.owns(found.owner) or not caller.sees(found.collection):
            raise NotFound(f"There is no job {identifier!r}.")
        return found

    async def cancel(self, caller: Caller, identifier: str) -> Job:
        found = await self.job(caller, identifier)
        await self._database.write(lambda db: jobs.cancel(db, found.key), deleting=True)
        return await self.job(caller, identifier)

    async def documents(
        self,
        caller: Caller,
        collection: str | None,
        after: int,
        limit: int,
        *,
        status: DocumentStatus | Literal["all"] | None = None,
        connector_id: str | None = None,
    ) -> tuple[list[StoredDocument], int]:
        """A page of the documents that the caller may see, after a key, and how many there are in total. Those that are
        not stored are only in lists of a status, and only for their owner."""
        key = (await self.collection(caller, collection)).collection.key if collection is not None else None
        wanted = lookup.ListFilter(collection=key, status=status, connector_id=connector_id)
        return await self._with_catalog(lambda db, catalog: lookup.page(db, catalog, caller, wanted, after, limit))

    async def cursors(self, of: ListName) -> Cursors:
        """Converts the keys of a list to opaque cursors and back."""
        found = await self._database.read(lambda db: cursors.existing(db, of))
        return found if found is not None else await self._database.write(lambda db: cursors.create(db, of))

    async def document(self, caller: Caller, name: str, *, content: bool = False) -> StoredDocument:
        """The document with this id, file name or title."""

        def read(db: Session) -> StoredDocument:
            found = lookup.find(db, caller, name)
            return documents.with_text(db, found) if content else found

        return await self._look_up(caller, name, read)

    async def chunks(self, caller: Caller, name: str, begin: int, limit: int) -> tuple[list[ChunkView], int]:
        """The chunks of the document with this id, file name or title from an index on, and how many it has."""

        def read(db: Session) -> tuple[list[ChunkView], int]:
            found = lookup.find(db, caller, name)
            return documents.chunks_of(db, found.id, begin, limit), found.chunk_count if found.searchable else 0

        return await self._look_up(caller, name, read)

    async def _look_up(self, caller: Caller, name: str, read: Callable[[Session], T]) -> T:
        """The result of a look-up. If there is no such document, the error suggests similar names."""
        try:
            return await self._database.read(read)
        except NotFound as error:
            hint = await self._with_catalog(lambda db, catalog: lookup.similar(db, catalog, caller, name))
            raise NotFound(f"{error.message}{hint}") from None

    async def retry(self, caller: Caller, name: str) -> str:
        """Queue a failed document again, by id, file name or title; returns the id of the job that ingests it."""
        identifier = (await self._look_up(caller, name, lambda db: lookup.find_failed(db, caller, name))).document_id

        def write(db: Session) -> str:
            failed = lookup.find_failed(db, caller, identifier)
            collection = collections.by_key(db, failed.collection)
            assert collection is not None, "open items have a collection"
            _may_change(caller, collection.owner, "collection")
            if not failed.has_upload:
                raise Conflict(
                    f"The upload of {failed.document.title!r} is no longer kept: at most "
                    f"{jobs.MAX_FAILED_BYTES >> 20} MB of failed documents are. Send the document again."
                )
            self._limits.check_waiting(db, failed.owner, 1, failed.size)
            return jobs.retry(db, failed, collection, effective(failed.chunking, self._embedder))

        return await self._database.write(write)

    async def describe(
        self,
        caller: Caller,
        name: str,
        *,
        title: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        permissions: Permissions | None = None,
    ) -> StoredDocument:
        """Change the title, metadata or permissions of a document; the next question sees the change."""
        if metadata is not None:
            check_metadata(metadata, "metadata")
        # Names are resolved before the transaction: that may take a while, and others would have to wait.
        identifier = (await self.document(caller, name)).id

        def write(db: Session) -> StoredDocument:
            found = _changeable(db, caller, identifier)
            if not found.searchable:
                raise Conflict(f"{found.title!r} is {found.status}, not stored; send it again to change it.")
            if permissions is not None:
                jobs.overrule(db, found.id)
            described = found.metadata if metadata is None else metadata
            changed = documents.describe(
                db,
                found,
                title=(title or found.title)[:MAX_TITLE],
                metadata=described,
                permissions=permissions or found.permissions,
                day=day_of(described, found.created_at),
            )
            return lookup.with_states(db, caller, [changed])[0]

        return await self._database.write(write)

    async def delete_document(self, caller: Caller, name: str) -> tuple[StoredDocument, Erasure]:
        """Delete a document, with what is not stored of it yet; returns it, and how the rest of it is erased."""
        identifier = (await self.document(caller, name)).id

        def write(db: Session) -> tuple[StoredDocument, Erasure]:
            found = _changeable(db, caller, identifier)
            jobs.drop(db, found.id)
            documents.remove(db, found.key)
            return found, erasures.request(db, "document", Erased(documents=(found.id,)), self._erasure_times)

        return await self._database.write(write, deleting=True)

    async def erase(self, *, document: str | None = None, user: str | None = None) -> tuple[Erasure, str | None]:
        """Erase a document, by its id also if it was deleted before, or a user: from the records now, and from
        everything else as soon as possible. For the operator. Also returns a warning if the records do not know the
        user: what else there is, such as streams and sessions in Redis, is erased nevertheless."""
        if (document is None) == (user is None):
            raise InvalidQuestion("Name a document or a user, one of the two.")
        if user is not None and not user.strip():
            raise InvalidQuestion("The name of the user is empty.")
        identifier = "" if document is None else await self._document_to_erase(document)

        def write(db: Session) -> tuple[Erasure, str | None]:
            if user is None:
                erased = Erased(documents=(identifier,))
                return erasures.request(db, "document", erased, self._erasure_times, now=True), None
            name = key_requests.written_name(user, lambda one: erasures.knows_user(db, one))
            warning = None if erasures.knows_user(db, name) else erasures.UNKNOWN_USER.format(name)
            return erasures.request(db, "user", Erased(users=(name,)), self._erasure_times, now=True), warning

        return await self._database.write(write, deleting=True)

    async def _document_to_erase(self, name: str) -> str:
        """An id comes before names, also that of a deleted document: others may have named theirs like it."""
        caller = Caller(operator=True)
        return await self._look_up(
            caller, name, lambda db: name if erasures.knows(db, name) else lookup.find_only(db, caller, name).id
        )

    async def erasure(self, identifier: str) -> Erasure:
        found = await self._database.read(lambda db: erasures.by_id(db, identifier))
        if found is None:
            raise NotFound(f"There is no erasure {identifier!r}.")
        return found

    async def erasures(self, limit: int) -> list[Erasure]:
        """The latest erasures, newest first."""
        return await self._database.read(lambda db: erasures.listed(db, limit))

    async def erased_since(self, documents: AnyCollection[str], moment: float) -> bool:
        """Whether the erasure of one of these documents, or of a user, was requested after a time."""
        return await self._database.read(lambda db: erasures.erased_since(db, documents, moment))

    async def backups_before(self, moment: float) -> list[Path]:
        """The backups that were made before a time and are still there."""
        return await self._database.read(lambda db: erasures.backups_before(db, moment))

    async def last_pass(self) -> int:
        """The number of the latest pass of erasures; 0 before the first."""
        return await self._database.read(erasures.last_pass)

    async def passed_since(self, number: int, settled_after: float) -> list[Erasure]:
        """The erasures that were part of a later pass, and had questions that ended after a time."""
        return await self._database.read(lambda db: erasures.passed_since(db, number, settled_after))

    async def count_erased(self, found: Sequence[Erasure], store: str, removed: int) -> None:
        await self._database.write(lambda db: erasures.count(db, found, store, removed))

    async def cluster(self) -> Cluster:
        """The nodes that share the records, and how far each has come. The caller must be the operator."""
        return await self._database.read(nodes.cluster)

    async def is_index_damaged(self) -> bool:
        """Whether a part of the index, or its manifest, is damaged and not rebuilt yet."""
        if self._index.is_partial:
            await self.adopt_index()  # it may have been rebuilt since the last search
        return self._index.is_partial or await self._database.read(self._index.is_reported_damaged)

    async def check_index(self) -> None:
        """Raise IndexFailed if the index cannot be searched now."""
        await self._index.check_reachable()

    def check_writable(self) -> None:
        """Raise StoreFailed if the records cannot be written now."""
        self._database.check_writable()

    async def adopt_index(self) -> None:
        """Read the current index, and drop the files of the one before."""
        await self._with_catalog(lambda _db, _catalog: None)

    async def waiting(self, collection: Collection | None = None, last: int | None = None) -> int:
        """How many documents wait to be ingested, of one collection or all, up to the job item `last` or all."""
        key = None if collection is None else collection.key
        return await self._database.read(lambda db: jobs.waiting(db, key, last))

    async def last_item(self) -> int:
        """The newest job item, for `waiting`."""
        return await self._database.read(jobs.last_item)

    async def unchanged(
        self, caller: Caller, collection: Collection, arrived: NewDocument, chunking: Mapping[str, Any]
    ) -> StoredDocument | None:
        """The stored document, if ingesting this one would change nothing."""
        recipe = recipe_of(self._chunking(collection, chunking), self._embedder)

        def read(db: Session) -> StoredDocument | None:
            content_hash = sha256(arrived.data).hexdigest()
            identity = jobs.identity_for(db, collection, caller, arrived, content_hash)
            document = msgspec.structs.replace(arrived, identity=identity)
            stored = find_stored(db, collection, caller.owner, document, content_hash, recipe)
            return None if stored is None or stored.changed else stored.document

        return await self._database.read(read)

    async def publish(self, caller: Caller, name: str, owner: str, slug: str) -> Collection:
        """Publish a collection as an endpoint; Conflict if another one has its path."""
        found = await self._own_collection(caller, name)
        by_operator = caller.operator
        if not await self._database.write(
            lambda db: collections.publish(db, owner, slug, found.key, by_operator=by_operator)
        ):
            raise path_taken(f"{owner}/{slug}")
        return found

    async def withdraw(self, caller: Caller, name: str, owner: str, slug: str) -> None:
        """Withdraw a collection from where it is published; NotFound if it is not."""
        found = await self._own_collection(caller, name)
        if not await self._database.write(lambda db: collections.withdraw(db, owner, slug, found.key)):
            raise NotFound(f"{found.name!r} is not published as {owner}/{slug}.")

    async def endpoints(self, caller: Caller, name: str) -> tuple[Collection, list[PublishedEndpoint]]:
        """Where a collection is published, for its owner."""
        found = await self._own_collection(caller, name)
        return found, await self.published(keys=[found.key])

    async def published(self, slug: str | None = None, keys: Sequence[int] | None = None) -> list[PublishedEndpoint]:
        """The published collections: all, or those with a slug, or of these keys."""
        return await self._database.read(lambda db: collections.published(db, slug, keys))

    async def api_key(self, secret: str) -> keys.ApiKey | None:
        """The API key with this secret, unless it is revoked or has expired."""
        return await self._database.read(lambda db: keys.find(db, secret))

    async def api_keys(self) -> tuple[list[keys.ApiKey], list[Collection]]:
        """All API keys, also revoked ones, and the collections to which they can be restricted."""
        return await self._database.read(lambda db: (keys.listed(db), collections.listed(db)))

    async def create_api_key(
        self, request: key_requests.KeyRequest, limits: AnyCollection[str]
    ) -> tuple[keys.ApiKey, str]:
        """A new API key, and its secret, which is not stored."""
        return await self._database.write(lambda db: key_requests.create(db, request, limits))

    async def rotate_api_key(self, name: str, overlap_s: float, expires_at: float | None) -> tuple[keys.ApiKey, str]:
        """A new secret for an API key, whose last one stays valid for the overlap."""
        return await self._database.write(lambda db: key_requests.rotate(db, name, overlap_s, expires_at))

    async def revoke_api_key(self, name: str) -> keys.ApiKey:
        return await self._database.write(lambda db: key_requests.revoke(db, name))

    async def api_keys_used(self, moments: Mapping[str, float]) -> None:
        """Record when API keys were used last, by id."""
        await self._database.write(lambda db: keys.used(db, moments), ordered=False)

    async def credentials(self) -> set[str]:
        """What identifies the secrets of API keys that are valid now."""
        return await self._database.read(keys.credentials)

    def _chunking(self, collection: Collection, given: Mapping[str, Any] | None) -> Chunking:
        return effective(msgspec.structs.replace(collection.settings.chunking, **(given or {})), self._embedder)

    async def record(self, query: queries.QueryRecord) -> None:
        await self._database.write(lambda db: queries.record(db, query), ordered=False)

    async def turns(self, caller: Caller, conversation: str, limit: int, last: str | None) -> list[Turn]:
        """The last turns of the caller's own conversation, up to the one with the id `last`, if it is given, without
        those whose answers are withheld. Guests have none: they have no identity."""
        if _is_guest(caller):
            return []
        return await self._database.read(lambda db: logged_queries.turns(db, caller, conversation, limit, last))

    async def turns_by_id(self, caller: Caller, ids: Sequence[str]) -> dict[str, Turn | None]:
        """The caller's own questions of these ids, which are given oldest first; None stands for one whose answer is
        withheld. Guests have none."""
        if _is_guest(caller):
            return {}
        return await self._database.read(lambda db: logged_queries.turns_by_id(db, caller, ids))

    async def rate(self, caller: Caller, query: str, rating: Rating, comment: str | None) -> queries.Rated | None:
        """Feedback on a question of the caller's own; None if there is none of that id."""
        return await self._database.write(lambda db: queries.rate(db, query, caller, rating, comment))

    async def logged_queries(
        self, caller: Caller, wanted: QueryFilter, before: int | None, limit: int, *, rated: bool
    ) -> list[LoggedQuery]:
        """A page of the caller's own entries in the query log, or for the operator of all, newest first; with `rated`
        of the entries with a rating, latest rating first."""
        return await self._database.read(
            lambda db: logged_queries.listed(db, caller, wanted, before, limit, rated=rated)
        )

    async def logged_query(self, caller: Caller, identifier: str) -> LoggedAnswer:
        """An entry of the query log with its answer."""
        found = await self._database.read(lambda db: logged_queries.detail(db, caller, identifier))
        if found is None:
            raise NotFound(f"There is no query {identifier!r}.")
        return found

    async def share(self, caller: Caller, identifier: str, *, shared: bool) -> None:
        """Let callers with a key read an entry of the caller's own, or no longer."""
        if not await self._database.write(lambda db: queries.share(db, caller, identifier, shared=shared)):
            raise NotFound(f"There is no query {identifier!r}.")

    async def audit(self, entries: Sequence[tuple[AuditEntry, Actor]]) -> None:
        """Record what changes nothing here."""

        def write(db: Session) -> None:
            for entry, by in entries:
                audit.append(db, entry, by)

        await self._database.write(write)

    async def recorded(self, entry: AuditEntry, change: Callable[[], T]) -> T:
        """Make a change outside of the records, inside the transaction that records it: without the change there is no
        record, and without a record no change."""

        def write(db: Session) -> T:
            audit.append(db, entry)
            return change()

        return await self._database.write(write)

    async def added_sources(self) -> str | None:
        """The sources that operators have added, as JSON, where nodes share them."""
        return await self._database.read(lambda db: facts.fact(db, ADDED_SOURCES))

    async def change_added_sources(self, change: Callable[[str | None], str], entry: AuditEntry) -> str:
        """Change them with a record, while no other node does; returns what they are now."""

        def write(db: Session) -> str:
            changed = change(facts.fact(db, ADDED_SOURCES))
            facts.set_fact(db, ADDED_SOURCES, changed)
            audit.append(db, entry)
            return changed

        return await self._database.write(write)

    async def audit_records(self, wanted: AuditFilter, before: int | None, limit: int) -> list[AuditRecord]:
        """A page of the audit log, newest first. The caller must be the operator."""
        return await self._database.read(lambda db: audit.listed(db, wanted, before, limit))

    async def _with_catalog(self, work: Callable[[Session, Catalog], T]) -> T:
        """Read the catalog and the records in one snapshot."""
        return await self._database.read(lambda db: self._index.with_catalog(db, work))

    def close(self) -> None:
        self._database.close()


def check_metadata(metadata: Mapping[str, Any], where: str) -> None:
    if len(msgspec.json.encode(metadata)) > MAX_METADATA:
        raise InvalidQuestion(f"{where} is larger than {MAX_METADATA:,} bytes.")


def _check_permissions(permissions: Permissions | None) -> None:
    """Refuse a collection that follows a collection."""
    if permissions is not None and permissions.visibility == "collection":
        raise InvalidQuestion(
            "visibility 'collection' is for documents; a collection is public, private or restricted."
        )


def _changeable(db: Session, caller: Caller, identifier: str) -> StoredDocument:
    """The document; Forbidden if the caller can see but not change it."""
    found = lookup.find(db, caller, identifier)
    _may_change(caller, found.owner, "document")
    return found


def _is_guest(caller: Caller) -> bool:
    return caller.user is None and not caller.operator


def _may_change(caller: Caller, owner: str, what: str) -> None:
    if not caller.owns(owner):
        raise Forbidden(f"You can see this {what}, but only its owner can change it.")
