"""Steps over HTTP: handed over, fed, judged, read again, cancelled, and all that by their owner only."""

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import pytest
import pytest_asyncio

from support.collection_server import Issuer
from support.planner_fixtures import Desk, desk, envelope

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("planner-api")]

TRACE = {"trace_id": "4bf92f3577b34da6a3ce929d0e0e4736", "span_id": "00f067aa0ba902b7"}
SESSIONS = itertools.count()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def planner(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Desk]:
    async with desk(
        tmp_path_factory.mktemp("data"),
        people=("alice", "bob"),
        cors_origins=("https://app.example",),
        max_request_bytes=600_000,
    ) as opened:
        yield opened


@pytest.fixture
def session() -> str:
    return f"sess-{next(SESSIONS)}"


async def test_a_step_is_handed_over_fed_and_read_again(planner: Desk, session: str) -> None:
    path = f"/planner/sessions/{session}/steps"
    spec = {
        "session_id": session,
        **envelope("plan-step-4", {"key": "lookup", "result_key": "quote_conversion", "telemetry": TRACE}),
        "planner_context": {"request_id": "req-789", "user_id": "user-42", "conversation_id": "conv-22"},
    }
    status, begun = await planner.ask("POST", path, spec)
    assert status == 201
    assert begun == {
        "session_id": session,
        "plan_step_id": "plan-step-4",
        "status": "in_progress",
        "sequence": begun["sequence"],
        "stream": f"{path}/plan-step-4/stream",
        "ws": f"{path}/plan-step-4/ws",
        "events": f"{path}/plan-step-4/events",
    }
    telemetry = {**TRACE, "latency_ms": 930, "metrics": {"retrieval_count": 4}}
    result = {"type": "subagent_result", "subagent": "lookup", "status": "success", "result_key": "quote_conversion"}
    status, taken = await planner.ask(
        "POST",
        f"{path}/plan-step-4/subagents/lookup/events",
        {**result, "payload": {"answer": "…"}, "telemetry": telemetry},
    )
    assert (status, taken["accepted"]) == (202, True)
    status, page = await planner.ask("GET", begun["events"])
    assert status == 200
    assert set(page) == {"session_id", "plan_step_id", "events", "next_cursor", "has_more", "reset"}
    assert (page["session_id"], page["plan_step_id"]) == (session, "plan-step-4")
    assert (page["has_more"], page["reset"], page["next_cursor"]) == (False, False, page["events"][-1]["sequence"])
    assert [event["sequence"] for event in page["events"]] == list(range(1, len(page["events"]) + 1))
    assert [event["type"] for event in page["events"]] == [
        "step_started",
        "subagent_pending",
        "subagent_started",
        "subagent_result",
        "subagent_completed",
        "step_completed",
        "plan_step_completed",
    ]
    for event in page["events"]:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", event["timestamp"])
    found = page["events"][3]
    assert set(found) == {"session_id", "plan_step_id", "sequence", "type", "timestamp", "content", "telemetry"}
    assert found["sequence"] == taken["sequence"]
    assert found["content"] == {
        "stage": "lookup",
        "status": "success",
        "payload": {"answer": "…"},
        "revision": 1,
        "result_key": "quote_conversion",
    }
    assert found["telemetry"]["trace_id"] == TRACE["trace_id"]
    assert (found["telemetry"]["latency_ms"], found["telemetry"]["metrics"]) == (930, {"retrieval_count": 4})
    assert page["events"][-1]["content"]["status"] == "success"
    assert page["events"][-2]["content"] == page["events"][-1]["content"]


