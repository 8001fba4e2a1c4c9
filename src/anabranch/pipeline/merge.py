"""Merge: the replies of all sources become one ranking, as the question's profile says."""

import asyncio
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from anabranch.domain.events import AnswerEvent, SourceReplied
from anabranch.domain.explanation import Notes, explained
from anabranch.domain.model import Duplicate, Passage, Profile, Question, SourceReply
from anabranch.domain.ranking import Ranking
from anabranch.text.near_duplicates import decisive_words, similarity

if TYPE_CHECKING:  # it loads a stemmer
    from anabranch.pipeline.scoring import Ranker

RRF_K = 60
# Fewest characters that may remain of a chunk without its overlap with others.
WORTH_READING = 80
# Above so many results, or characters, reading or comparing them takes tens of milliseconds: too long for the event
# loop.
MANY, LONG = 50, 50_000
# Deduplication gets this long even if no time is left, so that the best results do not repeat each other.
LEAST_S = 0.25
# Own threads: a merge may take until the deadline, which is too long for the threads that all callers share.
THREADS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="merge")


def by_similarity(replies: Sequence[SourceReply]) -> Sequence[Passage]:
    """Best first; equals keep the order of the sources."""
    found = [passage for reply in replies for passage in reply.passages]
    return sorted(found, key=lambda passage: -passage.score)


def by_rank(replies: Sequence[SourceReply], notes: Notes | None) -> Sequence[Passage]:
    """Reciprocal rank fusion: scores of different sources cannot be compared, ranks can. Equal texts count together,
    and the first of them names the others. What has no relation to the question (score 0) comes last, whatever its rank
    in its source: it would take the place of passages that answer."""
    best: dict[str, float] = {}
    equal: dict[str, list[Passage]] = {}
    for reply in replies:
        for rank, passage in enumerate(reply.passages, 1):
            best[passage.text] = best.get(passage.text, 0.0) + 1 / (RRF_K + rank)
            equal.setdefault(passage.text, []).append(passage)
    first = [naming(passages[0], [(one, 1.0) for one in passages[1:]]) for passages in equal.values()]
    ranked = sorted(first, key=lambda passage: (passage.score <= 0, -best[passage.text], -passage.score))
    if notes is not None:
        for rank, passage in enumerate(ranked, 1):
            notes.add(passage, "merge", rank=rank, fused=best[passage.text])
            for one in equal[passage.text][1:]:
                _note_equal(notes, one, passage)
    return ranked


def naming(passage: Passage, left_out: Sequence[tuple[Passage, float]]) -> Passage:
    """The passage with the names of those that it stands for, given with their similarities."""
    if not left_out:
        return passage
    named = {_name(passage, 1.0): None}
    for one, alike in left_out:
        named[_name(one, alike)] = None
        named.update((msgspec.structs.replace(also, similarity=alike), None) for also in one.also_in)
    _, *others = named
    return msgspec.structs.replace(passage, also_in=(*passage.also_in, *others))


def _name(passage: Passage, alike: float) -> Duplicate:
    place = passage.place
    return Duplicate(
        title=passage.title,
        source=passage.source,
        similarity=alike,
        document_id=passage.document_id,
        chunk_id=place.chunk_id if place is not None else None,
        url=place.url if place is not None else passage.url,
    )


def without_near_duplicates(
    passages: Sequence[Passage], threshold: float, until: float, notes: Notes | None
) -> Sequence[Passage]:
    """Of texts that are more similar than the threshold, only the first; but texts that differ in a number or a
    negation say different things."""
    from anabranch.pipeline.dedup import Distinct  # noqa: PLC0415

    texts = [passage.text for passage in passages]
    decisive = cache(lambda index: decisive_words(texts[index]))
    distinct = Distinct(
        texts,
        threshold,
        agree=lambda one, other: decisive(one) == decisive(other),
        until=max(until, time.monotonic() + LEAST_S),
    )
    kept: dict[int, list[tuple[Passage, float]]] = {index: [] for index in distinct}
    for index, other in distinct.left_out.items():
        # Past the end of the time, what is known has to do: it is above the threshold.
        alike = similarity(texts[index], texts[other], threshold) if time.monotonic() < until else threshold
        kept[other].append((passages[index], round(alike, 4)))
        if notes is not None:
            notes.repeats(passages[index], passages[other], round(alike, 4))
    return [naming(passages[index], left_out) for index, left_out in kept.items()]


def exact_duplicates_once(passages: Sequence[Passage], notes: Notes | None) -> Sequence[Passage]:
    seen: dict[str, Passage] = {}
    for passage in passages:
        seen.setdefault(passage.text, passage)
    if notes is not None:
        for passage in passages:
            _note_equal(notes, passage, seen[passage.text])
    return tuple(seen.values())


