"""One order for the passages of all sources: scores of different sources cannot be compared, evidence can."""

import time
from collections.abc import Sequence

import msgspec

from anabranch.domain.model import Passage
from anabranch.evidence.judge import Judge

# Judging may take this long; what is not judged by then keeps its place behind the judged.
MAX_S = 2.0


async def ranked_by_evidence(
    judge: Judge, question: str, passages: Sequence[Passage], left_s: float
) -> tuple[Passage, ...]:
    """The best candidates of every source by the probability that they answer, then the others as they were. Nothing
    changes if the judge has no opinion."""
    chosen = [passages[index] for index in candidates(passages, judge.limit)]
    sources = len({passage.source for passage in chosen})
    judged = await judge.judge(question, chosen, least=sources, until=time.monotonic() + min(left_s, MAX_S))
    if judged is None:
        return tuple(passages)
    read = {unit.placed.passage for unit in judged.units}
    scored = [
        msgspec.structs.replace(passage, evidence=round(probability, 4)) if number in read else passage
        for number, (passage, probability) in enumerate(zip(chosen, judged.passages, strict=True))
    ]
    scored.sort(key=lambda passage: -(passage.evidence or 0.0))
    known = set(map(id, chosen))
    return (*scored, *(passage for passage in passages if id(passage) not in known))


def candidates(passages: Sequence[Passage], limit: int) -> list[int]:
    """The best of every source, then the second best of every source, and so on."""
    places: dict[str, int] = {}
    rounds: list[tuple[int, int]] = []
    for index, passage in enumerate(passages):
        rounds.append((places.get(passage.source, 0), index))
        places[passage.source] = rounds[-1][0] + 1
    return [index for _, index in sorted(rounds)[:limit]]
