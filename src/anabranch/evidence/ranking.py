"""One order for the passages of all sources: scores of different sources cannot be compared, evidence can."""

import time
from collections.abc import Callable, Sequence

import msgspec

from anabranch.domain.model import Passage
from anabranch.evidence.judge import MAX_S, Judge, Judgement


async def ranked_by_evidence(
    judge: Judge,
    question: str,
    passages: Sequence[Passage],
    left_s: float,
    noted: Callable[[Judgement | str], None] = lambda _: None,
) -> tuple[Passage, ...]:
    """Those that were read by the probability that they answer, then the others as they were. Nothing changes if there
    is no judgement. `noted` is called with the judgement, or with why there is none."""
    judged = await judge.judgement_or_reason(question, passages, until=time.monotonic() + min(left_s, MAX_S))
    noted(judged)
    if isinstance(judged, str):
        return tuple(passages)
    scored = [
        passage if probability is None else msgspec.structs.replace(passage, evidence=round(probability, 4))
        for passage, probability in zip(passages, judged.passages, strict=True)
    ]
    return tuple(
        sorted(scored, key=lambda passage: -1.0 if passage.evidence is None else passage.evidence, reverse=True)
    )
