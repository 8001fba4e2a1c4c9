"""Leaves out chunks that nearly repeat a better one."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from anabranch.domain.explanation import ExplainedPassage, named
from anabranch.domain.model import Duplicate
from anabranch.knowledge.index.segment import products
from anabranch.knowledge.index.view import View
from anabranch.knowledge.model import Caller
from anabranch.knowledge.records import documents
from anabranch.knowledge.records.database import ResultRow, Session
from anabranch.text.near_duplicates import decisive_words, similarity

# Only texts whose vectors are so similar are compared.
SUSPECT = 0.85
# The budget for comparisons in steps of about 1.7 ns, and the cost of a comparison beside that of its characters.
BUDGET = 50_000_000
CALL_STEPS = 1_000


class Repeat(NamedTuple):
    """A chunk that is left out, and the better one that it nearly repeats."""

    row: ResultRow
    better: ResultRow
    similarity: float


class DistinctChunks:
    """Selects chunks by rank: one is left out if a selected one has a text that is more similar than `threshold`, and
    the same numbers and negations. Once the budget is spent, only equal texts are left out. `copies` names what was
    left out, by the id of the selected chunk, and `repeats` has it by its own key; only chunks that the caller may see
    are compared or named."""

    def __init__(self, threshold: float, caller: Caller, source: str | None) -> None:
        self._threshold = threshold
        self._caller = caller
        self._source = source
        self._decisive: dict[int, tuple[str, ...]] = {}
        self._left = BUDGET
        self.copies: dict[str, list[Duplicate]] = {}
        self.repeats: dict[int, Repeat] = {}

    def first(
        self, db: Session, view: View, keys: NDArray[np.int64], limit: int, dimensions: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The positions of the first distinct chunks among these, at most `limit`, and their vectors."""
        self.copies.clear()
        self.repeats.clear()
        kept: list[int] = []
        vectors = np.empty((0, dimensions), np.float32)
        begin = 0
        while begin < len(keys) and len(kept) < limit:
            block = list(range(begin, min(len(keys), begin + limit - len(kept))))
            positions = [*kept, *block]
            added = view.vectors(keys[block], dimensions)
            vectors = np.concatenate((vectors, added)) if kept else added
            alike = np.tril(products(vectors[len(kept) :], vectors) > SUSPECT, len(kept) - 1)
            if alike.any():
                kept = self._distinct(db, keys, kept, positions, alike)
                vectors = vectors[np.isin(positions, kept)]
            else:
                kept = positions
            begin = block[-1] + 1
        return np.array(kept, np.int64), vectors

    def _distinct(
        self,
        db: Session,
        keys: NDArray[np.int64],
        kept: Sequence[int],
        positions: Sequence[int],
        alike: NDArray[np.bool_],
    ) -> list[int]:
        """The positions without copies; `alike` has a row for each one that is not in `kept`, and a column for each."""
        suspects = np.union1d(np.flatnonzero(alike.any(axis=0)), len(kept) + np.flatnonzero(alike.any(axis=1)))
        rows = documents.chunks_by_key(db, self._caller, keys[positions][suspects].tolist())
        chosen = dict.fromkeys(kept)
        for position, similar in zip(positions[len(kept) :], alike, strict=True):
            row = rows.get(int(keys[position]))
            others = (positions[at] for at in np.flatnonzero(similar).tolist())
            better = [rows.get(int(keys[other])) for other in others if other in chosen]
            if row is None or not self._leave_out(row, [one for one in better if one is not None]):
                chosen[position] = None
        return list(chosen)

    def _leave_out(self, row: ResultRow, better: Sequence[ResultRow]) -> bool:
        """Whether one of the better chunks says the same; it then names this one."""
        for other in better:
            alike = self._similarity(row, other)
            if alike > self._threshold:
                copy = Duplicate(
                    title=row["title"],
                    source=self._source_of(row),
                    similarity=round(alike, 4),
                    document_id=row["id"],
                    chunk_id=row["chunk_id"],
                    url=row["url"],
                )
                self.copies.setdefault(other["chunk_id"], []).append(copy)
                self.repeats[row["chunk_key"]] = Repeat(row, other, copy.similarity)
                return True
        return False

    def named(self, row: ResultRow) -> ExplainedPassage:
        return named(self._source_of(row), row["title"], row["id"], row["chunk_id"], row["text"])

    def _source_of(self, row: ResultRow) -> str:
        return str(row["collection_name"]) if self._source is None else self._source

    def _similarity(self, row: ResultRow, other: ResultRow) -> float:
        one, two = row["text"], other["text"]
        if one == two:
            return 1.0
        longer = max(len(one), len(two))
        distance = int((1 - self._threshold) * longer)
        steps = CALL_STEPS + longer * (2 + distance // 32)
        if abs(len(one) - len(two)) > distance or steps > self._left:
            return 0.0
        self._left -= steps
        return similarity(one, two, self._threshold) if self._words(row) == self._words(other) else 0.0

    def _words(self, row: ResultRow) -> tuple[str, ...]:
        key = row["chunk_key"]
        if key not in self._decisive:
            self._decisive[key] = decisive_words(row["text"])
        return self._decisive[key]