async def test_every_expected_subagent_is_pending_first(planner: Desk, session: str) -> None:
    docs = {"key": "documentation", "result_key": "doc", "input": {"question": ""}, "telemetry": TRACE}
    await planner.begin(
        session, "p", docs, {"key": "lookup", "result_key": "one"}, {"key": "lookup", "result_key": "two"}
    )
    events = (await planner.events(session, "p"))["events"]
    assert events[0]["type"] == "step_started"
    pending = events[1:4]
    assert [(event["type"], event["content"]["status"]) for event in pending] == [("subagent_pending", "pending")] * 3
    assert [(event["content"]["stage"], event["content"]["result_key"]) for event in pending] == [
        ("documentation", "doc"),
        ("lookup", "one"),
        ("lookup", "two"),
    ]
    assert pending[0]["telemetry"]["trace_id"] == TRACE["trace_id"]
    assert "subagent_pending" not in [event["type"] for event in events[4:]]


async def test_a_retry_after_an_error_is_taken_although_its_revisions_start_at_one_again(
    planner: Desk, session: str
) -> None:
    await planner.begin(session, "p", "lookup", "other")
    path = f"/planner/sessions/{session}/steps/p/subagents/lookup/events"
    first: list[Any] = [
        {"status": "partial", "revision": 1, "payload": {"found": 1}},
        {"status": "error", "revision": 2, "payload": {"message": "It broke."}},
    ]
    status, sent = await planner.ask("POST", path, first)
    assert (status, [one["accepted"] for one in sent["results"]]) == (202, [True, True])
    status, sent = await planner.ask("POST", path, first)
    assert (status, [one["reason"] for one in sent["results"]]) == (200, ["superseded", "duplicate"])
    second: list[Any] = [
        {"status": "partial", "revision": 1, "payload": {"found": 7}},
        {"status": "success", "revision": 2, "payload": {"found": 8}},
    ]
    status, sent = await planner.ask("POST", path, second)
    assert (status, [one["accepted"] for one in sent["results"]]) == (202, [True, True])
    status, sent = await planner.ask("POST", path, [*first, *second])
    assert (status, {one["accepted"] for one in sent["results"]}) == (200, {False})
    assert (await planner.push(session, "p", "other"))[0] == 202
    events = [
        event for event in (await planner.events(session, "p"))["events"] if event["content"]["stage"] == "lookup"
    ]
    assert [(event["type"], event["content"]["status"], event["content"]["revision"]) for event in events[2:]] == [
        ("subagent_result", "partial", 1),
        ("subagent_result", "error", 2),
        ("subagent_completed", "error", 1),
        ("retry", "retrying", 2),
        ("subagent_result", "partial", 3),
        ("subagent_result", "success", 4),
        ("subagent_completed", "success", 2),
    ]
    assert events[-2]["content"]["payload"] == {"found": 8}


async def test_pages_of_step_events_follow_one_another(planner: Desk, session: str) -> None:
    await planner.begin(session, "p")
    for text in ("one", "two", "three"):
        assert (await planner.push(session, "p", "lookup", status="partial", payload={"text": text}))[0] == 202
    whole = await planner.events(session, "p")
    after, read = 0, []
    while True:
        page = await planner.events(session, "p", f"?after={after}&limit=2")
        assert len(page["events"]) <= 2
        read += page["events"]
        after = page["next_cursor"]
        if not page["has_more"]:
            break
    assert read == whole["events"]
    assert (await planner.events(session, "p", f"?after={after}"))["next_cursor"] == after
    beyond = await planner.events(session, "p", "?after=1000")
    assert beyond["reset"] is True
    assert beyond["events"] == whole["events"]


async def test_the_same_step_again_is_not_begun_again(planner: Desk, session: str) -> None:
    first = await planner.begin(session, "p", "lookup", "other")
    assert (await planner.push(session, "p", "lookup", payload={"n": 1}))[0] == 202
    path = f"/planner/sessions/{session}/steps"
    status, again = await planner.ask("POST", path, envelope("p", "lookup", "other"))
    assert (status, again["status"]) == (200, "in_progress")
    assert again["sequence"] > first["sequence"]
    status, refused = await planner.ask("POST", path, envelope("p", "lookup"))
    assert (status, refused["error"]) == (409, "conflict")
    assert set(refused) == {"error", "message", "detail", "details"}
    assert (await planner.push(session, "p", "other"))[0] == 202
    status, over = await planner.ask("POST", path, envelope("p", "lookup", "other"))
    assert (status, over["status"]) == (200, "success")


