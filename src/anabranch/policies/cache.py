"""Caches in memory and in Redis, and the caches of embeddings and of evidence."""

import asyncio
import hashlib
import math
import sys
from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from anabranch.domain.contracts import Cache, Clock, Embedder, Telemetry
from anabranch.domain.evidence import ClaimChecker, Evidence, EvidencePage, Reading, Verdict
from anabranch.domain.model import MAX_QUERY, Calibration, Embedding
from anabranch.domain.shares import claimant
from anabranch.domain.signals import CacheLookup, EvidenceJudged, EvidenceTask
from anabranch.redis.client import RedisGone

if TYPE_CHECKING:
    from anabranch.redis.client import Redis

T = TypeVar("T")

# The overhead of an entry beside its key and its value.
ENTRY_BYTES = 250
LARGEST_SHARE = 4
MAX_WRITES = 256
MAX_SHARED_BYTES = 1024 * 1024

# Atomic, so that the TTL is that of this value.
LOOK = "return {redis.call('GET', KEYS[1]), redis.call('PTTL', KEYS[1])}"


class MemoryCache:
    """An LRU cache bounded in bytes. No entry takes more than a quarter."""

    def __init__(self, max_bytes: int, clock: Clock) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._bytes = 0
        self._items: OrderedDict[str, tuple[bytes, float]] = OrderedDict()

    async def get(self, key: str) -> bytes | None:
        value, until = self._items.get(key, (None, -math.inf))
        if until <= self._clock.monotonic():
            self._drop(key)
            return None
        self._items.move_to_end(key)
        return value

    async def put(self, key: str, value: bytes, ttl_s: float) -> None:
        self._drop(key)
        size = _size(key, value)
        if ttl_s > 0 and size <= self._max_bytes / LARGEST_SHARE:
            self._items[key] = value, self._clock.monotonic() + ttl_s
            self._bytes += size
            while self._bytes > self._max_bytes:
                self._drop(next(iter(self._items)))

    def forget(self, patterns: Sequence[str]) -> int:
        """Drop the entries whose keys match a pattern; returns how many."""
        gone = [key for key in self._items if any(fnmatchcase(key, pattern) for pattern in patterns)]
        for key in gone:
            self._drop(key)
        return len(gone)

    def _drop(self, key: str) -> None:
        if (found := self._items.pop(key, None)) is not None:
            self._bytes -= _size(key, found[0])


class RedisCache:
    """A cache that all workers share, with a local one in front: a value of Redis is copied to the local cache for its
    remaining TTL. A read takes `wait_s` at most. Writes to Redis run in the background and are dropped if too many
    are pending. If Redis is unreachable, or the value is not bytes, it is a miss."""

    def __init__(self, redis: "Redis", local: Cache, wait_s: float) -> None:
        self._redis = redis
        self._local = local
        self._wait_s = wait_s
        self._writes: set[asyncio.Task[None]] = set()

    async def get(self, key: str) -> bytes | None:
        if (known := await self._local.get(key)) is not None:
            return known
        with suppress(RedisGone):
            match await self._redis.execute("EVAL", LOOK, 1, key, wait_s=self._wait_s):
                case [bytes(value), int(left_ms)]:
                    await self._local.put(key, value, max(left_ms, 0) / 1000)
                    return value
        return None

    async def put(self, key: str, value: bytes, ttl_s: float) -> None:
        await self._local.put(key, value, ttl_s)
        if self._redis.reachable and len(self._writes) < MAX_WRITES and len(value) <= MAX_SHARED_BYTES:
            write = asyncio.create_task(self._write(key, value, int(ttl_s * 1000)))
            self._writes.add(write)
            write.add_done_callback(self._writes.discard)

    async def settled(self) -> None:
        """Wait until no write is pending."""
        while self._writes:
            await asyncio.wait(self._writes)

    async def _write(self, key: str, value: bytes, ttl_ms: int) -> None:
        command = ("SET", key, value, "PX", ttl_ms) if ttl_ms > 0 else ("DEL", key)
        with suppress(RedisGone):
            await self._redis.execute(*command)


async def lookup(cache: Cache, key: str, decode: Callable[[bytes], T], valid: Callable[[T], bool]) -> T | None:
    """The cached value, if it can be decoded and is valid: other programs may be able to write to the cache."""
    stored = await cache.get(key)
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        value = decode(stored) if stored is not None else None
        return value if value is not None and valid(value) else None
    return None


def _size(key: str, value: bytes) -> int:
    return sys.getsizeof(key) + sys.getsizeof(value) + ENTRY_BYTES


FLOAT_BYTES = 4
EMBEDDING_KEYS = "embed:*"

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Embedding).decode


