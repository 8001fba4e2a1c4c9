"""The log in Redis, as typed calls: what each script is given, and what its reply means."""

import re
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from anabranch.domain.contracts import Clock
from anabranch.domain.eventlog import LAST, Entry, SequencedEntry
from anabranch.domain.model import Value
from anabranch.eventlog.redis import scripts
from anabranch.redis.client import Argument, Redis, RedisGone, RedisRefused, Reply

# What one command carries at most, besides a single entry that is larger: it has to fit into Redis' time-out.
CHUNK_BYTES = 512 * 1024
# What was collected for a restore that nobody finished.
STAGED_MS = 60_000

Verdict = Literal["ok", "taken", "lost", "behind", "ahead", "unstaged", "absent", "ended", "held", "buried"]
VERDICTS: dict[bytes, Verdict] = {
    b"ok": "ok",
    b"taken": "taken",
    b"lost": "lost",
    b"behind": "behind",
    b"ahead": "ahead",
    b"unstaged": "unstaged",
    b"absent": "absent",
    b"ended": "ended",
    b"held": "held",
    b"buried": "buried",
}

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(tuple[str, int, bytes, bool, bool]).decode


class HeldStream(Value):
    """Whose a stream is, for as long as it is kept."""

    stream: str
    token: str
    identity: str
    about: bytes


class StreamSlice(Value):
    """Entries of a stream, and how the stream stands. A part may be shorter than asked for, even when there is more."""

    entries: tuple[SequencedEntry, ...]
    head: int
    floor: int
    reset: bool
    more: bool
    ended: bool
    identity: str
    about: bytes
    keeper: str
    abandoned: bool


def channel(stream: str) -> str:
    return f"anabranch:{{{stream}}}:news"


