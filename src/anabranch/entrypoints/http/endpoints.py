"""The SyftAI-Space dialect, as a source speaks it: POST /api/v1/endpoints/{slug}/query."""

from contextlib import suppress
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.types import Receive, Scope, Send

from anabranch.app import Anabranch
from anabranch.app.publishing import Publication
from anabranch.app.questions import Options, relayed
from anabranch.app.runs import StartedRun
from anabranch.domain.errors import AnabranchError, DeadlineExceeded, InvalidQuestion
from anabranch.domain.eventlog import one_line
from anabranch.domain.events import Answered, AnswerEvent, Failed, Token
from anabranch.domain.model import Answer, Context, Endpoint, Message, Passage, Question, Status
from anabranch.entrypoints.http import errors, rate_headers
from anabranch.entrypoints.http.access import Access
from anabranch.entrypoints.http.asgi import Headers, TooLarge, header, read_body, send_json
from anabranch.entrypoints.http.run_stream import follow, whole

SURFACE = "endpoints"
LONGEST_QUESTION = 100_000
AGAIN: Headers = [(b"retry-after", b"5")]
MORE: dict[int, Headers] = {
    401: [(b"www-authenticate", b"Bearer")],
    408: [(b"connection", b"close")],  # the rest of the request is not read
    413: [(b"connection", b"close")],
}


class EndpointMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["system", "user", "assistant"] = "user"
    content: str = ""


