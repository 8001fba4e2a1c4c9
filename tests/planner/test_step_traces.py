"""Spec 2's TelemetryContextStore: traces by session, step and subagent, over any cache."""

from pathlib import Path

import pytest

from anabranch.domain.contracts import SystemClock
from anabranch.domain.errors import InternalError
from anabranch.domain.model import Context
from anabranch.domain.steps import Trace
from anabranch.planner.services import TelemetryContextStore, step_trace, within
from anabranch.policies.cache import MemoryCache, RedisCache
from anabranch.redis.client import Redis
from anabranch.telemetry.log import SilentTelemetry
from anabranch.testing import ManualClock
from support.valkey_server import running_valkey

TRACE = Trace(trace_id="a" * 32, span_id="b" * 16, parent_span_id="c" * 16, tracestate="x=1")
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-31c8b63d42d203f9-01"


async def test_a_stored_trace_is_found_by_session_step_and_subagent_until_it_expires() -> None:
    clock = ManualClock()
    store = TelemetryContextStore(MemoryCache(100_000, clock), 60)
    await store.put("s", "p", "docs", TRACE)
    assert await store.get("s", "p", "docs") == TRACE
    assert await store.get("s", "p", "rows") is None
    await store.put("1:s", "p", "k", TRACE)
    assert await store.get("1", "s:p", "k") is None
    clock.advance(61)
    assert await store.get("s", "p", "docs") is None


async def test_a_trace_stored_by_one_worker_is_found_by_another_through_redis(tmp_path: Path) -> None:
    clock = ManualClock()
    with running_valkey(tmp_path) as valkey:
        redis = Redis(valkey.url, timeout_s=20.0, clock=SystemClock(), telemetry=SilentTelemetry())
        caches = [RedisCache(redis, MemoryCache(100_000, clock), wait_s=20.0) for _ in range(2)]
        one, other = (TelemetryContextStore(cache, 60) for cache in caches)
        await one.put("s", "p", "docs", TRACE)
        await caches[0].settled()
        assert await other.get("s", "p", "docs") == TRACE
        assert await other.get("s", "p", "rows") is None
        await redis.close()
        await one.put("s", "p", "rows", TRACE)
        assert await one.get("s", "p", "rows") == TRACE, "without Redis, in memory"


class BrokenCache:
    def __init__(self, found: bytes | Exception) -> None:
        self._found = found

    async def get(self, key: str) -> bytes | None:
        if isinstance(self._found, Exception):
            raise self._found
        return self._found

    async def put(self, key: str, value: bytes, ttl_s: float) -> None:
        if isinstance(self._found, Exception):
            raise self._found


@pytest.mark.parametrize(
    "found", [b"", b"\xff", b"[]", b'{"trace_id":1}', OSError(), TimeoutError(), InternalError("no")]
)
async def test_a_failing_cache_counts_as_no_stored_trace(found: bytes | Exception) -> None:
    store = TelemetryContextStore(BrokenCache(found), 60)
    await store.put("s", "p", "docs", TRACE)
    assert await store.get("s", "p", "docs") is None


def test_a_step_uses_the_trace_of_its_request_or_a_new_one() -> None:
    asked = Context(correlation_id="c", deadline=0, traceparent=TRACEPARENT, tracestate="y=2")
    assert step_trace(asked).traceparent == TRACEPARENT
    assert step_trace(asked).tracestate == "y=2"
    for given in (None, "", "00-zz", TRACEPARENT.upper()):
        made = step_trace(Context(correlation_id="c", deadline=0, traceparent=given))
        assert (len(made.trace_id), len(made.span_id)) == (32, 16)
        assert made != step_trace(Context(correlation_id="c", deadline=0, traceparent=given))


def test_the_request_is_the_parent_of_a_subagents_trace_unless_it_names_one() -> None:
    asked = Context(correlation_id="c", deadline=0, traceparent=TRACEPARENT)
    bare = Trace(trace_id="a" * 32, span_id="b" * 16)
    assert within(bare, asked).parent_span_id == "31c8b63d42d203f9"
    assert within(TRACE, asked) == TRACE
    assert within(bare, Context(correlation_id="c", deadline=0)) == bare


def test_without_a_trace_of_the_request_a_step_uses_the_trace_of_its_envelope() -> None:
    named = Trace(trace_id="a" * 32, span_id="b" * 16, tracestate="vendor=1")
    own = step_trace(Context(correlation_id="c", deadline=1.0), [named, Trace(trace_id="c" * 32, span_id="d" * 16)])
    assert (own.trace_id, own.tracestate) == (named.trace_id, named.tracestate)
    assert own.span_id != named.span_id
    asked = Context(correlation_id="c", deadline=1.0, traceparent=f"00-{'e' * 32}-{'f' * 16}-01")
    assert step_trace(asked, [named]).trace_id == "e" * 32
