"""Merge: many replies become one ranking, by the profile that the surface has chosen."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from anabranch.domain.model import Passage, SourceReply

Step = Callable[[Sequence[Passage]], Sequence[Passage]]


class MergeProfile(NamedTuple):
    """How one surface merges: first `rank`, then `distinct` in rank order."""

    rank: Step
    distinct: Step


def by_similarity(passages: Sequence[Passage]) -> Sequence[Passage]:
    """Best first; equals keep the order of the sources."""
    return sorted(passages, key=lambda passage: -passage.score)


def exact_duplicates_once(passages: Sequence[Passage]) -> Sequence[Passage]:
    seen: dict[str, Passage] = {}
    for passage in passages:
        seen.setdefault(passage.text, passage)
    return tuple(seen.values())


PROFILES: Mapping[str, MergeProfile] = MappingProxyType(
    {
        "chat": MergeProfile(rank=by_similarity, distinct=exact_duplicates_once),
    }
)


def merge(replies: Iterable[SourceReply], profile: str) -> tuple[Passage, ...]:
    chosen = PROFILES[profile]
    found = [passage for reply in replies for passage in reply.passages]
    return tuple(chosen.distinct(chosen.rank(found)))
