"""The embedding cache: the same text is embedded once."""

import asyncio
import hashlib
import math
from array import array
from collections.abc import Sequence

import msgspec

from anabranch.domain.contracts import Cache, Embedder, Telemetry
from anabranch.domain.model import Embedding
from anabranch.domain.signals import CacheLooked

FLOAT_BYTES = 4

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Embedding).decode


class CachedEmbedder:
    """An Embedder with a cache. Cached vectors are checked to be of this model and its dimensions."""

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
        digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=20, person=self._where).hexdigest()
        return f"embed:{self._inner.name}:{digest}"

    def _fits(self, found: Embedding) -> bool:
        dimensions = self._inner.dimensions
        return (
            0 < len(found.vector) == FLOAT_BYTES * dimensions
            and len(found.tokens) % max(1, dimensions // 8) == 0
            and all(map(math.isfinite, array("f", found.vector)))
        )

    async def _cached(self, key: str) -> Embedding | None:
        stored = await self._cache.get(key)
        found = None
        if stored is not None:
            try:
                found = decode(stored)
            except msgspec.MsgspecError:
                found = None
        if found is not None and not self._fits(found):
            found = None
        self._telemetry.noted(CacheLooked(cache="embedding", hit=found is not None))
        return found
