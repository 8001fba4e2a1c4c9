"""The query log, kept behind the answers."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from anabranch.domain.model import Answer, Question, Usage
from anabranch.entrypoints.http.citations import citations
from anabranch.knowledge.model import Caller, Collection
from anabranch.knowledge.records import queries
from anabranch.telemetry.log import Log

if TYPE_CHECKING:  # it brings numpy along
    from anabranch.knowledge.knowledge import Knowledge

EXTRACTIVE = "extractive"


class QueryLog:
    """Writes down what was asked without holding up the answer. The writes begin in the order in which they were given,
    and before anything that the client sends after its answer."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._writing: set[asyncio.Task[None]] = set()

    def write(self, room: "Knowledge", asked: queries.QueryRecord) -> None:
        task = asyncio.create_task(room.record(asked))
        self._writing.add(task)
        task.add_done_callback(self._written)

    async def settled(self) -> None:
        """What was given so far is written, or is not going to be."""
        if self._writing:
            await asyncio.wait(set(self._writing))

    def _written(self, task: asyncio.Task[None]) -> None:
        self._writing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("query_not_recorded", exc_info=error)


class QueryLogEntry(NamedTuple):
    """One question's place in the ledger; without one, nothing is written."""

    ledger: QueryLog | None
    room: "Knowledge"
    caller: Caller
    query_id: str
    conversation: str
    question: Question
    searched: Sequence[Collection]

    def write(self, answer: Answer) -> None:
        if self.ledger is not None:
            self.ledger.write(self.room, self._asked(answer))

    def _asked(self, answer: Answer) -> queries.QueryRecord:
        inside = {passage.place.chunk_id for passage in answer.passages if passage.place is not None}
        cited = [one for one in citations(answer) if one.chunk_id in inside]
        scores = [answer.passages[index].score for index in {citation.passage for citation in answer.citations}]
        # A remembered answer was paid for the first time.
        usage = Usage() if answer.cached else answer.usage or Usage()
        verbatim = self.question.model is not None and self.question.model.kind == EXTRACTIVE and not answer.refused
        return queries.QueryRecord(
            id=self.query_id,
            user=queries.asker(self.caller),
            original=self.question.text,
            answer=answer.text,
            refused=answer.refused,
            model=answer.model,
            found=tuple(passage for reply in answer.replies for passage in reply.passages),
            quotes=tuple(
                queries.QuotedChunk(
                    citation_index=one.citation_index,
                    chunk=one.chunk_id,
                    document=one.document_id,
                    text=one.quoted_text,
                )
                for one in cited
            ),
            collections=tuple(one.key for one in self.searched),
            top_k=self.question.top_k,
            input_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            retrieval_ms=answer.timings.retrieval_ms,
            latency_ms=answer.timings.total_ms,
            conversation=self.conversation,
            rewritten=answer.rewritten,
            variants=answer.variants,
            filters=self.question.filters,
            # Sentences taken word for word are faithful; of a model's own, nothing is known yet.
            faithfulness=1.0 if verbatim else None,
            relevance=sum(scores) / len(scores) if scores else None,
        )