def _note_equal(notes: Notes, passage: Passage, kept: Passage) -> None:
    """A source that returned the kept passage twice has left out nothing."""
    if explained(passage).key != explained(kept).key:
        notes.add(passage, "merge", other=kept, left_out=True, note="a better passage has the same text")


def without_overlap(passages: Sequence[Passage], notes: Notes | None) -> Sequence[Passage]:
    """Of overlapping chunks of a document, a lower one keeps only what the higher ones do not have."""
    kept: list[Passage] = []
    taken: dict[str, list[tuple[int, int]]] = {}
    for passage in exact_duplicates_once(passages, notes):
        if passage.place is None or passage.document_id is None:
            kept.append(passage)
            continue
        spans = taken.setdefault(passage.document_id, [])
        own = passage.place.end - passage.place.added
        start, end = _uncovered(passage.place.start, own, spans)
        if end - start == len(passage.text) - passage.place.added or end - start >= WORTH_READING:
            # What completes a list stays with it, even if another passage has it, too.
            kept.append(_cut(passage, start, passage.place.end if end == own else end))
            spans.append((start, end))
            if notes is not None and (start, end) != (passage.place.start, own):
                _note_overlap(notes, passage, kept[:-1], end - start)
        elif notes is not None:
            _note_overlap(notes, passage, kept, 0)
    return kept


def _note_overlap(notes: Notes, passage: Passage, kept: Sequence[Passage], left: int) -> None:
    """`left` characters of the passage are kept."""
    other = next((one for one in kept if one.document_id == passage.document_id and _overlap(one, passage)), None)
    note = (
        f"cut to {left:,} of {len(passage.text):,} characters"
        if left
        else "better passages of the same document have almost all of it"
    )
    notes.add(passage, "overlap", other=other, note=note, left_out=not left)


def _overlap(one: Passage, other: Passage) -> bool:
    return (
        one.place is not None
        and other.place is not None
        and one.place.start < other.place.end
        and one.place.end > other.place.start
    )


def _uncovered(start: int, end: int, spans: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The longest range that no span covers."""
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


def merge(
    replies: Sequence[SourceReply], profile: Profile, until: float = math.inf, notes: Notes | None = None
) -> tuple[Passage, ...]:
    """`until` is the end (monotonic) of the time for comparing texts."""
    if profile.merge == "similarity":
        found = tuple(exact_duplicates_once(by_similarity(replies), notes))
        if notes is not None:
            notes.ranked(found, "merge")
        return found
    ranked = by_rank(replies, notes)
    if profile.near_duplicates is not None and not _is_distinct(replies):
        ranked = without_near_duplicates(ranked, profile.near_duplicates, until, notes)
    return tuple(without_overlap(ranked, notes))


def _is_distinct(replies: Sequence[SourceReply]) -> bool:
    """Whether all passages come from one source that has compared them."""
    found = [reply for reply in replies if reply.passages]
    return len(found) <= 1 and all(reply.distinct for reply in found)


class Merged(NamedTuple):
    """The passages, best first; `distinct` is their number before the limit of a ranking. `complete` says that each was
    compared with all that rank above it."""

    passages: tuple[Passage, ...]
    distinct: int | None = None
    complete: bool = True


class Merging:
    """The merge of one question's replies. A ranking reads each reply as it arrives."""

    def __init__(self, question: Question, notes: Notes | None = None) -> None:
        self._question = question
        self._notes = notes
        self._ranker: Ranker | None = None
        self._unread: list[SourceReplied] = []

    def read(self, event: AnswerEvent) -> None:
        ranking = self._question.ranking
        if ranking is None or not isinstance(event, SourceReplied):
            return
        if _size(event.reply) > LONG:
            self._unread.append(event)
        else:
            self._reader(ranking).read(event.index, event.reply)

    async def merged(self, replies: Sequence[SourceReply], left_s: float) -> Merged:
        """`left_s` is the time for deduplication: results that are not compared by then are kept."""
        ranking, profile = self._question.ranking, self._question.profile
        until = time.monotonic() + left_s
        if ranking is None and (profile.near_duplicates is None or _is_distinct(replies)):
            return Merged(merge(replies, profile, notes=self._notes))
        if sum(len(reply.passages) for reply in replies) > MANY or sum(map(_size, replies)) > LONG:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(THREADS, self._compared, replies, until)
        return self._compared(replies, until)

    def _compared(self, replies: Sequence[SourceReply], until: float) -> Merged:
        ranking = self._question.ranking
        if ranking is None:
            return Merged(merge(replies, self._question.profile, until, self._notes))
        ranker = self._reader(ranking)
        for event in self._unread:
            ranker.read(event.index, event.reply)
        return _distinct(ranker.ranked(), ranking, until)

    def _reader(self, ranking: Ranking) -> "Ranker":
        """Created with the first reply: its import would delay the queries to the sources."""
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
