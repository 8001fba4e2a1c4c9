"""The documentation subagent: answers a question and streams the answer in progress as revisions of its result."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from typing import Annotated, Any

import msgspec

from anabranch.domain.contracts import Answerer, Clock
from anabranch.domain.errors import DeadlineExceeded, FailureKind, InvalidQuestion, UpstreamError
from anabranch.domain.events import (
    AnswerEvent,
    RetrievalFinished,
    RetrievalStarted,
    SourceReplied,
    SubagentStatus,
    Token,
)
from anabranch.domain.model import Answer, Context, Filters, Ground, Question, SourceReply, Status, Value
from anabranch.domain.steps import Directive, Expected, Fragment
from anabranch.subagents.payloads import (
    MAX_LABEL,
    Aliases,
    Object,
    convert,
    cut,
    decode,
    encode,
    fragment,
    input_of,
    merge,
    missing,
    web_address,
    within,
)
from anabranch.text.messages import LANGUAGES, known

PENDING = 256
TEXT_EVERY_S = 0.1


class PartialResults:
    """The status of each source as it replies, and the text so far at most ten times a second."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sources: list[Object] = []
        self._found = 0
        self._text: list[str] = []
        self._unsent = False
        self._sent_at = float("-inf")

    def update(self, event: AnswerEvent) -> Fragment | None:
        match event:
            case RetrievalStarted():
                self._sources = [{"source": path, "status": "pending", "passages": 0} for path in event.sources]
                return self._retrieval()
            case SourceReplied(index=index, reply=reply) if index < len(self._sources):
                count = len(reply.passages)
                self._sources[index] = {"source": reply.path, "status": reply.status, "passages": count}
                self._found += count
                return self._retrieval()
            case RetrievalFinished():
                self._found = event.passages
                return self._retrieval(finished=True)
            case Token() if event.text and not self._all_failed:
                self._text.append(event.text)
                self._unsent = True
            case _:
                pass
        return None

    @property
    def _all_failed(self) -> bool:
        """No source has replied: the text is not the beginning of an answer."""
        return bool(self._sources) and all(one["status"] != Status.SUCCESS for one in self._sources)

    @property
    def wait_s(self) -> float | None:
        """How long the unsent text waits for more; None if there is none."""
        return max(0.0, self._sent_at + TEXT_EVERY_S - self._clock.monotonic()) if self._unsent else None

    def due(self) -> Fragment | None:
        now = self._clock.monotonic()
        if not self._unsent or now < self._sent_at + TEXT_EVERY_S:
            return None
        self._sent_at, self._unsent = now, False
        self._text = ["".join(self._text)]
        return Fragment(status="partial", payload=encode({"stage": "generation", "answer": self._text[0]}))

    def _retrieval(self, *, finished: bool = False) -> Fragment:
        payload = {"stage": "retrieval", "sources": self._sources, "passages": self._found, "finished": finished}
        return Fragment(status="in_progress", payload=encode(payload))


MAX_QUESTION = 10_000
MAX_CITATIONS = 100
MAX_QUOTE = 1_000
MAX_COUNT = 2**53
INPUT_ALIASES: Aliases = {"question": ("query",)}
ALIASES: Aliases = {"answer": ("text", "response"), "citations": ("sources",)}
CITATION_ALIASES: Aliases = {
    "document_id": ("doc_id", "id"),
    "title": ("name", "source"),
    "quoted_text": ("quote", "text", "snippet", "content"),
    "url": ("link",),
}


class DocumentationInput(Value):
    question: str | None = None
    collections: Annotated[list[str], msgspec.Meta(max_length=100)] | None = None
    top_k: int | None = None
    language: str | None = None


class DocumentationPayload(Value):
    """What a remote subagent sends as its answer."""

    answer: str | None = None
    citations: list[dict[str, Any] | str] | None = None
    model: str | None = None
    retrieval_count: Annotated[int, msgspec.Meta(ge=0, lt=MAX_COUNT)] | None = None


