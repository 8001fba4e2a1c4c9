"""A model of a Space: it replies whole or word by word, in the Space's dialect and in OpenAI's."""

import asyncio
from collections.abc import Callable, Iterator, Sequence

import msgspec
from aiohttp import web

from anabranch.domain.model import EndpointKind, Message, Usage
from anabranch.testing import model_frames
from anabranch.testing.http_server import json
from anabranch.testing.model_frames import Form

Reply = Callable[[Sequence[Message]], str]


class _StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: bool = False


class _ModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    messages: tuple[Message, ...]
    stream: bool = False
    stream_options: _StreamOptions | None = None


_decoder = msgspec.json.Decoder(_ModelRequest)


class Model:
    def __init__(
        self,
        slug: str,
        *,
        reply: str | Reply,
        delay_s: float,
        form: Form,
        chunk_delay_s: float,
        done_mark: bool,
        token: str | None,
        usage: bool,
    ) -> None:
        self.token = token
        self._slug = slug
        self._reply = reply
        self._delay_s = delay_s
        self._form = form
        self._chunk_delay_s = chunk_delay_s
        self._done_mark = done_mark
        self._usage = usage

    async def answer(self, request: web.BaseRequest, body: bytes, dialect: EndpointKind) -> web.StreamResponse:
        asked = _decoder.decode(body)
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        text = self._reply if isinstance(self._reply, str) else self._reply(asked.messages)
        usage = _usage(asked.messages, text) if self._usage else None
        if not asked.stream:
            return json(self._whole(text, usage, dialect))
        if dialect == "openai" and not (asked.stream_options and asked.stream_options.include_usage):
            usage = None
        return await self._stream(request, self._frames(text, usage, "openai" if dialect == "openai" else self._form))

    def _whole(self, text: str, usage: Usage | None, dialect: EndpointKind) -> bytes:
        message = {"role": "assistant", "content": text}
        if dialect == "openai":
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            completion = {"object": "chat.completion", "created": 0, "model": self._slug, "choices": [choice]}
            return msgspec.json.encode({"id": "chatcmpl-1", **completion, **({"usage": usage} if usage else {})})
        summary = {
            "id": "gen-1",
            "model": self._slug,
            "message": message | {"tokens": _tokens(text)},
            "finish_reason": "stop",
            "usage": usage,
            "cost": 0.0,
            "provider_info": {},
        }
        return msgspec.json.encode({"summary": summary, "references": None})

    def _frames(self, text: str, usage: Usage | None, form: Form) -> Iterator[bytes]:
        if form == "openai":
            yield model_frames.event(model_frames.chunk(self._slug, {"role": "assistant", "content": ""}))
        for piece in model_frames.words(text):
            yield model_frames.word(form, piece, self._slug)
        if form == "openai":
            end = model_frames.chunk(self._slug, {}, finish_reason="stop")
            yield model_frames.event(end)
            if usage:
                yield model_frames.event({**end, "choices": [], "usage": usage})
        elif form == "summary" and usage:
            end = {"message": {"role": "assistant", "content": ""}, "finish_reason": "stop", "usage": usage}
            yield model_frames.event({"summary": end})
        if self._done_mark:
            yield model_frames.DONE

    async def _stream(self, request: web.BaseRequest, pieces: Iterator[bytes]) -> web.StreamResponse:
        response = await model_frames.opened(request)
        if not self._chunk_delay_s:
            await response.write(b"".join(pieces))
            return response
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(self._chunk_delay_s)
        return response


def _usage(messages: Sequence[Message], text: str) -> Usage:
    prompt = sum(_tokens(message.content) for message in messages)
    completion = _tokens(text)
    return Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)


def _tokens(text: str) -> int:
    return -(-len(text) // 4)
