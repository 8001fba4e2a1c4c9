"""Route: the sources of a question, and the query for each."""

from typing import NamedTuple

from anabranch.domain.contracts import Directory, Source
from anabranch.domain.model import Query, Question

NO_VARIANTS: tuple[str, ...] = ()


class SourceQuery(NamedTuple):
    path: str
    source: Source
    query: Query


def route(
    question: Question,
    directory: Directory,
    text: str | None = None,
    variants: tuple[str, ...] = NO_VARIANTS,
    hypothetical: str | None = None,
) -> tuple[SourceQuery, ...]:
    return tuple(
        SourceQuery(
            path=endpoint.path,
            source=directory.source(endpoint),
            query=Query(
                text=endpoint.query or text or question.text,
                limit=question.top_k,
                similarity_threshold=question.similarity_threshold,
                filters=question.filters,
                rerank=question.rerank,
                variants=variants,
                hypothetical=hypothetical,
                diversity=question.diversity,
                raw=question.ranking is not None,
            ),
        )
        for endpoint in question.sources
    )
