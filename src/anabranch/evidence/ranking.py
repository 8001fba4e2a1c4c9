"""One order for the passages of all sources: scores of different sources cannot be compared, evidence can."""

import time
from collections.abc import Sequence

import msgspec

from anabranch.domain.model import Passage
from anabranch.evidence.judge import MAX_S, Judge


async def ranked_by_evidence(
    judge: Judge, question: str, passages: Sequence[Passage], left_s: float
) -> tuple[Passage, ...]:
    """Those that were read by the probability that they answer, then the others as they were. Nothing changes if the
    judge has no opinion."""
    judged = await judge.judge(question, passages, until=time.monotonic() + min(left_s, MAX_S))
    if judged is None:
        return tuple(passages)
    scored = [
        passage if probability is None else msgspec.structs.replace(passage, evidence=round(probability, 4))
        for passage, probability in zip(passages, judged.passages, strict=True)
    ]
    return tuple(
        sorted(scored, key=lambda passage: -1.0 if passage.evidence is None else passage.evidence, reverse=True)
    )