async def test_what_changes_nothing_is_ignored_and_said_so(planner: Desk, session: str) -> None:
    await planner.begin(session, "p", "lookup", "other")
    assert (await planner.push(session, "p", "lookup", status="partial", revision=2))[0] == 202
    status, again = await planner.push(session, "p", "lookup", status="partial", revision=2)
    assert (status, again["accepted"], again["reason"]) == (200, False, "duplicate")
    status, older = await planner.push(session, "p", "lookup", status="partial", revision=1)
    assert (status, older["accepted"], older["reason"]) == (200, False, "superseded")
    path = f"/planner/sessions/{session}/steps/p/subagents/lookup/events"
    status, several = await planner.ask(
        "POST", path, [{"status": "partial", "revision": 2}, {"status": "completed", "revision": 3}]
    )
    assert status == 202
    assert [one["accepted"] for one in several["results"]] == [False, True]
    status, late = await planner.push(session, "p", "lookup", status="partial", revision=4)
    assert (status, late["accepted"], late["reason"]) == (200, False, "completed")
    types = [event["type"] for event in (await planner.events(session, "p"))["events"]]
    assert types.count("subagent_result") == 2


async def test_progress_is_an_event_and_may_name_the_next_step(planner: Desk, session: str) -> None:
    await planner.begin(session, "p")
    path = f"/planner/sessions/{session}/steps/p/progress"
    status, taken = await planner.ask("POST", path, {"payload": {"done": 3}, "stage": "ranking", "next_step_id": "q"})
    assert (status, taken["accepted"]) == (202, True)
    await planner.push(session, "p", "lookup")
    events = (await planner.events(session, "p"))["events"]
    progress = next(event for event in events if event["type"] == "progress")
    assert progress["content"]["stage"] == "ranking"
    assert progress["content"]["payload"] == {"done": 3}
    assert events[-1]["content"]["payload"]["next_step_id"] == "q"
    status, late = await planner.ask("POST", path, {"payload": {}})
    assert (status, late["accepted"], late["reason"]) == (200, False, "ended")


@pytest.mark.parametrize(
    ("decision", "applied", "status"),
    [
        ("allow", "allow", "in_progress"),
        ("warn", "warn", "in_progress"),
        ("perhaps", "block", "blocked"),
        (None, "block", "blocked"),
    ],
)
async def test_a_safety_decision_that_nobody_knows_blocks(
    planner: Desk, session: str, decision: Any, applied: str, status: str
) -> None:
    await planner.begin(session, "p", "lookup", "other")
    await planner.push(session, "p", "lookup", payload={"kept": True})
    path = f"/planner/sessions/{session}/steps/p/safety"
    code, judged = await planner.ask("POST", path, {"decision": decision, "reason": "why"})
    assert (code, judged["decision"], judged["status"], judged["accepted"]) == (200, applied, status, True)
    events = (await planner.events(session, "p"))["events"]
    assert next(event for event in events if event["type"] == "safety")["content"]["status"] == applied
    assert any(event["content"]["payload"] == {"kept": True} for event in events)
    assert (events[-1]["type"] == "plan_step_completed") is (status == "blocked")


async def test_a_step_is_cancelled_once(planner: Desk, session: str) -> None:
    await planner.begin(session, "p")
    status, body = await planner.ask("DELETE", f"/planner/sessions/{session}/steps/p")
    assert (status, body["status"], body["accepted"]) == (200, "cancelled", True)
    status, body = await planner.ask("DELETE", f"/planner/sessions/{session}/steps/p")
    assert (status, body["status"], body["accepted"], body["reason"]) == (200, "cancelled", False, "ended")
    events = (await planner.events(session, "p"))["events"]
    assert [event["type"] for event in events].count("plan_step_completed") == 1