class RedisStreamStore:
    """Everything raises RedisGone, after which it is not known whether the script has run, or will: one that waits in
    the socket of a frozen server may run after later ones. `shaken_at` is when Redis was last found to be gone."""

    def __init__(self, redis: Redis, *, worker: str, clock: Clock, ttl_s: float, lease_s: float) -> None:
        self._redis = redis
        self._worker = worker
        self._clock = clock
        self._ttl_ms = max(1, round(ttl_s * 1000))
        self._lease_ms = max(1, round(lease_s * 1000))
        self.shaken_at = float("-inf")

    @property
    def reachable(self) -> bool:
        return self._redis.reachable

    def shaken(self) -> None:
        self.shaken_at = self._clock.monotonic()

    async def open(self, held: HeldStream, epoch_head: int, replaces: str) -> Verdict:
        return await self._verdict(
            scripts.OPEN,
            _keys(held.stream),
            held.token,
            self._worker,
            held.identity,
            held.about,
            epoch_head,
            self._lease_ms,
            self._ttl_ms + self._lease_ms,
            channel(held.stream),
            replaces,
        )

    async def append(self, held: HeldStream, head: int, recorded: Sequence[SequencedEntry]) -> Verdict:
        ended = bool(recorded) and recorded[-1].final
        return await self._verdict(
            scripts.APPEND,
            _keys(held.stream),
            held.token,
            head,
            recorded[-1].sequence if recorded else head,
            int(ended),
            self._lease_ms,
            self._ttl_ms if ended else self._ttl_ms + self._lease_ms,
            channel(held.stream),
            *_packed(recorded),
        )

    async def trim(self, held: HeldStream, head: int, floor: int, gone: Sequence[int]) -> None:
        await self._verdict(scripts.TRIM, _keys(held.stream), held.token, head, floor, *gone)

    async def part(self, stream: str, after: int, limit: int, *, onward: bool = False) -> StreamSlice | None:
        """What stands behind a cursor, or with `onward` behind a place; None where there is no such stream."""
        after = max(0, min(after, LAST)) if after >= 0 else LAST
        reply = await self._run(scripts.READ, _keys(stream), after, limit, CHUNK_BYTES, int(onward))
        return None if reply is None else _slice(reply)

    async def bury(self, stream: str, last: Entry, epoch: int) -> Verdict:
        given = (_entry(last), self._ttl_ms, channel(stream), epoch)
        try:
            return await self._verdict(scripts.BURY, _keys(stream), *given)
        except RedisRefused:
            self.shaken()  # It takes nothing, so its owner could not say either that it lives.
            raise

    async def stage(self, stream: str, attempt: str, recorded: Sequence[SequencedEntry]) -> None:
        """Collect part of what is to be restored, where nobody reads it."""
        await self._verdict(scripts.STAGE, (_staged(stream, attempt),), STAGED_MS, *_packed(recorded))

    async def restore(
        self,
        held: HeldStream,
        recorded: Sequence[SequencedEntry],
        *,
        head: int,
        floor: int,
        ended: bool,
        left_s: float,
        attempt: str = "",
    ) -> Verdict:
        """Put what was staged in that attempt, and these behind it, in the place of all that Redis has."""
        return await self._verdict(
            scripts.RESTORE,
            (*_keys(held.stream), _staged(held.stream, attempt)),
            held.token,
            self._worker,
            held.identity,
            held.about,
            head,
            floor,
            int(ended),
            self._lease_ms,
            max(1, round(left_s * 1000)) if ended else self._ttl_ms + self._lease_ms,
            channel(held.stream),
            int(bool(attempt)),
            *_packed(recorded),
        )

    async def undo(self, stream: str, token: str) -> None:
        await self._verdict(scripts.UNDO, _keys(stream), token)

    async def known(self, stream: str) -> tuple[str, int] | None:
        """With which token it is written, and how far it is."""
        match await self._execute("HMGET", _keys(stream)[0], "token", "head"):
            case [bytes(token), bytes(head)]:
                return token.decode(), int(head)
        return None

    async def uptime_s(self) -> float:
        """For how long Redis has been running; for ever, if it does not say."""
        said = await self._execute("INFO", "server")
        found = re.search(rb"uptime_in_seconds:(\d+)", said) if isinstance(said, bytes) else None
        return float(found[1]) if found else float("inf")

    async def _verdict(self, script: str, keys: tuple[str, ...], *arguments: Argument) -> Verdict:
        reply = await self._run(script, keys, *arguments)
        verdict = VERDICTS.get(reply) if isinstance(reply, bytes) else None
        if verdict is None:
            raise RedisGone("Redis answered the log with something else.")
        return verdict

    async def _run(self, script: str, keys: tuple[str, ...], *arguments: Argument) -> Reply:
        return await self._execute("EVAL", script, len(keys), *keys, *arguments)

    async def _execute(self, *command: Argument) -> Reply:
        try:
            return await self._redis.execute(*command)
        except RedisRefused:
            raise
        except RedisGone:
            self.shaken()
            raise


def _keys(stream: str) -> tuple[str, str]:
    return f"anabranch:{{{stream}}}:stream", f"anabranch:{{{stream}}}:entries"


def _staged(stream: str, attempt: str) -> str:
    return f"anabranch:{{{stream}}}:staged:{attempt}"


def _entry(entry: Entry | SequencedEntry) -> bytes:
    return _pack((entry.key, entry.revision, entry.body, entry.partial, entry.final))


def _packed(recorded: Iterable[SequencedEntry]) -> list[Argument]:
    packed: list[Argument] = []
    for each in recorded:
        packed.append(each.sequence)
        packed.append(_entry(each))
    return packed


def _slice(reply: Reply) -> StreamSlice:
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
            return StreamSlice(
                entries=tuple(map(_recorded, entries[::2], entries[1::2])),
                head=int(head),
                floor=int(floor),
                reset=bool(reset),
                more=bool(more),
                ended=bool(ended),
                identity=identity.decode("utf-8", "surrogatepass"),
                about=about,
                keeper=keeper.decode(),
                abandoned=bool(abandoned),
            )
    raise RedisGone("Redis answered the log with something else.")


def _recorded(name: Reply, packed: Reply) -> SequencedEntry:
    if not isinstance(name, bytes) or not isinstance(packed, bytes):
        raise RedisGone("Redis answered the log with something else.")
    try:
        key, revision, body, partial, final = _unpack(packed)
    except msgspec.MsgspecError as error:
        raise RedisGone("Redis holds something in the log that is none of ours.") from error
    sequence = int(name.partition(b"-")[0])
    return SequencedEntry(sequence=sequence, key=key, revision=revision, body=body, partial=partial, final=final)
