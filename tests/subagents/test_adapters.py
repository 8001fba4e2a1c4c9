"""What each kind of subagent sends, and the form in which a client gets it."""

import json
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from anabranch.domain.contracts import Answerer, Subagent
from anabranch.domain.errors import InvalidQuestion
from anabranch.domain.events import SubagentStatus
from anabranch.domain.model import Context, Question
from anabranch.domain.steps import Directive, Expected, Fragment
from anabranch.subagents import payloads
from anabranch.subagents.documentation import DocumentationSubagent
from anabranch.subagents.kinds import UNCHECKED, SafetySubagent, confirmation, preview, transcript
from anabranch.subagents.payloads import CardSubagent
from anabranch.testing import ManualClock
from support.examples import examples

STATUSES: tuple[SubagentStatus, ...] = get_args(SubagentStatus)


class Nobody(Answerer):
    async def answer(self, *_: object) -> Any:
        raise AssertionError("nobody is asked")


async def nothing_chosen(*_: object) -> tuple[str, ...]:
    return ()


ADAPTERS: dict[str, Subagent] = {
    "documentation": DocumentationSubagent(
        Nobody(), ManualClock(), template=Question(text=""), max_top_k=20, chosen=nothing_chosen
    ),
    "row_selection": CardSubagent(preview),
    "action": CardSubagent(confirmation),
    "voice": CardSubagent(transcript, UNCHECKED),
    "safety": SafetySubagent(),
    "other": CardSubagent(),
}


def taken(kind: str, payload: Any, status: SubagentStatus = "success") -> Fragment:
    return ADAPTERS[kind].convert(json.dumps(payload).encode(), status)


def card(kind: str, payload: Any, status: SubagentStatus = "success") -> Any:
    return json.loads(bytes(taken(kind, payload, status).payload))


def refusal(kind: str, payload: Any) -> str:
    with pytest.raises(InvalidQuestion) as refused:
        taken(kind, payload)
    return refused.value.message


# --- row selection


def test_rows_given_as_objects_become_a_table() -> None:
    rows = [{"sku": "A-1", "unit_price": 9.5, "in_stock": True}, {"sku": "B-2", "quantity": 3, "unit_price": 4}]
    assert card("row_selection", {"rows": rows, "table": "Quotes", "selected_ids": ["A-1"]}) == {
        "card": "table_preview",
        "title": "Quotes",
        "columns": [
            {"key": "sku", "label": "Sku", "type": "string"},
            {"key": "unit_price", "label": "Unit price", "type": "number"},
            {"key": "in_stock", "label": "In stock", "type": "boolean"},
            {"key": "quantity", "label": "Quantity", "type": "integer"},
        ],
        "rows": [["A-1", 9.5, True, None], ["B-2", 4, None, 3]],
        "row_count": 2,
        "truncated": False,
        "selected": ["A-1"],
    }


def test_rows_given_as_arrays_use_the_named_columns() -> None:
    columns = ["sku", {"name": "price", "header": "Price (EUR)", "type": "currency"}]
    found = card("row_selection", {"columns": columns, "rows": [["A-1", 9.5, "beyond"], ["B-2"]]})
    assert found["columns"] == [
        {"key": "sku", "label": "Sku", "type": "string"},
        {"key": "price", "label": "Price (EUR)", "type": "currency"},
    ]
    assert found["rows"] == [["A-1", 9.5], ["B-2", None]]
    unnamed = card("row_selection", {"rows": [[1], [2, "x"]]})
    assert [column["key"] for column in unnamed["columns"]] == ["column_1", "column_2"]
    assert unnamed["rows"] == [[1, None], [2, "x"]]


def test_a_table_preview_is_truncated() -> None:
    found = card("row_selection", {"rows": [{"n": n, "text": "x" * 600, "more": {"a": [n]}} for n in range(60)]})
    assert (len(found["rows"]), found["row_count"], found["truncated"]) == (50, 60, True)
    assert found["rows"][3] == [3, "x" * 499 + "…", '{"a":[3]}']
    assert card("row_selection", {"rows": [{"n": 1}], "total": 4_000})["truncated"] is True
    wide = card("row_selection", {"rows": [{f"c{n}": n for n in range(150)}]})
    assert (len(wide["columns"]), len(wide["rows"][0]), wide["truncated"]) == (100, 100, True)


