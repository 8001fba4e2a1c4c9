"""Reranking: late interaction over stored sign bits, and combined and smoothed scores."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from anabranch.knowledge.index.segment import products

Scores = NDArray[np.float32]

# Weights, tuned on Cranfield and Medline (docs/search.md).
DENSE = 1.0
SPARSE = 1.5
TOKENS = 0.7
NEIGHBOURS = 10
SMOOTHING = 0.3


def token_scores(question: bytes, chunks: Sequence[bytes], width: int) -> Scores:
    """MaxSim of each chunk: the mean over the question's tokens of the similarity of the closest token, from 0 to 1."""
    asked = np.frombuffer(question, np.uint64).reshape(-1, width // 8)
    counts = np.fromiter((len(chunk) // width for chunk in chunks), np.int64, len(chunks))
    scores = np.zeros(len(chunks), np.float32)
    filled = np.flatnonzero(counts)
    if not len(asked) or not len(filled):
        return scores
    tokens = np.frombuffer(b"".join(chunks), np.uint64).reshape(-1, width // 8)
    columns = np.ascontiguousarray(tokens.T)
    begins = np.concatenate(([0], np.cumsum(counts[filled])[:-1]))
    for token in asked:
        apart = np.bitwise_count(columns[0] ^ token[0]).astype(np.uint16)
        for column, bits in zip(columns[1:], token[1:], strict=True):
            apart += np.bitwise_count(column ^ bits)
        scores[filled] += 1 - np.minimum.reduceat(apart, begins) / np.float32(width * 4)
    return scores / np.float32(len(asked))


def combined(dense: Scores, sparse: Scores, tokens: Scores | None, vectors: NDArray[np.float32]) -> Scores:
    """One score per candidate: the weighted sum of the standardised scores, smoothed over its nearest candidates."""
    total = DENSE * _standard(dense) + SPARSE * _standard(sparse)
    if tokens is not None:
        total = total + TOKENS * _standard(tokens)
    return smoothed(total, vectors)


def smoothed(scores: Scores, vectors: NDArray[np.float32]) -> Scores:
    """Each score moved towards those of its nearest neighbours: relevant chunks are similar to each other."""
    count = min(NEIGHBOURS, len(scores) - 1)
    if count < 1:
        return scores
    alike = products(vectors, vectors)
    np.fill_diagonal(alike, -np.inf)
    near = np.argpartition(-alike, count - 1, axis=1)[:, :count]
    weights = np.maximum(np.take_along_axis(alike, near, axis=1), 0)
    around = (weights * scores[near]).sum(axis=1) / np.maximum(weights.sum(axis=1), 1e-6)
    drawn: Scores = ((1 - SMOOTHING) * scores + SMOOTHING * around).astype(np.float32)
    return drawn


def _standard(scores: Scores) -> Scores:
    spread = float(scores.std())
    standard: Scores = (scores - scores.mean()) / np.float32(max(spread, 1e-9))
    return standard
