"""The kinds of subagent payloads: action, safety, voice, row selection; and the registry that finds one by name."""

from collections.abc import Collection, Sequence
from typing import Any, get_args

import msgspec

from anabranch.domain.contracts import Clock, Outbound, Subagent
from anabranch.domain.errors import InvalidQuestion
from anabranch.domain.events import SafetyVerdict, SubagentStatus
from anabranch.domain.model import Value
from anabranch.domain.steps import Expected, Fragment, verdict_of
from anabranch.subagents.http import HttpSubagent
from anabranch.subagents.payloads import (
    MAX_LABEL,
    Aliases,
    CardSubagent,
    Object,
    convert,
    cut,
    decode,
    encode,
    label,
    merge,
    missing,
    web_address,
)

# The states of an action, and their synonyms.
STATES = {
    "proposed": "proposed",
    "awaiting_confirmation": "awaiting_confirmation",
    "confirmed": "confirmed",
    "executed": "executed",
    "rejected": "rejected",
    "failed": "failed",
    "pending": "awaiting_confirmation",
    "pending_confirmation": "awaiting_confirmation",
    "needs_confirmation": "awaiting_confirmation",
    "approved": "confirmed",
    "completed": "executed",
    "done": "executed",
    "success": "executed",
    "cancelled": "rejected",
    "declined": "rejected",
    "denied": "rejected",
    "error": "failed",
}
ACTION_ALIASES: Aliases = {
    "action": ("action_name", "name"),
    "title": ("label",),
    "state": ("action_state",),
    "requires_confirmation": ("confirmation_required", "needs_confirmation"),
    "parameters": ("params", "arguments", "args"),
    "message": ("summary", "description"),
}


class Proposal(Value):
    action: str | None = None
    title: str | None = None
    state: str | None = None
    requires_confirmation: bool | None = None
    parameters: dict[str, Any] | None = None
    message: str | None = None
    confirmation_id: str | int | None = None


def confirmation(given: Object) -> Object:
    """The card. Unless it says otherwise, an action needs a confirmation."""
    sent, others = convert(given, Proposal, ACTION_ALIASES)
    if not sent.action:
        raise missing("action", ACTION_ALIASES)
    state = None if sent.state is None else STATES.get(sent.state.strip().lower())
    if state is None and sent.state is not None:
        raise InvalidQuestion(f"state must be one of {', '.join(dict.fromkeys(STATES.values()))}.")
    unconfirmed = state in (None, "proposed", "awaiting_confirmation")
    asks = unconfirmed if sent.requires_confirmation is None else sent.requires_confirmation
    card = {
        "card": "action_confirmation",
        "action": cut(sent.action, MAX_LABEL),
        "title": cut(sent.title, MAX_LABEL) if sent.title else label(sent.action),
        "state": state or ("awaiting_confirmation" if asks else "proposed"),
        "requires_confirmation": asks,
        "parameters": sent.parameters or {},
        "message": sent.message,
        "confirmation_id": sent.confirmation_id,
    }
    return merge(card, others)


MAX_REASON = 1_000
MAX_CATEGORY = 100
MAX_CATEGORIES = 50
DECISIONS = ("decision", "verdict", "outcome")
REASONS = ("reason", "message", "rationale", "explanation")


class SafetySubagent(CardSubagent):
    """A Subagent that pushes its decision, is called at its URL, or has it in the envelope's `input`. Anything but
    allow and warn counts as block, also a missing decision. In an unfinished result only a block counts."""

    def convert(self, payload: bytes, status: SubagentStatus) -> Fragment:
        given = decode(payload)
        decision = next((given[name] for name in DECISIONS if given.get(name) is not None), None)
        verdict, unknown = _verdict(decision)
        reason = cut(" ".join(filter(None, (unknown, _reason(given)))), MAX_REASON)
        if status != "success" and (unknown or verdict != "block"):
            return Fragment(status=status, payload=encode(given), reason=_reason(given))
        others = {name: value for name, value in given.items() if name not in DECISIONS}
        card: Object = {
            "card": "safety_decision",
            "decision": verdict,
            "reason": reason,
            "categories": _categories(given.get("categories")),
        }
        return Fragment(status=status, payload=encode(merge(card, others)), verdict=verdict, reason=reason)


def _verdict(decision: Any) -> tuple[SafetyVerdict, str]:
    """The decision, and why it counts as block if it is unknown."""
    if decision is None:
        return "block", "No decision was given, which counts as block."
    if isinstance(decision, str) and decision.strip().lower() in get_args(SafetyVerdict):
        return verdict_of(decision), ""
    quoted = cut(decision if isinstance(decision, str) else msgspec.json.encode(decision).decode(), MAX_CATEGORY)
    return "block", f"The decision {quoted!r} is not known, which counts as block."


