"""Steps under a coordinator: what readers of the log see, whatever subagents, callers and the log do."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from anabranch.domain.contracts import SystemClock
from anabranch.domain.errors import (
    AnabranchError,
    Conflict,
    FailureKind,
    InvalidQuestion,
    LeaseLost,
    NotFound,
    Overloaded,
    ShuttingDown,
    StreamFull,
    StreamUnavailable,
    UpstreamError,
    UpstreamTimedOut,
)
from anabranch.domain.eventlog import Entry
from anabranch.domain.model import Context
from anabranch.domain.signals import EventIgnored, ShadowCompared, StepEnded, SubagentEnded
from anabranch.domain.steps import Cancel, Decision, Fragment, Progress, Push, Trace
from anabranch.planner.services import later
from anabranch.testing import FakeSubagent
from support.planner_server import STREAM, TRACEPARENT, Workbench, expects, here, told


def raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


PART = Fragment(status="partial", payload=raw({"n": 1}), metrics={"count": 4})
DONE = Fragment(status="success", payload=raw({"n": 2}))
NEVER = asyncio.Event


async def test_pushed_and_called_subagents_share_one_stream_with_one_end() -> None:
    bench = Workbench({"docs": FakeSubagent([PART, DONE])})
    await bench.begin(here("docs"), expects("rows"), next_step_id="q")
    first = await bench.push("rows", "partial", {"r": 1}, revision=1)
    assert first.sequence
    assert (await bench.push("rows", "partial", {"r": 1}, revision=1)).ignored == "duplicate"
    last = await bench.push("rows_result", "success", {"r": 2}, latency_ms=12)
    assert last.status in ("in_progress", "success")
    events = await bench.ended()
    assert [event["sequence"] for event in events] == list(range(1, len(events) + 1))
    assert told([event for event in events if event["content"]["stage"] == "docs"]) == [
        ("subagent_pending", "pending"),
        ("subagent_started", "in_progress"),
        ("subagent_result", "partial"),
        ("subagent_result", "success"),
        ("subagent_completed", "success"),
    ]
    end = events[-1]["content"]
    assert end["status"] == "success"
    assert end["payload"]["next_step_id"] == "q"
    assert end["payload"]["subagents"]["rows_result"]["latency_ms"] == 12
    assert events[last.sequence - 1]["telemetry"]["latency_ms"] == 12
    with pytest.raises(NotFound):
        await bench.push("rows", "success")
    written = [crumb for crumb in bench.crumbs.dropped if crumb.ignored is None]
    assert [crumb.sequence for crumb in written] == [event["sequence"] for event in events]
    assert [crumb.ignored for crumb in bench.crumbs.dropped if crumb.ignored] == ["duplicate"]
    signals = bench.telemetry.signals
    assert EventIgnored(reason="duplicate") in signals
    assert StepEnded(status="success", latency_ms=0) in signals
    assert SubagentEnded(subagent="docs", status="success", latency_ms=0) in signals
    assert {span.name for span in bench.telemetry.spans} == {"aggregation.wait", "aggregation.emit"}
    assert all(turns.left == [True] for turns in bench.turns.values())


async def test_metrics_and_payloads_are_written_unchanged() -> None:
    bench = Workbench({"docs": FakeSubagent([PART, DONE])})
    await bench.begin(here("docs"))
    partial = next(event for event in await bench.ended() if event["content"]["status"] == "partial")
    assert partial["content"]["payload"] == {"n": 1}
    assert partial["content"]["result_key"] == "docs_result"
    assert partial["telemetry"]["metrics"] == {"count": 4}


async def test_an_event_has_the_trace_of_its_subagent_or_else_of_its_step() -> None:
    docs = FakeSubagent([DONE])
    bench = Workbench({"docs": docs})
    named = Trace(trace_id="a" * 32, span_id="b" * 16, tracestate="x=1")
    await bench.begin(here("docs", trace=named), expects("rows"))
    events = await bench.events()
    assert events[0]["telemetry"]["traceparent"] == TRACEPARENT
    assert "parent_span_id" not in events[0]["telemetry"]
    own = Trace(trace_id="c" * 32, span_id="d" * 16)
    await bench.push("rows", "partial")
    await bench.push("rows", "partial", trace=own)
    await bench.push("rows", "success")
    events = await bench.ended()
    by_stage = [event["telemetry"] for event in events if event["content"]["stage"] == "docs"]
    assert {told["traceparent"] for told in by_stage} == {named.traceparent}
    assert {told["parent_span_id"] for told in by_stage} == {TRACEPARENT[36:52]}
    assert {told["tracestate"] for told in by_stage} == {"x=1"}
    assert docs.contexts[0].traceparent == named.traceparent
    assert docs.contexts[0].tracestate == "x=1"
    assert docs.contexts[0].user_id == "ada"
    assert docs.contexts[0].deadline == 1030.0
    rows = [event["telemetry"]["trace_id"][0] for event in events if event["type"] == "subagent_result"]
    assert rows.count("4") == 1
    assert rows.count("c") == 2
    kept = await bench.traces.get("s", "p", "docs")
    assert kept is not None
    assert kept.trace_id == named.trace_id


async def test_a_push_without_a_trace_uses_the_stored_trace() -> None:
    bench = Workbench()
    await bench.begin(expects("docs"))
    await bench.until(lambda: not bench.coordinator._tasks)
    stored = Trace(trace_id="e" * 32, span_id="f" * 16)
    await bench.traces.put("s", "p", "docs", stored)
    await bench.push("docs", "success")
    events = await bench.ended()
    assert {event["telemetry"]["trace_id"] for event in events[2:-2]} == {stored.trace_id}


async def test_a_step_without_a_trace_gets_a_new_one() -> None:
    bench = Workbench()
    await bench.begin(expects("docs"), context=Context(correlation_id="c", deadline=9e9, traceparent="no trace"))
    await bench.push("docs", "success")
    assert len({event["telemetry"]["traceparent"] for event in await bench.ended()}) == 1


async def test_a_subagent_that_hangs_times_out_and_the_others_continue() -> None:
    docs = FakeSubagent([PART, NEVER()])
    bench = Workbench({"docs": docs})
    await bench.begin(here("docs", deadline_ms=5000), expects("rows"))
    await bench.advance(5.1)
    assert docs.closed == 1
    assert ("timeout", "timeout") in told(await bench.events())
    assert (await bench.push("docs", "success")).ignored == "late"
    assert (await bench.push("rows", "success")).status == "partial_failure"
    await bench.ended()
    assert sorted(str(turns.left) for turns in bench.turns.values()) == ["[False]", "[True]"]
    waited = [span.attributes for span in bench.telemetry.spans if span.name == "aggregation.wait"]
    assert {"subagent": "docs", "status": "timeout", "error.type": "timeout"} in waited
    assert {"subagent": "rows", "status": "success"} in waited


async def test_a_subagent_that_times_out_a_moment_early_counts_as_timed_out() -> None:
    gate = asyncio.Event()
    bench = Workbench({"docs": FakeSubagent([PART, gate, UpstreamTimedOut("Late.", FailureKind.DOWN)])})
    await bench.begin(here("docs", deadline_ms=5000))
    await bench.advance(4.999)
    gate.set()
    await bench.until(lambda: not bench.coordinator._tasks)
    await bench.advance(0.002)
    assert told(await bench.ended())[-3:] == [
        ("timeout", "timeout"),
        ("step_completed", "partial_failure"),
        ("plan_step_completed", "partial_failure"),
    ]


async def test_a_subagent_times_out_with_the_real_clock() -> None:
    docs = FakeSubagent([UpstreamError("busy", FailureKind.BUSY, 0.001)], [PART, NEVER()])
    bench = Workbench({"docs": docs}, clock=SystemClock(), later=later)
    await bench.begin(here("docs", deadline_ms=50))
    async with asyncio.timeout(20):
        while not bench.idle:  # noqa: ASYNC110 (it announces nothing)
            await asyncio.sleep(0.001)
    kinds = [kind for kind, _ in told(await bench.ended())]
    assert kinds[-3:] == ["timeout", "step_completed", "plan_step_completed"]


async def test_a_step_without_any_push_ends_at_its_deadline() -> None:
    bench = Workbench(lease_s=3.0)
    await bench.begin(expects("docs"), expects("rows"))
    appends = bench.log.appends
    await bench.advance(29.0)
    assert bench.log.appends - appends >= 20  # the lease is held though nothing happens
    await bench.advance(1.1)
    assert (await bench.ended())[-1]["content"]["status"] == "failed"


@pytest.mark.parametrize("stubborn", [0, 3])
async def test_a_subagent_that_ignores_its_cancellation_does_not_delay_the_step(stubborn: int) -> None:
    gate = asyncio.Event()
    docs = FakeSubagent([PART, gate, DONE], stubborn=stubborn)
    bench = Workbench({"docs": docs})
    await bench.begin(here("docs", deadline_ms=1000))
    await bench.until(lambda: docs.contexts)
    await bench.advance(1.1)
    await bench.until(lambda: not len(bench.coordinator._steps))
    gate.set()
    events = await bench.ended()
    assert told(events)[-3:] == [
        ("timeout", "timeout"),
        ("step_completed", "partial_failure"),
        ("plan_step_completed", "partial_failure"),
    ]
    assert docs.closed == 1


@pytest.mark.parametrize(
    "script",
    [
        [],
        [PART],
        ["words"],
        [None],
        [Fragment(status="odd", payload=raw({}))],  # type: ignore[arg-type]
        [Fragment(status="success", payload=msgspec.Raw(b'{"a":'))],
        [Fragment(status="success", payload=msgspec.Raw(b"[]"))],
        [Fragment(status="success", payload=msgspec.Raw(b'{"a":"\xff"}'))],
        [Fragment(status="success", payload=b"{}")],  # type: ignore[arg-type]
        [Fragment(status="success", metrics={"a": object()})],  # type: ignore[dict-item]
        [Fragment(status="success", verdict=7)],  # type: ignore[arg-type]
        [ValueError("a bug")],
        [asyncio.CancelledError()],
        [GeneratorExit()],
        [StopAsyncIteration()],
        [UpstreamError("\ud800" * 1000, FailureKind.REQUEST)],
        [Fragment(status="error", payload=raw({}), reason="it says so")],
    ],
)
async def test_an_exception_in_a_subagent_fails_only_that_subagent(script: Sequence[object]) -> None:
    bench = Workbench({"docs": FakeSubagent(script)})
    await bench.begin(here("docs"), expects("rows"))
    await bench.until(lambda: ("subagent_completed", "error") in [(c.type, c.status) for c in bench.crumbs.dropped])
    await bench.push("rows", "success")
    assert (await bench.ended())[-1]["content"]["status"] == "partial_failure"


async def test_a_subagent_is_not_read_after_its_success() -> None:
    docs = FakeSubagent([DONE, PART, NEVER()])
    bench = Workbench({"docs": docs})
    await bench.begin(here("docs"))
    assert [kind for kind, _ in told(await bench.ended())].count("subagent_result") == 1
    assert docs.closed == 1


async def test_a_temporary_failure_is_retried_under_the_same_result_key() -> None:
    docs = FakeSubagent(
        [PART, UpstreamError("busy", FailureKind.BUSY)], [UpstreamError("down", FailureKind.DOWN, 2.0)], [PART, DONE]
    )
    bench = Workbench({"docs": docs})
    await bench.begin(here("docs"))
    await bench.until(lambda: bench.alarms.pending == 2)
    await bench.advance(0.6)
    await bench.until(lambda: len(docs.contexts) == 2)
    await bench.advance(2.0)
    events = await bench.ended()
    assert told(events) == [
        ("step_started", "in_progress"),
        ("subagent_pending", "pending"),
        ("subagent_started", "in_progress"),
        ("subagent_result", "partial"),
        ("retry", "retrying"),
        ("retry", "retrying"),
        ("subagent_result", "partial"),
        ("subagent_result", "success"),
        ("subagent_completed", "success"),
        ("step_completed", "success"),
        ("plan_step_completed", "success"),
    ]
    results = [event["content"] for event in events if event["type"] == "subagent_result"]
    assert [(each["result_key"], each["revision"]) for each in results] == [("docs_result", n) for n in (1, 2, 3)]
    assert events[4]["content"]["payload"] == {"attempt": 2, "retry_count": 1, "reason": "busy"}
    assert [span.attributes["attempt"] for span in bench.telemetry.spans if span.name == "aggregation.retry"] == [2, 3]
    assert [turns.left for turns in bench.turns.values()] == [[True]]


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (UpstreamError("down", FailureKind.DOWN), 3),
        (UpstreamError("down", FailureKind.DOWN, 60.0), 1),
        (UpstreamError("no", FailureKind.REQUEST), 1),
        (InvalidQuestion("no"), 1),
    ],
)
async def test_a_subagent_is_not_retried_after_a_permanent_failure_or_near_its_deadline(
    error: Exception, asked: int
) -> None:
    docs = FakeSubagent([error])
    bench = Workbench({"docs": docs})
    await bench.begin(here("docs"))
    await bench.advance(3.0)
    assert (await bench.ended())[-1]["content"]["status"] == "failed"
    assert len(docs.contexts) == asked


async def test_a_disabled_subagent_or_an_open_circuit_is_degraded() -> None:
    docs = FakeSubagent([DONE])
    bench = Workbench({"docs": docs, "new": FakeSubagent()})
    await bench.begin(expects("nobody"), here("docs"), expects("rows"))
    await bench.push("rows", "success")
    await bench.ended()
    for turns in bench.turns.values():
        turns.refuses = True
    await bench.begin(here("docs"), expects("rows"), expects("new"), stream="again")
    assert (await bench.take(Progress(), "again")).ignored is None
    assert told(await bench.events("again"))[4:6] == [("degraded", "degraded")] * 2
    assert (await bench.take(Push(name="rows", status="success"), "again")).ignored == "degraded"
    assert len(docs.contexts) == 1
    await bench.take(Cancel(), "again")
    await bench.until(lambda: bench.idle)


@pytest.mark.parametrize("late", [False, True], ids=["not written", "written, and the reply lost"])
async def test_a_retry_after_an_error_that_could_not_be_written_can_be_sent_again(late: bool) -> None:
    bench = Workbench()
    await bench.begin(expects("docs"), expects("rows"))
    await bench.push("docs", "error", revision=1)
    bench.log.faults, bench.log.late = [StreamUnavailable("gone")], late
    with pytest.raises(StreamUnavailable):
        await bench.push("docs", "success", {"n": 1}, revision=1)
    again = await bench.push("docs", "success", {"n": 1}, revision=1)
    assert again.ignored == ("duplicate" if late else None)
    await bench.push("rows", "success")
    events = await bench.ended()
    results = [event["content"] for event in events if event["type"] == "subagent_result"]
    assert [(each["status"], each["revision"]) for each in results] == [("error", 1), ("success", 2), ("success", 1)]
    assert events[-1]["content"]["status"] == "success"
    assert events[-1]["content"]["payload"]["subagents"]["docs_result"]["attempts"] == 2


async def test_after_a_pushed_error_another_attempt_can_be_pushed() -> None:
    bench = Workbench()
    await bench.begin(expects("docs"), expects("rows"))
    await bench.push("docs", "error")
    assert (await bench.push("docs", "success", attempt=1)).ignored == "completed"
    assert (await bench.push("docs", "success")).sequence
    await bench.push("rows", "success")
    assert (await bench.ended())[-1]["content"]["status"] == "success"
    assert sorted(str(turns.left) for turns in bench.turns.values()) == ["[False, True]", "[True]"]
    assert "aggregation.retry" in {span.name for span in bench.telemetry.spans}


@pytest.mark.parametrize("decision", ["block", "whatever"])
async def test_a_block_ends_the_step_keeps_results_and_sends_the_callback(decision: str) -> None:
    docs = FakeSubagent([PART, NEVER()])
    bench = Workbench({"docs": docs})
    bench.notice_errors = [UpstreamError("down", FailureKind.DOWN), ValueError("a bug")]
    await bench.begin(here("docs"), expects("rows"), callback_url="https://planner.example/cb")
    await bench.push("rows", "success", {"r": 1})
    await bench.until(lambda: len(docs.contexts))
    assert (await bench.coordinator.execute(STREAM, Decision(decision="warn"))).status == "in_progress"
    receipt = await bench.coordinator.execute(STREAM, Decision(decision=decision, reason="too risky"))
    assert receipt.status == "blocked"
    assert receipt.ignored is None
    await bench.advance(5.0)
    events = await bench.ended()
    assert told(events)[-3:] == [
        ("safety", "block"),
        ("step_completed", "blocked"),
        ("plan_step_completed", "blocked"),
    ]
    assert [event["content"]["payload"] for event in events if event["content"]["stage"] == "rows"][2] == {"r": 1}
    ((url, notice),) = bench.notices
    assert url == "https://planner.example/cb"
    assert notice == {
        "type": "safety",
        "session_id": "s",
        "plan_step_id": "p",
        "decision": "block",
        "reason": "too risky",
        "status": "blocked",
        "subagents": events[-1]["content"]["payload"]["subagents"],
        "timestamp": "2023-11-14T22:13:20.500Z",
    }
    assert docs.closed == 1
    assert {str(turns.left) for turns in bench.turns.values()} == {"[True]", "[None]"}


async def test_a_pushed_verdict_blocks_and_a_failing_callback_is_given_up() -> None:
    bench = Workbench({"safety": FakeSubagent(judges=True)})
    bench.notice_errors = [UpstreamError("down", FailureKind.DOWN)] * 3
    await bench.begin(expects("safety"), expects("rows"), callback_url="https://planner.example/cb")
    assert (await bench.push("safety", "partial", {"decision": "allow"})).status == "in_progress"
    with pytest.raises(InvalidQuestion):
        await bench.push("safety", "partial", {"decision": 3})
    assert (await bench.push("safety", "success", {"decision": "no idea"})).status == "blocked"
    await bench.advance(5.0)
    await bench.ended()
    assert not bench.notices
    assert bench.crumbs.dropped[-1].type == "callback"
    assert bench.crumbs.dropped[-1].status == "error"


async def test_cancelling_a_step_cancels_its_subagents() -> None:
    docs = FakeSubagent([PART, NEVER()])
    bench = Workbench({"docs": docs})
    await bench.begin(here("docs"))
    await bench.until(lambda: docs.contexts)
    assert (await bench.take(Cancel(reason="enough"))).status == "cancelled"
    end = (await bench.ended())[-1]["content"]
    assert (end["status"], end["payload"]["reason"]) == ("cancelled", "enough")
    assert docs.closed == 1


async def test_a_push_is_matched_by_subagent_key_or_result_key() -> None:
    bench = Workbench()
    twice = [msgspec.structs.replace(expects("docs"), result_key=name) for name in ("one", "two")]
    await bench.begin(*twice, expects("rows"))
    with pytest.raises(NotFound):
        await bench.push("nobody", "success")
    with pytest.raises(InvalidQuestion):
        await bench.push("docs", "success")
    with pytest.raises(InvalidQuestion):
        await bench.push("rows", "success", result_key="one")
    with pytest.raises(InvalidQuestion):
        await bench.push("rows", "success", [1])
    with pytest.raises(InvalidQuestion):
        await bench.push("rows", "success", attempt=0)
    await bench.push("docs", "success", result_key="one")
    await bench.push("two", "success")
    await bench.push("rows", "success")
    assert (await bench.ended())[-1]["content"]["status"] == "success"


async def test_line_ends_in_a_payload_are_removed() -> None:
    bench = Workbench()
    await bench.begin(expects("docs"))
    await bench.take(Progress(payload=msgspec.Raw(b'{\r\n "a": "\\n\xe2\x80\xa8" }\n')))
    with pytest.raises(InvalidQuestion):
        await bench.take(Progress(payload=msgspec.Raw(b'{"a": "\xff"}')))
    await bench.push("docs", "success")
    progress = next(event for event in await bench.ended() if event["type"] == "progress")
    assert progress["content"]["payload"] == {"a": "\n\u2028"}


async def test_a_thousand_pushes_race_with_a_block_and_the_deadline() -> None:
    bench = Workbench()
    await bench.begin(expects("docs", deadline_ms=1000), expects("rows"))
    pushes = [asyncio.create_task(bench.push("docs", "partial", revision=n + 1)) for n in range(500)]
    await asyncio.sleep(0)
    bench.alarms.advance(1.0)
    pushes += [asyncio.create_task(bench.push("docs", "partial", revision=n + 1)) for n in range(500, 800)]
    block = asyncio.create_task(bench.take(Decision(decision="block")))
    pushes += [asyncio.create_task(bench.push("rows", "partial")) for n in range(200)]
    receipts = await asyncio.gather(*pushes, return_exceptions=True)
    assert (await block).status == "blocked"
    events = await bench.ended()
    reasons = [receipt if isinstance(receipt, NotFound) else receipt.ignored for receipt in receipts]  # type: ignore[union-attr]
    assert reasons[:500] == [None] * 500
    assert reasons[500:800] == ["late"] * 300
    assert set(reasons[800:]) == {"ended"}
    assert bench.log.appends < 50
    assert len(events) == 1 + 2 + 501 + 1 + 3


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("at", range(6))
async def test_a_short_outage_of_the_log_loses_nothing_that_was_acknowledged(at: int, late: bool) -> None:
    bench = Workbench({"docs": FakeSubagent([PART, DONE])})
    bench.log.faults = [None] * (at + 1) + [StreamUnavailable("gone"), OSError("a bug")]
    bench.log.late = late
    await bench.begin(here("docs"), expects("rows"))
    places: dict[int, int] = {}
    async with bench.ticking():
        for n in range(1, 5):
            for _ in range(4):
                try:
                    receipt = await bench.push("rows", "partial" if n < 4 else "success", {"n": n}, revision=n)
                except StreamUnavailable:
                    continue
                except LeaseLost:  # it was the end, and it was written
                    break
                places[n] = receipt.sequence
                break
        events = await bench.ended()
    for n, place in places.items():
        assert not place or events[place - 1]["content"]["payload"] == {"n": n}
    assert events[-1]["content"]["status"] == "success"
    results = [event["content"] for event in events if event["type"] == "subagent_result"]
    assert [each["revision"] for each in results if each["stage"] == "rows"] == [1, 2, 3, 4]
    assert [each["revision"] for each in results if each["stage"] == "docs"] == [1, 2]


async def test_an_outage_of_the_log_for_the_length_of_the_lease_gives_up_the_step() -> None:
    docs = FakeSubagent([PART, NEVER()])
    bench = Workbench({"docs": docs})
    await bench.begin(here("docs", deadline_ms=2000))
    bench.log.endless = lambda _: StreamUnavailable("gone")
    await bench.advance(10.0)
    assert len(bench.coordinator._steps) == 1
    await bench.advance(10.0)
    await bench.until(lambda: bench.idle)
    assert bench.alarms.pending == 0
    assert docs.closed == 1
    assert told(await bench.events())[-1][0] != "plan_step_completed"


async def test_a_lost_lease_stops_the_step_without_another_event() -> None:
    docs = FakeSubagent([PART, NEVER()])
    bench = Workbench({"docs": docs})
    await bench.begin(here("docs"), expects("rows"))
    await bench.until(lambda: docs.contexts)
    bench.log.endless = lambda _: LeaseLost("another has it")
    with pytest.raises(LeaseLost):
        await bench.push("rows", "success")
    await bench.until(lambda: bench.idle)
    assert bench.alarms.pending == 0
    assert all(span.ended for span in bench.telemetry.spans)
    assert docs.closed == 1
    with pytest.raises(NotFound):
        await bench.push("rows", "success")


async def test_a_new_epoch_of_the_log_is_reported_once() -> None:
    bench = Workbench()
    await bench.begin(expects("docs"))
    bench.log.epoch = 1
    receipt = await bench.push("docs", "partial")
    assert receipt.sequence > 2**32
    await bench.push("docs", "partial")
    await bench.push("docs", "success")
    events = await bench.ended()
    degraded = [event["content"] for event in events if event["type"] == "degraded"]
    assert [(each["stage"], each["revision"]) for each in degraded] == [("stream", 1)]


def no_room(entries: Sequence[Entry]) -> AnabranchError | None:
    return None if len(entries) == 1 and entries[0].final else StreamFull("no room") if entries else None


async def test_a_push_to_a_full_stream_is_refused_and_changes_nothing() -> None:
    bench = Workbench()
    await bench.begin(expects("docs", deadline_ms=5000))
    bench.log.endless = no_room
    with pytest.raises(StreamFull):
        await bench.push("docs", "success", revision=1)
    with pytest.raises(StreamFull):
        await bench.take(Progress())
    bench.log.endless = lambda _: None
    assert (await bench.push("docs", "partial", revision=1)).sequence
    bench.log.endless = no_room
    await bench.advance(6.0)
    end = (await bench.ended())[-1]["content"]
    assert end["status"] == "partial_failure"
    assert end["payload"]["subagents"]["docs_result"]["status"] == "timeout"


@pytest.mark.parametrize("fragment", [DONE, PART, Fragment(status="success", payload=raw({}), verdict="block")])
async def test_a_result_without_room_fails_its_subagent_and_a_block_still_ends_the_step(fragment: Fragment) -> None:
    gate = asyncio.Event()
    bench = Workbench({"docs": FakeSubagent([gate, fragment, NEVER()])})
    await bench.begin(here("docs", deadline_ms=5000))
    bench.log.endless = no_room
    gate.set()
    await bench.advance(6.0)
    end = (await bench.ended())[-1]["content"]
    status = "blocked" if fragment.verdict else "failed"
    outcome = {DONE.status: "error", PART.status: "timeout"}[fragment.status] if not fragment.verdict else "cancelled"
    assert (end["status"], end["payload"]["subagents"]["docs_result"]["status"]) == (status, outcome)


async def test_a_command_without_room_does_not_affect_the_other_commands_of_its_batch() -> None:
    bench = Workbench()
    await bench.begin(expects("docs"), expects("rows"))

    def too_big(entries: Sequence[Entry]) -> AnabranchError | None:
        return StreamFull("no room") if any(b"big" in entry.body for entry in entries) else None

    bench.log.endless = too_big
    pushes = [bench.push("docs", "partial", {"n": "big" if n % 2 else "small"}, revision=n + 1) for n in range(6)]
    receipts = await asyncio.gather(*pushes, return_exceptions=True)
    assert [isinstance(receipt, StreamFull) for receipt in receipts] == [False, True] * 3
    await bench.take(Cancel())
    results = [event["content"]["revision"] for event in await bench.ended() if event["type"] == "subagent_result"]
    assert results == [1, 3, 5]


async def test_a_pushed_result_cancels_the_call_of_its_subagent() -> None:
    docs = FakeSubagent([PART, NEVER()])
    bench = Workbench({"docs": docs})
    await bench.begin(here("docs"), expects("rows"))
    await bench.until(lambda: docs.contexts)
    await bench.push("docs", "success")
    await bench.until(lambda: docs.closed)
    await bench.push("rows", "success")
    assert (await bench.ended())[-1]["content"]["status"] == "success"


async def test_a_full_memory_log_has_room_for_the_end_of_the_step() -> None:
    bench = Workbench(max_bytes=40_000)
    await bench.begin(*(msgspec.structs.replace(expects("rows"), result_key=f"r{n}") for n in range(30)))
    refused = 0
    for n in range(30):
        try:
            await bench.push(f"r{n}", "success", {"text": "x" * 2000})
        except StreamFull:
            refused += 1
    assert 0 < refused < 30
    await bench.take(Cancel())
    assert (await bench.ended())[-1]["content"]["status"] == "cancelled"


@pytest.mark.parametrize("error", [StreamUnavailable("gone"), StreamFull("no room"), LeaseLost("another")])
async def test_a_step_whose_start_cannot_be_written_is_refused(error: AnabranchError) -> None:
    docs = FakeSubagent([DONE])
    bench = Workbench({"docs": docs})
    bench.log.faults = [error]
    with pytest.raises(type(error)):
        await bench.begin(here("docs"))
    await bench.until(lambda: bench.idle)
    assert not docs.contexts
    assert [turns.left for turns in bench.turns.values()] == [[None]]
    assert bench.alarms.pending == 0
    if not isinstance(error, LeaseLost):
        assert told(await bench.events()) == [("step_completed", "failed"), ("plan_step_completed", "failed")]


@pytest.mark.parametrize(("faults", "status"), [([], "success"), ([StreamUnavailable("gone")], "failed")])
async def test_a_step_continues_if_the_request_that_started_it_is_cancelled(
    faults: list[Exception | None], status: str
) -> None:
    bench = Workbench({"docs": FakeSubagent([DONE])})
    bench.log.faults = faults
    asking = asyncio.create_task(bench.begin(here("docs")))
    await bench.until(lambda: len(bench.coordinator._steps))
    asking.cancel()
    await asyncio.wait([asking])
    assert (await bench.ended())[-1]["content"]["status"] == status


async def test_step_limit_and_a_second_begin_of_the_same_step() -> None:
    bench = Workbench(steps=1)
    with bench.coordinator.reserve(STREAM):
        token = await bench.begin(expects("docs"))
    with pytest.raises(Overloaded), bench.coordinator.reserve("another"):
        pass
    directive = bench.coordinator._steps[STREAM].directive
    with pytest.raises(Conflict):
        await bench.coordinator.begin(STREAM, token, directive, Context(correlation_id="c", deadline=9e9))
    assert bench.coordinator.holds(STREAM)
    await bench.push("docs", "success")
    await bench.ended()
    assert not bench.coordinator.holds(STREAM)
    with bench.coordinator.reserve("another"):
        pass


async def test_drain_waits_and_then_ends_open_steps_as_worker_lost() -> None:
    docs = FakeSubagent([PART, NEVER()])
    bench = Workbench({"docs": docs})
    await bench.begin(here("docs"), expects("rows"))
    draining = asyncio.create_task(bench.coordinator.drain(0.05))
    await asyncio.sleep(0)
    with pytest.raises(ShuttingDown), bench.coordinator.reserve("another"):
        pass
    assert (await bench.push("rows", "success")).sequence
    await draining
    end = (await bench.ended())[-1]["content"]
    assert end["status"] == "worker_lost"
    assert end["payload"]["subagents"]["docs_result"]["status"] == "cancelled"


async def test_drain_returns_as_soon_as_all_steps_have_ended() -> None:
    bench = Workbench()
    await bench.begin(expects("docs"))
    draining = asyncio.create_task(bench.coordinator.drain(600.0))
    await asyncio.sleep(0)
    await bench.push("docs", "success")
    await draining
    assert (await bench.ended())[-1]["content"]["status"] == "success"


def compared(bench: Workbench) -> list[ShadowCompared]:
    return [signal for signal in bench.telemetry.signals if isinstance(signal, ShadowCompared)]


async def test_shadow_mode_reports_the_difference_whichever_answer_comes_first() -> None:
    legacy: dict[str, Any] = {"docs_result": raw({"a": 1}), "rows_result": raw({"b": [1, 2]})}
    bench = Workbench()
    await bench.begin(expects("docs"), expects("rows"), shadow=True, legacy=legacy)
    await bench.push("docs", "success", {"a": 1})
    await bench.push("rows", "success", {"b": [1]})
    await bench.ended()
    assert [signal.differences for signal in compared(bench)] == [("missing /rows_result/b/1",)]
    bench = Workbench()
    await bench.begin(expects("docs"), shadow=True)
    await bench.push("docs", "success", {"a": 1})
    assert bench.coordinator.holds(STREAM)
    assert (await bench.push("docs", "success")).ignored == "ended"
    receipt = await bench.take(Progress(legacy={"docs_result": raw({"a": 1})}))
    assert (receipt.ignored, receipt.status) == (None, "success")
    await bench.ended()
    assert [signal.equal for signal in compared(bench)] == [True]


async def test_results_for_shadow_mode_are_dropped_after_their_time_to_live() -> None:
    bench = Workbench(ttl_s=60.0)
    await bench.begin(expects("docs"), shadow=True)
    await bench.take(Progress(legacy=None))
    await bench.push("docs", "success", {"a": 1})
    assert not bench.idle
    await bench.advance(61.0)
    await bench.ended()
    assert not compared(bench)
