"""Every limiter passes the contract suite of limiters."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from anabranch.domain.contracts import SystemClock
from anabranch.policies.rate_limits import MemoryLimiter, RedisLimiter
from anabranch.redis.client import Redis
from anabranch.telemetry.log import SilentTelemetry
from anabranch.testing.contracts.limiter import LIMIT, WINDOW_S, LimiterCase, LimiterContract
from anabranch.testing.fakes import ManualClock
from support.valkey_server import running_valkey


@pytest.fixture(params=["memory", "redis", "redis that is gone"])
async def case(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[LimiterCase]:
    clock = ManualClock(1_000_000.1)
    local = MemoryLimiter(LIMIT, WINDOW_S, clock)

    async def later(seconds: float) -> None:
        clock.advance(seconds)

    if request.param == "memory":
        yield LimiterCase(local, later)
        return

    with running_valkey(tmp_path) as server:
        redis = Redis(server.url, timeout_s=20.0, clock=SystemClock(), telemetry=SilentTelemetry())

        async def all_earlier(seconds: float) -> None:
            """Time passes in Redis too: whatever happened there has happened so much earlier."""
            clock.advance(seconds)
            keys = await redis.execute("KEYS", "*") if redis.reachable else []
            for key in keys if isinstance(keys, list) else []:
                assert isinstance(key, bytes)
                calls = await redis.execute("ZRANGE", key, 0, -1)
                for call in calls if isinstance(calls, list) else []:
                    assert isinstance(call, bytes)
                    await redis.execute("ZINCRBY", key, -round(seconds * 1_000_000), call)

        if request.param == "redis that is gone":
            server.kill()
        yield LimiterCase(RedisLimiter(redis, local, LIMIT, WINDOW_S), all_earlier)
        await redis.close()


class TestLimiter(LimiterContract):
    """Every limiter of this package."""
