"""Parses model replies, whole or streamed, in any of the known formats."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, suppress

import msgspec

from anabranch.domain.contracts import Exchange
from anabranch.domain.errors import GenerationFailed, GenerationTimedOut, Trouble, UpstreamError, UpstreamTimedOut
from anabranch.domain.model import Delta, Usage
from anabranch.network import sse, syft_wire
from anabranch.network.redaction import quoted
from anabranch.policies import resilience

MAX_FINISH_REASON = 50
LAST_BYTES_S = 0.02
UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


async def deltas(ask: Callable[[], AbstractAsyncContextManager[Exchange]]) -> AsyncGenerator[Delta, None]:
    """Call a model and yield its deltas; every failure is a GenerationFailed."""
    try:
        async with ask() as exchange:
            if not 200 <= exchange.status < 300:
                _, sentence = await syft_wire.refusal(exchange)
                trouble, wait_s = (
                    syft_wire.trouble(exchange.status),
                    resilience.retry_after_s(exchange.header("Retry-After")),
                )
                raise GenerationFailed(sentence, trouble, wait_s, upstream_status=exchange.status)
            if exchange.content_type != "text/event-stream":
                yield _whole(await exchange.read(), exchange.content_type)
                return
            events = sse.events(exchange.chunks())
            async for data in events:
                if data.strip() == "[DONE]":
                    await _drain(events)
                    return
                yield _piece(data)
    except UpstreamTimedOut as error:
        raise GenerationTimedOut(error.message, error.trouble) from error
    except UpstreamError as error:
        raise GenerationFailed(error.message, error.trouble) from error


async def _drain(events: AsyncIterator[str]) -> None:
    """Read the reply to its end, so that its connection can be reused."""
    with suppress(TimeoutError, UpstreamError):
        async with asyncio.timeout(LAST_BYTES_S):
            async for _ in events:
                pass


def _whole(body: bytes, content_type: str) -> Delta:
    try:
        reply = msgspec.json.decode(body)
    except UNDECODABLE as error:
        what = "an HTML page" if content_type == "text/html" else "something else"
        raise GenerationFailed(f"The model's reply should be JSON, but it is {what}.", Trouble.UNUSABLE) from error
    text = _text(reply)
    if text is None:
        # An empty answer in a known format is not a fault of the model server; an unknown format is.
        known_format = _choice(reply) is not None or _field(reply, "summary") is not None
        raise GenerationFailed(
            "The model's reply holds no answer.", Trouble.REQUEST if known_format else Trouble.UNUSABLE
        )
    return Delta(text=text, usage=_usage(reply), finish_reason=_finish_reason(reply))


def _piece(data: str) -> Delta:
    """One event of a stream: JSON in one of the known forms, or plain text."""
    try:
        piece = msgspec.json.decode(data)
    except UNDECODABLE:
        return Delta(text=data)
    if isinstance(piece, dict):
        if piece.get("error"):
            why = syft_wire.reason(piece)
            reported = "The model reported an error in the middle of its answer"
            code = _field(piece["error"], "code")
            trouble = syft_wire.trouble(code) if isinstance(code, int) else Trouble.REQUEST
            raise GenerationFailed(f"{reported}: {why}" if why else f"{reported}.", trouble)
        return Delta(text=_text(piece) or "", usage=_usage(piece), finish_reason=_finish_reason(piece))
    return Delta(text=piece if isinstance(piece, str) else data)


def _text(reply: object) -> str | None:
    """SyftAI-Space's summary, OpenAI's choices, `content` or `text`."""
    choice = _choice(reply)
    candidates = (
        _field(_field(_field(reply, "summary"), "message"), "content"),
        _field(_field(choice, "delta"), "content"),
        _field(_field(choice, "message"), "content"),
        _field(reply, "content"),
        _field(reply, "text"),
    )
    return next((text for text in candidates if isinstance(text, str)), None)


def _choice(reply: object) -> object:
    choices = _field(reply, "choices")
    return choices[0] if isinstance(choices, list) and choices else None


def _finish_reason(reply: object) -> str | None:
    """Why generation ended: `stop`, or for example `length` or `content_filter`."""
    reason = _field(_field(reply, "summary"), "finish_reason") or _field(_choice(reply), "finish_reason")
    return quoted(reason, most=MAX_FINISH_REASON) if isinstance(reason, str) else None


def _usage(reply: object) -> Usage | None:
    """Token counts as the model reports them, without invalid ones."""
    reported = _field(_field(reply, "summary"), "usage") or _field(reply, "usage")
    counts = {
        name: value
        for name in Usage.__struct_fields__
        if isinstance(value := _field(reported, name), int) and 0 <= value < 2**53
    }
    if not counts:
        return None
    counts.setdefault("total_tokens", counts.get("prompt_tokens", 0) + counts.get("completion_tokens", 0))
    return Usage(**counts)


def _field(value: object, name: str) -> object:
    return value.get(name) if isinstance(value, dict) else None
