"""Opens the knowledge base of the data folder when it is first needed."""

import asyncio
import os
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack, closing, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from anabranch.app.records import folder_of, has_records, node_of, open_records
from anabranch.configuration.extras import require
from anabranch.configuration.settings import Settings, compared
from anabranch.domain.audit import AuditEntry
from anabranch.domain.contracts import Embedder, Outbound, RunInThread
from anabranch.domain.errors import AnabranchError, ConfigurationError
from anabranch.domain.model import Context, Query, Question
from anabranch.knowledge.model import EVERYTHING, Caller
from anabranch.knowledge.records import collections, documents, erasures, moves, used_settings
from anabranch.knowledge.records.database import StoreFailed
from anabranch.knowledge.records.erasures import ErasureTimes
from anabranch.knowledge.supervisor import supervised
from anabranch.models.factory import LocalEmbedder, embedder_for, reranker_for
from anabranch.policies.limits import limits_of
from anabranch.policies.resilience import Resilience
from anabranch.telemetry.log import Log

if TYPE_CHECKING:
    from anabranch.knowledge.knowledge import Knowledge

# A question ends within its time limit; then its answer is written.
WRITING_S = 10.0
# Refused requests, with the names of those who sent them, are recorded at these intervals.
REFUSED_S = 60.0
T = TypeVar("T")

SAY_VISIBILITY = (
    "This data folder was made when everybody saw a new collection unless somebody said otherwise. Set "
    "AGGREGATOR_DEFAULT_VISIBILITY to private or public."
)
INDEXER = (sys.executable, "-m", "anabranch.app.indexer")


