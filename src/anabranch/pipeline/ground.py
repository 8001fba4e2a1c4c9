"""Ground: whether there is anything to answer from, and the refusal if there is not."""

from collections.abc import Sequence
from heapq import nlargest
from typing import assert_never

from anabranch.domain.model import Ground, Passage, SourceReply, Status
from anabranch.text.messages import message

# The mean is over the best passages only: sources without relevant passages must not lower it.
BEST = 5


def ground(replies: Sequence[SourceReply], passages: Sequence[Passage], threshold: float | None = None) -> Ground:
    """What an answer can be based on; with a threshold, passages must be that similar to the question on average."""
    if passages:
        weak = threshold is not None and similarity(passages) < threshold
        return Ground.WEAK if weak else Ground.DOCUMENTS
    if all(reply.empty for reply in replies):
        return Ground.NO_SOURCES
    if all(reply.status is not Status.SUCCESS for reply in replies):
        return Ground.ALL_FAILED
    return Ground.NOTHING_FOUND


def similarity(passages: Sequence[Passage]) -> float:
    """The mean of the best scores, each weighted by itself, which the threshold is compared with. The weights keep
    unrelated passages of a small collection from lowering the mean."""
    best = nlargest(BEST, (passage.score for passage in passages))
    return sum(score * score for score in best) / (sum(best) or 1.0)


def refusal(missing: Ground, replies: Sequence[SourceReply], language: str | None = None) -> str:
    """The text of a refusal, which says what is missing."""
    count = len(replies)
    answered = sum(reply.status is Status.SUCCESS for reply in replies)
    match missing:
        case Ground.NO_SOURCES:
            return message("refusal_no_documents" if replies else "refusal_no_sources", language)
        case Ground.ALL_FAILED:
            return message("refusal_failed_one" if count == 1 else "refusal_failed_all", language, count=count)
        case Ground.WEAK:
            return message("refusal_weak", language)
        case Ground.NOTHING_FOUND | Ground.DOCUMENTS if count == 1:
            return message("refusal_nothing_one", language)
        case Ground.NOTHING_FOUND | Ground.DOCUMENTS:
            key = "refusal_nothing_all" if answered == count else "refusal_nothing_some"
            return message(key, language, answered=answered, count=count)
        case _:
            assert_never(missing)