class EndpointQuery(msgspec.Struct, frozen=True, kw_only=True):
    """What an aggregator asks: a data source takes a text, a model takes messages."""

    messages: str | list[EndpointMessage]
    limit: Annotated[int, Meta(ge=1)] | None = None
    similarity_threshold: Annotated[float, Meta(ge=0, le=1)] | None = None
    include_metadata: bool | None = True
    transaction_token: Annotated[str, Meta(max_length=8_192)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    stream: bool | None = False


decode = msgspec.json.Decoder(EndpointQuery, strict=False).decode


class EndpointSurface:
    """Published collections answer with references, published models with a summary."""

    def __init__(self, anabranch: Anabranch) -> None:
        self._anabranch = anabranch
        self._settings = anabranch.settings
        self._publishing = anabranch.publishing
        self._access = Access(anabranch)

    async def query(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._anabranch.check(SURFACE)
            await self._answer(scope, receive, send)
        except AnabranchError as error:
            self._anabranch.turned_away(SURFACE, error.code)
            status = errors.status_of(error)
            await _refuse(send, status, error.message, rate_headers.refused(error, status))
        except TooLarge:
            await _refuse(send, 413, f"The request is larger than {self._settings.max_request_bytes:,} bytes.")
        except TimeoutError:
            await _refuse(send, 408, "The request took too long to arrive.")
        except UnicodeDecodeError:
            await _refuse(send, 422, "The body is not UTF-8.")
        except (msgspec.MsgspecError, RecursionError) as error:
            await _refuse(send, 422, f"The request is not valid: {error}")

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Who asks comes first: a stranger learns nothing, not even which slugs there are.
        caller, owners = await self._access.visitor(scope, await self._publishing.owners())
        named = scope["path_params"]
        owner = named.get("owner") or header(scope, b"x-tenant-name")
        publication = await self._publishing.find(named["slug"], owner, owners)
        body = await read_body(receive, self._settings.max_request_bytes)
        if body is None:
            return
        if not body:
            raise InvalidQuestion("The body is empty; send JSON.")
        asked = decode(body)
        spoken = [EndpointMessage(content=asked.messages)] if isinstance(asked.messages, str) else asked.messages
        context = self._access.context(scope, caller, SURFACE)
        if publication.model is None:
            question = self._search(publication, asked, spoken)
            run, allowance = await self._begun(publication, asked, question, context)
            reply = (await whole(run, receive)).replies[0]
            if reply.status is Status.TIMEOUT:
                raise DeadlineExceeded("The search took too long.")
            if reply.status is not Status.SUCCESS:  # why is in the log: it may name our folders
                await _refuse(send, 503, "The collection cannot be searched at the moment.", AGAIN)
                return
            found = _references(publication, reply.passages, metadata=asked.include_metadata is not False)
            await _send(send, found, rate_headers.left(allowance))
            return
        question = _relayed(publication.model, asked, spoken)
        run, allowance = await self._begun(publication, asked, question, context)
        left = rate_headers.left(allowance)
        if asked.stream:
            form = Pieces(publication.slug, context.correlation_id)
            await follow(run, receive, send, form.frame, self._settings, left)
            return
        answer = await whole(run, receive)
        await _send(send, {"summary": _summary(publication, answer, context), "references": None}, left)

    async def _begun(
        self, publication: Publication, asked: EndpointQuery, question: Question, context: Context
    ) -> StartedRun:
        answerer = self._publishing.answerer(publication)
        entry = publication.log_entry(asked.transaction_token or None)
        return await self._anabranch.begin(question, context, answerer, entry)

    def _search(self, publication: Publication, asked: EndpointQuery, spoken: list[EndpointMessage]) -> Question:
        text = _last_question(spoken)
        if len(text) > LONGEST_QUESTION:
            raise InvalidQuestion(f"The question has {len(text):,} characters; at most {LONGEST_QUESTION:,} are read.")
        return self._anabranch.questions.published_search(
            text, publication.collection or "", asked.limit, asked.similarity_threshold
        )


class Pieces:
    """A published model's words as they come, in the form that most clients of models read."""

    def __init__(self, model: str, identifier: str) -> None:
        self._head = {"id": identifier, "object": "chat.completion.chunk", "model": model}

    def frame(self, event: AnswerEvent) -> bytes:
        match event:
            case Token():
                return self._chunk({"content": event.text})
            case Answered(answer=answer):
                return self._chunk({}, answer.finish_reason or "stop", usage=answer.usage) + b"data: [DONE]\n\n"
            case Failed():
                return _line({"error": {"message": event.message, "code": event.code}}) + b"data: [DONE]\n\n"
            case _:
                return b""

    def _chunk(self, delta: dict[str, str], finish_reason: str | None = None, **more: object) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        return _line({**self._head, "choices": [choice], **more})


def _relayed(model: Endpoint, asked: EndpointQuery, spoken: list[EndpointMessage]) -> Question:
    messages = tuple(Message(role=turn.role, content=turn.content) for turn in spoken)
    options = Options(max_tokens=asked.max_tokens, temperature=asked.temperature)
    return relayed(_last_question(spoken), model, messages, options)


def _last_question(spoken: list[EndpointMessage]) -> str:
    text = next((turn.content for turn in reversed(spoken) if turn.role == "user"), "")
    if not text.strip():
        raise InvalidQuestion("messages holds no question.")
    return text


def _references(publication: Publication, passages: tuple[Passage, ...], *, metadata: bool) -> dict[str, Any]:
    documents = [_document(passage, metadata=metadata) for passage in passages]
    info = {"name": "anabranch", "endpoint": publication.path}
    return {"summary": None, "references": {"documents": documents, "provider_info": info, "cost": 0.0}}


def _document(passage: Passage, *, metadata: bool) -> dict[str, Any]:
    document: dict[str, Any] = {
        "document_id": passage.document_id,
        "content": passage.text,
        "similarity_score": passage.score,
    }
    if metadata and passage.place is not None:
        place = passage.place
        document["metadata"] = {
            **place.metadata,
            "title": passage.title,
            "chunk_id": place.chunk_id,
            "start_char": place.start,
            "end_char": place.end,
            "page_number": place.page,
            "headers": place.headers,
            "url": place.url,
        }
    return document


def _summary(publication: Publication, answer: Answer, context: Context) -> dict[str, Any]:
    used = answer.usage.completion_tokens if answer.usage is not None else None
    return {
        "id": context.correlation_id,
        "model": publication.slug,
        "message": {"role": "assistant", "content": answer.text, "tokens": used},
        "finish_reason": answer.finish_reason or "stop",
        "usage": answer.usage,
        "cost": 0.0,
        "provider_info": {"name": "anabranch", "endpoint": publication.path},
    }


def _line(content: dict[str, Any]) -> bytes:
    return b"data: " + one_line(msgspec.json.encode(content)) + b"\n\n"


async def _send(send: Send, content: dict[str, Any], headers: Headers) -> None:
    with suppress(TimeoutError):  # the client does not read
        await send_json(send, 200, msgspec.json.encode(content), headers)


async def _refuse(send: Send, status: int, message: str, headers: Headers = ()) -> None:
    await send_json(send, status, msgspec.json.encode({"detail": message}), [*headers, *MORE.get(status, ())])