class CitationPayload(Value):
    document_id: str | int | None = None
    title: str | None = None
    quoted_text: str | None = None
    url: str | None = None
    citation_index: int | None = None


class DocumentationSubagent:
    """A Subagent that answers from collections. Its `input` has a `question` (or `query`) and may name `collections`,
    `top_k` and a `language`. Without an input it pushes its result. `template` has the settings of every question.
    `chosen` resolves collection names for a caller; NotFound if one does not exist. `found` is told of the documents of
    collections that were found for a step, before any text made of them is reported."""

    def __init__(
        self,
        answerer: Answerer,
        clock: Clock,
        *,
        template: Question,
        max_top_k: int,
        chosen: Callable[[Sequence[str], Context], Awaitable[tuple[str, ...]]],
        found: Callable[[Directive, Collection[str]], None] = lambda _directive, _documents: None,
    ) -> None:
        self._found = found
        self._answerer = answerer
        self._clock = clock
        self._template = template
        self._max_top_k = max_top_k
        self._chosen = chosen

    def convert(self, payload: bytes, status: SubagentStatus) -> Fragment:
        converted = fragment(payload, status, final_answer if status == "success" else partial_answer, ("citations",))
        count = msgspec.json.decode(converted.payload).get("retrieval_count")
        metrics = {"retrieval_count": float(count)} if isinstance(count, int) and 0 <= count < MAX_COUNT else {}
        return msgspec.structs.replace(converted, metrics=metrics)

    async def work(
        self,
        expected: Expected,
        directive: Directive,
        context: Context,
    ) -> AsyncGenerator[Fragment, None]:
        question = await self._question(decode(input_of(expected)), context)
        results = PartialResults(self._clock)
        events: asyncio.Queue[AnswerEvent] = asyncio.Queue(PENDING)
        late = DeadlineExceeded("The answer was not complete in time.")
        answer = within(
            self._answerer.answer(question, context, events.put), context.deadline - self._clock.monotonic(), late
        )
        answering = asyncio.create_task(answer)
        try:
            while not (answering.done() and events.empty()):
                for event in await _next_events(events, answering, results.wait_s):
                    if isinstance(event, SourceReplied):
                        self._found(directive, _stored(event.reply))
                    if (partial := results.update(event)) is not None:
                        yield partial
                if (partial := results.due()) is not None:
                    yield partial
            yield finished(answering.result())
        finally:
            answering.cancel()
            await asyncio.wait({answering})
            if not answering.cancelled():
                answering.exception()  # avoids the warning about an exception never retrieved

    async def _question(self, given: Object, context: Context) -> Question:
        options, _ = convert(given, DocumentationInput, INPUT_ALIASES)
        if options.question is None:
            raise missing("question", INPUT_ALIASES)
        if not options.question.strip() or len(options.question) > MAX_QUESTION:
            raise InvalidQuestion(f"question must have 1 to {MAX_QUESTION:,} characters.")
        top_k = min(self._template.top_k, self._max_top_k) if options.top_k is None else options.top_k
        if not 1 <= top_k <= self._max_top_k:
            raise InvalidQuestion(f"top_k is {top_k}; it must be from 1 to {self._max_top_k}.")
        language = known(options.language)
        if options.language is not None and language is None:
            raise InvalidQuestion(f"language must be one of {', '.join(LANGUAGES)}.")
        filters = self._template.filters
        if options.collections:
            filters = Filters(collections=await self._chosen(options.collections, context))
        return msgspec.structs.replace(
            self._template, text=options.question, top_k=top_k, filters=filters, language=language, answer_in=language
        )


def _stored(reply: SourceReply) -> set[str]:
    """The documents of collections among the passages."""
    return {one.document_id for one in reply.passages if one.place is not None and one.document_id}


