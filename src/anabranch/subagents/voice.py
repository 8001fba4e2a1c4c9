"""The subagent that listens: what it heard becomes a card with the transcript."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from anabranch.domain.errors import InvalidQuestion
from anabranch.domain.events import SubagentStatus
from anabranch.domain.model import Context, Value
from anabranch.domain.steps import Directive, Expected, Fragment
from anabranch.subagents.payloads import (
    MAX_LABEL,
    Aliases,
    Object,
    cut,
    fitted,
    fragment,
    handed_over,
    joined,
    missing,
    web_address,
)

MAX_SEGMENTS = 500
LONGEST_S = 10_000_000
ALIASES: Aliases = {
    "transcript": ("text", "transcription"),
    "language": ("lang", "locale"),
    "segments": ("utterances",),
    "duration": ("duration_s", "duration_seconds"),
    "audio_url": ("recording_url",),
}
SEGMENT_ALIASES: Aliases = {
    "text": ("transcript",),
    "start": ("start_s", "start_time"),
    "end": ("end_s", "end_time"),
    "speaker": ("speaker_id",),
}


class Heard(Value):
    """What is sent; times without a unit in their name are seconds."""

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


class VoiceSubagent:
    """It pushes what it heard, is asked for it, or has it in the envelope's `input`."""

    def taken(self, payload: bytes, status: SubagentStatus) -> Fragment:
        return fragment(payload, status, transcript, ("audio_url", *ALIASES["audio_url"]))

    def work(self, expected: Expected, directive: Directive, context: Context) -> AsyncGenerator[Fragment, None]:  # noqa: ARG002
        return handed_over(self, expected)


def transcript(given: Object) -> Object:
    """The card. Without a transcript the segments are one, and without a duration it ends with the last of them."""
    heard, others = fitted(given, Heard, ALIASES)
    segments = [_segment(one, at) for at, one in enumerate((heard.segments or [])[:MAX_SEGMENTS])]
    text = heard.transcript
    if text is None:
        if not segments:
            raise missing("transcript", ALIASES)
        text = " ".join(one["text"] for one in segments if one["text"])
    duration_ms = _ms(heard.duration_ms, heard.duration, "duration_ms")
    card = {
        "card": "voice_transcript",
        "transcript": text,
        "language": cut(heard.language, MAX_LABEL) if heard.language else None,
        "confidence": _share(heard.confidence, "confidence"),
        "duration_ms": _last(segments) if duration_ms is None else duration_ms,
        "segments": segments,
        "audio_url": web_address(heard.audio_url, "audio_url"),
    }
    return joined(card, others)


def _segment(given: Object, at: int) -> Object:
    where = f"segments[{at}]"
    try:
        segment, _ = fitted(given, VoiceSegment, SEGMENT_ALIASES)
    except InvalidQuestion as error:
        raise InvalidQuestion(f"{where}: {error.message}") from None
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
    if not 0 <= ms <= LONGEST_S * 1000:
        raise InvalidQuestion(f"{field} is not a length of time.")
    return round(ms)


def _share(given: float | None, field: str) -> float | None:
    if given is not None and not 0 <= given <= 1:
        raise InvalidQuestion(f"{field} must be from 0 to 1.")
    return given


def _last(segments: Sequence[Object]) -> int | None:
    return max((one["end_ms"] for one in segments if one["end_ms"] is not None), default=None)