VERBS = [
    ("POST", "", {"plan_step_id": "mine", "expected_subagents": [{"key": "lookup"}]}),
    ("POST", "/p/subagents/lookup/events", {"status": "success"}),
    ("POST", "/p/subagents/nobody/events", {"status": "success"}),
    ("POST", "/p/subagents/lookup/events", [{"status": "success"}]),
    ("POST", "/p/progress", {"payload": {}}),
    ("POST", "/p/safety", {"decision": "block"}),
    ("GET", "/p/stream", None),
    ("GET", "/p/stream?last_event_id=3", None),
    ("GET", "/p/events", None),
    ("DELETE", "/p", None),
]


@pytest.mark.parametrize(("method", "rest", "body"), VERBS)
async def test_a_session_is_its_owners_alone(planner: Desk, session: str, method: str, rest: str, body: Any) -> None:
    await planner.begin(session, "p", who="alice")
    path = f"/planner/sessions/{session}/steps"
    status, refused = await planner.ask(method, path + rest, body, who="bob")
    assert status == 404
    if rest:
        missing = await planner.ask(method, f"/planner/sessions/{session}-none/steps{rest}", body, who="bob")
        assert (status, refused) == missing
    assert (await planner.ask(method, path + rest, body))[0] == 404, "nor the operator's, who has a name of its own"
    assert (await planner.ask(method, path + rest, body, headers={"Authorization": "Bearer ab_none"}))[0] == 401
    assert len((await planner.events(session, "p", who="alice"))["events"]) == 2, "nothing has happened to it"


@pytest.mark.parametrize("rest", ["/p/subagents/lookup/events", "/p/progress", "/p/safety"])
@pytest.mark.parametrize("body", [b"{", b'{"status": 5, "payload": 5, "decision": 1, "reason": 1}', b"x" * 600_001])
async def test_what_is_wrong_with_a_request_says_nothing_of_a_step(
    planner: Desk, session: str, rest: str, body: bytes
) -> None:
    await planner.begin(session, "p", who="alice")
    there = await planner.ask("POST", f"/planner/sessions/{session}/steps{rest}", body, who="bob")
    not_there = await planner.ask("POST", f"/planner/sessions/{session}-none/steps{rest}", body, who="bob")
    assert there == not_there
    assert there[0] in (413, 422)


BAD_ENVELOPES = [
    {},
    {"plan_step_id": "p"},
    {"plan_step_id": "p", "expected_subagents": []},
    envelope("p", session_id="another"),
    envelope(""),
    envelope("x" * 201),
    envelope("a\nb"),
    envelope(".."),
    envelope("p", *({"key": "lookup", "result_key": str(n)} for n in range(65))),
    envelope("p", "lookup", "lookup"),
    envelope("p", {"key": "a", "result_key": "b"}, "b"),
    envelope("p", {"key": "lookup", "deadline_ms": 0}),
    envelope("p", {"key": "lookup", "deadline_ms": 86_400_001}),
    envelope("p", {"key": "lookup", "url": "file:///etc/passwd"}),
    envelope("p", {"key": "lookup", "url": "http://a b"}),
    envelope("p", {"key": "lookup", "telemetry": {"trace_id": "none", "span_id": "none"}}),
    envelope("p", callback_url="javascript:alert(1)"),
    envelope("p", next_step_id=""),
    envelope("p", planner_context={"nested": {}}),
    envelope("p", legacy_response={"\x00": 1}),
]


@pytest.mark.parametrize("body", BAD_ENVELOPES, ids=range(len(BAD_ENVELOPES)))
async def test_an_invalid_step_envelope_is_refused_with_a_sentence(planner: Desk, session: str, body: Any) -> None:
    status, refused = await planner.ask("POST", f"/planner/sessions/{session}/steps", body)
    assert (status, refused["error"]) == (422, "invalid_request")
    assert refused["message"].endswith((".", "`", ")"))
    assert "regex" not in refused["message"]
    assert (await planner.ask("GET", f"/planner/sessions/{session}/steps/p/events"))[0] == 404