def test_an_invalid_table_is_refused_with_the_name_of_its_field() -> None:
    assert refusal("row_selection", {"columns": ["a"]}) == "rows (or records, data) is missing."
    assert refusal("row_selection", {"rows": "none"}).startswith("rows or records or data cannot be understood")
    assert refusal("row_selection", {"rows": [{"a": 1}, 5]}).startswith("rows[1] cannot be understood")
    assert refusal("row_selection", {"rows": [], "columns": [{"key": 1}]}).startswith("columns[0]: key or name")
    assert card("row_selection", {"rows": []})["rows"] == []


# --- action


def test_an_action_requires_a_confirmation_by_default() -> None:
    given = {"action_name": "send_quote", "params": {"id": 7}, "summary": "Send it?", "confirmation_id": "c-1"}
    assert card("action", {**given, "workflow": "quotes"}) == {
        "card": "action_confirmation",
        "action": "send_quote",
        "title": "Send quote",
        "state": "awaiting_confirmation",
        "requires_confirmation": True,
        "parameters": {"id": 7},
        "message": "Send it?",
        "confirmation_id": "c-1",
        "workflow": "quotes",
    }


@pytest.mark.parametrize(
    ("given", "state", "asks"),
    [
        ({"confirmation_required": False}, "proposed", False),
        ({"confirmation_required": True}, "awaiting_confirmation", True),
        ({"state": "executed"}, "executed", False),
        ({"state": " Completed "}, "executed", False),
        ({"state": "approved", "requires_confirmation": True}, "confirmed", True),
        ({"state": "proposed"}, "proposed", True),
        ({"state": "declined"}, "rejected", False),
        ({"state": "error"}, "failed", False),
    ],
)
def test_synonyms_of_an_actions_state(given: Any, state: str, asks: bool) -> None:
    found = card("action", {"action": "ship", **given})
    assert (found["state"], found["requires_confirmation"]) == (state, asks)


def test_an_invalid_action_is_refused_with_the_name_of_its_field() -> None:
    assert refusal("action", {"title": "Ship"}).startswith("action (or")
    assert refusal("action", {"action": "ship", "state": "sideways"}).startswith("state must be one of proposed,")
    assert refusal("action", {"action": "ship", "args": [1]}).startswith("parameters or params or arguments")


# --- voice


def test_voice_segments_become_one_transcript() -> None:
    segments = [{"text": "Send it", "start": 0, "end": 1.25, "speaker": "A"}, {"transcript": "now.", "end_ms": 2100}]
    assert card("voice", {"segments": segments, "lang": "en-GB", "confidence": 0.9}) == {
        "card": "voice_transcript",
        "transcript": "Send it now.",
        "language": "en-GB",
        "confidence": 0.9,
        "duration_ms": 2100,
        "segments": [
            {"text": "Send it", "start_ms": 0, "end_ms": 1250, "speaker": "A", "confidence": None},
            {"text": "now.", "start_ms": None, "end_ms": 2100, "speaker": None, "confidence": None},
        ],
        "audio_url": None,
    }
    assert card("voice", {"text": "Hello.", "duration_s": 0.5})["duration_ms"] == 500


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "transcript (or text"),
        ({"transcript": 5}, "transcript or text or transcription cannot be understood"),
        ({"transcript": "x", "confidence": 90}, "confidence must be from 0 to 1"),
        ({"transcript": "x", "audio_url": "javascript:alert(1)"}, "audio_url must begin with"),
        ({"transcript": "x", "duration": -1}, "duration_ms is not a length of time"),
        ({"transcript": "x", "segments": [{"text": 1}]}, "segments[0]: text or transcript"),
    ],
)
def test_an_invalid_transcript_is_refused_with_the_name_of_its_field(given: Any, said: str) -> None:
    assert refusal("voice", given).startswith(said)