class CachedEmbedder:
    """An Embedder with a cache for each caller: a shared one is faster with what others have asked, and so tells it.
    Cached vectors are checked to be of this model and its dimensions."""

    def __init__(self, inner: Embedder, *, where: str, cache: Cache, ttl_s: float, telemetry: Telemetry) -> None:
        self._inner = inner
        self._where = hashlib.blake2b(where.encode(), digest_size=16).digest()
        self._cache = cache
        self._ttl_s = ttl_s
        self._telemetry = telemetry

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def dimensions(self) -> int:
        return self._inner.dimensions

    @property
    def window(self) -> int:
        return self._inner.window

    @property
    def calibration(self) -> Calibration:
        return self._inner.calibration

    def tokens(self, text: str) -> Sequence[tuple[int, int]]:
        return self._inner.tokens(text)

    async def embed(self, texts: Sequence[str]) -> Sequence[Embedding]:
        keys = [self._key(text) for text in texts]
        known = await asyncio.gather(*map(self._cached, keys))
        missing = [index for index, found in enumerate(known) if found is None]
        fresh = await self._inner.embed([texts[index] for index in missing]) if missing else ()
        for index, embedding in zip(missing, fresh, strict=True):
            known[index] = embedding
            await self._cache.put(keys[index], encode(embedding), self._ttl_s)
        return [embedding for embedding in known if embedding is not None]

    def _key(self, text: str) -> str:
        """Includes the server: two servers may have different models of the same name."""
        digest = hashlib.blake2b(
            text.encode(errors="replace"), digest_size=20, person=self._where, salt=_salt(claimant.get().name)
        )
        return f"embed:{self._inner.name}:{digest.hexdigest()}"

    def _fits(self, found: Embedding) -> bool:
        dimensions = self._inner.dimensions
        return (
            0 < len(found.vector) == FLOAT_BYTES * dimensions
            and len(found.tokens) % max(1, dimensions // 8) == 0
            and all(map(math.isfinite, array("f", found.vector)))
        )

    async def _cached(self, key: str) -> Embedding | None:
        found = await lookup(self._cache, key, decode, self._fits)
        self._telemetry.noted(CacheLookup(cache="embedding", hit=found is not None))
        return found


def _salt(caller: str) -> bytes:
    return hashlib.blake2b(caller.encode(errors="surrogatepass"), digest_size=hashlib.blake2b.SALT_SIZE).digest()


Pages = tuple[EvidencePage, ...]
Judge = Callable[[Sequence[Pages]], Awaitable[Sequence[T | None]]]

# Readings of a few thousand passages.
EVIDENCE_BYTES = 8 * 1024 * 1024


class Judgements(Generic[T]):
    """What a model says about pages, kept in this process. A result depends on the text and the pages only, and a
    caller must have all of them to find it, so callers share the cache."""

    def __init__(self, task: EvidenceTask, kind: type[T], clock: Clock, telemetry: Telemetry, max_bytes: int) -> None:
        self._task: EvidenceTask = task
        self._decode = msgspec.msgpack.Decoder(kind).decode
        self._clock = clock
        self._telemetry = telemetry
        self._cache = MemoryCache(max_bytes, clock)

    async def judged(self, text: str, inputs: Sequence[Pages], judge: Judge[T]) -> Sequence[T | None]:
        keys = [_evidence_key(self._task, text, pages) for pages in inputs]
        found = [await lookup(self._cache, key, self._decode, lambda _: True) for key in keys]
        for result in found:
            self._telemetry.noted(CacheLookup(cache="evidence", hit=result is not None))
        missing = [index for index, result in enumerate(found) if result is None]
        if not missing:
            return found
        began = self._clock.monotonic()
        fresh = await judge([inputs[index] for index in missing])
        latency_ms = (self._clock.monotonic() - began) * 1000
        passages = 0
        for index, result in zip(missing, fresh, strict=True):
            if result is not None:
                found[index] = result
                passages += len(inputs[index])
                await self._cache.put(keys[index], encode(result), math.inf)
        if passages:
            self._telemetry.noted(EvidenceJudged(task=self._task, passages=passages, latency_ms=latency_ms))
        return found


class CachedEvidence:
    """An Evidence with a cache: passages are often read twice for a question, to rank and to answer."""

    def __init__(self, inner: Evidence, clock: Clock, telemetry: Telemetry, max_bytes: int = EVIDENCE_BYTES) -> None:
        self._inner = inner
        self._readings = Judgements("read", Reading, clock, telemetry, max_bytes)

    async def read(
        self, question: str, inputs: Sequence[Pages], *, until: float | None = None
    ) -> Sequence[Reading | None]:
        question = question[:MAX_QUERY]
        return await self._readings.judged(question, inputs, partial(self._inner.read, question, until=until))


class CachedClaims:
    """A ClaimChecker with a cache: an answer is often given again."""

    def __init__(
        self, inner: ClaimChecker, clock: Clock, telemetry: Telemetry, max_bytes: int = EVIDENCE_BYTES
    ) -> None:
        self._inner = inner
        self._verdicts = Judgements("check", Verdict, clock, telemetry, max_bytes)

    async def check(
        self, claim: str, inputs: Sequence[Pages], *, until: float | None = None
    ) -> Sequence[Verdict | None]:
        return await self._verdicts.judged(claim, inputs, partial(self._inner.check, claim, until=until))


def _evidence_key(task: EvidenceTask, text: str, pages: Pages) -> str:
    """Includes lengths and counts, so that different inputs have different bytes."""
    texts = [text]
    for page in pages:
        texts += (page.title, str(len(page.units)))
        for unit in page.units:
            texts += (unit.before, unit.text)
    digest = hashlib.blake2b(digest_size=20, person=task.encode())
    for one in texts:
        encoded = one.encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % len(encoded))
        digest.update(encoded)
    return digest.hexdigest()