@pytest.mark.parametrize(
    ("subagent", "rule"),
    [
        ({"key": ".."}, "key must have 1 to 200 characters without control characters (and be neither . nor ..)."),
        ({"key": "k" * 201}, "key must have 1 to 200 characters without control characters"),
        ({"url": "file:///etc/passwd"}, "url must be an http:// or https:// address of at most 2,048 characters"),
        ({"deadline_ms": 0}, "deadline_ms must be from 1 to 86,400,000."),
        (
            {"telemetry": {"trace_id": "none", "span_id": "none"}},
            "telemetry.trace_id must be 32 hexadecimal digits",
        ),
        ({"telemetry": {"trace_id": "a" * 32, "span_id": "b" * 16, "tracestate": "ä"}}, "printable ASCII characters"),
    ],
)
async def test_a_refused_envelope_names_the_allowed_values(
    planner: Desk, session: str, subagent: dict[str, Any], rule: str
) -> None:
    body = envelope("p", {"key": "lookup", **subagent})
    _, refused = await planner.ask("POST", f"/planner/sessions/{session}/steps", body)
    assert rule in refused["message"]


@pytest.mark.parametrize("telemetry", [{"trace_id": "none"}, {"span_id": "none"}, {"tracestate": "ä"}])
async def test_half_a_trace_is_ignored(planner: Desk, session: str, telemetry: dict[str, Any]) -> None:
    body = envelope("p", {"key": "lookup", "telemetry": telemetry})
    assert (await planner.ask("POST", f"/planner/sessions/{session}/steps", body))[0] == 201
    event = {"status": "partial", "payload": {}, "telemetry": telemetry}
    path = f"/planner/sessions/{session}/steps/p/subagents/lookup/events"
    assert (await planner.ask("POST", path, event))[0] == 202


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (
            {"status": "zz"},
            "status must be one of pending, in_progress, partial, success, error (or completed, for success).",
        ),
        ({"status": "success", "attempt": 0}, "attempt must be from 1 to 1,000."),
        ({"status": "success", "revision": 0}, "revision must be from 1 to 2,147,483,647."),
        ([{"status": "success", "attempt": 0}], "[0].attempt must be from 1 to 1,000."),
        ([{"status": "success"}] * 101, "Send one event, or a list of 1 to 100."),
    ],
)
async def test_a_refused_push_says_what_is_allowed(planner: Desk, session: str, event: Any, message: str) -> None:
    await planner.begin(session, "p", "lookup")
    path = f"/planner/sessions/{session}/steps/p/subagents/lookup/events"
    status, refused = await planner.ask("POST", path, event)
    assert (status, refused["message"]) == (422, message)


def deep(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"": value}
    return value


@pytest.mark.parametrize(
    ("event", "refusal"),
    [
        ({"status": "done"}, 422),
        ({"status": "success", "payload": []}, 422),
        ({"status": "success", "payload": deep(101)}, 422),
        ({"status": "success", "payload": {"text": "x" * 512 * 1024}}, 413),
        ({"status": "success", "revision": 0}, 422),
        ({"status": "success", "revision": 2**70}, 422),
        ({"status": "success", "attempt": 0}, 422),
        ({"status": "success", "type": "step_started"}, 422),
        ({"status": "success", "telemetry": {"latency_ms": -1}}, 422),
        ({"status": "success", "telemetry": {"metrics": {str(n): n for n in range(65)}}}, 422),
        ([], 422),
        ([{"status": "partial"}] * 101, 422),
        (b'{"status": "success", "payload": {"\xff": 1}}', 422),
        (b'{"status": "success", "payload": {"a": "\\ud800"}}', 422),
        (b'{"status": "success", "payload": {"a": 1e999}}', 422),
        (b'{"status": "success", "payload": ' + b"[" * 100_000, 422),
    ],
    ids=range(16),
)
async def test_an_invalid_push_changes_nothing(planner: Desk, session: str, event: Any, refusal: int) -> None:
    await planner.begin(session, "p")
    path = f"/planner/sessions/{session}/steps/p/subagents/lookup/events"
    status, refused = await planner.ask("POST", path, event)
    assert status == refusal, refused
    assert len((await planner.events(session, "p"))["events"]) == 2