# --- safety


@pytest.mark.parametrize(
    ("given", "verdict", "reason"),
    [
        ({"decision": "allow"}, "allow", ""),
        ({"verdict": " Warn ", "message": "Careful."}, "warn", "Careful."),
        ({"outcome": "block", "reason": "A secret."}, "block", "A secret."),
        (
            {"decision": "maybe", "reason": "Hm."},
            "block",
            "The decision 'maybe' is not known, which counts as block. Hm.",
        ),
        ({"decision": True}, "block", "The decision 'true' is not known, which counts as block."),
        ({"decision": ["allow"]}, "block", "The decision '[\"allow\"]' is not known, which counts as block."),
        ({}, "block", "No decision was given, which counts as block."),
    ],
)
def test_a_safety_decision_other_than_allow_and_warn_blocks(given: Any, verdict: str, reason: str) -> None:
    fragment = taken("safety", given)
    assert (fragment.verdict, fragment.reason) == (verdict, reason)
    shown = json.loads(bytes(fragment.payload))
    assert (shown["card"], shown["decision"], shown["reason"]) == ("safety_decision", verdict, reason)


@pytest.mark.parametrize("status", ["pending", "in_progress", "partial", "error"])
def test_in_an_unfinished_safety_result_only_a_block_counts(status: SubagentStatus) -> None:
    for undecided in ({}, {"decision": "reviewing"}, {"decision": "allow"}, {"message": "Reading."}):
        assert taken("safety", undecided, status).verdict is None
    assert taken("safety", {"decision": "block"}, status).verdict == "block"


# --- documentation


def test_the_answer_of_a_remote_subagent_is_converted() -> None:
    citations = [{"doc_id": "d-1", "source": "Handbook", "quote": "Thirty days.", "page": 4}, "FAQ"]
    fragment = taken("documentation", {"text": "Thirty days [1].", "citations": citations, "confidence": 0.8})
    assert json.loads(bytes(fragment.payload)) == {
        "answer": "Thirty days [1].",
        "citations": [
            {
                "citation_index": 1,
                "document_id": "d-1",
                "title": "Handbook",
                "quoted_text": "Thirty days.",
                "url": None,
                "page": 4,
            },
            {"citation_index": 2, "document_id": None, "title": "FAQ", "quoted_text": None, "url": None},
        ],
        "model": None,
        "retrieval_count": 2,
        "confidence": 0.8,
    }
    assert fragment.metrics == {"retrieval_count": 2.0}
    assert refusal("documentation", {"citations": []}) == "answer (or text, response) is missing."
    assert refusal("documentation", {"answer": "x", "citations": [{"url": "data:x"}]}).startswith("citations[0]: url")


# --- what they have in common


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("status", ["pending", "in_progress", "partial", "error"])
def test_an_unfinished_result_may_be_incomplete(kind: str, status: SubagentStatus) -> None:
    given = {"message": "searching", "rows": 3, "segments": "none", "sources": 1, "state": "odd"}
    assert card(kind, given, status) == given


def test_unchecked_fields_are_removed_from_an_unfinished_result() -> None:
    spoofed = {"card": "table_preview", "rows": "<b>", "message": "Hm."}
    assert card("row_selection", spoofed, "partial") == {"rows": "<b>", "message": "Hm."}
    assert card("voice", {"audio_url": "javascript:x", "stage": "listening"}, "partial") == {"stage": "listening"}
    assert card("documentation", {"citations": [{"url": "javascript:x"}], "n": 1}, "partial") == {"n": 1}


def test_the_citations_may_come_before_the_answer() -> None:
    found = card("documentation", {"citations": [{"doc_id": "d-1"}], "stage": "reading"}, "partial")
    assert (found["citations"][0]["document_id"], found["retrieval_count"], "answer" in found) == ("d-1", 1, False)


