"""Erasure: what was deleted is removed from every store. The process that holds the indexer lock erases from files and
Redis in passes; then every server process erases from its memory."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from anabranch.app.knowledge_opener import KnowledgeOpener, stores_of
from anabranch.app.recording_folder import PREFIX as RECORDING
from anabranch.app.recording_folder import ids_in, repeats_turns
from anabranch.app.records import folder_of, node_of
from anabranch.configuration.settings import Settings
from anabranch.domain.contracts import SystemClock
from anabranch.domain.errors import AnabranchError
from anabranch.knowledge.disk import RESERVE_BYTES, free_bytes, reserve_bytes, reserve_released
from anabranch.knowledge.model import Erased
from anabranch.knowledge.records import backup, erasures, nodes
from anabranch.knowledge.records.database import Database, Session
from anabranch.knowledge.records.erasures import Erasure
from anabranch.telemetry.log import SilentTelemetry

if TYPE_CHECKING:
    from anabranch.knowledge.index.contract import IndexUpdates

RETRY_S = 300.0
WAITS = "It waits until {} MB are free on the disk of the data folder: the records are rewritten."
ELSEWHERE = (
    "It waits for a server: {} must be erased from as well, and this process does not have the settings of the server "
    "for it (only `anabranch serve` reads .env)."
)
T = TypeVar("T")
Step = Callable[[str], None]


class ErasurePass(NamedTuple):
    """The erasures of one pass, and together what they erase. What ended after `settled_at` holds nothing of it."""

    erasures: Sequence[Erasure]
    erased: Erased
    at: float

    @property
    def settled_at(self) -> float:
        return max(one.settled_at for one in self.erasures)


class ErasureStore(NamedTuple):
    """Something that may hold what is erased. `erase` returns how much it has removed, and may be called again."""

    name: str
    erase: Callable[[ErasurePass], Awaitable[int]]


def eraser_for(settings: Settings, database: Database, writer: "IndexUpdates") -> "Eraser":
    """The eraser of a data folder, whose lock the caller holds. To erase from one more store, add it here; a table of
    the records is one more entry of `erasures.STORES`."""
    folder = folder_of(settings)
    stores = [
        *(ErasureStore(name, partial(_erase_rows, database, erase)) for name, erase in erasures.STORES),
        ErasureStore("index segments", lambda _: asyncio.to_thread(writer.drop_deleted)),
        ErasureStore("copies of earlier records", partial(_erase_copies, database, folder)),
    ]
    if settings.recordings_dir is not None:
        recordings = Path(settings.recordings_dir).expanduser()
        stores.append(ErasureStore("recordings", lambda now: asyncio.to_thread(_erase_recordings, recordings, now)))
    if settings.redis_url is not None:
        stores.append(ErasureStore("Redis", partial(_erase_redis, settings)))
    # The last: it overwrites what the others have deleted from the records.
    stores.append(ErasureStore("free bytes of the records", partial(_erase_free_bytes, database)))
    return Eraser(database, folder, stores, stores_of(settings), node_of(settings))


class Eraser:
    """Runs the passes that are due. One that fails, or is interrupted, is run again as a whole. It leaves them to
    others if a server uses a store outside of the data folder that is not one of its own (`outside`)."""

    def __init__(
        self,
        database: Database,
        folder: Path,
        stores: Sequence[ErasureStore],
        outside: Sequence[str] = (),
        node: str = "",
    ) -> None:
        self._outside = outside
        self._database = database
        self._folder = folder
        self._node = node
        self._stores = stores

    async def erase_due(self, step: Step = lambda _: None) -> None:
        """Run a pass if one is due; `step` is called with the name of each store."""
        at = time.time()
        found = await self._database.read(lambda db: erasures.due(db, at))
        if not found or not await self._database.read(lambda db: nodes.leads(db, self._node)):
            return
        if lacking := (await self._database.read(erasures.stores_noted)) - set(self._outside):
            await self._wait(found, ELSEWHERE.format(" and ".join(sorted(lacking))), at)
            return
        folder, needed = self._folder, await asyncio.to_thread(self._database.bytes_to_compact)
        if free_bytes(folder) >= needed:
            await self._run(found, at, step)
        elif free_bytes(folder) + reserve_bytes(folder) >= needed:
            with reserve_released(folder, RESERVE_BYTES):
                await self._run(found, at, step)
        else:
            await self._wait(found, WAITS.format(-(-needed // 1_000_000)), at)

    async def _wait(self, found: Sequence[Erasure], reason: str, at: float) -> None:
        """Note why these wait; they stay due."""
        if any(one.error != reason for one in found):
            await self._write(lambda db: erasures.failed(db, found, reason, at))

    async def _run(self, found: Sequence[Erasure], at: float, step: Step) -> None:
        now = ErasurePass(found, await self._write(partial(_whole, found)), at)
        problems = [problem for store in self._stores if (problem := await self._erase(store, now, step))]
        if problems:
            reason, retry_at = " ".join(problems), time.time() + RETRY_S
            await self._write(lambda db: erasures.failed(db, found, reason, retry_at))
        else:
            await self._write(lambda db: erasures.passed(db, found, at, self._node))

    async def _write(self, work: Callable[[Session], T]) -> T:
        return await self._database.write(work, deleting=True)

    async def _erase(self, store: ErasureStore, now: ErasurePass, step: Step) -> str | None:
        """Erase from a store; returns why that has failed, so that the others are erased nevertheless."""
        step(store.name)
        try:
            removed = await store.erase(now)
            await self._write(lambda db: erasures.count(db, now.erasures, store.name, removed))
        except (AnabranchError, OSError) as error:
            return f"{store.name}: {error.message if isinstance(error, AnabranchError) else error}"
        return None


def _whole(found: Sequence[Erasure], db: Session) -> Erased:
    """What these erasures erase together, with the documents that users have stored since."""
    wholes = [erasures.whole(db, one) for one in found]
    return Erased(
        documents=tuple(dict.fromkeys(document for whole in wholes for document in whole.documents)),
        users=tuple(dict.fromkeys(user for whole in wholes for user in whole.users)),
    )


async def _erase_rows(database: Database, erase: Callable[[Session, Erased], int], now: ErasurePass) -> int:
    return await database.write(lambda db: erase(db, now.erased), deleting=True)


async def _erase_copies(database: Database, folder: Path, now: ErasurePass) -> int:
    done, damaged = await asyncio.to_thread(erasures.erase_copies, folder, now.erased)
    backup.remove_restoring(folder)
    backup.remove_plain(folder)
    for path in damaged:  # named with the backups
        await database.write(partial(erasures.note_backup, path=path, made_at=0.0))
    return done


def _erase_recordings(folder: Path, now: ErasurePass) -> int:
    """Delete the recordings in which a document was found, and those with earlier turns of a conversation: they do not
    say of which, and may repeat its answers. A recording does not say who asked, so for a user all of them."""
    documents = {document.encode() for document in now.erased.documents}
    removed = 0
    for path in (*folder.glob(f"{RECORDING}*"), *folder.glob(f".{RECORDING}*")):
        with suppress(FileNotFoundError):
            if now.erased.users or not documents.isdisjoint(ids_in(path)) or repeats_turns(path):
                path.unlink()
                removed += 1
    return removed


async def _erase_redis(settings: Settings, now: ErasurePass) -> int:
    from anabranch.app.redis_erasure import erase  # noqa: PLC0415  most have no Redis
    from anabranch.redis.client import Redis  # noqa: PLC0415

    assert settings.redis_url is not None, "the store is there with a Redis"
    redis = Redis(
        settings.redis_url, timeout_s=settings.redis_timeout, clock=SystemClock(), telemetry=SilentTelemetry()
    )
    try:
        return await erase(redis, now.erased, settings.stream_ttl, max(0.0, now.at - now.settled_at))
    finally:
        await redis.close()


async def _erase_free_bytes(database: Database, now: ErasurePass) -> int:
    await database.write(lambda db: erasures.forget_users(db, now.erasures, now.at), deleting=True)
    return await asyncio.to_thread(database.compact)


async def erase_memory(knowledge: KnowledgeOpener, stores: Sequence[ErasureStore], every_s: float) -> None:
    """After each pass, erase from the memory of this process. The passes are in the records, so it does not matter
    which process ran them."""
    # What was erased before this process began is not in its memory.
    began, seen = time.time(), 0
    while True:
        with suppress(AnabranchError):  # records that cannot be read now are read again
            if knowledge.is_open:  # otherwise nothing of it is in memory
                seen = await _erased_since(knowledge, stores, seen, began)
        await asyncio.sleep(every_s)


async def _erased_since(knowledge: KnowledgeOpener, stores: Sequence[ErasureStore], seen: int, began: float) -> int:
    opened = await knowledge()
    last = await opened.last_pass()
    found = await opened.passed_since(seen, began) if last > seen else []
    if found:
        await opened.adopt_index()  # replaced segments stay on disk as long as somebody has them open
        documents = tuple({document for one in found for document in one.subject.documents})
        now = ErasurePass(found, Erased(documents=documents), time.time())
        for store in stores:
            await opened.count_erased(found, store.name, await store.erase(now))
    return last
