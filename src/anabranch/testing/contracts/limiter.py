"""The tests of the contract Limiter."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from anabranch.domain.contracts import Limiter

LIMIT = 5
WINDOW_S = 300.0
# Longer than any test: a limiter may also measure real time.
MARGIN_S = 30.0


class LimiterCase(NamedTuple):
    """A limiter of LIMIT calls in WINDOW_S, and `advance` to move its clock by seconds."""

    limiter: Limiter
    advance: Callable[[float], Awaitable[None]]


class LimiterContract:
    """The fixture `case` gives a LimiterCase."""

    async def test_calls_above_the_limit_get_a_wait_time(self, case: LimiterCase) -> None:
        for used in range(LIMIT):
            allowance = await case.limiter.admit("rl:rag_stream:alice")
            assert (allowance.limit, allowance.remaining, allowance.wait_s) == (LIMIT, LIMIT - used - 1, 0)
            assert abs(allowance.reset_s - WINDOW_S) < 0.001
        allowance = await case.limiter.admit("rl:rag_stream:alice")
        assert (allowance.limit, allowance.remaining) == (LIMIT, 0)
        assert WINDOW_S - MARGIN_S < allowance.wait_s <= allowance.reset_s <= WINDOW_S

    async def test_a_call_is_admitted_after_wait_s_and_not_before(self, case: LimiterCase) -> None:
        for _ in range(LIMIT):
            assert not (await case.limiter.admit("k")).wait_s
            await case.advance(40.0)
        # The first call leaves the window after 300 s, the next 40 s later, and so on.
        for _ in range(3):
            early = await case.limiter.admit("k")
            assert early.wait_s > 0
            await case.advance(max(early.wait_s - MARGIN_S, 0))
            allowance = await case.limiter.admit("k")
            assert 0 < allowance.wait_s <= MARGIN_S + 0.001
            await case.advance(allowance.wait_s)
            assert not (await case.limiter.admit("k")).wait_s

    async def test_after_reset_s_the_whole_limit_is_available(self, case: LimiterCase) -> None:
        for _ in range(LIMIT):
            await case.limiter.admit("k")
            await case.advance(10.0)
        refused = await case.limiter.admit("k")
        assert refused.wait_s < refused.reset_s
        await case.advance(refused.reset_s)
        assert (await case.limiter.admit("k")).remaining == LIMIT - 1

    async def test_used_counts_admitted_calls_of_the_window(self, case: LimiterCase) -> None:
        for _ in range(LIMIT + 1):
            await case.limiter.admit("k")
        assert (case.limiter.used("k"), case.limiter.used("other")) == (LIMIT, 0)
        await case.advance(WINDOW_S + MARGIN_S)
        assert case.limiter.used("k") == 0

    async def test_refused_calls_do_not_count(self, case: LimiterCase) -> None:
        for _ in range(LIMIT):
            await case.limiter.admit("k")
        await case.advance(WINDOW_S / 2)
        for _ in range(3 * LIMIT):
            assert (await case.limiter.admit("k")).wait_s
        await case.advance(WINDOW_S / 2)
        for _ in range(LIMIT):
            assert not (await case.limiter.admit("k")).wait_s

    async def test_concurrent_calls_never_exceed_the_limit(self, case: LimiterCase) -> None:
        allowances = await asyncio.gather(*(case.limiter.admit("k") for _ in range(20 * LIMIT)))
        assert sorted(each.remaining for each in allowances if not each.wait_s) == list(range(LIMIT))

    async def test_keys_are_limited_independently(self, case: LimiterCase) -> None:
        keys = ["", " ", "a", "A", "a:b", "ä", "half \ud83d", "line\r\nbreak", "nul\0", "{tag}", "x" * 5000]
        for _ in range(LIMIT):
            for key in keys:
                assert not (await case.limiter.admit(key)).wait_s
        for key in keys:
            assert (await case.limiter.admit(key)).wait_s