class KnowledgeOpener:
    """Calling it returns the one Knowledge of this process. With `indexing` it also runs an indexer, unless another
    process has the data folder's lock. One that is `serving` notes its settings, and which stores it uses besides the
    data folder. Searches and local models run with `run`."""

    def __init__(
        self,
        settings: Settings,
        outbound: Outbound,
        *,
        indexing: bool,
        serving: bool = False,
        cached: Callable[[Embedder], Embedder] = lambda embedder: embedder,
        resilience: Resilience | None = None,
        run: RunInThread = asyncio.to_thread,
        died: Callable[[int], None] = lambda _: None,
        damaged: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._settings = settings
        self._outbound = outbound
        self._cached = cached
        self._resilience = resilience
        self._run = run
        self._indexing = indexing
        self._serving = serving
        self._died = died
        self._damaged = damaged
        self._opening = asyncio.Lock()
        self._open: Knowledge | None = None
        self._warming: asyncio.Task[None] | None = None
        self._stack = AsyncExitStack()

    @property
    def is_open(self) -> bool:
        return self._open is not None

    @property
    def exists(self) -> bool:
        """Whether there are records."""
        return self.is_open or has_records(self._settings)

    @property
    def is_remote(self) -> bool:
        """Whether the records are in a database that may be unreachable."""
        return self._settings.database_url is not None

    async def __call__(self) -> "Knowledge":
        if self._open is None:
            async with self._opening:
                if self._open is None:
                    self._open = await self._opened()
        return self._open

    @cached_property
    def embedder(self) -> Embedder:
        """The embedder of the settings, without a cache. It loads its model with the first text."""
        return embedder_for(self._settings, self._outbound, resilience=self._resilience, run=self._run)

    async def existing(self) -> "Knowledge | None":
        """The Knowledge, if the data folder has records: asking creates none."""
        return await self() if self.exists else None

    async def recorded(self, entry: AuditEntry, change: Callable[[], T]) -> T:
        """Make a change outside of the records, with its record in the audit log if the data folder has records."""
        if not self.exists:
            return await asyncio.to_thread(change)
        return await (await self()).recorded(entry, change)

    async def seen(self, question: Question, context: Context) -> str | None:
        """A hash of the documents that a question to all collections can find; None for other questions."""
        if not self.exists or any(source.slug != EVERYTHING for source in question.sources):
            return None
        return await (await self()).seen(question.filters, Caller.of(context))

    async def close(self) -> None:
        if self._warming is not None:
            await asyncio.wait([self._warming])
        await self._stack.aclose()
        if self._open is not None:
            self._open.close()
            self._open = None

    async def _opened(self) -> "Knowledge":
        # numpy loads here: a server that only forwards questions never needs it.
        from anabranch.app.search_index import open_index  # noqa: PLC0415
        from anabranch.knowledge.knowledge import Knowledge  # noqa: PLC0415
        from anabranch.knowledge.search import Searcher  # noqa: PLC0415

        folder = folder_of(self._settings)
        database = await asyncio.to_thread(open_records, self._settings)
        embedder = self._cached(self.embedder)
        try:
            await database.read(lambda db: documents.check_embedder(db, embedder.name))
            if self._serving:
                await database.write(lambda db: erasures.note_stores(db, stores_of(self._settings)))
                with suppress(StoreFailed):  # a full disk must not keep the settings from being changed
                    node = node_of(self._settings)
                    await database.write(lambda db: used_settings.note(db, compared(self._settings), node))
            chosen = (self._settings, self._outbound, self._resilience, self._run)
            reranker = await asyncio.to_thread(reranker_for, *chosen)
        except BaseException:
            database.close()
            raise
        if self._indexing:
            first_line = msgspec.json.encode(self._settings) + b"\n"
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            await self._stack.enter_async_context(supervised(folder, INDEXER, first_line, self._died))
        index = open_index(self._settings, self._outbound, embedder.name, self._damaged)
        searcher = Searcher(database, index, embedder, reranker, self._run)
        knowledge = Knowledge(
            database=database,
            index=index,
            searcher=searcher,
            embedder=embedder,
            erasure_times=times_of(self._settings),
            default_visibility=self._settings.default_visibility,
            limits=limits_of(self._settings),
        )
        if self._indexing and self._settings.embedding_url is None:
            self._warming = asyncio.create_task(_warm(knowledge, self.embedder))
        return knowledge


async def _warm(knowledge: "Knowledge", embedder: Embedder) -> None:
    """Load the model and the index now, so that the first question does not wait for them. The embedding cache is
    bypassed: a hit would not load the model."""
    with suppress(AnabranchError):
        await embedder.embed(["warm up"])
        await knowledge.search(Query(text="warm up", limit=1, similarity_threshold=0), Caller(operator=True))


def check(settings: Settings, log: Log) -> None:
    """Raise ConfigurationError before the start if the records or the reranker cannot be used. Log it if everybody sees
    new collections because nobody has said who may."""
    if settings.reranker_path is not None and not os.access(Path(settings.reranker_path).expanduser(), os.R_OK):
        raise ConfigurationError(
            "AGGREGATOR_RERANKER_PATH takes an ONNX file, or a folder with model.onnx; "
            f"{settings.reranker_path!r} does not exist, or may not be read."
        )
    folder = folder_of(settings)
    if not has_records(settings):
        return
    with closing(open_records(settings)) as database:
        database.reading(moves.check_served)
        if settings.embedding_url is None and (settings.database_url is None or database.reading(collections.listed)):
            place = folder if settings.database_url is None else "the database"
            require("local-models", f"{place} holds collections, and their embedding model")
        database.reading(lambda db: documents.check_embedder(db, settings.embedding_model or LocalEmbedder.name))
        if settings.default_visibility is None and database.reading(collections.default_visibility) == "public":
            log.warning("new_collections_are_public", hint=SAY_VISIBILITY)


def times_of(settings: Settings) -> ErasureTimes:
    longest = max(settings.total_timeout, settings.planner_timeout, REFUSED_S)
    return ErasureTimes(after_s=settings.erase_after, settle_s=longest + WRITING_S)


def stores_of(settings: Settings) -> list[str]:
    """What a server keeps outside of the data folder and must be erased from, too."""
    stores = ["Redis"] if settings.redis_url is not None else []
    if settings.recordings_dir is not None:
        stores.append(f"recordings in {Path(settings.recordings_dir).expanduser().absolute()}")
    return stores


def is_writable(settings: Settings) -> bool:
    """Whether this process can write to the data folder, or create it."""
    folder = folder_of(settings).absolute()
    nearest = next(place for place in (folder, *folder.parents) if os.access(place, os.F_OK))
    return os.access(nearest, os.W_OK | os.X_OK)
