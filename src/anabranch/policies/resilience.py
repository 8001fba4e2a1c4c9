"""The policies towards upstreams, put around the adapters that reach them."""

import asyncio
import random
from collections.abc import Callable, Mapping

import msgspec

from anabranch.domain.contracts import Clock, Generator, Source, Telemetry
from anabranch.domain.model import Endpoint
from anabranch.domain.signals import BreakerState
from anabranch.policies.breaker import Breaker
from anabranch.policies.hedging import HedgedSource, ResilientSource
from anabranch.policies.retries import Chance, GuardedCalls, ResilientGenerator, Sleep
from anabranch.policies.upstreams import Policy, Role, Upstreams


class Resilience:
    """What a process knows of its upstreams, and the decorators that make use of it. One for all questions."""

    def __init__(
        self,
        policy: Policy,
        clock: Clock,
        telemetry: Telemetry,
        *,
        sleep: Sleep = asyncio.sleep,
        chance: Chance = random.random,
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._telemetry = telemetry
        self._sleep = sleep
        self._chance = chance
        self.upstreams = Upstreams(policy, clock, telemetry)

    def source(self, endpoint: Endpoint, made: Callable[[Endpoint], Source]) -> Source:
        """A source behind its breaker, and beside its alternate if it has one; `made` reaches an endpoint."""
        first = self._source(endpoint, made)
        if endpoint.alternate is None:
            return first
        other = msgspec.structs.replace(endpoint, url=endpoint.alternate, alternate=None)
        second = self._source(other, made, " (alternate)")
        return HedgedSource(first, second, clock=self._clock, telemetry=self._telemetry)

    def _source(self, endpoint: Endpoint, made: Callable[[Endpoint], Source], suffix: str = "") -> ResilientSource:
        upstream = self.upstreams.of(endpoint, suffix)
        inner, path = made(endpoint), endpoint.path
        return ResilientSource(inner, upstream, path, clock=self._clock, telemetry=self._telemetry)

    def attempts(self, endpoint: Endpoint, role: Role) -> GuardedCalls:
        """For plain calls, such as those for embeddings."""
        return GuardedCalls(self.upstreams.of(endpoint, f" ({role})", role), self._clock, self._telemetry)

    def breaker(self, endpoint: Endpoint, role: Role) -> Breaker:
        """For those who do the rest themselves."""
        return self.upstreams.of(endpoint, f" ({role})", role).breaker

    def generator(self, endpoint: Endpoint, inner: Generator, *, retried: bool = True) -> Generator:
        return ResilientGenerator(
            inner,
            self.upstreams.of(endpoint, role="model"),
            retries=self._policy.model_retries if retried else 0,
            clock=self._clock,
            telemetry=self._telemetry,
            sleep=self._sleep,
            chance=self._chance,
        )

    def states(self) -> Mapping[str, BreakerState]:
        """How each breaker stands, for display."""
        return self.upstreams.states()
