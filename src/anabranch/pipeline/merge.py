"""Merge: many replies become one ranking, by the profile that the surface has chosen."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from anabranch.domain.model import Passage, SourceReply

Rank = Callable[[Sequence[SourceReply]], Sequence[Passage]]
Distinct = Callable[[Sequence[Passage]], Sequence[Passage]]

RRF_K = 60
# What is left of a chunk besides what another one has said already must be worth reading.
WORTH_READING = 80


class MergeProfile(NamedTuple):
    """How one surface merges: first `rank`, then `distinct` in rank order."""

    rank: Rank
    distinct: Distinct


def by_similarity(replies: Sequence[SourceReply]) -> Sequence[Passage]:
    """Best first; equals keep the order of the sources."""
    found = [passage for reply in replies for passage in reply.passages]
    return sorted(found, key=lambda passage: -passage.score)


def by_rank(replies: Sequence[SourceReply]) -> Sequence[Passage]:
    """Each source's best before any source's second best: scores of different makers cannot be compared, ranks can."""
    best: dict[str, float] = {}
    first: dict[str, Passage] = {}
    for reply in replies:
        for rank, passage in enumerate(reply.passages, 1):
            best[passage.text] = best.get(passage.text, 0.0) + 1 / (RRF_K + rank)
            first.setdefault(passage.text, passage)
    return sorted(first.values(), key=lambda passage: (-best[passage.text], -passage.score))


def exact_duplicates_once(passages: Sequence[Passage]) -> Sequence[Passage]:
    seen: dict[str, Passage] = {}
    for passage in passages:
        seen.setdefault(passage.text, passage)
    return tuple(seen.values())


def said_once(passages: Sequence[Passage]) -> Sequence[Passage]:
    """Chunks of one document may overlap: of a lower one, only what the higher ones do not have is left."""
    kept: list[Passage] = []
    taken: dict[str, list[tuple[int, int]]] = {}
    for passage in exact_duplicates_once(passages):
        if passage.place is None or passage.document_id is None:
            kept.append(passage)
            continue
        spans = taken.setdefault(passage.document_id, [])
        start, end = _uncovered(passage.place.start, passage.place.end, spans)
        if end - start == len(passage.text) or end - start >= WORTH_READING:
            kept.append(_cut(passage, start, end))
            spans.append((start, end))
    return kept


def _uncovered(start: int, end: int, spans: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The longest stretch that no span has yet."""
    inside = sorted((max(start, a), min(end, b)) for a, b in spans if a < end and b > start)
    gaps: list[tuple[int, int]] = []
    at = start
    for a, b in inside:
        gaps.append((at, a))
        at = max(at, b)
    gaps.append((at, end))
    return max(gaps, key=lambda gap: gap[1] - gap[0])


def _cut(passage: Passage, start: int, end: int) -> Passage:
    place = passage.place
    if place is None or (start, end) == (place.start, place.end):
        return passage
    text = passage.text[start - place.start : end - place.start]
    share = len(text) / max(1, len(passage.text))
    cut = msgspec.structs.replace(place, start=start, end=end, tokens=max(1, round(place.tokens * share)))
    return msgspec.structs.replace(passage, text=text, place=cut)


PROFILES: Mapping[str, MergeProfile] = MappingProxyType(
    {
        "chat": MergeProfile(rank=by_similarity, distinct=exact_duplicates_once),
        "query": MergeProfile(rank=by_rank, distinct=said_once),
        "rag": MergeProfile(rank=by_rank, distinct=said_once),
    }
)


def merge(replies: Iterable[SourceReply], profile: str) -> tuple[Passage, ...]:
    chosen = PROFILES[profile]
    return tuple(chosen.distinct(chosen.rank(tuple(replies))))
