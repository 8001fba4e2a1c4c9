"""Batches of examples, made by worker processes.

An epoch is a shuffled list of draws, cut into chunks. A chunk depends only on the seed and its number, not on the
number of workers: two runs with one seed see the same batches in the same order."""

from collections.abc import Iterator
from random import Random
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from anabranch.models.evidence_input import MAX_CLAIM
from training import sources
from training.corpus import Corpus
from training.examples import UNKNOWN, Example, Examples

Shorts = npt.NDArray[np.int16]

CHUNK_DRAWS = 3072
# Lengths are rounded up, so that there are few shapes.
STEP = 32
# How far apart, in tokens, the lengths of neighbours may be: without it, equal lengths would always meet.
JITTER = 16
QUESTION, CLAIM, MADE = range(3)

# The columns before those of the units and of the tokens.
FIELDS = ("pages_start", "length", "relevance", "answerable", "claim", "span_start", "span_end", "unit_weight")
# A claim begins after [CLS] and the token that says that it is one.
CLAIM_START = 2
# Weights are stored in hundredths.
WEIGHT_UNIT = 100


class Shape(NamedTuple):
    """Of one batch: its inputs, the most units of an input, and the most tokens."""

    inputs: int
    units: int
    tokens: int

    def width(self) -> int:
        return len(FIELDS) + 2 * self.units + 2 * self.tokens


class Chunk(NamedTuple):
    """The batches one after the other in one array: one transfer between processes, and one to the GPU. A row has the
    FIELDS, the places of the unit markers, the labels of the units, the labels of a claim's tokens, the ids."""

    numbers: Shorts
    shapes: list[Shape]


class Epochs:
    """All chunks of all epochs, by number."""

    def __init__(
        self, corpus: Corpus, examples: Examples, *, seed: int, tokens: int, made_claims: int, only_claims: bool = False
    ) -> None:
        self._examples = examples
        self._seed, self._tokens = seed, tokens
        self._kinds, self._numbers, self._draws = _draws(corpus, made_claims, only_claims)
        self._order: tuple[int, npt.NDArray[np.int64]] = (-1, np.zeros(0, np.int64))
        # Every epoch has about as many draws; this many full chunks are taken of each.
        self.chunks = max(1, int(self._draws.sum()) // CHUNK_DRAWS)

    def __getitem__(self, chunk: int) -> Chunk:
        epoch, number = divmod(chunk, self.chunks)
        rng = Random(f"{self._seed} {chunk}")
        examples: list[Example] = []
        order = self._shuffled(epoch)
        for draw in order[number * CHUNK_DRAWS : (number + 1) * CHUNK_DRAWS].tolist():
            examples += self._drawn(draw, rng)
        batches = list(_batches(examples, self._tokens, rng))
        rng.shuffle(batches)
        rows = [_rows(batch) for batch in batches]
        return Chunk(np.concatenate([each.ravel() for each, _ in rows]), [shape for _, shape in rows])

    def _drawn(self, draw: int, rng: Random) -> list[Example]:
        kind, number = self._kinds[draw], int(self._numbers[draw])
        if kind == QUESTION:
            return self._examples.of_question(number, rng)
        example = self._examples.of_claim(number, rng) if kind == CLAIM else self._examples.made_claim(rng)
        return [example] if example else []

    def _shuffled(self, epoch: int) -> npt.NDArray[np.int64]:
        """The draws of an epoch. The fraction of 2.3 draws is a third draw in 30% of the epochs."""
        if self._order[0] != epoch:
            random = np.random.default_rng([self._seed, epoch])
            times = np.floor(self._draws + random.random(len(self._draws))).astype(np.int64)
            self._order = epoch, random.permutation(np.repeat(np.arange(len(times)), times))
        return self._order[1]


def _draws(
    corpus: Corpus, made_claims: int, only_claims: bool
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """What can be drawn: its kind, its number among those of its kind, and how often it is drawn in an epoch."""
    questions = []
    for question in () if only_claims else corpus.questions:
        complete = question.several and not question.incomplete and question.answerable
        questions.append(sources.source(question.source).draws * (sources.SEVERAL_DRAWS if complete else 1))
    claims = [sources.CLAIMS.get(claim.source, 1.0) for claim in corpus.claims]
    counts = (len(questions), len(claims), made_claims)
    return (
        np.repeat(np.array((QUESTION, CLAIM, MADE), np.int8), counts),
        np.concatenate([np.arange(count) for count in counts]),
        np.array([*questions, *claims, *[1.0] * made_claims]),
    )


def _batches(examples: list[Example], tokens: int, rng: Random) -> Iterator[list[Example]]:
    """Examples of similar length, up to so many tokens with padding."""
    batch: list[Example] = []
    for example in sorted(examples, key=lambda example: len(example.input.ids) + rng.random() * JITTER):
        longest = max(_rounded(len(each.input.ids)) for each in (example, *batch[-1:]))
        if batch and (len(batch) + 1) * longest > tokens:
            yield batch
            batch = []
        batch.append(example)
    if batch:
        yield batch


def _rows(batch: list[Example]) -> tuple[Shorts, Shape]:
    shape = Shape(
        len(batch),
        max(1, *(len(each.units) for each in batch)),
        _rounded(max(len(each.input.ids) for each in batch)),
    )
    rows = np.zeros((shape.inputs, shape.width()), np.int16)
    first_label, first_word = len(FIELDS) + shape.units, len(FIELDS) + 2 * shape.units
    first_id = first_word + shape.tokens
    rows[:, first_label:first_id] = UNKNOWN
    for row, each in zip(rows, batch, strict=True):
        ids, units = each.input.ids, len(each.units)
        weight = round(each.unit_weight * WEIGHT_UNIT)
        row[: len(FIELDS)] = (
            each.input.pages_start,
            len(ids),
            each.relevance,
            each.answerable,
            each.claim,
            *each.span,
            weight,
        )
        row[len(FIELDS) : len(FIELDS) + units] = [place.marker for place in each.input.places]
        row[first_label : first_label + units] = each.units
        wrong = each.wrong[:MAX_CLAIM]
        row[first_word + CLAIM_START : first_word + CLAIM_START + len(wrong)] = wrong
        row[first_id : first_id + len(ids)] = ids
    return rows, shape


def _rounded(length: int) -> int:
    return -(-length // STEP) * STEP