async def _next_events(
    events: asyncio.Queue[AnswerEvent], answering: "asyncio.Task[Answer]", wait_s: float | None
) -> list[AnswerEvent]:
    """All events since the last call. Waits for the first of them, the end of the answer, or `wait_s`."""
    found = []
    getting = asyncio.ensure_future(events.get())
    try:
        await asyncio.wait({getting, answering}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        if getting.done():
            found.append(getting.result())
    finally:
        getting.cancel()
    while not events.empty():
        found.append(events.get_nowait())
    return found


def finished(answer: Answer) -> Fragment:
    """The final result. UpstreamError if every source failed; that may pass."""
    if answer.ground is Ground.ALL_FAILED:
        why = next((reply.error for reply in answer.replies if reply.error), "The search failed.")
        raise UpstreamError(why, FailureKind.DOWN)
    found = sum(len(reply.passages) for reply in answer.replies)
    payload = {
        "answer": answer.text,
        "citations": _citations(answer),
        "model": answer.model,
        "retrieval_count": found,
        "refused": answer.refused,
        "finish_reason": answer.finish_reason,
        "latency_ms": answer.timings.total_ms,
        **({} if answer.fallback is None else {"fallback": answer.fallback}),
        **({} if answer.faithfulness is None else {"faithfulness_score": answer.faithfulness}),
        **({"unfaithful": True} if answer.unfaithful else {}),
    }
    return Fragment(status="success", payload=encode(payload), metrics={"retrieval_count": float(found)})


def _citations(answer: Answer) -> list[Object]:
    """As `/v1/query` has them: `start_char` and `end_char` are offsets in the document, or in the passage if it is not
    from a collection."""
    found = []
    for citation in answer.citations[:MAX_CITATIONS]:
        passage = answer.passages[citation.passage]
        begin = passage.place.start if passage.place else 0
        quote = passage.text[citation.passage_start : citation.passage_end]
        found.append(
            {
                "citation_index": citation.passage + 1,
                "document_id": passage.document_id,
                "chunk_id": passage.place.chunk_id if passage.place else None,
                "title": cut(passage.title, MAX_LABEL),
                "source": citation.source,
                "start_char": begin + citation.passage_start,
                "end_char": begin + citation.passage_end,
                "quoted_text": cut(quote, MAX_QUOTE),
                "answer_start": citation.start,
                "answer_end": citation.end,
                "url": passage.place.url if passage.place else None,
            }
        )
    return found


def final_answer(given: Object) -> Object:
    """The final answer of a remote subagent, in our form."""
    found = partial_answer(given)
    if found.get("answer") is None:
        raise missing("answer", ALIASES)
    return {"answer": "", "citations": [], "model": None, "retrieval_count": 0} | found


def partial_answer(given: Object) -> Object:
    """The fields that are there so far."""
    sent, others = convert(given, DocumentationPayload, ALIASES)
    card: Object = {"answer": sent.answer, "model": sent.model, "retrieval_count": sent.retrieval_count}
    if sent.citations is not None:
        card["citations"] = [_cited(*one) for one in enumerate(sent.citations[:MAX_CITATIONS])]
        card["retrieval_count"] = len(sent.citations) if sent.retrieval_count is None else sent.retrieval_count
    return merge({name: value for name, value in card.items() if value is not None}, others)


def _cited(at: int, given: Object | str) -> Object:
    if isinstance(given, str):
        given = {"title": given}
    where = f"citations[{at}]: "
    cited, others = convert(given, CitationPayload, CITATION_ALIASES, where)
    citation = {
        "citation_index": at + 1 if cited.citation_index is None else cited.citation_index,
        "document_id": cited.document_id,
        "title": cut(cited.title, MAX_LABEL) if cited.title else None,
        "quoted_text": cut(cited.quoted_text, MAX_QUOTE) if cited.quoted_text else None,
        "url": web_address(cited.url, f"{where}url"),
    }
    return merge(citation, others)
