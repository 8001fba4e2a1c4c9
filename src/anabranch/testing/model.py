"""A model of a Space: it replies in one piece or word by word, in the Space's format and in OpenAI's."""

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import unescape
from itertools import islice
from typing import Literal, assert_never

import msgspec
from aiohttp import web

from anabranch.domain.model import EndpointKind, Message, Usage
from anabranch.testing.http_server import json

Form = Literal["summary", "openai", "content", "text", "plain"]
Reply = Callable[[Sequence[Message]], str]

SSE_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
DONE = b"data: [DONE]\n\n"
NO_ANSWER = "The documents do not contain the answer."
_WORD = re.compile(r"\s*\S+\s*")
_DOCUMENT = re.compile(
    r"<document\b[^>]*>\s*<source>(?P<source>[^<]*)</source>.*?<content>(?P<content>.*?)</content>", re.DOTALL
)
_SENTENCE = re.compile(r".+?(?=[.!?](?:\s|$)|$)", re.DOTALL)


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


def stream_error(form: Form, message: str) -> bytes:
    return event({"error": {"message": message, "type": "server_error"} if form == "openai" else message})


def chunk(model: str, delta: dict[str, str], finish_reason: str | None = None) -> dict[str, object]:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 0,
        "model": model,
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}],
    }


async def open_stream(request: web.BaseRequest, headers: Mapping[str, str] = SSE_HEADERS) -> web.StreamResponse:
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    return response


def scribe(messages: Sequence[Message]) -> str:
    """`First sentence [owner/slug].` for up to three of the documents in the last user message."""
    prompt = next((message.content for message in reversed(messages) if message.role == "user"), "")
    sentences = [
        f"{_first_sentence(unescape(found['content']))} [{unescape(found['source']).strip()}]."
        for found in islice(_DOCUMENT.finditer(prompt), 3)
        if found["content"].strip()
    ]
    return " ".join(sentences) or NO_ANSWER


def _first_sentence(text: str) -> str:
    found = _SENTENCE.match(text.strip())
    return " ".join(found[0].split()) if found else ""


class _StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: bool = False


class _ModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    messages: tuple[Message, ...]
    stream: bool = False
    stream_options: _StreamOptions | None = None


_decoder = msgspec.json.Decoder(_ModelRequest)


class Model(msgspec.Struct, frozen=True, kw_only=True):
    slug: str
    reply: str | Reply
    delay_s: float
    form: Form
    chunk_delay_s: float
    done_mark: bool
    token: str | None
    usage: bool

    async def answer(self, request: web.BaseRequest, body: bytes, dialect: EndpointKind) -> web.StreamResponse:
        query = _decoder.decode(body)
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        text = self.reply if isinstance(self.reply, str) else self.reply(query.messages)
        usage = _usage(query.messages, text) if self.usage else None
        if not query.stream:
            return json(self._whole(text, usage, dialect))
        if dialect == "openai" and not (query.stream_options and query.stream_options.include_usage):
            usage = None
        return await self._stream(request, self._frames(text, usage, "openai" if dialect == "openai" else self.form))

    def _whole(self, text: str, usage: Usage | None, dialect: EndpointKind) -> bytes:
        message = {"role": "assistant", "content": text}
        if dialect == "openai":
            completion = {
                "id": "chatcmpl-1",
                "object": "chat.completion",
                "created": 0,
                "model": self.slug,
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            }
            return msgspec.json.encode(completion | ({"usage": usage} if usage else {}))
        summary = {
            "id": "gen-1",
            "model": self.slug,
            "message": message | {"tokens": _tokens(text)},
            "finish_reason": "stop",
            "usage": usage,
            "cost": 0.0,
            "provider_info": {},
        }
        return msgspec.json.encode({"summary": summary, "references": None})

    def _frames(self, text: str, usage: Usage | None, form: Form) -> Iterator[bytes]:
        if form == "openai":
            yield event(chunk(self.slug, {"role": "assistant", "content": ""}))
        for piece in _WORD.findall(text):
            yield word(form, piece, self.slug)
        if form == "openai":
            end = chunk(self.slug, {}, finish_reason="stop")
            yield event(end)
            if usage:
                yield event({**end, "choices": [], "usage": usage})
        elif form == "summary" and usage:
            end = {"message": {"role": "assistant", "content": ""}, "finish_reason": "stop", "usage": usage}
            yield event({"summary": end})
        if self.done_mark:
            yield DONE

    async def _stream(self, request: web.BaseRequest, pieces: Iterator[bytes]) -> web.StreamResponse:
        response = await open_stream(request)
        for piece in pieces if self.chunk_delay_s else (b"".join(pieces),):
            await response.write(piece)
            await asyncio.sleep(self.chunk_delay_s)
        return response


def _usage(messages: Sequence[Message], text: str) -> Usage:
    prompt, completion = sum(_tokens(message.content) for message in messages), _tokens(text)
    return Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)


def _tokens(text: str) -> int:
    return -(-len(text) // 4)
