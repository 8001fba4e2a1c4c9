"""Spec 4's dialect: POST /rag/stream, a question to the collections, answered word by word."""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
from starlette.types import Receive, Scope, Send

from anabranch.app import Anabranch
from anabranch.app.endpoint_resolver import COLLECTIONS
from anabranch.domain.errors import AnabranchError, InvalidQuestion
from anabranch.domain.events import Answered, AnswerEvent
from anabranch.domain.model import Allowance, Context, Endpoint, Filters, Ground, Message, Question
from anabranch.entrypoints.http import rag_wire as wire
from anabranch.entrypoints.http import rate_headers
from anabranch.entrypoints.http.access import Access
from anabranch.entrypoints.http.asgi import Headers, header, send_json, wants_fresh
from anabranch.entrypoints.http.knowledge_errors import Gone, body_of
from anabranch.entrypoints.http.query import named
from anabranch.entrypoints.http.query_log import QueryLog, QueryLogEntry
from anabranch.entrypoints.http.query_wire import filters_of
from anabranch.entrypoints.http.resumable import AnswerInfo, Resuming, preferred
from anabranch.entrypoints.http.run_stream import follow
from anabranch.knowledge.records.identifiers import new_id
from anabranch.pipeline.prompt import version_of
from anabranch.pipeline.run import Run
from anabranch.text.messages import LANGUAGES, known, language_of, message

SURFACE = "rag_stream"
PROFILE = "rag"
LONGEST = 10_000
TOP_K, MOST = 5, 8
# Spec 4's own, where neither the request nor the settings say otherwise.
THRESHOLD = 0.55
MMR_LAMBDA = 0.5
MAX_TOKENS = 1_024
MORE: Mapping[int, Headers] = {
    401: ((b"www-authenticate", b"Bearer"),),
    408: ((b"connection", b"close"),),  # the rest of the request is not read
    413: ((b"connection", b"close"),),
}

# Lenient as the chat surface is: "5" and 5.0 are taken for 5.
decode = msgspec.json.Decoder(wire.RagRequest, strict=False).decode


class NotValid(InvalidQuestion):
    """What is wrong with a request, in the caller's language."""

    code = "validation_error"


class Started(NamedTuple):
    run: Run
    allowance: Allowance | None
    entry: QueryLogEntry
    context: Context


