"""Spec 1's dialect: POST /api/v1/chat and POST /api/v1/chat/stream."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from anabranch.app import Anabranch
from anabranch.domain.errors import AnabranchError, InvalidQuestion
from anabranch.domain.model import Allowance, Context, Endpoint, Question, Until
from anabranch.entrypoints.http import allowances, errors
from anabranch.entrypoints.http import chat_wire as wire
from anabranch.entrypoints.http.access import Access
from anabranch.entrypoints.http.errors import send_error
from anabranch.entrypoints.http.exchange import TooLarge, read_body, send_json
from anabranch.entrypoints.http.following import follow, whole
from anabranch.entrypoints.http.resuming import About, Resuming, preferred
from anabranch.pipeline.run import Run
from anabranch.runtime.settings import Settings

N = TypeVar("N", int, float)

SURFACE = "chat"

# Lenient as the first implementation was: "5" and 5.0 are taken for 5.
decode = msgspec.json.Decoder(wire.ChatRequest, strict=False).decode


class Started(NamedTuple):
    run: Run
    allowance: Allowance | None
    context: Context


class ChatSurface:
    """Both ways of asking: `complete` answers in JSON, `stream` as server-sent events. One Run behind each."""

    def __init__(self, anabranch: Anabranch) -> None:
        self._anabranch = anabranch
        self._settings = anabranch.settings
        self._access = Access(anabranch)
        self._resuming = Resuming(anabranch)

    async def complete(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = await self._begun(scope, receive, send)
        if begun is None:
            return
        try:
            answer = await whole(begun.run, receive)
        except AnabranchError as error:
            await send_error(send, error)
        else:
            with suppress(TimeoutError):
                await send_json(send, 200, wire.response(answer), allowances.left(begun.allowance))

    async def stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = await self._begun(scope, receive, send)
        if begun is None:
            return
        run, left = begun.run, allowances.left(begun.allowance)
        if preferred(scope):
            about = About(dialect="chat", correlation_id=scope["correlation_id"])
            resuming, context = self._resuming, begun.context
            await resuming.follow(run, scope, receive, send, wire.frame, about=about, context=context, headers=left)
        else:
            await follow(run, receive, send, wire.frame, self._settings, left)

    async def _begun(self, scope: Scope, receive: Receive, send: Send) -> Started | None:
        """Admission: what is wrong with a request is said before any 200."""
        limit = self._settings.max_request_bytes
        try:
            await self._anabranch.check(SURFACE)
            caller = await self._access.admit(scope)
            body = await read_body(receive, limit)
            if body is None:
                return None
            if not body:
                raise InvalidQuestion("The body is empty; send JSON.")
            request = decode(body)
            public_only = self._access.public_only(scope, caller)
            question = _question(request, self._settings, lambda: self._access.vouched(scope, caller), public_only)
            tokens, transactions = request.endpoint_tokens, request.transaction_tokens
            context = self._access.context(scope, caller, SURFACE, tokens=tokens, transactions=transactions)
            run, allowance = await self._anabranch.begin(question, context)
            return Started(run, allowance, context)
        except TimeoutError:
            message = "The request took too long to arrive."
            await send_json(send, 408, errors.body("request_timeout", message), [(b"connection", b"close")])
        except TooLarge:
            message = f"The request is larger than {limit:,} bytes."
            await send_json(send, 413, errors.body("request_too_large", message), [(b"connection", b"close")])
        except UnicodeDecodeError:
            await self._refuse(send, InvalidQuestion("The body is not UTF-8."))
        except (msgspec.MsgspecError, RecursionError) as error:
            await self._refuse(send, InvalidQuestion(f"The request is not valid: {error}"))
        except AnabranchError as error:
            await self._refuse(send, error)
        return None

    async def _refuse(self, send: Send, error: AnabranchError) -> None:
        self._anabranch.turned_away(SURFACE, error.code)
        await send_error(send, error)


def _question(
    request: wire.ChatRequest, settings: Settings, vouched: Callable[[], bool], public_only: bool
) -> Question:
    references = request.data_sources or []
    named = any(reference is not None and not reference.url for reference in (request.model, *references))
    named_sources, named_models = (settings.sources, settings.models) if named and vouched() else ({}, {})
    until = Until.MERGE if request.retrieval_only else Until.GENERATE
    model = _endpoint(request.model or wire.EndpointRef(), named_models, public_only)
    if until is Until.GENERATE and not (model.url and model.slug):
        raise InvalidQuestion(
            "model needs a url and a slug (or, for callers who may use it, the slug of a configured model), "
            "unless retrieval_only is true."
        )
    defaults = Question(text="")
    return Question(
        text=request.prompt,
        sources=tuple(_endpoint(reference, named_sources, public_only) for reference in references),
        model=model if until is Until.GENERATE else None,
        history=wire.history(request.messages),
        top_k=_or(request.top_k, settings.default_top_k),
        similarity_threshold=_or(request.similarity_threshold, defaults.similarity_threshold),
        max_tokens=_or(request.max_tokens, defaults.max_tokens),
        temperature=_or(request.temperature, defaults.temperature),
        system_prompt=request.custom_system_prompt or None,
        until=until,
        diversity=settings.mmr_lambda,
        threshold=settings.guard_threshold,
    )


def _endpoint(reference: wire.EndpointRef, named: Mapping[str, Endpoint], public_only: bool) -> Endpoint:
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
        public_only=public_only,
    )


def _or(value: N | None, default: N) -> N:
    return default if value is None else value
