"""Passages, and answers that are quoted from them with a judge."""

import time
from collections.abc import Sequence

from anabranch.domain.evidence import Evidence, EvidencePage, Reading
from anabranch.domain.model import Context, Delta, Passage, Place, Prompt, Scores
from anabranch.evidence.judge import Judge
from anabranch.models.extractive import ABSTAINED, Extractive
from anabranch.testing import FakeEvidence


def passage(
    text: str,
    title: str = "Notes",
    source: str = "lee/notes",
    *,
    near: float = 0.6,
    headers: tuple[str, ...] = (),
    score: float = 0.5,
) -> Passage:
    place = Place(
        chunk_id="1",
        collection="c",
        start=0,
        end=len(text),
        tokens=0,
        headers=headers,
        scores=Scores(dense=near),
    )
    return Passage(source=source, title=title, text=text, score=score, document_id=title, place=place)


class RecordingEvidence(FakeEvidence):
    """Keeps the inputs that it was given."""

    def __init__(self, *, limit: int = 64) -> None:
        super().__init__(limit=limit)
        self.inputs: list[tuple[EvidencePage, ...]] = []

    async def read(
        self, question: str, inputs: Sequence[tuple[EvidencePage, ...]], *, until: float | None = None
    ) -> Sequence[Reading | None]:
        self.inputs += inputs
        return await super().read(question, inputs, until=until)

    @property
    def titles(self) -> list[str]:
        """The titles of the passages that were read alone."""
        return [pages[0].title for pages in self.inputs if len(pages) == 1]


class QuotedAnswer:
    """What was said about passages."""

    def __init__(self, deltas: Sequence[Delta], passages: Sequence[Passage]) -> None:
        self.deltas = deltas
        self.text = "".join(delta.text for delta in deltas)
        self.refused = deltas[-1].finish_reason == ABSTAINED
        self.support = deltas[0].support if deltas[0].support is not None else -1.0
        self.quotations = [
            [passages[quote.passage].text[quote.start : quote.end] for quote in delta.quotes]
            for delta in deltas
            if delta.quotes
        ]


async def quoted(
    evidence: Evidence | None,
    question: str,
    *passages: Passage,
    limit: int = 8,
    language: str | None = None,
    deadline_s: float = 30.0,
) -> QuotedAnswer:
    prompt = Prompt(
        question=question,
        messages=(),
        max_tokens=500,
        temperature=0,
        passages=passages,
        version="test",
        language=language,
    )
    generator = Extractive(Judge(evidence, limit) if evidence is not None else None)
    context = Context(correlation_id="c", deadline=time.monotonic() + deadline_s)
    return QuotedAnswer([delta async for delta in generator.generate(prompt, context)], passages)
