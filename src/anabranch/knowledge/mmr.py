"""Maximal marginal relevance (MMR): results that are relevant and unlike each other."""

import numpy as np
from numpy.typing import NDArray

from anabranch.knowledge.index.segment import products

Floats = NDArray[np.float32]


def mmr(relevance: Floats, vectors: Floats, limit: int, weight: float) -> NDArray[np.int64]:
    """The chosen rows, in order. The first is the most relevant; each further one maximises
    `weight · relevance - (1 - weight) · cosine`, with the cosine to the most similar row chosen so far. Ties go to the
    lower row, so a weight of 1 gives the order by relevance."""
    order = np.empty(max(0, min(limit, len(relevance))), np.int64)
    if not len(order):
        return order
    lengths = np.sqrt(np.einsum("ij,ij->i", vectors, vectors))[:, None]
    unit = np.ascontiguousarray(vectors / np.where(lengths > 0, lengths, 1), np.float32)  # zero vectors stay zero
    worth = np.float32(weight) * relevance
    closest = np.full(len(relevance), -1.0, np.float32)
    order[0] = latest = int(np.argmax(relevance))
    for at in range(1, len(order)):
        worth[latest] = -np.inf
        # Only the latest choice can be closer than the closest before it: no matrix of all pairs is needed.
        np.maximum(closest, products(unit[latest : latest + 1], unit)[0], out=closest)
        order[at] = latest = int(np.argmax(worth - np.float32(1 - weight) * closest))
    return order