def _reason(given: Object) -> str:
    return cut(next((given[name] for name in REASONS if isinstance(given.get(name), str)), ""), MAX_REASON)


def _categories(given: Any) -> list[str]:
    one_or_more = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    return [cut(name, MAX_CATEGORY) for name in one_or_more[:MAX_CATEGORIES] if isinstance(name, str)]


MAX_SEGMENTS = 500
MAX_DURATION_S = 10_000_000
VOICE_ALIASES: Aliases = {
    "transcript": ("text", "transcription"),
    "language": ("lang", "locale"),
    "segments": ("utterances",),
    "duration": ("duration_s", "duration_seconds"),
    "audio_url": ("recording_url",),
}
UNCHECKED = ("audio_url", *VOICE_ALIASES["audio_url"])
SEGMENT_ALIASES: Aliases = {
    "text": ("transcript",),
    "start": ("start_s", "start_time"),
    "end": ("end_s", "end_time"),
    "speaker": ("speaker_id",),
}


class Speech(Value):
    """What a subagent sends; times without a unit in their name are seconds."""

    transcript: str | None = None
    language: str | None = None
    confidence: float | None = None
    duration_ms: float | None = None
    duration: float | None = None
    segments: list[dict[str, Any]] | None = None
    audio_url: str | None = None


class VoiceSegment(Value):
    text: str | None = None
    start_ms: float | None = None
    end_ms: float | None = None
    start: float | None = None
    end: float | None = None
    speaker: str | int | None = None
    confidence: float | None = None


def transcript(given: Object) -> Object:
    """The card. The segments replace a missing transcript, and the end of the last one a missing duration."""
    speech, others = convert(given, Speech, VOICE_ALIASES)
    segments = [_segment(one, at) for at, one in enumerate((speech.segments or [])[:MAX_SEGMENTS])]
    text = speech.transcript
    if text is None:
        if not segments:
            raise missing("transcript", VOICE_ALIASES)
        text = " ".join(one["text"] for one in segments if one["text"])
    duration_ms = _ms(speech.duration_ms, speech.duration, "duration_ms")
    ends = [one["end_ms"] for one in segments if one["end_ms"] is not None]
    card = {
        "card": "voice_transcript",
        "transcript": text,
        "language": cut(speech.language, MAX_LABEL) if speech.language else None,
        "confidence": _share(speech.confidence, "confidence"),
        "duration_ms": max(ends, default=None) if duration_ms is None else duration_ms,
        "segments": segments,
        "audio_url": web_address(speech.audio_url, "audio_url"),
    }
    return merge(card, others)


def _segment(given: Object, at: int) -> Object:
    where = f"segments[{at}]"
    segment, _ = convert(given, VoiceSegment, SEGMENT_ALIASES, f"{where}: ")
    return {
        "text": segment.text or "",
        "start_ms": _ms(segment.start_ms, segment.start, f"{where}.start_ms"),
        "end_ms": _ms(segment.end_ms, segment.end, f"{where}.end_ms"),
        "speaker": segment.speaker,
        "confidence": _share(segment.confidence, f"{where}.confidence"),
    }


def _ms(given_ms: float | None, given_s: float | None, field: str) -> int | None:
    ms = given_ms if given_ms is not None else given_s * 1000 if given_s is not None else None
    if ms is None:
        return None
    if not 0 <= ms <= MAX_DURATION_S * 1000:
        raise InvalidQuestion(f"{field} is not a length of time.")
    return round(ms)


def _share(given: float | None, field: str) -> float | None:
    if given is not None and not 0 <= given <= 1:
        raise InvalidQuestion(f"{field} must be from 0 to 1.")
    return given


MAX_ROWS = 50
MAX_COLUMNS = 100
MAX_CELL = 500
MAX_SELECTED = 500
SELECTION_ALIASES: Aliases = {
    "rows": ("records", "data"),
    "columns": ("fields", "headers"),
    "title": ("table", "table_name", "name"),
    "row_count": ("total_rows", "total", "count"),
    "selected": ("selected_rows", "selected_ids", "selection"),
}
COLUMN_ALIASES: Aliases = {"key": ("name", "field", "id"), "label": ("title", "header"), "type": ("data_type",)}


