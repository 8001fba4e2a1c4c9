"""Admission, rate limits, caches and circuit breakers, in memory or shared by workers through Redis."""

import asyncio
import hashlib
from importlib.metadata import version
from ipaddress import IPv6Address, ip_address, ip_network
from typing import TYPE_CHECKING

from anabranch.app.knowledge_opener import KnowledgeOpener
from anabranch.configuration.settings import Settings
from anabranch.domain.contracts import Answerer, Cache, Clock, Embedder, Limiter, Telemetry
from anabranch.domain.errors import RateLimited
from anabranch.domain.model import Allowance, Context, Question
from anabranch.domain.signals import RateLimitChecked, Rejected
from anabranch.knowledge.model import EVERYTHING, Caller
from anabranch.policies.admission import AdmissionGate
from anabranch.policies.answer_cache import CachedAnswerer, Recipe
from anabranch.policies.breaker import Policy
from anabranch.policies.cache import CachedEmbedder, MemoryCache, RedisCache, TieredCache
from anabranch.policies.rate_limits import MemoryLimiter, RedisLimiter
from anabranch.policies.resilience import Resilience

if TYPE_CHECKING:
    from anabranch.policies.breaker import SharedBreakers
    from anabranch.redis.client import Redis

# A request waits for Redis up to three times: the full time-out for the limiter, a share of it for each of two caches.
CACHE_SHARE = 0.25
LONGEST_USER = 200
ADDRESS_BLOCK = 64
TEND_EVERY_S = 10.0


class Policies:
    def __init__(self, settings: Settings, clock: Clock, telemetry: Telemetry) -> None:
        self._settings = settings
        self._clock = clock
        self._telemetry = telemetry
        self.redis = _redis(settings, clock, telemetry)
        self._far: RedisCache | None = None
        near = MemoryCache(settings.cache_bytes, clock)
        self.cache: Cache = near
        limit, window_s = settings.rate_limit, settings.rate_limit_window
        local = MemoryLimiter(limit, window_s, clock)
        self._limiter: Limiter = local
        if self.redis is not None:
            self._far = RedisCache(self.redis, wait_s=settings.redis_timeout * CACHE_SHARE)
            self.cache = TieredCache(near, self._far)
            self._limiter = RedisLimiter(self.redis, local, limit, window_s)
        self._limited = frozenset(settings.rate_limit_surfaces) if limit else frozenset()
        self._recipe_settings = _answer_settings(settings)
        self.resilience = Resilience(Policy.of(settings), clock, telemetry)
        self._breakers = _shared(self.redis, self.resilience, clock)
        self._tending: asyncio.Task[None] | None = None
        self.gate = AdmissionGate(settings.max_running, settings.max_waiting, telemetry)

    def start(self) -> None:
        """Start the background tasks."""
        self._tending = asyncio.create_task(self._tend())
        if self._breakers is not None:
            self._breakers.start()

    async def _tend(self) -> None:
        while True:
            await asyncio.sleep(TEND_EVERY_S)
            self.resilience.upstreams.tend()

    async def close(self) -> None:
        if self._tending is not None:
            self._tending.cancel()
            await asyncio.wait([self._tending])
        if self._breakers is not None:
            await self._breakers.close()
        if self._far is not None:
            await self._far.settled()
        if self.redis is not None:
            await self.redis.close()

    async def meter(self, context: Context) -> Allowance | None:
        """Count a question against its caller's limit, where there is one."""
        if context.surface not in self._limited or (bucket := bucket_of(context)) is None:
            return None
        allowance = await self._limiter.admit(bucket)
        caller = context.user_id or context.address or ""
        self._telemetry.noted(RateLimitChecked(surface=context.surface, admitted=not allowance.wait_s, caller=caller))
        if allowance.wait_s:
            self._telemetry.noted(Rejected(surface=context.surface, code=RateLimited.code))
            raise RateLimitExceeded(allowance)
        return allowance

    def cached(self, inner: Answerer, knowledge: KnowledgeOpener) -> Answerer:
        """The Answerer with a cache, if the settings have one."""
        if not self._settings.answer_cache_ttl:
            return inner

        async def look(question: Question, context: Context) -> str | None:
            if not knowledge.exists or any(source.slug != EVERYTHING for source in question.sources):
                return None
            return await (await knowledge()).seen(question.filters, Caller.of(context))

        return CachedAnswerer(
            inner,
            cache=self.cache,
            ttl_s=self._settings.answer_cache_ttl,
            look=look,
            recipe=self._recipe,
            clock=self._clock,
            telemetry=self._telemetry,
        )

    def embedder(self, inner: Embedder) -> Embedder:
        """The Embedder with a cache of question vectors, if the settings have one."""
        ttl_s = self._settings.embedding_cache_ttl
        if not ttl_s:
            return inner
        where = self._settings.embedding_url or ""
        return CachedEmbedder(inner, where=where, cache=self.cache, ttl_s=ttl_s, telemetry=self._telemetry)

    def _recipe(self, question: Question) -> Recipe:
        return Recipe(prompt_version=question.profile.prompt_version, settings=self._recipe_settings)


def _answer_settings(settings: Settings) -> tuple[str, ...]:
    """The settings in the key of the answer cache: another release, embedder or reranker invalidates it."""
    chosen = (
        version("anabranch"),
        settings.query_context_tokens,
        settings.embedding_url,
        settings.embedding_model,
        settings.reranker_path,
        settings.reranker_url,
        settings.reranker_model,
    )
    return tuple(map(str, chosen))


def _shared(redis: "Redis | None", resilience: Resilience, clock: Clock) -> "SharedBreakers | None":
    """Shared circuit breaker states, if there is a Redis."""
    if redis is None:
        return None
    from anabranch.policies.breaker import SharedBreakers  # noqa: PLC0415  most have no Redis

    return SharedBreakers(redis, resilience.upstreams, clock)


def _redis(settings: Settings, clock: Clock, telemetry: Telemetry) -> "Redis | None":
    if settings.redis_url is None:
        return None
    from anabranch.redis.client import Redis  # noqa: PLC0415  most have none

    return Redis(settings.redis_url, timeout_s=settings.redis_timeout, clock=clock, telemetry=telemetry)


class RateLimitExceeded(RateLimited):
    """RateLimited, with the time to wait in whole seconds, rounded up."""

    def __init__(self, allowance: Allowance) -> None:
        self.allowance = allowance
        wait_s = int(-(-allowance.wait_s // 1))
        super().__init__(
            f"You have asked {allowance.limit} times within a short while; ask again in {wait_s} s.",
            retry_after_s=wait_s,
        )


def bucket_of(context: Context) -> str | None:
    """The rate limit's key: the user, or else the address; of IPv6 the /64 block, all of which one client can have."""
    surface = f"rl:{context.surface}"
    user = context.user_id
    if user is not None:
        long = len(user) > LONGEST_USER
        return f"{surface}:{hashlib.blake2b(user.encode(errors='replace')).hexdigest() if long else user}"
    if context.address is None:
        return None
    try:
        address = ip_address(context.address)
    except ValueError:
        return f"{surface}_address:{context.address}"
    if isinstance(address, IPv6Address):
        block = ip_network((address, ADDRESS_BLOCK), strict=False)
        return f"{surface}_address:{block.network_address}/{ADDRESS_BLOCK}"
    return f"{surface}_address:{address}"