@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_error_result_has_a_reason(kind: str) -> None:
    assert taken(kind, {"message": "The table is locked."}, "error").reason == "The table is locked."


@pytest.mark.parametrize("kind", [kind for kind in ADAPTERS if kind != "documentation"])
async def test_the_input_in_the_envelope_is_the_result(kind: str) -> None:
    given = {"rows": [], "action": "ship", "transcript": "Hm.", "decision": "allow"}
    envelope = Expected(key=kind, result_key="r", input=msgspec.Raw(json.dumps(given, indent=1).encode()))
    directive = Directive(session_id="s", plan_step_id="p", expected=(envelope,))
    context = Context(correlation_id="c", deadline=1.0)
    fragments = [one async for one in ADAPTERS[kind].work(envelope, directive, context)]
    assert fragments == [taken(kind, given)]
    without = Expected(key=kind, result_key="r")
    with pytest.raises(InvalidQuestion, match="no input"):
        await anext(ADAPTERS[kind].work(without, directive, context))


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"null",
        b"[]",
        b'"text"',
        b'{"a":',
        b"\xff\xfe",
        b'{"a":"\\ud800"}',
        b'{"a":1e999}',
        b'{"a":NaN}',
        b'{"a":' + b"9" * 5_000 + b"}",
        b'{"a":' * 100 + b"1" + b"}" * 100,
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":"' + b"x" * payloads.MAX_BYTES + b'"}',
    ],
    ids=lambda payload: payload[:12].decode(errors="replace"),
)
def test_an_invalid_payload_is_refused_with_every_status(kind: str, payload: bytes) -> None:
    for status in STATUSES:
        with pytest.raises(InvalidQuestion):
            ADAPTERS[kind].convert(payload, status)


def test_a_payload_that_exceeds_the_limit_when_encoded_is_refused() -> None:
    with pytest.raises(InvalidQuestion, match="larger"):
        taken("other", {"a": "\u2028" * (payloads.MAX_BYTES // 3 - 100)})
    with pytest.raises(InvalidQuestion, match="larger"):
        ADAPTERS["other"].convert(b'{"a":"%b"}' % ("\u2028".encode() * (payloads.MAX_BYTES // 3 - 100)), "success")


FIELDS = sorted(
    {
        *("rows", "records", "columns", "title", "row_count", "selected", "truncated", "key", "label", "type"),
        *("action", "state", "requires_confirmation", "parameters", "message", "confirmation_id"),
        *("transcript", "text", "language", "confidence", "duration_ms", "duration", "segments", "audio_url", "end"),
        *("decision", "verdict", "reason", "categories", "answer", "citations", "model", "retrieval_count", "url"),
    }
)
names = st.sampled_from(FIELDS) | st.text(max_size=8)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from(["executed", "block", "allow", "https://x.example/a", "a\r\nb\u2028c\u0085"])
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=5), max_leaves=12
)


@settings(max_examples=examples(200))
@given(st.sampled_from(sorted(ADAPTERS)), st.sampled_from(STATUSES), values | st.dictionaries(names, values))
@example("row_selection", "success", {"rows": [{"a": 10**400}], "row_count": 10**400})
@example("documentation", "partial", {"retrieval_count": 10**400})
@example("voice", "success", {"transcript": "", "duration": 1e308, "duration_ms": None})
def test_any_payload_becomes_an_object_on_one_line_or_is_refused(kind: str, status: SubagentStatus, value: Any) -> None:
    payload = json.dumps(value, ensure_ascii=False, indent=1).encode()
    try:
        fragment = ADAPTERS[kind].convert(payload, status)
    except InvalidQuestion:
        return
    assert fragment.status == status
    written = bytes(fragment.payload)
    assert len(written.decode().splitlines()) == 1
    assert len(written) <= payloads.MAX_BYTES
    assert isinstance(json.loads(written), dict)
    assert msgspec.json.encode({"payload": fragment.payload})
    assert all(isinstance(metric, float) for metric in fragment.metrics.values())
    assert ADAPTERS[kind].convert(payload, status) == fragment
