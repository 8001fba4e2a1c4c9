"""How a model's words look on the wire, in each form that a Space may stream."""

import re
from typing import Literal, assert_never

import msgspec
from aiohttp import web

Form = Literal["summary", "openai", "content", "text", "plain"]

DONE = b"data: [DONE]\n\n"
_WORD = re.compile(r"\s*\S+\s*")


def words(text: str) -> list[str]:
    """The pieces of a text, one word each; joined they are the text again."""
    return _WORD.findall(text)


def event(data: object) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def word(form: Form, text: str, model: str = "") -> bytes:
    match form:
        case "summary":
            return event({"summary": {"message": {"role": "assistant", "content": text}}})
        case "openai":
            return event(chunk(model, {"content": text}))
        case "content":
            return event({"content": text})
        case "text":
            return event({"text": text})
        case "plain":
            return b"".join(b"data: " + line.encode() + b"\n" for line in text.split("\n")) + b"\n"
        case _:
            assert_never(form)


def error(form: Form, message: str) -> bytes:
    return event({"error": {"message": message, "type": "server_error"} if form == "openai" else message})


def chunk(model: str, delta: dict[str, str], finish_reason: str | None = None) -> dict[str, object]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 0, "model": model, "choices": [choice]}


async def opened(request: web.BaseRequest) -> web.StreamResponse:
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    return response
