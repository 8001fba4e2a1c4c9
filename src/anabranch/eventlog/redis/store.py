"""The event log's Redis commands and Lua scripts."""

import re
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

import msgspec

from anabranch.domain.contracts import Clock
from anabranch.domain.eventlog import LAST, Entry, LogLimits, Page, SequencedEntry
from anabranch.domain.model import Value
from anabranch.eventlog.streams import StreamOwner
from anabranch.redis.client import Argument, Redis, RedisGone, RedisRefused, Reply, script


class RedisLogTiming(Value):
    """`repair_every_s`: how often the log checks Redis and restores its streams. `recheck_s` and `recheck_ended_s`: how
    often a replica reads without a notification, since one can get lost and a dead worker sends none. `restore_s`: how
    long owners have to restore their streams after a restart of Redis before a name can be opened again."""

    repair_every_s: float = 0.25
    recheck_s: float = 1.0
    recheck_ended_s: float = 15.0
    restore_s: float = 2.0


# The most that one command carries, unless a single entry is larger: it must arrive within the Redis time-out.
CHUNK_BYTES = 512 * 1024
# How long Redis keeps the entries of a restore that was not finished.
STAGED_MS = 60_000
# For longer than the workers need to learn what was erased, and to drop their copies.
FORGOTTEN, FORGOTTEN_MS = "anabranch:forgotten", 60_000
# A restore may reach Redis this much later than its owner has computed when the stream ended.
LATE_MS = 10_000

Verdict = Literal["ok", "taken", "lost", "behind", "ahead", "unstaged", "absent", "ended", "held", "buried"]
VERDICTS: dict[bytes, Verdict] = {name.encode(): name for name in get_args(Verdict)}
UNKNOWN_REPLY = "Redis sent a reply that the event log does not know."

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(tuple[str, int, bytes, bool, bool]).decode


def channel(stream: str) -> str:
    return f"anabranch:{{{stream}}}:news"


class RedisStreamStore:
    """Every call may raise RedisGone. Then it is not known whether the script has run or will: one that waits in the
    socket of a frozen server may run after later ones. `interrupted_at` is when Redis was last found unreachable."""

    def __init__(self, redis: Redis, *, worker: str, clock: Clock, limits: LogLimits) -> None:
        self.redis = redis
        self._worker = worker
        self._clock = clock
        self._ttl_ms = max(1, round(limits.ttl_s * 1000))
        self._lease_ms = max(1, round(limits.lease_s * 1000))
        self.interrupted_at = float("-inf")

    def now(self) -> float:
        return self._clock.monotonic()

    def interrupted(self) -> None:
        self.interrupted_at = self.now()

    async def open(self, owner: StreamOwner, epoch_head: int, replaces: str) -> Verdict:
        return await self._verdict(
            "open",
            _keys(owner.stream),
            owner.token,
            self._worker,
            owner.identity,
            owner.about,
            epoch_head,
            self._lease_ms,
            self._ttl_ms + self._lease_ms,
            channel(owner.stream),
            replaces,
        )

    async def append(self, owner: StreamOwner, head: int, recorded: Sequence[SequencedEntry]) -> Verdict:
        ended = bool(recorded) and recorded[-1].final
        return await self._verdict(
            "append",
            _keys(owner.stream),
            owner.token,
            head,
            recorded[-1].sequence if recorded else head,
            int(ended),
            self._lease_ms,
            self._ttl_ms if ended else self._ttl_ms + self._lease_ms,
            channel(owner.stream),
            *_packed(recorded),
        )

    async def trim(self, owner: StreamOwner, head: int, floor: int, gone: Sequence[int]) -> None:
        await self._verdict("trim", _keys(owner.stream), owner.token, head, floor, *gone)

    async def read(self, stream: str, after: int, limit: int, *, onward: bool) -> Page | None:
        """The entries after a cursor, or None if there is no such stream; they may be fewer than `limit`, even when
        there are more. With `onward` the cursor is never reset."""
        after = max(0, min(after, LAST)) if after >= 0 else LAST
        reply = await self._run("read", _keys(stream), after, limit, CHUNK_BYTES, int(onward))
        return None if reply is None else _page(reply)

    async def end_abandoned(self, stream: str, last: Entry, epoch: int) -> Verdict:
        try:
            return await self._verdict(
                "end_abandoned", _keys(stream), _entry(last), self._ttl_ms, channel(stream), epoch
            )
        except RedisRefused:
            self.interrupted()  # Redis takes no writes, so the owner could not renew its lease either.
            raise

    async def stage(self, stream: str, attempt: str, recorded: Sequence[SequencedEntry]) -> None:
        """Store part of a restore under a key that nobody reads."""
        await self._verdict("stage", (_staged(stream, attempt),), STAGED_MS, *_packed(recorded))

    async def restore(
        self,
        owner: StreamOwner,
        recorded: Sequence[SequencedEntry],
        *,
        head: int,
        floor: int,
        ended: bool,
        left_s: float,
        ended_for_s: float = 0.0,
        attempt: str = "",
    ) -> Verdict:
        """Replace the stream in Redis by the entries that were staged in that attempt, followed by these. "lost" if it
        was forgotten."""
        return await self._verdict(
            "restore",
            (*_keys(owner.stream), _staged(owner.stream, attempt), FORGOTTEN),
            owner.token,
            self._worker,
            owner.identity,
            owner.about,
            head,
            floor,
            int(ended),
            self._lease_ms,
            max(1, round(left_s * 1000)) if ended else self._ttl_ms + self._lease_ms,
            channel(owner.stream),
            int(bool(attempt)),
            max(0, round(ended_for_s * 1000)),
            *_packed(recorded),
        )

    async def undo(self, stream: str, token: str) -> None:
        await self._verdict("undo", _keys(stream), token)

    async def delete(self, stream: str) -> None:
        await self._execute("DEL", *_keys(stream))

    async def known(self, stream: str) -> tuple[str, int] | None:
        """The token of its owner and its head."""
        match await self._execute("HMGET", _keys(stream)[0], "token", "head"):
            case [bytes(token), bytes(head)]:
                return token.decode(), int(head)
        return None

    async def uptime_s(self) -> float:
        """How long Redis has been running; infinite if it does not say."""
        info = await self._execute("INFO", "server")
        found = re.search(rb"uptime_in_seconds:(\d+)", info) if isinstance(info, bytes) else None
        return float(found[1]) if found else float("inf")

    async def _verdict(self, name: str, keys: tuple[str, ...], *arguments: Argument) -> Verdict:
        reply = await self._run(name, keys, *arguments)
        verdict = VERDICTS.get(reply) if isinstance(reply, bytes) else None
        if verdict is None:
            raise RedisGone(UNKNOWN_REPLY)
        return verdict

    async def _run(self, name: str, keys: tuple[str, ...], *arguments: Argument) -> Reply:
        return await self._execute("EVAL", script(__package__, f"lua/{name}.lua"), len(keys), *keys, *arguments)

    async def _execute(self, *command: Argument) -> Reply:
        try:
            return await self.redis.execute(*command)
        except RedisRefused:
            raise
        except RedisGone:
            self.interrupted()
            raise


