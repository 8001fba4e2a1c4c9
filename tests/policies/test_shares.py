"""Shares: what each caller may hold of a resource, and the fair queue for it."""

import asyncio
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.domain.errors import LimitReached, Overloaded
from anabranch.domain.shares import LOCAL, Claimant, Limit
from anabranch.policies.shares import Held, LoopPace, Share

ALICE, BOB, CAROL = (Claimant(name=name) for name in ("alice", "bob", "carol"))
STRANGER, OTHER = (Claimant(name=name, known=False) for name in ("10.0.0.1", "10.0.0.2"))


def share(**limits: Any) -> Share:
    return Share(Limit(name="things", description="things at once", setting="CALLER_THINGS", **limits))


async def test_a_caller_over_its_limit_is_refused_and_others_are_not() -> None:
    things = share(each=2)
    held = [things.enter(caller=ALICE) for _ in range(2)]
    with pytest.raises(LimitReached) as refused:
        things.enter(caller=ALICE)
    assert refused.value.details == {"limit": "things", "allowed": 2, "retry_after_s": 1}
    assert "your limit of 2 things at once (CALLER_THINGS)" in refused.value.message
    things.enter(caller=BOB)
    held[0].leave()
    things.enter(caller=ALICE)


async def test_the_operator_has_a_larger_share_and_a_key_may_have_its_own() -> None:
    things = share(each=2)
    assert things.limit.of(LOCAL) == 8
    assert things.limit.of(Claimant(name="alice", limits={"things": 5})) == 5
    assert things.limit.of(Claimant(name="alice", limits={"others": 5})) == 2


@pytest.mark.parametrize("waiting", [0, 9])
async def test_a_limit_of_nothing_refuses_at_once(waiting: int) -> None:
    things = share(each=2, waiting=waiting)
    with pytest.raises(LimitReached):
        things.enter(caller=Claimant(name="alice", limits={"things": 0}))


async def test_a_caller_with_many_requests_does_not_delay_one_with_few() -> None:
    things = share(total=1, queued=1_000)
    running = things.enter(caller=ALICE)
    crowd = [things.enter(caller=ALICE) for _ in range(300)]
    single = things.enter(caller=BOB)
    served = 0
    while not single.granted:
        running.leave()
        running = next(one for one in [*crowd, single] if one.granted and not one.gone)
        served += running is not single
    assert served <= 1


async def test_unknown_callers_leave_what_is_reserved_for_known_ones() -> None:
    things = share(total=4, reserved=1, queued=10)
    strangers = [things.enter(caller=STRANGER), things.enter(caller=OTHER), things.enter(caller=STRANGER)]
    waiting = things.enter(caller=OTHER)
    assert not waiting.granted
    known = things.enter(caller=ALICE)
    assert known.granted
    known.leave()
    assert not waiting.granted
    strangers[0].leave()
    assert waiting.granted


async def test_all_in_use_is_an_overload_of_the_server() -> None:
    things = share(each=5, total=1)
    things.enter(caller=ALICE)
    with pytest.raises(Overloaded) as refused:
        things.enter(caller=BOB)
    assert refused.value.details == {"limit": "things", "retry_after_s": 1}


async def test_what_is_larger_than_the_limit_is_held_alone() -> None:
    things = share(each=10, total=20)
    large = things.enter(15, ALICE)
    with pytest.raises(LimitReached):
        things.enter(1, ALICE)
    large.leave()
    small = things.enter(1, ALICE)
    with pytest.raises(LimitReached):
        things.enter(15, ALICE)
    with pytest.raises(LimitReached):
        small.grow(10)
    small.grow(9)
    assert things.usage(ALICE).held == 10
    small.leave()
    assert things.usage(ALICE).held == things.held == 0


async def test_what_is_held_in_other_processes_counts() -> None:
    things = share(each=3, waiting=5)
    things.counted_elsewhere({"alice": 2})
    first, second = things.enter(caller=ALICE), things.enter(caller=ALICE)
    assert (first.granted, second.granted) == (True, False)
    assert things.usage(ALICE).held == 3
    things.counted_elsewhere({})
    assert second.granted


async def test_a_caller_with_many_gets_more_only_while_the_loop_keeps_up() -> None:
    pace = LoopPace(tick_s=0.001, per_tick=2, late_s=1e9)
    things = Share(Limit(name="things", description="things", each=100, waiting=100, ready=3), pace=pace)
    held = [things.enter(caller=ALICE) for _ in range(8)]
    assert sum(one.granted for one in held) == 5  # three at once, two in this tick
    other = [things.enter(caller=BOB) for _ in range(3)]
    assert all(one.granted for one in other)
    async with asyncio.timeout(30):
        await asyncio.gather(*(one.turn() for one in held))
    pace.close()


async def test_while_the_loop_is_late_a_caller_gets_no_more_than_its_first() -> None:
    pace = LoopPace(tick_s=0.001, per_tick=2, late_s=-1.0)
    things = Share(Limit(name="things", description="things", each=100, waiting=100, ready=3), pace=pace)
    held = [things.enter(caller=ALICE) for _ in range(8)]
    for _ in range(5):
        await asyncio.sleep(0.002)
    assert sum(one.granted for one in held) == 5
    held[0].leave()
    held[1].leave()
    held[2].leave()
    assert sum(one.granted for one in held) == 6  # it holds three again
    pace.close()


@given(st.data())
def test_limits_hold_and_no_place_is_left_unused_while_somebody_waits(
    data: st.DataObject,
) -> None:
    asyncio.run(_random_run(data))


async def _random_run(data: st.DataObject) -> None:
    each, total = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    reserved = data.draw(st.integers(0, total - 1))
    things = share(each=each, total=total, reserved=reserved, waiting=20, queued=20)
    callers = [ALICE, BOB, STRANGER, OTHER]
    present: list[tuple[Claimant, Held]] = []
    for _ in range(data.draw(st.integers(1, 60))):
        leaves: bool = data.draw(st.booleans())
        if present and leaves:
            present.pop(data.draw(st.integers(0, len(present) - 1)))[1].leave()
        else:
            caller = data.draw(st.sampled_from(callers))
            with suppress(LimitReached, Overloaded):
                present.append((caller, things.enter(caller=caller)))
        _check(things, present, each, total, reserved)
    while present:
        granted = [one for one in present if one[1].granted]
        assert granted, "somebody waits although nobody holds anything"
        present.remove(granted[0])
        granted[0][1].leave()
        _check(things, present, each, total, reserved)
    assert (things.held, things.waiting, things.holders()) == (0, 0, {})


def _check(things: Share, present: list[tuple[Claimant, Held]], each: int, total: int, reserved: int) -> None:
    held = Counter(caller.name for caller, one in present if one.granted)
    unknown = sum(one.granted and not caller.known for caller, one in present)
    assert all(count <= each for count in held.values())
    assert sum(held.values()) == things.held <= total
    assert unknown <= total - reserved
    assert sum(not one.granted for _, one in present) == things.waiting
    # Who waits could not hold it: no place is left unused.
    for caller, one in present:
        if not one.granted:
            full = things.held >= total
            assert full or held[caller.name] >= each or (not caller.known and unknown >= total - reserved)
