"""Finds passages that share rare words with a question."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from anabranch.text.words import terms

K1, B = 1.2, 0.75


class Bm25:
    """An inverted index over texts with BM25 scores."""

    def __init__(self, texts: Sequence[str]) -> None:
        counts = [Counter(terms(text)) for text in texts]
        lengths = np.array([max(1, sum(count.values())) for count in counts], np.float32)
        norm = K1 * (1 - B + B * lengths / lengths.mean())
        postings: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for number, count in enumerate(counts):
            for term, times in count.items():
                postings[term].append((number, times))
        self._size = len(texts)
        self._weights: dict[int, tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]] = {}
        for term, found in postings.items():
            numbers = np.array([number for number, _ in found], np.int32)
            often = np.array([times for _, times in found], np.float32)
            rarity = math.log(1 + (self._size - len(found) + 0.5) / (len(found) + 0.5))
            self._weights[term] = (numbers, rarity * often * (K1 + 1) / (often + norm[numbers]))

    def scores(self, question: str) -> npt.NDArray[np.float32]:
        scores = np.zeros(self._size, np.float32)
        for term in set(terms(question)):
            if term in self._weights:
                numbers, weights = self._weights[term]
                scores[numbers] += weights
        return scores