async def forget_before(redis: Redis, ended_for_s: float) -> None:
    """Keep owners from restoring streams that ended at least that long ago, and also those that ended shortly after."""
    lua = script(__package__, "lua/forget_before.lua")
    await redis.execute("EVAL", lua, 1, FORGOTTEN, round(ended_for_s * 1000) - LATE_MS, FORGOTTEN_MS)


async def forget_ended(redis: Redis, key: bytes, ttl_s: float, ended_for_s: float) -> int:
    """Delete the stream of this key if it ended at least that long ago, or its worker is gone; returns how many."""
    ttl_ms, ended_ms = max(1, round(ttl_s * 1000)), max(0, round(ended_for_s * 1000))
    entries = key.removesuffix(b":stream") + b":entries"
    lua = script(__package__, "lua/forget_ended.lua")
    return 1 if await redis.execute("EVAL", lua, 2, key, entries, ttl_ms, ended_ms) == 1 else 0


def _keys(stream: str) -> tuple[str, str]:
    return f"anabranch:{{{stream}}}:stream", f"anabranch:{{{stream}}}:entries"


def _staged(stream: str, attempt: str) -> str:
    return f"anabranch:{{{stream}}}:staged:{attempt}"


def _entry(entry: Entry) -> bytes:
    return _pack((entry.key, entry.revision, entry.body, entry.partial, entry.final))


def _packed(recorded: Iterable[SequencedEntry]) -> list[Argument]:
    return [part for each in recorded for part in (each.sequence, _entry(each))]


def _page(reply: Reply) -> Page:
    match reply:
        case [
            bytes(head),
            bytes(floor),
            int(reset),
            int(more),
            int(ended),
            bytes(identity),
            bytes(about),
            bytes(keeper),
            int(abandoned),
            list(entries),
        ]:
            return Page(
                entries=tuple(map(_recorded, entries[::2], entries[1::2])),
                head=int(head),
                reset=bool(reset),
                more=bool(more),
                ended=bool(ended),
                identity=identity.decode("utf-8", "surrogatepass"),
                about=about,
                keeper=keeper.decode(),
                abandoned=bool(abandoned),
                floor=int(floor),
            )
    raise RedisGone(UNKNOWN_REPLY)


def _recorded(name: Reply, packed: Reply) -> SequencedEntry:
    if not isinstance(name, bytes) or not isinstance(packed, bytes):
        raise RedisGone(UNKNOWN_REPLY)
    try:
        key, revision, body, partial, final = _unpack(packed)
    except msgspec.MsgspecError as error:
        raise RedisGone("Redis holds an entry in the event log that cannot be decoded.") from error
    return SequencedEntry(
        sequence=int(name.partition(b"-")[0]), key=key, revision=revision, body=body, partial=partial, final=final
    )
