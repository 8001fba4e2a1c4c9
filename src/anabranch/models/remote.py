"""Models behind HTTP: OpenAI-compatible servers and SyftHub endpoints; chat and embeddings."""

import asyncio
import json
import math
import re
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from types import MappingProxyType

import msgspec

from anabranch.domain.contracts import Exchange, Outbound
from anabranch.domain.errors import (
    EmbeddingFailed,
    EmptyReply,
    FailureKind,
    GenerationFailed,
    GenerationTimedOut,
    UpstreamError,
    UpstreamTimedOut,
)
from anabranch.domain.model import Calibration, Context, Delta, Embedding, Endpoint, Prompt, Usage, Value
from anabranch.domain.shares import reply_memory
from anabranch.models.calibration import MINILM
from anabranch.network import sse, syft_wire
from anabranch.network.large_json import decoded
from anabranch.network.redaction import quoted
from anabranch.network.surrogates import repair_surrogates
from anabranch.policies.resilience import GuardedCalls, Sleep, backoff_s, refused

RETRIES = 3
FIRST_WAIT_S = 0.5
MAX_BACKOFF_S = 10.0
# A longer Retry-After than this fails the call.
MAX_RETRY_AFTER_S = 30.0


class ModelServer:
    """A client of one model server. Time-outs, broken connections, 429 and 5xx are retried; every failure is an
    UpstreamError. `guard` applies a circuit breaker and a retry budget."""

    def __init__(
        self,
        url: str,
        outbound: Outbound,
        *,
        api_key: str = "",
        timeout_s: float = 30.0,
        sleep: Sleep = asyncio.sleep,
        guard: GuardedCalls | None = None,
    ) -> None:
        self._url = url
        self._outbound = outbound
        authorization = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._headers = {"Content-Type": "application/json", "Accept": "application/json", **authorization}
        self._timeout_s = timeout_s
        self._sleep = sleep
        self._guard = guard

    async def post(self, payload: Mapping[str, object]) -> bytes:
        body = msgspec.json.encode(payload)
        attempt = 0
        while True:
            try:
                if self._guard is None:
                    return await self._post(body)
                return await self._guard.call(lambda: self._post(body), first=attempt == 0)
            except UpstreamError as error:
                wait_s = _wait_s(error, attempt)
                if wait_s is None or not (self._guard is None or self._guard.take_retry()):
                    raise
                await self._sleep(wait_s)
                attempt += 1

    async def _post(self, body: bytes) -> bytes:
        call = self._outbound.request("POST", self._url, headers=self._headers, body=body, operator=True)
        try:
            async with asyncio.timeout(self._timeout_s), call as exchange:
                if 200 <= exchange.status < 300:
                    return await exchange.read()
                raise await refused(exchange, UpstreamError)
        except TimeoutError as error:
            raise UpstreamTimedOut(f"It did not answer within {self._timeout_s:g} s.", FailureKind.DOWN) from error


def api_url(base: str, operation: str, versions: tuple[str, ...] = ("/v1",)) -> str:
    """The URL of an operation; `base` is the host, the host with its version, or the whole URL."""
    base = syft_wire.base(base)
    if base.endswith(operation):
        return base
    return f"{base}{operation}" if base.endswith(versions) else f"{base}/v1{operation}"


def _wait_s(error: UpstreamError, attempt: int) -> float | None:
    """The server's Retry-After, else exponential backoff; None if a retry cannot help, or not soon enough."""
    if attempt == RETRIES or not error.failure_kind.temporary or (error.wait_s or 0.0) > MAX_RETRY_AFTER_S:
        return None
    return error.wait_s if error.wait_s is not None else min(MAX_BACKOFF_S, backoff_s(FIRST_WAIT_S, attempt))


# What to do about a failure, by the status of the reply; None: no connection could be made.
Hints = Mapping[int | None, str]
NO_HINTS: Hints = MappingProxyType({})
Hint = Callable[[int | None], str | None]
MAX_FINISH_REASON = 50
COMPLETE, INCOMPLETE = "stop", "incomplete"
LAST_BYTES_S = 0.02
COUNTED_AT_ONCE = 4096
UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


