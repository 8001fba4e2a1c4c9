"""Merge: many replies become one ranking, by the profile that the surface has chosen."""

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from anabranch.domain.events import AnswerEvent, SourceReplied
from anabranch.domain.model import Passage, Profile, Question, SourceReply
from anabranch.domain.ranking import Ranking

if TYPE_CHECKING:  # a stemmer comes with it, and numpy with the rest
    from anabranch.pipeline.scoring import Ranker

RRF_K = 60
# What is left of a chunk besides what another one has said already must be worth reading.
WORTH_READING = 80
# Above so many results, or characters of them, to read or to compare them may take tens of milliseconds: too long for
# the loop that everybody shares.
MANY, LONG = 50, 50_000
# So long a comparison may take even if there is no time left: the best must not repeat each other.
LEAST_S = 0.25
# Threads of their own: whoever searches, embeds or counts needs the others.
THREADS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="merge")


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


def merge(replies: Sequence[SourceReply], profile: Profile) -> tuple[Passage, ...]:
    if profile.merge == "similarity":
        return tuple(exact_duplicates_once(by_similarity(replies)))
    return tuple(said_once(by_rank(replies)))


class Merged(NamedTuple):
    """The passages, best first, and how many there would have been without a limit, where there is one. `complete` says
    that each was compared with each that stands above it."""

    passages: tuple[Passage, ...]
    distinct: int | None = None
    complete: bool = True


class Merging:
    """The merge of one question's replies. It is told of each as it comes, so that what can be done then is done."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._ranker: Ranker | None = None
        self._unread: list[SourceReplied] = []

    def heard(self, event: AnswerEvent) -> None:
        ranking = self._question.ranking
        if ranking is None or not isinstance(event, SourceReplied):
            return
        if _size(event.reply) > LONG:
            self._unread.append(event)
        else:
            self._reader(ranking).read(event.index, event.reply)

    async def merged(self, replies: Sequence[SourceReply], left_s: float) -> Merged:
        """`left_s` is how much time there is: what is not compared by then stays."""
        ranking = self._question.ranking
        if ranking is None:
            return Merged(merge(replies, self._question.profile))
        if sum(len(reply.passages) for reply in replies) > MANY or sum(map(_size, replies)) > LONG:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(THREADS, self._best, ranking, time.monotonic() + left_s)
        return self._best(ranking, time.monotonic() + left_s)

    def _best(self, ranking: Ranking, until: float) -> Merged:
        ranker = self._reader(ranking)
        for event in self._unread:
            ranker.read(event.index, event.reply)
        return _distinct(ranker.ranked(), ranking, until)

    def _reader(self, ranking: Ranking) -> "Ranker":
        """Made while the sources are busy, and not before they are asked."""
        if self._ranker is None:
            from anabranch.pipeline.scoring import Ranker  # noqa: PLC0415

            self._ranker = Ranker(self._question.text, ranking)
        return self._ranker


def _size(reply: SourceReply) -> int:
    return sum(len(passage.text) for passage in reply.passages)


def _distinct(ranked: Sequence[Passage], ranking: Ranking, until: float) -> Merged:
    from anabranch.pipeline.dedup import Distinct  # noqa: PLC0415

    texts = [passage.text for passage in ranked]
    distinct = Distinct(texts, ranking.threshold, until=max(until, time.monotonic() + LEAST_S))
    kept = list(distinct)
    return Merged(tuple(ranked[index] for index in kept[: ranking.limit]), len(kept), distinct.complete)
