"""What an answer is based on, as it is sent: passages, citations, and the status of the sources."""

import hashlib
from collections.abc import Mapping
from typing import Any

from anabranch.domain.model import Answer, Citation, Passage, Place, Scores, Status
from anabranch.entrypoints.http.knowledge_wire import KnowledgeWire
from anabranch.text.sentences import sentences

SNIPPET = 200
IDENTITY = 16


class SourceView(KnowledgeWire, frozen=True, kw_only=True):
    """A passage that was found, in order of rank. `citation_index` is its number in the answer's marks; null if it
    did not fit into the prompt. `score` is the similarity of meaning, from 0 to 1. A passage of another
    source has no collection; its `chunk_id` identifies its text, and its offsets are those in that text."""

    chunk_id: str
    document_id: str
    title: str
    content_snippet: str
    score: float
    citation_index: int | None
    source: str
    collection: str
    page: int | None
    section_title: str | None
    headers: tuple[str, ...]
    start_char: int
    end_char: int
    url: str | None
    metadata: dict[str, Any]
    scores: Scores


class CitationView(KnowledgeWire, frozen=True, kw_only=True):
    """The quoted text of a citation mark: `start_char` and `end_char` are offsets in the document's content,
    `answer_start` and `answer_end` those of the mark in the answer."""

    citation_index: int
    chunk_id: str
    document_id: str
    start_char: int
    end_char: int
    quoted_text: str
    answer_start: int
    answer_end: int


class SourceStatus(KnowledgeWire, frozen=True, kw_only=True):
    """The outcome of one source."""

    source: str
    status: Status
    latency_ms: int
    results: int
    error: str | None


class Sentence(KnowledgeWire, frozen=True, kw_only=True):
    text: str
    citations: list[int]


class AnswerJson(KnowledgeWire, frozen=True, kw_only=True):
    """The answer without citation marks, and its sentences with the numbers of their sources."""

    answer: str
    sentences: list[Sentence]


def sources(answer: Answer) -> list[SourceView]:
    """Every passage that was found, in order of rank."""
    numbers = {place_of(passage).chunk_id: number for number, passage in enumerate(answer.passages, 1)}
    return [_source(passage, numbers) for reply in answer.replies for passage in reply.passages]


def place_of(passage: Passage) -> Place:
    """The place in its collection; a passage of another source is a place of its own."""
    if passage.place is not None:
        return passage.place
    identity = hashlib.blake2b(f"{passage.source}\0{passage.text}".encode(), digest_size=IDENTITY).hexdigest()
    return Place(chunk_id=identity, collection="", start=0, end=len(passage.text), tokens=0, url=passage.url)


def _source(passage: Passage, numbers: Mapping[str, int]) -> SourceView:
    place = place_of(passage)
    return SourceView(
        chunk_id=place.chunk_id,
        document_id=passage.document_id or "",
        title=passage.title,
        content_snippet=passage.text[:SNIPPET],
        score=passage.score,
        citation_index=numbers.get(place.chunk_id),
        source=passage.source,
        collection=place.collection,
        page=place.page,
        section_title=place.headers[-1] if place.headers else None,
        headers=place.headers,
        start_char=place.start,
        end_char=place.end,
        url=place.url,
        metadata=dict(place.metadata),
        scores=place.scores,
    )


def citations(answer: Answer) -> list[CitationView]:
    return [_citation(one, answer.passages[one.passage]) for one in answer.citations]


def statuses(answer: Answer) -> list[SourceStatus]:
    return [
        SourceStatus(
            source=reply.path,
            status=reply.status,
            latency_ms=reply.latency_ms,
            results=len(reply.passages),
            error=reply.error,
        )
        for reply in answer.replies
    ]


def _citation(citation: Citation, passage: Passage) -> CitationView:
    place = place_of(passage)
    return CitationView(
        citation_index=citation.passage + 1,
        chunk_id=place.chunk_id,
        document_id=passage.document_id or "",
        start_char=place.start + citation.passage_start,
        end_char=place.start + citation.passage_end,
        quoted_text=passage.text[citation.passage_start : citation.passage_end],
        answer_start=citation.start,
        answer_end=citation.end,
    )


def sentence_by_sentence(answer: Answer) -> AnswerJson:
    """Removes the citation marks, and gives each to the sentence that contains or precedes it."""
    text, at = "", 0
    marks: list[tuple[int, int]] = []
    for citation in answer.citations:
        if citation.start >= at:
            text = (text + answer.text[at : citation.start]).rstrip(" ")
            at = citation.end
        marks.append((len(text), citation.passage + 1))
    text += answer.text[at:]
    found: list[Sentence] = []
    begun = 0
    for start, end in sentences(text):
        numbers = dict.fromkeys(number for place, number in marks if begun < place <= end)
        found.append(Sentence(text=text[start:end], citations=list(numbers)))
        begun = end
    return AnswerJson(answer=text.strip(), sentences=found)
