"""Admission control: how many questions run, wait and are rejected."""

import asyncio

import pytest

from anabranch.domain.errors import Overloaded
from anabranch.domain.shares import Limit
from anabranch.domain.signals import Load, Rejected
from anabranch.policies.admission import REPORT_AFTER_S, AdmissionGate
from anabranch.testing import Recorder


def gate(running: int, waiting: int) -> tuple[AdmissionGate, Recorder]:
    telemetry = Recorder()
    limit = Limit(name="questions", description="questions at once", total=running, queued=waiting)
    return AdmissionGate(limit, telemetry), telemetry


async def begun(task: "asyncio.Task[None]") -> bool:
    """Whether it is through, once everything that can go on has gone on."""
    for _ in range(5):
        await asyncio.sleep(0)
    return task.done()


async def test_a_question_beyond_the_limit_is_rejected_with_retry_after() -> None:
    full, telemetry = gate(1, 1)
    full.enter("chat")
    full.enter("chat")
    with pytest.raises(Overloaded) as refused:
        full.enter("chat")
    assert refused.value.details["retry_after_s"] == 1
    assert telemetry.signals == [Rejected(surface="chat", code="overloaded")]
    full.report_load()
    assert telemetry.signals[-1] == Load(running=1, waiting=1)


async def test_waiting_questions_are_admitted_in_order() -> None:
    narrow, _ = gate(1, 2)
    first, second, third = (narrow.enter("chat") for _ in range(3))
    await first.turn()
    turns = [asyncio.create_task(place.turn()) for place in (second, third)]
    assert [await begun(turn) for turn in turns] == [False, False]
    first.leave()
    assert [await begun(turn) for turn in turns] == [True, False]
    second.leave()
    assert await begun(turns[1])


async def test_a_question_cancelled_in_the_queue_frees_its_place() -> None:
    narrow, telemetry = gate(1, 2)
    first, second, third = (narrow.enter("chat") for _ in range(3))
    turn = asyncio.create_task(third.turn())
    second.leave()
    assert not await begun(turn)
    narrow.enter("chat")
    first.leave()
    assert await begun(turn)
    narrow.report_load()
    assert telemetry.signals[-1] == Load(running=1, waiting=1)


async def test_a_question_cancelled_as_it_is_admitted_frees_its_slot() -> None:
    narrow, telemetry = gate(1, 2)
    first, second, third = (narrow.enter("chat") for _ in range(3))
    turns = [asyncio.create_task(place.turn()) for place in (second, third)]
    await begun(turns[0])
    turns[0].cancel()
    first.leave()  # before the cancelled one has had a chance to leave
    second.leave()
    assert await begun(turns[1])
    third.leave()
    narrow.report_load()
    assert telemetry.signals[-1] == Load(running=0, waiting=0)


async def test_leaving_an_admission_slot_twice_counts_once() -> None:
    narrow, telemetry = gate(2, 0)
    place = narrow.enter("chat")
    narrow.enter("chat")
    place.leave()
    place.leave()
    narrow.report_load()
    assert telemetry.signals[-1] == Load(running=1, waiting=0)


async def test_the_load_is_reported_a_moment_after_a_change() -> None:
    wide, telemetry = gate(2, 0)
    place = wide.enter("chat")
    assert telemetry.signals == []
    await asyncio.sleep(2 * REPORT_AFTER_S)
    assert telemetry.signals == [Load(running=1, waiting=0)]
    place.leave()
    await asyncio.sleep(2 * REPORT_AFTER_S)
    assert telemetry.signals[1:] == [Load(running=0, waiting=0)]
