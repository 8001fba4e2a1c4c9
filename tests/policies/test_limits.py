"""Limits under load, over several workers, and while Redis comes and goes."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from anabranch.domain.contracts import SystemClock
from anabranch.domain.signals import RedisStateChanged
from anabranch.policies import rate_limits
from anabranch.policies.rate_limits import MemoryLimiter, RedisLimiter
from anabranch.redis.client import Redis
from anabranch.testing.fakes import ManualClock, Recorder
from support.valkey_server import Valkey, running_valkey, until

LIMIT = 20
WINDOW_S = 300.0
TIMEOUT_S = 0.2
NOISE_S = 0.8
LONG_S = 20.0
PATIENCE_S = 15


class Worker:
    """What a process has: its own connection to Redis, its own memory."""

    def __init__(self, url: str, *, timeout_s: float = LONG_S, limit: int = LIMIT) -> None:
        self.recorder = Recorder()
        self.redis = Redis(url, timeout_s=timeout_s, clock=SystemClock(), telemetry=self.recorder)
        self.limiter = RedisLimiter(self.redis, MemoryLimiter(limit, WINDOW_S, SystemClock()), limit, WINDOW_S)


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Valkey]:
    with running_valkey(tmp_path) as server:
        yield server


@pytest.fixture
async def worker(valkey: Valkey) -> AsyncIterator[Callable[..., Worker]]:
    started: list[Worker] = []

    def start(**options: float) -> Worker:
        started.append(Worker(valkey.url, **options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for one in started:
        await one.redis.close()


steps_s = st.one_of(st.just(0.0), st.floats(min_value=0, max_value=4), st.sampled_from([0.5, 1.0, 2.0, 3.0]))


@given(
    st.integers(1, 5),
    st.sampled_from([1.0, 3.0, 0.1]),
    st.lists(st.tuples(steps_s, st.sampled_from("ab")), max_size=60),
    st.floats(min_value=0, max_value=1e6),
)
def test_in_memory_it_decides_as_the_naive_one_does(
    limit: int, window_s: float, calls: list[tuple[float, str]], began: float
) -> None:
    clock = ManualClock(began)
    limiter = MemoryLimiter(limit, window_s, clock)
    admitted: dict[str, list[float]] = {"a": [], "b": []}
    for step_s, key in calls:
        clock.advance(step_s)
        now = clock.monotonic()
        counting = [at for at in admitted[key] if at + window_s > now]
        allowance = limiter.reserve(key).allowance
        assert (allowance.wait_s == 0) == (len(counting) < limit)
        if allowance.wait_s:
            assert now + allowance.wait_s >= counting[-limit] + window_s
            assert allowance.wait_s <= window_s * 1.0001
        else:
            admitted[key].append(now)
            assert allowance.remaining == limit - len(counting) - 1
    for times in admitted.values():
        for first, one_too_many in zip(times, times[limit:], strict=False):
            assert one_too_many >= first + window_s


@example(1, 48.02269730176029, 797.4042475543029)
@given(st.integers(1, 4), st.floats(min_value=0, max_value=1e9), st.floats(min_value=0.001, max_value=1e5))
def test_the_wait_is_exact_whatever_the_rounding(limit: int, began: float, window_s: float) -> None:
    clock = ManualClock(began)
    limiter = MemoryLimiter(limit, window_s, clock)
    for _ in range(limit):
        limiter.reserve("k")
    clock.advance(window_s / 3)
    clock.advance(limiter.reserve("k").allowance.wait_s)
    assert not limiter.reserve("k").allowance.wait_s


def test_what_is_released_is_that_very_call() -> None:
    clock = ManualClock()
    limiter = MemoryLimiter(2, 10.0, clock)
    first = limiter.reserve("k")
    clock.advance(1)
    limiter.reserve("k")
    limiter.release("k", first)
    clock.advance(9.5)  # The first would be over by now, the second is not.
    assert limiter.reserve("k").allowance.remaining == 0
    assert limiter.reserve("k").allowance.wait_s == pytest.approx(0.5)


def test_expired_keys_and_keys_beyond_the_maximum_are_dropped() -> None:
    clock = ManualClock()
    limiter = MemoryLimiter(1, 10.0, clock, max_keys=100)
    for number in range(150):
        limiter.reserve(f"old {number}")
    assert len(limiter._calls) == 100
    assert limiter.reserve("old 149").allowance.wait_s
    assert not limiter.reserve("old 0").allowance.wait_s
    clock.advance(10.0)
    for number in range(60):
        limiter.reserve(f"new {number}")
    assert len(limiter._calls) == 60


async def test_two_workers_admit_exactly_the_limit_between_them(worker: Callable[..., Worker]) -> None:
    workers = [worker(), worker()]
    admitted: Counter[int] = Counter()

    async def caller(number: int) -> None:
        for turn in range(2 * LIMIT):
            allowance = await workers[(turn + number) % 2].limiter.admit(f"rl:rag_stream:{number}")
            admitted[number] += not allowance.wait_s

    await asyncio.gather(*(caller(number) for number in range(200)))
    assert set(admitted.values()) == {LIMIT}
    assert len(admitted) == 200
    for one in workers:
        assert one.recorder.signals == []


async def test_what_another_worker_admitted_is_counted_and_waited_for(worker: Callable[..., Worker]) -> None:
    one, other = worker(), worker()
    for _ in range(LIMIT - 1):
        await one.limiter.admit("k")
    last = await other.limiter.admit("k")
    assert (last.remaining, last.wait_s) == (0, 0)
    for _ in range(LIMIT):
        denied = await other.limiter.admit("k")
        assert WINDOW_S - PATIENCE_S < denied.wait_s <= WINDOW_S
    # What Redis refused does not count here either, or this would be full by now.
    await one.redis.execute("DEL", "k")
    assert not (await other.limiter.admit("k")).wait_s


async def test_the_key_is_as_given_and_leaves_by_itself(worker: Callable[..., Worker]) -> None:
    one = worker()
    await one.limiter.admit("rl:rag_stream:alice")
    assert await one.redis.execute("KEYS", "*") == [b"rl:rag_stream:alice"]
    left_ms = await one.redis.execute("PTTL", "rl:rag_stream:alice")
    assert isinstance(left_ms, int)
    assert WINDOW_S - PATIENCE_S < left_ms / 1000 <= WINDOW_S


async def test_a_clock_that_is_set_back_neither_forgets_nor_locks_out(worker: Callable[..., Worker]) -> None:
    one, other = worker(), worker()
    for _ in range(LIMIT):
        await one.limiter.admit("k")
    calls = await one.redis.execute("ZRANGE", "k", 0, -1)
    assert isinstance(calls, list)
    for call in calls:  # As if Redis' clock had been an hour ahead when they came.
        assert isinstance(call, bytes)
        await one.redis.execute("ZINCRBY", "k", 3_600_000_000, call)
    denied = await other.limiter.admit("k")
    assert WINDOW_S - PATIENCE_S < denied.wait_s <= denied.reset_s <= WINDOW_S


async def test_calls_of_the_same_microsecond_are_still_several(worker: Callable[..., Worker]) -> None:
    one, other = worker(), worker()
    script = ("EVAL", rate_limits.SCRIPT, 1, "k", LIMIT, 1_000_000_000)
    *_, replies = await asyncio.gather(  # Within a transaction Redis' time stands still.
        one.redis.execute("MULTI"), *(one.redis.execute(*script) for _ in range(LIMIT)), one.redis.execute("EXEC")
    )
    assert isinstance(replies, list)
    assert [reply[0] for reply in replies if isinstance(reply, list)] == list(reversed(range(LIMIT)))
    assert (await other.limiter.admit("k")).wait_s


async def test_a_limit_that_was_lowered_counts_what_is_there(worker: Callable[..., Worker]) -> None:
    before, after = worker(limit=10), worker(limit=3)
    for number in range(10):
        await before.limiter.admit("k")
        await before.redis.execute("ZINCRBY", "k", -20_000_000 * (10 - number), await newest(before))
    denied = await after.limiter.admit("k")
    # Eight of the ten have to be over; the eighth came a minute ago.
    assert WINDOW_S - 60 - PATIENCE_S < denied.wait_s <= WINDOW_S - 60


async def newest(worker: Worker) -> bytes:
    last = await worker.redis.execute("ZRANGE", "k", -1, -1)
    assert isinstance(last, list)
    assert isinstance(last[0], bytes)
    return last[0]


async def test_something_else_under_the_key_leaves_it_to_the_process(worker: Callable[..., Worker]) -> None:
    one = worker(limit=2)
    await one.redis.execute("SET", "k", "not ours")
    assert [bool((await one.limiter.admit("k")).wait_s) for _ in range(3)] == [False, False, True]
    assert one.redis.reachable


@pytest.mark.parametrize("way", ["killed", "frozen"])
async def test_while_redis_is_gone_each_process_keeps_its_own_limit(
    way: str, valkey: Valkey, worker: Callable[..., Worker]
) -> None:
    """A steady stream of calls of ever new callers, each asking more often than it may, before, while and after."""
    workers = [worker(timeout_s=TIMEOUT_S), worker(timeout_s=TIMEOUT_S)]
    admitted: Counter[tuple[int, int]] = Counter()
    took: list[float] = []
    numbers = itertools.count()
    ended = asyncio.Event()

    async def caller(place: int) -> None:
        while not ended.is_set():
            number = next(numbers)
            for _ in range(LIMIT + 3):
                began = time.monotonic()
                allowance = await workers[place].limiter.admit(str(number // 2))
                took.append(time.monotonic() - began)
                admitted[place, number // 2] += not allowance.wait_s
                await asyncio.sleep(0.001)

    async def go_on() -> None:
        seen = len(took)
        await until(lambda: len(took) > seen + 300)

    callers = [asyncio.create_task(caller(place % 2)) for place in range(20)]
    await go_on()
    valkey.kill() if way == "killed" else valkey.freeze()
    await until(lambda: not any(one.redis.reachable for one in workers))
    await go_on()
    valkey.start() if way == "killed" else valkey.thaw()
    await until(lambda: all(one.redis.reachable for one in workers))
    await go_on()
    ended.set()
    await asyncio.gather(*callers)
    assert max(admitted.values()) == LIMIT
    assert max(took) < TIMEOUT_S + NOISE_S
    for one in workers:
        moves = [signal.reachable for signal in one.recorder.signals if isinstance(signal, RedisStateChanged)]
        assert (moves[0], moves[-1]) == (False, True)


async def test_a_process_remembers_what_a_restarted_redis_forgot(valkey: Valkey, worker: Callable[..., Worker]) -> None:
    one, other = worker(), worker()
    for _ in range(LIMIT):
        assert not (await one.limiter.admit("k")).wait_s
    valkey.kill()
    valkey.start()
    assert (await one.limiter.admit("k")).wait_s
    assert not (await other.limiter.admit("k")).wait_s