@pytest.mark.parametrize("where", ["stream?last_event_id=", "events?after="])
@pytest.mark.parametrize("cursor", ["abc", "-1", "1.5", "%2B1", str(2**70), str(2**53), "%D9%A3", ""])
async def test_an_invalid_planner_cursor_is_refused(planner: Desk, session: str, where: str, cursor: str) -> None:
    await planner.begin(session, "p")
    status, refused = await planner.ask("GET", f"/planner/sessions/{session}/steps/p/{where}{cursor}")
    assert (status, refused["error"]) == (422, "invalid_request")


async def test_a_page_holds_a_thousand_events_at_the_most(planner: Desk, session: str) -> None:
    await planner.begin(session, "p")
    for start in range(1, 1_101, 100):
        pushed = [{"status": "partial", "revision": number} for number in range(start, start + 100)]
        await planner.ask("POST", f"/planner/sessions/{session}/steps/p/subagents/lookup/events", pushed)
    page = await planner.events(session, "p", "?limit=10000")
    assert (len(page["events"]), page["has_more"]) == (1_000, True)


async def test_fields_without_a_payload_become_the_payload(planner: Desk, session: str) -> None:
    await planner.begin(session, "p", "lookup", "other")
    await planner.ask("POST", f"/planner/sessions/{session}/steps/p/progress", {"message": "thinking", "stage": "plan"})
    await planner.push(session, "p", "lookup", status="error", error="no such order")
    await planner.push(session, "p", "lookup", payload={"order": 7})
    said = [(event["type"], event["content"]["payload"]) for event in (await planner.events(session, "p"))["events"]]
    assert ("progress", {"message": "thinking"}) in said
    assert ("subagent_result", {"error": "no such order"}) in said
    assert [kind for kind, _ in said][-3:] == ["retry", "subagent_result", "subagent_completed"]
    assert dict(said)["retry"] == {"attempt": 2, "retry_count": 1, "reason": "no such order"}


@pytest.mark.parametrize("limit", ["0", "-1", "all", "", "9" * 5_000, "00001" + "9" * 5_000])
async def test_an_invalid_page_limit_is_refused(planner: Desk, session: str, limit: str) -> None:
    await planner.begin(session, "p")
    status, refused = await planner.ask("GET", f"/planner/sessions/{session}/steps/p/events?limit={limit}")
    assert (status, refused["error"]) == (422, "invalid_request")


@pytest.mark.parametrize("name", ["a/b", "ä ö", "100%", "?x=1#y", "日本", "a" * 200])
async def test_planner_ids_may_have_any_printable_characters(planner: Desk, session: str, name: str) -> None:
    spec = envelope(name, {"key": name, "telemetry": {"trace_id": "0" * 32, "span_id": "0" * 16}})
    status, begun = await planner.ask("POST", f"/planner/sessions/{quote(session + name, safe='')[:200]}/steps", spec)
    if len(session + name) > 200:
        return
    assert status == 201, begun
    path = begun["events"].removesuffix("/events")
    assert (await planner.ask("POST", f"{path}/subagents/{quote(name, safe='')}/events", {"status": "success"}))[
        0
    ] == 202
    status, page = await planner.ask("GET", begun["events"])
    assert (page["session_id"], page["plan_step_id"]) == (session + name, name)
    assert page["events"][-1]["content"]["status"] == "success"


