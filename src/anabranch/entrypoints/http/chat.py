"""Spec 1's dialect: POST /api/v1/chat and POST /api/v1/chat/stream."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from anabranch.app import Anabranch
from anabranch.domain.errors import AnabranchError, InvalidQuestion
from anabranch.domain.model import Context, Endpoint, Question, Until
from anabranch.entrypoints.http import chat_wire as wire
from anabranch.entrypoints.http import errors
from anabranch.entrypoints.http.access import Access
from anabranch.entrypoints.http.exchange import TooLarge, read_body, send_error, send_json
from anabranch.entrypoints.http.following import follow, trace, whole
from anabranch.knowledge.model import Caller
from anabranch.pipeline.run import Run
from anabranch.runtime.settings import Settings

N = TypeVar("N", int, float)

# Lenient as the first implementation was: "5" and 5.0 are taken for 5.
decode = msgspec.json.Decoder(wire.ChatRequest, strict=False).decode


class ChatSurface:
    """Both ways of asking: `complete` answers in JSON, `stream` as server-sent events. One Run behind each."""

    def __init__(self, anabranch: Anabranch) -> None:
        self._anabranch = anabranch
        self._settings = anabranch.settings
        self._access = Access(anabranch)

    async def complete(self, scope: Scope, receive: Receive, send: Send) -> None:
        run = await self._started(scope, receive, send)
        if run is None:
            return
        try:
            answer = await whole(run, receive)
        except AnabranchError as error:
            await send_error(send, error)
        else:
            with suppress(TimeoutError):
                await send_json(send, 200, wire.response(answer))

    async def stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        run = await self._started(scope, receive, send)
        if run is not None:
            await follow(run, receive, send, wire.frame, self._settings)

    async def _started(self, scope: Scope, receive: Receive, send: Send) -> Run | None:
        """Admission: what is wrong with a request is said before any 200."""
        limit = self._settings.max_request_bytes
        try:
            caller = await self._access.admit(scope)
            body = await read_body(receive, limit)
            if body is None:
                return None
            if not body:
                raise InvalidQuestion("The body is empty; send JSON.")
            request = decode(body)
            question = _question(request, self._settings, lambda: self._access.vouched(scope, caller))
            return self._anabranch.start(question, self._context(scope, request, caller))
        except TimeoutError:
            message = "The request took too long to arrive."
            await send_json(send, 408, errors.body("request_timeout", message), [(b"connection", b"close")])
        except TooLarge:
            message = f"The request is larger than {limit:,} bytes."
            await send_json(send, 413, errors.body("request_too_large", message), [(b"connection", b"close")])
        except UnicodeDecodeError:
            await send_error(send, InvalidQuestion("The body is not UTF-8."))
        except (msgspec.MsgspecError, RecursionError) as error:
            await send_error(send, InvalidQuestion(f"The request is not valid: {error}"))
        except AnabranchError as error:
            await send_error(send, error)
        return None

    def _context(self, scope: Scope, request: wire.ChatRequest, caller: Caller | None) -> Context:
        traceparent, tracestate = trace(scope)
        return self._anabranch.context(
            correlation_id=scope["correlation_id"],
            address=self._access.address(scope),
            user_id=caller.user if caller else None,
            groups=caller.groups if caller else (),
            operator=caller is not None and caller.operator,
            tokens=request.endpoint_tokens,
            transactions=request.transaction_tokens,
            traceparent=traceparent,
            tracestate=tracestate,
        )


def _question(request: wire.ChatRequest, settings: Settings, vouched: Callable[[], bool]) -> Question:
    references = request.data_sources or []
    named = any(reference is not None and not reference.url for reference in (request.model, *references))
    named_sources, named_models = (settings.sources, settings.models) if named and vouched() else ({}, {})
    until = Until.MERGE if request.retrieval_only else Until.GENERATE
    model = _endpoint(request.model or wire.EndpointRef(), named_models)
    if until is Until.GENERATE and not (model.url and model.slug):
        raise InvalidQuestion(
            "model needs a url and a slug (or, for callers on this machine, the slug of a configured model), "
            "unless retrieval_only is true."
        )
    defaults = Question(text="")
    return Question(
        text=request.prompt,
        sources=tuple(_endpoint(reference, named_sources) for reference in references),
        model=model if until is Until.GENERATE else None,
        history=wire.history(request.messages),
        top_k=_or(request.top_k, settings.default_top_k),
        similarity_threshold=_or(request.similarity_threshold, defaults.similarity_threshold),
        max_tokens=_or(request.max_tokens, defaults.max_tokens),
        temperature=_or(request.temperature, defaults.temperature),
        system_prompt=request.custom_system_prompt or None,
        until=until,
    )


def _endpoint(reference: wire.EndpointRef, named: Mapping[str, Endpoint]) -> Endpoint:
    """The endpoint that a request names: by its URL, or, for a caller who may, as the operator has named it."""
    if not reference.url and reference.slug in named:
        return named[reference.slug]
    return Endpoint(
        slug=reference.slug,
        url=reference.url,
        name=reference.name or "",
        owner=reference.owner_username or None,
        tenant=reference.tenant_name or None,
        kind=reference.kind,
        query=reference.query_override or None,
    )


def _or(value: N | None, default: N) -> N:
    return default if value is None else value
