"""Spec 4's dialect: POST /rag/stream, a question to the collections, answered word by word."""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
from starlette.types import Receive, Scope, Send

from anabranch.app import Anabranch
from anabranch.app.query_log import LogEntry
from anabranch.app.questions import Options
from anabranch.domain.errors import AnabranchError, InvalidQuestion
from anabranch.domain.model import RAG, Allowance, Context, Message
from anabranch.entrypoints.http import rag_wire as wire
from anabranch.entrypoints.http import rate_headers
from anabranch.entrypoints.http.access import Access
from anabranch.entrypoints.http.asgi import Headers, header, send_json, wants_fresh
from anabranch.entrypoints.http.knowledge_errors import Gone, body_of
from anabranch.entrypoints.http.query import named, scope_of
from anabranch.entrypoints.http.query_wire import filters_of
from anabranch.entrypoints.http.resumable import AnswerInfo, Resuming, preferred
from anabranch.entrypoints.http.run_stream import follow
from anabranch.knowledge.records.identifiers import new_id
from anabranch.pipeline.run import Run
from anabranch.text.messages import LANGUAGES, known, language_of, message

SURFACE = "rag_stream"
LONGEST = 10_000
MOST = 8
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
    context: Context


class RagSurface:
    def __init__(self, anabranch: Anabranch) -> None:
        self._anabranch = anabranch
        self._settings = anabranch.settings
        self._access = Access(anabranch)
        self._resuming = Resuming(anabranch)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        language = language_of(header(scope, b"accept-language"))
        form = wire.RagForm(
            query_id=new_id(),
            language=language,
            prompt_version=RAG.prompt_version,
            correlation_id=scope["correlation_id"],
        )
        try:
            run, allowance, context = await self._started(scope, receive, form)
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

        left = rate_headers.left(allowance)
        if preferred(scope):
            about = AnswerInfo(
                dialect="rag",
                correlation_id=scope["correlation_id"],
                language=form.language,
                prompt_version=RAG.prompt_version,
            )
            await self._resuming.follow(
                run, scope, receive, send, form.frame, about=about, context=context, headers=left
            )
        else:
            await follow(run, receive, send, form.frame, self._settings, left)

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
        search, keys = await scope_of(room, caller, asked.collections, elsewhere, filters_of(asked.filters))
        form.elsewhere = bool(elsewhere)
        question = self._anabranch.questions.rag(
            asked.query,
            search,
            tuple(Message(role=turn.role, content=turn.content) for turn in asked.messages or ()),
            Options(
                top_k=asked.top_k,
                max_tokens=asked.max_tokens or None,
                rerank=asked.rerank,
                fresh=wants_fresh(scope),
                threshold=asked.threshold,
                diversity=asked.mmr_lambda,
                language=form.language,
                answer_in=form.language if asked.language is not None else None,
            ),
        )
        context = self._access.context(scope, caller, SURFACE)
        entry = LogEntry(query_id=form.query_id, conversation=new_id(), collections=keys)
        run, allowance = await self._anabranch.begin(question, context, entry=entry)
        return Started(run, allowance, context)

    async def _refuse(self, send: Send, error: AnabranchError, form: wire.RagForm) -> None:
        status, body = form.refusal(error)
        self._anabranch.turned_away(SURFACE, wire.CODES.get(error.code, wire.OTHERWISE)[1])
        await send_json(send, status, body, [*rate_headers.refused(error, status), *MORE.get(status, ())])


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