async def test_what_would_break_a_line_of_the_stream_is_escaped(planner: Desk, session: str) -> None:
    await planner.begin(session, "p")
    path = f"/planner/sessions/{session}/steps/p/subagents/lookup/events"
    text = "a\u2028b\u2029c\x85d\r\ne\n\nid: 7"
    body = json.dumps({"status": "success", "payload": {"text": text}}, indent=2, ensure_ascii=False).encode()
    assert (await planner.ask("POST", path, body))[0] == 202
    async with planner.stream(session, "p") as stream:
        found = [event for frame in await stream.rest() for event in frame.data["events"]]
    result = next(event for event in found if event["type"] == "subagent_result")
    assert result["content"]["payload"] == {"text": text}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/planner/sessions", 404),
        ("GET", "/planner/sessions/s", 404),
        ("GET", "/planner/sessions/s/steps/p/q", 404),
        ("GET", "/planner/sessions/s/steps", 405),
        ("GET", "/planner/sessions/s/steps/p", 405),
        ("POST", "/planner/sessions/s/steps/p/stream", 405),
        ("GET", "/planner/sessions/s/steps/p/ws", 426),
        ("GET", "/planner/sessions//steps/p/events", 422),
        ("GET", "/planner/sessions/%ff/steps/p/events", 422),
        ("GET", "/planner/sessions/%00/steps/p/events", 422),
    ],
)
async def test_other_addresses_and_methods_are_refused_in_our_form(
    planner: Desk, method: str, path: str, status: int
) -> None:
    found, refused = await planner.ask(method, path)
    assert found == status
    assert set(refused) == {"error", "message", "detail", "details"}


async def test_cors_of_the_planner_allows_configured_origins_only(planner: Desk) -> None:
    path = f"{planner.url}/planner/sessions/s/steps/p"
    asked = {"Access-Control-Request-Method": "DELETE", "Access-Control-Request-Headers": "authorization"}
    for origin, status in (("https://app.example", 200), ("https://evil.example", 400)):
        async with planner.session.options(path, headers={"Origin": origin, **asked}) as response:
            assert response.status == status
            assert response.headers.get("Access-Control-Allow-Origin") == (origin if status == 200 else None)


async def test_with_streaming_off_a_step_answers_once_at_its_end(tmp_path: Any) -> None:
    async with desk(tmp_path, planner_streaming=False) as planner:
        spec = envelope("p", {"key": "lookup", "result_key": "doc"}, "other", next_step_id="q")
        asked = asyncio.create_task(planner.ask("POST", "/planner/sessions/s/steps", spec))
        while (await planner.push("s", "p", "lookup", status="partial", payload={"n": 1}))[0] != 202:
            assert not asked.done()
        await planner.push("s", "p", "lookup", payload={"n": 2})
        assert not asked.done()
        await planner.push("s", "p", "other", status="error", payload={"why": "no"})
        status, answer = await asked
        assert status == 200
        assert answer["status"] == "partial_failure"
        assert answer["results"] == {
            "doc": {"subagent": "lookup", "status": "success", "payload": {"n": 2}, "revision": 2},
            "other": {"subagent": "other", "status": "error", "payload": {"why": "no"}, "revision": 1},
        }
        assert answer["next_step_id"] == "q"
        assert (await planner.ask("POST", "/planner/sessions/s/steps", spec)) == (200, answer)


async def test_a_guest_of_the_hub_is_nobody_here(tmp_path: Any) -> None:
    async with Issuer() as hub, desk(tmp_path, syfthub_url=hub.url, jwt_audience="library") as planner:
        path = "/planner/sessions/s/steps"
        for token, status in (
            (hub.token(sub="guest", role="guest"), 401),
            (hub.token(sub="17", username="dora"), 201),
        ):
            headers = {"Authorization": f"Bearer {token}"}
            assert (await planner.ask("POST", path, envelope("p"), headers=headers))[0] == status