async def deltas(
    ask: Callable[[], AbstractAsyncContextManager[Exchange]], *, with_address: bool, hint: Hint
) -> AsyncGenerator[Delta, None]:
    """Call a model and yield its deltas; every failure is a GenerationFailed, `with_address` if the caller may know the
    address, and then also with the hint for it. A stream without a finish reason gets one: `stop` if it ends with
    `[DONE]`, else `incomplete`."""
    finished, pieces, memory, uncounted = False, StreamPieces(), reply_memory.get(), 0
    try:
        async with ask() as exchange:
            if not 200 <= exchange.status < 300:
                raise await refused(exchange, GenerationFailed, hint(exchange.status) if with_address else None)
            if exchange.content_type != "text/event-stream":
                yield await _whole(await exchange.read(memory), exchange.content_type)
                return
            events = sse.events(exchange.chunks())
            async for data in events:
                if data.strip() == "[DONE]":
                    await _drain(events)
                    if not finished:
                        yield Delta(text="", finish_reason=COMPLETE)
                    return
                piece = pieces.delta(data)
                uncounted += len(piece.text)
                if uncounted > COUNTED_AT_ONCE and memory is not None:
                    await memory.add(uncounted)
                    uncounted = 0
                finished = finished or piece.finish_reason is not None
                yield piece
            if not finished:
                yield Delta(text="", finish_reason=INCOMPLETE)
    except UpstreamError as error:
        kind = GenerationTimedOut if isinstance(error, UpstreamTimedOut) else GenerationFailed
        message = error.described(with_address=with_address)
        if with_address and error.address:
            message = syft_wire.with_hint(message, hint(None))
        raise kind(message, error.failure_kind) from error


async def _drain(events: AsyncIterator[str]) -> None:
    """Read the reply to its end, so that its connection can be reused."""
    with suppress(TimeoutError, UpstreamError):
        async with asyncio.timeout(LAST_BYTES_S):
            async for _ in events:
                pass


async def _whole(body: bytes, content_type: str) -> Delta:
    try:
        reply = await decoded(body, _decoded)
    except (ValueError, RecursionError) as error:
        what = "an HTML page" if content_type == "text/html" else "something else"
        raise GenerationFailed(f"The model's reply should be JSON, but it is {what}.", FailureKind.UNUSABLE) from error
    text = _text(reply)
    if text is None:
        # An empty answer in a known format is not a fault of the model server; an unknown format is.
        known_format = _choice(reply) is not None or _field(reply, "summary") is not None
        if known_format:
            raise EmptyReply("The model's reply holds no answer.")
        raise GenerationFailed("The model's reply holds no answer.", FailureKind.UNUSABLE)
    return _delta(reply, text)


def _decoded(data: bytes | str) -> object:
    """JSON, also with lone surrogates, which U+FFFD replaces, and with NaN, which servers in Python write."""
    try:
        return msgspec.json.decode(data)
    except UNDECODABLE:
        body = data.encode() if isinstance(data, str) else data
        found: object = json.loads(repair_surrogates(body).decode())
        return found


# How a chunk of a stream begins.
CHUNK = re.compile(r'\s*\{\s*"(?:id|object|created|model|choices|delta|summary|usage|error)"\s*:')


class StreamPieces:
    """Reads the events of one stream: JSON in one of the known forms, or plain text."""

    def __init__(self) -> None:
        self._has_plain_text = False

    def delta(self, data: str) -> Delta:
        """GenerationFailed if the event reports an error, or if it is broken JSON."""
        try:
            piece = _decoded(data)
        except (ValueError, RecursionError) as error:
            # Plain text, such as code, may begin with a brace.
            if CHUNK.match(data) and not self._has_plain_text:
                why = "The model's stream has an event that should be JSON, but it cannot be decoded."
                raise GenerationFailed(why, FailureKind.UNUSABLE) from error
            piece = None
        if isinstance(piece, str):
            return Delta(text=piece)
        if not isinstance(piece, dict):
            # An empty event only keeps the connection open.
            self._has_plain_text = self._has_plain_text or bool(data.strip())
            return Delta(text=data)
        if piece.get("error"):
            raise _reported_error(piece)
        return _delta(piece, _text(piece) or "")


def _reported_error(piece: Mapping[str, object]) -> GenerationFailed:
    why = syft_wire.reason(piece)
    code = _field(piece["error"], "code")
    return GenerationFailed(
        f"The model reported an error in the middle of its answer{f': {why}' if why else '.'}",
        syft_wire.failure_kind(code) if isinstance(code, int) else FailureKind.REQUEST,
    )


def _delta(reply: object, text: str) -> Delta:
    """The text of a reply, with its usage and its finish reason: `stop`, or for example `length`."""
    reason = _field(_field(reply, "summary"), "finish_reason") or _field(_choice(reply), "finish_reason")
    return Delta(
        text=text,
        usage=_usage(reply),
        finish_reason=quoted(reason, most=MAX_FINISH_REASON) if isinstance(reason, str) else None,
    )


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


class OpenAIModel:
    """The endpoint's slug is the model's name; its token is the API key."""

    def __init__(self, endpoint: Endpoint, outbound: Outbound, hints: Hints = NO_HINTS) -> None:
        self._endpoint = endpoint
        self._outbound = outbound
        self._hints = hints

    def generate(self, prompt: Prompt, context: Context) -> AsyncGenerator[Delta, None]:
        payload = {
            "model": self._endpoint.slug,
            "messages": prompt.messages,
            "max_tokens": prompt.max_tokens,
            "temperature": prompt.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"stop": prompt.stop} if prompt.stop else {}),
        }
        return deltas(
            lambda: self._outbound.request(
                "POST",
                api_url(self._endpoint.url, "/chat/completions"),
                headers=syft_wire.headers(self._endpoint, context),
                body=msgspec.json.encode(payload),
                operator=self._endpoint.operator,
                public_only=self._endpoint.public_only,
            ),
            with_address=context.may_know_address(self._endpoint),
            hint=self._hints.get,
        )


