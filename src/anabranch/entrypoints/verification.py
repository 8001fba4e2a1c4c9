"""A verified answer as every surface shows it: its sentences, with the words that support them or say otherwise."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import asdict

from anabranch.domain.model import (
    Answer,
    AnswerPolicy,
    ConflictKind,
    Passage,
    SourceConflict,
    Value,
)
from anabranch.domain.sentences import PassageWords, Probability, SentenceView, sentence_views, words_of

NOT_VERIFIED: Mapping[str, Any] = {}


class VerifiedRequest(Value):
    """What a request says about the verification of its answer."""

    verify: (
        Annotated[
            bool,
            Meta(
                description="Whether each sentence of the answer is checked against the passages; left out, the "
                "setting AGGREGATOR_VERIFY decides"
            ),
        ]
        | None
    ) = None
    answer_policy: AnswerPolicy | None = None


class ConflictView(Value, gc=False):
    """Two documents that contradict each other on what was asked, in a number, a date, a name, a negation or something
    `other`, and the probability that they do."""

    claim: PassageWords
    against: PassageWords
    kind: ConflictKind
    probability: Probability


class MarksView(Value, gc=False):
    """Citation marks: those that the model has `written`; of these, `corrected` ones named a passage that does not
    support the sentence instead of one that does, and `removed` ones have no right passage. `added` citations had no
    mark."""

    written: int
    corrected: int
    removed: int
    added: int


class VerificationView(Value):
    """What a verified answer has in addition; all of it is absent if the answer was not verified."""

    sentences: tuple[SentenceView, ...] | UnsetType = UNSET
    faithfulness_score: (
        Annotated[
            float,
            Meta(
                ge=0,
                le=1,
                description="The share of the checked sentences that the sources support; one that they support partly "
                "counts half. Null if none was checked",
            ),
        ]
        | UnsetType
        | None
    ) = UNSET
    unfaithful: (
        Annotated[bool, Meta(description="`faithfulness_score` is below AGGREGATOR_MIN_FAITHFULNESS")] | UnsetType
    ) = UNSET
    left_out: Annotated[int, Meta(description="Sentences that `answer_policy: strict` has left out")] | UnsetType = (
        UNSET
    )
    marks: MarksView | UnsetType = UNSET
    conflicts: (
        Annotated[
            tuple[ConflictView, ...],
            Meta(description="Documents that contradict each other on what was asked; absent if there are none"),
        ]
        | UnsetType
    ) = UNSET


def verification(answer: Answer) -> Mapping[str, Any]:
    """The fields of a VerificationView; none if the answer was not verified."""
    if not (answer.sentences or answer.faithfulness is not None or answer.left_out):
        return NOT_VERIFIED
    view = VerificationView(
        sentences=sentence_views(answer),
        faithfulness_score=answer.faithfulness,
        unfaithful=answer.unfaithful or UNSET,
        left_out=answer.left_out or UNSET,
        marks=MarksView(**answer.marks),
        conflicts=tuple(conflict_view(one, answer.passages) for one in answer.conflicts) or UNSET,
    )
    return asdict(view)


def conflict_view(conflict: SourceConflict, passages: Sequence[Passage]) -> ConflictView:
    claim, against = (PassageWords(**words_of(side, passages)) for side in (conflict.claim, conflict.against))
    return ConflictView(claim=claim, against=against, kind=conflict.kind, probability=conflict.probability)
