"""Large replies count against their caller's limit; small ones do not, and what waits holds nothing."""

import asyncio

import pytest

from anabranch.domain.errors import LimitReached
from anabranch.domain.shares import LOCAL, Limit, waits_for_own
from anabranch.policies.reply_memory import FREE_BYTES, HeldReplies
from anabranch.policies.shares import Share

BIG = 4 * FREE_BYTES


@pytest.fixture
def share() -> Share:
    return Share(Limit(name="response_bytes", description="replies", unit="bytes", each=BIG / 2, waiting=1, queued=9))


def used(share: Share) -> float:
    return share.usage(LOCAL).held


async def test_small_replies_are_not_counted(share: Share) -> None:
    replies = HeldReplies(share)
    await replies.add(FREE_BYTES)
    assert used(share) == 0
    await replies.add(1)
    assert used(share) == FREE_BYTES + 1
    replies.leave()
    assert used(share) == 0


async def test_a_request_holds_its_replies_until_its_run_and_its_response_have_ended(share: Share) -> None:
    replies = HeldReplies(share)
    replies.join()
    await replies.add(BIG)
    replies.leave()
    assert used(share) == BIG
    replies.leave()
    assert used(share) == 0
    await replies.add(BIG)
    assert used(share) == 0


async def test_a_run_that_begins_after_its_request_has_ended_is_counted(share: Share) -> None:
    replies = HeldReplies(share)
    await replies.add(BIG)
    replies.leave()
    replies.join()
    await replies.add(BIG)
    assert used(share) == BIG
    replies.leave()
    assert used(share) == 0


async def test_a_response_is_counted_once_with_its_replies_even_beyond_the_limit(share: Share) -> None:
    replies = HeldReplies(share)
    await replies.add(BIG)
    await replies.add_response(BIG + 1)
    assert used(share) == BIG + 1
    replies.count_response(3 * BIG)
    assert used(share) == 3 * BIG


async def test_a_response_without_replies_waits_for_its_turn(share: Share) -> None:
    first, second = HeldReplies(share), HeldReplies(share)
    await first.add(2 * BIG)
    sending = asyncio.create_task(second.add_response(BIG))
    await asyncio.sleep(0)
    assert (used(share), share.usage(LOCAL).waiting) == (2 * BIG, 1)
    first.leave()
    await sending
    assert used(share) == BIG


async def test_a_further_reply_of_a_request_does_not_wait_for_others(share: Share) -> None:
    first, second = HeldReplies(share), HeldReplies(share)
    await first.add(BIG)
    await second.add(BIG)
    with pytest.raises(LimitReached) as refused:
        await second.add(BIG)
    assert refused.value.details["limit"] == "response_bytes"
    assert used(share) == 2 * BIG


async def test_a_request_that_is_cancelled_while_it_waits_holds_nothing(share: Share) -> None:
    first, second = HeldReplies(share), HeldReplies(share)
    await first.add(2 * BIG)
    waited_for_own = False

    async def wait() -> None:
        nonlocal waited_for_own
        try:
            await second.add(BIG)
        finally:
            waited_for_own = waits_for_own.get()

    waiting, behind = asyncio.create_task(wait()), asyncio.create_task(second.add(BIG))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert waited_for_own
    first.leave()
    await behind
    assert used(share) == BIG
    second.leave()
    assert used(share) == 0
