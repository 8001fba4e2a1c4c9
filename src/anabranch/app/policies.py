"""Admission, rate limits, caches and circuit breakers, in memory or shared by workers through Redis."""

import asyncio
from collections.abc import Coroutine
from importlib.metadata import version
from typing import Any

from anabranch.app.knowledge_opener import KnowledgeOpener
from anabranch.configuration.settings import Settings
from anabranch.domain.contracts import Answerer, Cache, Clock, Embedder, Limiter, Telemetry
from anabranch.policies.admission import AdmissionGate
from anabranch.policies.answer_cache import KEYS as ANSWERS
from anabranch.policies.answer_cache import CachedAnswerer
from anabranch.policies.breaker import Policy, SharedBreakers
from anabranch.policies.cache import EMBEDDING_KEYS, CachedEmbedder, MemoryCache, RedisCache
from anabranch.policies.fair_threads import COMPUTING_NICENESS, FairThreads
from anabranch.policies.limits import limits_of
from anabranch.policies.rate_limits import MemoryLimiter, RateLimits, RedisLimiter
from anabranch.policies.resilience import Resilience
from anabranch.policies.shared_shares import SharedShares
from anabranch.policies.shares import LoopPace, Share
from anabranch.redis.client import Redis

# A request waits for Redis up to three times: the full time-out for the limiter, a share of it for each of two caches.
CACHE_SHARE = 0.25
TEND_EVERY_S = 10.0
SHARED = ("embeddings", "uploads", "upload_bytes", "response_bytes", "steps", "stream_readers")


class Policies:
    def __init__(self, settings: Settings, clock: Clock, telemetry: Telemetry) -> None:
        self._settings = settings
        self._clock = clock
        self._telemetry = telemetry
        self.redis: Redis | None = None
        if settings.redis_url is not None:
            self.redis = Redis(settings.redis_url, timeout_s=settings.redis_timeout, clock=clock, telemetry=telemetry)
        self._far: RedisCache | None = None
        self._near = near = MemoryCache(settings.cache_bytes, clock)
        self.cache: Cache = near
        limit, window_s = settings.rate_limit, settings.rate_limit_window
        local = MemoryLimiter(limit, window_s, clock)
        limiter: Limiter = local
        if self.redis is not None:
            self.cache = self._far = RedisCache(self.redis, near, wait_s=settings.redis_timeout * CACHE_SHARE)
            limiter = RedisLimiter(self.redis, local, limit, window_s)
        self.resilience = Resilience(Policy.of(settings), clock, telemetry)
        limits = self.limits = limits_of(settings)
        surfaces = settings.rate_limit_surfaces if limit else ()
        self.rate_limits = RateLimits(limiter, surfaces, limits["changes"], telemetry)
        self._pace = LoopPace()
        self.gate = AdmissionGate(limits["questions"], telemetry, self._pace)
        self.computing = FairThreads(limits["computations"], COMPUTING_NICENESS)
        self.shares = {
            "questions": self.gate.share,
            "computations": self.computing.share,
            **{name: Share(limits[name]) for name in SHARED},
        }

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        """What runs in the background while questions are answered."""
        tasks = [self._tend()]
        if self.redis is not None:
            tasks.append(SharedBreakers(self.redis, self.resilience.upstreams, self._clock).run())
            tasks.append(SharedShares(self.redis, self.shares).run())
        return tasks

    async def _tend(self) -> None:
        while True:
            await asyncio.sleep(TEND_EVERY_S)
            self.resilience.upstreams.drop_unused()

    def forget_cached(self) -> int:
        """Drop the answers and embeddings that this process has cached; returns how many."""
        return self._near.forget((ANSWERS, EMBEDDING_KEYS))

    async def close(self) -> None:
        self._pace.close()
        if self._far is not None:
            await self._far.settled()
        if self.redis is not None:
            await self.redis.close()
        await asyncio.to_thread(self.computing.close)

    def cached(self, inner: Answerer, knowledge: KnowledgeOpener) -> Answerer:
        """The Answerer with a cache, if the settings have one."""
        if not self._settings.answer_cache_ttl:
            return inner

        return CachedAnswerer(
            inner,
            cache=self.cache,
            ttl_s=self._settings.answer_cache_ttl,
            look=knowledge.seen,
            settings=_answer_settings(self._settings),
            clock=self._clock,
            telemetry=self._telemetry,
            withholds=self._settings.min_faithfulness is not None,
        )

    def embedder(self, inner: Embedder) -> Embedder:
        """The Embedder with a cache of question vectors, if the settings have one."""
        ttl_s = self._settings.embedding_cache_ttl
        if not ttl_s:
            return inner
        where = self._settings.embedding_url or ""
        return CachedEmbedder(inner, where=where, cache=self.cache, ttl_s=ttl_s, telemetry=self._telemetry)


def _answer_settings(settings: Settings) -> tuple[str, ...]:
    """The settings in the key of the answer cache: another release or model invalidates it."""
    chosen = (
        version("anabranch"),
        settings.query_context_tokens,
        settings.context,
        settings.compact_tokens,
        settings.embedding_url,
        settings.embedding_model,
        settings.embedding_relevance,
        settings.reranker_path,
        settings.reranker_url,
        settings.reranker_model,
        settings.verifier_path,
        settings.verifier_url,
        settings.verifier_model,
        settings.evidence,
        settings.evidence_passages,
        settings.verify,
        settings.min_faithfulness,
    )
    return tuple(map(str, chosen))
