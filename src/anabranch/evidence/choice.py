"""Which passages the evidence model reads: those that probably have the answer, by what search knows about them."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from anabranch.domain.model import Passage
from anabranch.evidence.weights import PassageFeatures, probabilities_of_passages
from anabranch.text.support import MAX_TITLE, Wording, bare, nearness, share, word_weights

# Passages are chosen until it is this probable that one of the chosen has the answer, if one has it at all; and at
# least so many.
ENOUGH, FEWEST = 0.8, 3
# The first ones of the search are read in any case: of a question of two words, headings say little.
FIRST = 2
# From this rank on a source's passages are guessed to match no word.
GUESSED = 10
# A question of so many words and pairs of words is trusted half as much as an endless one: a heading that has both of
# two words says less than one that has ten.
MANY = 8
# Characters of a passage in which words are looked for, and of all passages together.
MAX_READ, MAX_READ_ALL = 2_000, 80_000


def candidates(question: str, passages: Sequence[Passage], limit: int) -> list[int]:
    """The numbers of the passages to read, the most probable first, but the first of every source before a second one
    of a source. What was read when passages were put in order is read again, and nothing else."""
    read = [index for index, passage in enumerate(passages) if passage.evidence is not None]
    if read:
        return read[:limit]
    probable = probabilities_of_passages(passage_features(question, passages))
    places: dict[str, int] = {}
    rounds: list[tuple[int, float, int]] = []
    for index in sorted(range(len(passages)), key=lambda index: -probable[index]):
        source = passages[index].source
        rounds.append((places.get(source, 0), -probable[index], index))
        places[source] = rounds[-1][0] + 1
    chosen: list[int] = []
    for _, _, index in sorted(rounds)[:limit]:
        if len(chosen) >= max(FEWEST, len(places)) and sum(probable[one] for one in chosen) >= ENOUGH:
            break
        chosen.append(index)
    missed = [index for index in range(min(FIRST, len(passages))) if index not in chosen]
    return [*chosen[: max(len(places), limit - len(missed))], *missed][:limit]


class _Words(NamedTuple):
    """The question's words in a passage with its title and headings, and in the latter alone."""

    all: int
    above: int


def passage_features(question: str, passages: Sequence[Passage]) -> list[PassageFeatures]:
    # Capital letters must not change an answer.
    wording = Wording(question.lower())
    each = min(MAX_READ, MAX_READ_ALL // max(1, len(passages)))
    words = [_words(wording, passage, each) for passage in passages]
    weights = word_weights(wording, [one.all for one in words])
    trust = len(weights) / (len(weights) + MANY)

    def weight(bits: int) -> float:
        return trust * sum(each for bit, each in weights.items() if bits & bit)

    near = [nearness(passage, share(one.all, wording.everything)) for passage, one in zip(passages, words, strict=True)]
    nearest = max(near, default=0.0)
    matches = _matches(passages)
    documents: dict[str, float] = {}
    for passage, similar in zip(passages, near, strict=True):
        documents[_document(passage)] = max(documents.get(_document(passage), -1.0), similar)
    return [
        PassageFeatures(
            near=similar - nearest,
            matches=match,
            words=weight(one.all),
            above=weight(one.above),
            document=documents[_document(passage)] - nearest,
            length=math.log(max(1, len(passage.text))),
        )
        for passage, one, similar, match in zip(passages, words, near, matches, strict=True)
    ]


def _words(wording: Wording, passage: Passage, most: int) -> _Words:
    headers = " | ".join(passage.place.headers)[:MAX_TITLE] if passage.place is not None else ""
    above = wording.within(f"{bare(passage.title)} | {headers}")
    return _Words(above | wording.within(passage.text[:most]), above)


def _matches(passages: Sequence[Passage]) -> list[float]:
    """The score of the words that match, as a share of the best one; of sources that do not tell it, a guess from the
    rank."""
    known = [passage.place.scores.sparse or 0.0 if passage.place is not None else None for passage in passages]
    best = max((score for score in known if score is not None), default=0.0) or 1.0
    ranks: dict[str, int] = {}
    found: list[float] = []
    for passage, score in zip(passages, known, strict=True):
        rank = ranks.get(passage.source, 0)
        ranks[passage.source] = rank + 1
        found.append(max(0.0, 1 - rank / GUESSED) if score is None else score / best)
    return found


def _document(passage: Passage) -> str:
    return passage.document_id or passage.title or passage.text