class SpaceModel:
    def __init__(self, endpoint: Endpoint, outbound: Outbound, *, streaming: bool) -> None:
        self._endpoint = endpoint
        self._outbound = outbound
        self._streaming = streaming

    def generate(self, prompt: Prompt, context: Context) -> AsyncGenerator[Delta, None]:
        payload = {
            "messages": prompt.messages,
            "max_tokens": prompt.max_tokens,
            "temperature": prompt.temperature,
            "stream": self._streaming,
            "stop_sequences": prompt.stop,
        }
        return deltas(
            lambda: syft_wire.call(self._endpoint, payload, context, self._outbound),
            with_address=context.may_know_address(self._endpoint),
            hint=lambda status: syft_wire.key_needed(self._endpoint) if status == 401 else None,
        )


MAX_BATCH = 96
# The dimensions are unknown before the first reply, and a reply must stay within its size limit.
FIRST_BATCH = 16
REPLY_BYTES = 2_000_000
BYTES_PER_NUMBER = 24
MAX_DIMENSIONS = 16_384
# One ideograph, up to six letters, up to three digits, or one symbol.
PIECE = re.compile(
    r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\d_\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]{1,6}|\d{1,3}|[^\w\s]|_"
)


class EmbeddingItem(Value):
    embedding: list[float]
    index: int | None = None


class EmbeddingsReply(Value):
    data: list[EmbeddingItem]


class OpenAIEmbeddings:
    """An Embedder on a configured server. `dimensions` is 0 until the first reply; later replies must have the same."""

    def __init__(self, server: ModelServer, model: str, calibration: Calibration = MINILM, window: int = 8000) -> None:
        self.name = model
        self.window = window
        self.calibration = calibration
        self.dimensions = 0
        self._server = server

    def tokens(self, text: str) -> Sequence[tuple[int, int]]:
        """An estimate, since the server's tokenizer is unknown: close to common vocabularies for English, too high
        rather than too low for other languages."""
        return [piece.span() for piece in PIECE.finditer(text)]

    async def embed(self, texts: Sequence[str]) -> Sequence[Embedding]:
        found: list[Embedding] = []
        while len(found) < len(texts):
            size = REPLY_BYTES // (BYTES_PER_NUMBER * self.dimensions) if self.dimensions else FIRST_BATCH
            batch = texts[len(found) : len(found) + max(1, min(MAX_BATCH, size))]
            found += await self._embed_batch([self._sendable(text) for text in batch])
        return found

    def _sendable(self, text: str) -> str:
        """Truncated to the window, and never empty, which servers reject."""
        if len(text) > self.window and len(pieces := self.tokens(text)) > self.window:
            text = text[: pieces[self.window - 1][1]]
        return text.encode(errors="replace").decode() or " "

    async def _embed_batch(self, texts: list[str]) -> list[Embedding]:
        try:
            body = await self._server.post({"model": self.name, "input": texts, "encoding_format": "float"})
        except UpstreamError as error:
            raise EmbeddingFailed(
                f"The embedding model (AGGREGATOR_EMBEDDING_URL) cannot be asked: {error.message}", **error.details
            ) from error
        vectors = _vectors(body, len(texts))
        dimensions = len(vectors[0])
        if self.dimensions not in (0, dimensions):
            raise EmbeddingFailed(
                f"The embedding model's vectors have changed their length from {self.dimensions} to {dimensions}."
            )
        self.dimensions = dimensions
        return [Embedding(vector=_unit(vector)) for vector in vectors]


def _vectors(body: bytes, count: int) -> list[list[float]]:
    """The reply's vectors, in the order of the texts."""
    try:
        items = msgspec.json.decode(body, type=EmbeddingsReply).data
    except UNDECODABLE as error:
        raise EmbeddingFailed("The embedding model's reply is not a list of embeddings.") from error
    vectors = {number if item.index is None else item.index: item.embedding for number, item in enumerate(items)}
    if len(items) != count or vectors.keys() != set(range(count)):
        raise EmbeddingFailed(f"The embedding model was given {count} texts and its reply does not match them.")
    lengths = {len(vector) for vector in vectors.values()}
    if len(lengths) != 1 or not 0 < max(lengths) <= MAX_DIMENSIONS:
        raise EmbeddingFailed("The embedding model's vectors are not of one usable length.")
    return [vectors[number] for number in range(count)]


def _unit(vector: list[float]) -> bytes:
    """The vector, scaled to unit length, as float32. Without numpy, which a server that only forwards questions never
    loads."""
    norm = math.hypot(*vector)
    if not 0 < norm < math.inf:
        raise EmbeddingFailed("The embedding model's vectors hold numbers that cannot be compared.")
    return array("f", [number / norm for number in vector]).tobytes()
