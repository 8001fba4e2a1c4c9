"""The tools `search` and `ask`: questions of MCP callers, and their results."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from msgspec import UNSET

from anabranch.app.anabranch import Anabranch
from anabranch.app.endpoint_resolver import COLLECTIONS
from anabranch.app.query_log import LogEntry
from anabranch.app.questions import Options, SearchScope
from anabranch.domain.errors import NotFound
from anabranch.domain.events import FellBack, GenerationStarted, SourceReplied
from anabranch.domain.model import Answer, Citation, Context, Filters, Ground, Passage, SourceReply, Status
from anabranch.domain.rights import Grants
from anabranch.domain.sentences import place_of
from anabranch.entrypoints.answer_json import sentence_by_sentence
from anabranch.entrypoints.http.errors import SearchUnavailable
from anabranch.entrypoints.mcp.schemas import (
    AskArguments,
    AskedSource,
    AskResponse,
    CitedPassage,
    FoundPassage,
    SearchResponse,
)
from anabranch.entrypoints.verification import verification
from anabranch.knowledge.collection_names import matching, unambiguous
from anabranch.knowledge.model import Caller
from anabranch.pipeline.marks import with_marks
from anabranch.text.messages import message

if TYPE_CHECKING:
    from anabranch.knowledge.model import Collection

# Reports progress: how much is done, of how much, and a message.
Progress = Callable[[float, float | None, str | None], Awaitable[None]]


class McpCaller(NamedTuple):
    """The caller of a tool, and which of the configured sources and models it may use."""

    context: Context
    identity: Caller
    grants: Grants


def progress_text(name: str, reply: SourceReply) -> str:
    """A line of progress."""
    if reply.status is not Status.SUCCESS:
        return f"{name}: {reply.status} after {reply.latency_ms} ms"
    count = len(reply.passages)
    return f"{name}: {count} result{'' if count == 1 else 's'} in {reply.latency_ms} ms"


MAX_SHOWN = 50
NOTHING_FOUND = "Nothing was found; try other words."


async def search(
    anabranch: Anabranch, query: str, collections: Sequence[str], limit: int, caller: McpCaller
) -> SearchResponse:
    """Passages of the documents that the caller can read, best first."""
    searched = await _collections(anabranch, collections, caller)
    if not searched:
        return SearchResponse(results=(), time_ms=0, hint=message("refusal_no_documents"))
    question = anabranch.questions.search_tool(query, _filters(searched, collections), limit)
    entry = LogEntry(collections=tuple(one.key for one in searched))
    run, _ = await anabranch.begin(question, caller.context, entry=entry)
    answer = await run.value()
    if answer.ground is Ground.ALL_FAILED:
        raise SearchUnavailable(answer.replies[0].error or "The search failed.")
    results = tuple(_found(rank, passage) for rank, passage in enumerate(answer.passages, 1))
    nothing = message("refusal_no_documents") if answer.ground is Ground.NO_SOURCES else NOTHING_FOUND
    # A source that succeeded and names an error has found less than there is.
    incomplete = next((reply.error for reply in answer.replies if reply.error), None)
    hint = incomplete or (None if results else nothing)
    return SearchResponse(results=results, time_ms=answer.timings.total_ms, hint=hint)


async def ask(
    anabranch: Anabranch, arguments: AskArguments, top_k: int, caller: McpCaller, progress: Progress
) -> AskResponse:
    """A cited answer, or a refusal that says what is missing."""
    questions, name = anabranch.questions, arguments.model
    model = questions.named_model(name, caller.grants) if name else None
    scope = await _scope(anabranch, arguments.question, arguments.sources or (), caller)
    verify, policy = arguments.verify, arguments.answer_policy
    options = Options(top_k=top_k, verify=verify if verify is not UNSET else None, answer_policy=policy or "all")
    run, _ = await anabranch.begin(questions.ask_tool(arguments.question, scope, options, model), caller.context)
    done, total = 0, len(scope.sources) + 1
    async with run.listen() as listener:
        async for event in listener:
            match event:
                case SourceReplied(reply=reply):
                    done += 1
                    await progress(done, total, progress_text(_name(reply), reply))
                case GenerationStarted():
                    await progress(done + 0.5, total, "writing")
                case FellBack(fallback=why):
                    await progress(done + 0.75, total, f"{why.failed} failed; quoting the documents")
                case _:
                    pass
        return _answered(with_marks(await run.value()))


async def _scope(anabranch: Anabranch, question: str, names: Sequence[str], caller: McpCaller) -> SearchScope:
    """Configured sources and collections by name; without names, all that the caller may use."""
    if not names:
        visible = bool(await _collections(anabranch, (), caller))
        return SearchScope(sources=anabranch.questions.every(question, collections=visible, grants=caller.grants))
    known = [COLLECTIONS.slug, *configured(anabranch, caller.grants)]
    ours = [name for name in names if name in known]
    rest = [name for name in names if name not in known]
    sources = anabranch.configured(ours, caller.grants)
    if not rest:
        return SearchScope(sources=sources)
    searched = await _collections(anabranch, rest, caller, others=known[1:])
    if COLLECTIONS in sources:
        return SearchScope(sources=sources)
    return SearchScope(sources=(COLLECTIONS, *sources), filters=_filters(searched, rest))


def configured(anabranch: Anabranch, grants: Grants) -> Sequence[str]:
    """Names of the configured sources and MCP servers that are granted."""
    servers = [one.name for one in anabranch.servers() if one.state != "disabled" and grants.server(one.name)]
    return [*servers, *grants.sources(anabranch.catalog.sources)]


def named(names: Sequence[str]) -> str:
    listed = ", ".join(names[:MAX_SHOWN])
    return listed if len(names) <= MAX_SHOWN else f"{listed} and {len(names) - MAX_SHOWN} more"


async def _collections(
    anabranch: Anabranch, names: Sequence[str], caller: McpCaller, others: Sequence[str] | None = None
) -> "Sequence[Collection]":
    """The named collections, or all that the caller can read. `others` are further valid names, for the error."""
    visible: Sequence[Collection] = ()
    if anabranch.knowledge.exists:
        knowledge = await anabranch.knowledge()
        try:
            return await knowledge.chosen(caller.identity, names or None)
        except NotFound:
            visible = await knowledge.chosen(caller.identity, None)
    if not names:
        return ()
    missing = next((name for name in names if not matching(name, visible, caller.identity)), names[0])
    what = "collection" if others is None else "source"
    there = named([*(unambiguous(one, visible, caller.identity) for one in visible), *(others or ())])
    raise NotFound(f"There is no {what} {missing!r}; {f'there are: {there}' if there else 'there are no others'}.")


def _filters(searched: "Sequence[Collection]", named: Sequence[str]) -> Filters:
    return Filters(collections=tuple(one.id for one in searched)) if named else Filters()


def _found(rank: int, passage: Passage) -> FoundPassage:
    place = place_of(passage)
    return FoundPassage(
        rank=rank,
        title=passage.title,
        text=passage.text,
        score=passage.score,
        collection=place.collection,
        owner=place.owner,
        document_id=passage.document_id or "",
        start_char=place.start,
        end_char=place.end,
        page=place.page,
        headings=place.headers,
        url=place.url,
        chunk_id=place.chunk_id,
        chunk_type=place.chunk_type,
        suspected_instructions=passage.suspected_instructions,
        **passage.shown_duplicates,
    )


def _answered(answer: Answer) -> AskResponse:
    verified = dict(verification(answer))
    # `sentences` is another field here, which is older.
    checked = verified.pop("sentences", UNSET)
    return AskResponse(
        answer=answer.text,
        refused=answer.refused,
        sentences=sentence_by_sentence(answer).sentences,
        citations=tuple(_cited(one, answer.passages[one.passage]) for one in answer.citations),
        sources=tuple(
            AskedSource(
                name=_name(reply),
                status=reply.status,
                results=len(reply.passages),
                latency_ms=reply.latency_ms,
                error=reply.error,
            )
            for reply in answer.replies
        ),
        model=answer.model,
        time_ms=answer.timings.total_ms,
        fallback=answer.fallback,
        support=answer.support,
        removed_links=answer.removed_links,
        checked_sentences=checked,
        **verified,
    )


def _cited(citation: Citation, passage: Passage) -> CitedPassage:
    place = place_of(passage)
    return CitedPassage(
        number=citation.passage + 1,
        source=place.collection or passage.source,
        owner=place.owner,
        title=passage.title,
        url=place.url,
        document_id=passage.document_id,
        start_char=place.start + citation.passage_start,
        end_char=place.start + citation.passage_end,
        quoted_text=passage.text[citation.passage_start : citation.passage_end],
        answer_start=citation.start,
        answer_end=citation.end,
        chunk_type=place.chunk_type,
        suspected_instructions=passage.suspected_instructions,
        **passage.shown_duplicates,
    )


def _name(reply: SourceReply) -> str:
    return "collections" if reply.path == COLLECTIONS.path else reply.path
