"""The voice adapter: recognized speech becomes a card with the transcript."""

from collections.abc import Sequence
from typing import Any

from anabranch.domain.errors import InvalidQuestion
from anabranch.domain.model import Value
from anabranch.subagents.payloads import (
    MAX_LABEL,
    Aliases,
    Object,
    cut,
    fitted,
    joined,
    missing,
    web_address,
)

MAX_SEGMENTS = 500
MAX_DURATION_S = 10_000_000
ALIASES: Aliases = {
    "transcript": ("text", "transcription"),
    "language": ("lang", "locale"),
    "segments": ("utterances",),
    "duration": ("duration_s", "duration_seconds"),
    "audio_url": ("recording_url",),
}
UNCHECKED = ("audio_url", *ALIASES["audio_url"])
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
    speech, others = fitted(given, Speech, ALIASES)
    segments = [_segment(one, at) for at, one in enumerate((speech.segments or [])[:MAX_SEGMENTS])]
    text = speech.transcript
    if text is None:
        if not segments:
            raise missing("transcript", ALIASES)
        text = " ".join(one["text"] for one in segments if one["text"])
    duration_ms = _ms(speech.duration_ms, speech.duration, "duration_ms")
    card = {
        "card": "voice_transcript",
        "transcript": text,
        "language": cut(speech.language, MAX_LABEL) if speech.language else None,
        "confidence": _share(speech.confidence, "confidence"),
        "duration_ms": _last(segments) if duration_ms is None else duration_ms,
        "segments": segments,
        "audio_url": web_address(speech.audio_url, "audio_url"),
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
    if not 0 <= ms <= MAX_DURATION_S * 1000:
        raise InvalidQuestion(f"{field} is not a length of time.")
    return round(ms)


def _share(given: float | None, field: str) -> float | None:
    if given is not None and not 0 <= given <= 1:
        raise InvalidQuestion(f"{field} must be from 0 to 1.")
    return given


def _last(segments: Sequence[Object]) -> int | None:
    return max((one["end_ms"] for one in segments if one["end_ms"] is not None), default=None)