class RagSurface:
    def __init__(self, anabranch: Anabranch, ledger: QueryLog) -> None:
        self._anabranch = anabranch
        self._settings = anabranch.settings
        self._access = Access(anabranch)
        self._resuming = Resuming(anabranch)
        self._ledger = ledger
        self._prompt_version = version_of(PROFILE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        language = language_of(header(scope, b"accept-language"))
        form = wire.RagForm(
            query_id=new_id(),
            language=language,
            prompt_version=self._prompt_version,
            correlation_id=scope["correlation_id"],
        )
        try:
            run, allowance, entry, context = await self._started(scope, receive, form)
        except Gone:
            return
        except AnabranchError as error:
            await self._refuse(send, error, form)
            return
        except UnicodeDecodeError:
            await self._refuse(send, InvalidQuestion("The body is not UTF-8."), form)
            return
        except (msgspec.MsgspecError, RecursionError) as error:
            await self._refuse(send, InvalidQuestion(str(error)), form)
            return

        def frame(event: AnswerEvent) -> bytes:
            if isinstance(event, Answered) and event.answer.ground is not Ground.ALL_FAILED:
                entry.write(event.answer)
            return form.frame(event)

        left = rate_headers.left(allowance)
        if preferred(scope):
            about = AnswerInfo(
                dialect="rag",
                correlation_id=scope["correlation_id"],
                language=form.language,
                prompt_version=self._prompt_version,
            )
            await self._resuming.follow(run, scope, receive, send, frame, about=about, context=context, headers=left)
        else:
            await follow(run, receive, send, frame, self._settings, left)

    async def _started(self, scope: Scope, receive: Receive, form: wire.RagForm) -> Started:
        """Admission: what is wrong with a request is said before any 200."""
        await self._anabranch.check(SURFACE)
        caller = await self._access.caller(scope)
        asked = decode(await body_of(receive, self._settings.max_request_bytes))
        if asked.language is not None:
            form.language = _language(asked.language, form.language)
        _check(asked, form.language)
        room = await self._anabranch.knowledge()
        elsewhere = named(self._anabranch, self._access.vouched(scope, caller), asked.sources)
        ours = bool(asked.collections) or not elsewhere
        searched = await room.chosen(caller, asked.collections or None) if ours else []
        form.elsewhere = bool(elsewhere)
        filters = filters_of(asked.filters)
        if asked.collections:
            filters = msgspec.structs.replace(filters, collections=tuple(one.id for one in searched))
        asked_of = (*((COLLECTIONS,) if ours else ()), *elsewhere)
        question = self._question(asked, asked_of, filters, form.language, fresh=wants_fresh(scope))
        context = self._access.context(scope, caller, SURFACE)
        run, allowance = await self._anabranch.begin(question, context)
        ledger = self._ledger if self._settings.query_log_days else None
        entry = QueryLogEntry(ledger, room, caller, form.query_id, new_id(), question, searched)
        return Started(run, allowance, entry, context)

    async def _refuse(self, send: Send, error: AnabranchError, form: wire.RagForm) -> None:
        status, body = form.refusal(error)
        self._anabranch.turned_away(SURFACE, wire.CODES.get(error.code, wire.OTHERWISE)[1])
        await send_json(send, status, body, [*rate_headers.refused(error, status), *MORE.get(status, ())])

    def _question(
        self, asked: wire.RagRequest, asked_of: tuple[Endpoint, ...], filters: Filters, language: str, *, fresh: bool
    ) -> Question:
        model, settings = self._anabranch.model, self._settings
        threshold = asked.threshold if asked.threshold is not None else settings.guard_threshold
        diversity = asked.mmr_lambda
        if diversity is msgspec.UNSET:
            diversity = MMR_LAMBDA if settings.mmr_lambda is None else settings.mmr_lambda
        return Question(
            text=asked.query,
            sources=asked_of,
            model=model,
            history=tuple(Message(role=turn.role, content=turn.content) for turn in asked.messages or ()),
            top_k=min(TOP_K, settings.max_top_k) if asked.top_k is None else asked.top_k,
            similarity_threshold=0.0,
            max_tokens=asked.max_tokens or MAX_TOKENS,
            temperature=0.0,
            profile=PROFILE,
            refuse=True,
            filters=filters,
            rerank=asked.rerank,
            rewrite=self._anabranch.rewrites(model) and COLLECTIONS in asked_of,
            diversity=diversity,
            threshold=THRESHOLD if threshold is None else threshold,
            language=language,
            answer_in=language if asked.language is not None else None,
            fresh=fresh,
        )


def _language(tag: str, accepted: str) -> str:
    found = known(tag)
    if found is None:
        raise NotValid(message("language_unknown", accepted, languages=", ".join(LANGUAGES)))
    return found


def _check(asked: wire.RagRequest, language: str) -> None:
    """What a type alone cannot say, in the caller's language."""
    if not asked.query.strip():
        raise NotValid(message("query_empty", language))
    if len(asked.query) > LONGEST:
        raise NotValid(message("query_too_long", language, limit=LONGEST))
    if asked.top_k is not None and not 1 <= asked.top_k <= MOST:
        raise NotValid(message("top_k_range", language, limit=MOST))
    if asked.threshold is not None and not 0 <= asked.threshold <= 1:
        raise NotValid(message("threshold_range", language))
    if isinstance(asked.mmr_lambda, float) and not 0 <= asked.mmr_lambda <= 1:
        raise NotValid(message("mmr_lambda_range", language))