class Table(Value):
    """What a subagent sends: rows as objects or as arrays, columns as names or as objects."""

    rows: list[dict[str, Any] | list[Any]] | None = None
    columns: list[str | dict[str, Any]] | None = None
    title: str | None = None
    row_count: int | None = None
    truncated: bool | None = None
    selected: list[Any] | None = None


class Column(Value):
    key: str | None = None
    label: str | None = None
    type: str | None = None


def preview(given: Object) -> Object:
    """The card: columns with key, label and type, and the first rows as arrays."""
    table, others = convert(given, Table, SELECTION_ALIASES)
    if table.rows is None:
        raise missing("rows", SELECTION_ALIASES)
    columns = _columns(table)
    visible = columns[:MAX_COLUMNS]
    keys = [column.key or "" for column in visible]
    rows = [_row(row, keys) for row in table.rows[:MAX_ROWS]]
    row_count = max(table.row_count or 0, len(table.rows))
    card = {
        "card": "table_preview",
        "title": cut(table.title, MAX_LABEL) if table.title else "Selected rows",
        "columns": [_described(column, [row[at] for row in rows]) for at, column in enumerate(visible)],
        "rows": rows,
        "row_count": row_count,
        "truncated": bool(table.truncated) or row_count > len(rows) or len(columns) > len(visible),
        "selected": [_cell(one) for one in (table.selected or [])[:MAX_SELECTED]],
    }
    return merge(card, others)


def _columns(table: Table) -> list[Column]:
    if table.columns is not None:
        return [_column(one, at) for at, one in enumerate(table.columns)]
    rows = (table.rows or [])[:MAX_ROWS]
    named = dict.fromkeys(key for row in rows if isinstance(row, dict) for key in row)
    width = max((len(row) for row in rows if isinstance(row, list)), default=0)
    return [Column(key=key) for key in named] + [_column({}, at) for at in range(len(named), width)]


def _column(given: str | Object, at: int) -> Column:
    if isinstance(given, str):
        return Column(key=given)
    column, _ = convert(given, Column, COLUMN_ALIASES, f"columns[{at}]: ")
    return msgspec.structs.replace(column, key=f"column_{at + 1}") if column.key is None else column


def _row(row: Object | list[Any], keys: Sequence[str]) -> list[Any]:
    if isinstance(row, dict):
        return [_cell(row.get(key)) for key in keys]
    return [_cell(row[at]) if at < len(row) else None for at in range(len(keys))]


def _cell(value: Any) -> Any:
    """Scalars as they are; objects and arrays as JSON text."""
    if isinstance(value, dict | list):
        value = msgspec.json.encode(value).decode()
    elif isinstance(value, int) and abs(value) >= 2**63:
        value = str(value)
    return cut(value, MAX_CELL) if isinstance(value, str) else value


def _described(column: Column, cells: Sequence[Any]) -> Object:
    key = column.key or ""
    return {
        "key": cut(key, MAX_LABEL),
        "label": cut(column.label, MAX_LABEL) if column.label else label(key),
        "type": cut(column.type, MAX_LABEL) if column.type else _type(cells),
    }


def _type(cells: Sequence[Any]) -> str:
    kinds = {type(cell) for cell in cells if cell is not None}
    if kinds == {bool}:
        return "boolean"
    if kinds == {int}:
        return "integer"
    return "number" if kinds and kinds <= {int, float} else "string"


KINDS = ("documentation", "row_selection", "action", "voice", "safety", "other")
# Other names in spec 2.
KIND_SYNONYMS = {
    "documentation_qa": "documentation",
    "action_workflow": "action",
    "workflow": "action",
}


class SubagentRegistry:
    """A subagent with a URL is called there; its kind must be enabled, too."""

    def __init__(
        self, *, documentation: Subagent, outbound: Outbound, clock: Clock, enabled: Collection[str] = KINDS
    ) -> None:
        every: dict[str, Subagent] = {
            "documentation": documentation,
            "row_selection": CardSubagent(preview),
            "action": CardSubagent(confirmation),
            "voice": CardSubagent(transcript, UNCHECKED),
            "safety": SafetySubagent(),
            "other": CardSubagent(),
        }
        self._local = {kind: subagent for kind, subagent in every.items() if kind in enabled}
        self._remote = {kind: HttpSubagent(one, outbound, clock) for kind, one in self._local.items()}

    def find(self, expected: Expected) -> Subagent | None:
        """None if its kind is disabled. A key of no known kind is an `other`."""
        name = expected.key.strip().lower().replace("-", "_").replace(" ", "_")
        kind = KIND_SYNONYMS.get(name, name if name in KINDS else "other")
        return self._local.get(kind) if expected.url is None else self._remote.get(kind)
