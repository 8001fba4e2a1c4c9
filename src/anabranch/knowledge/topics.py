"""Where one topic ends and the next begins, by the likeness of the sentences on both sides."""

from collections.abc import Sequence

from anabranch.domain.model import Embedding

# Calibrated for all-MiniLM-L6-v2: docs/chunking.md has the figures.
THRESHOLD = 0.35
REACH = 3


def topics(sentences: Sequence[Embedding]) -> list[int]:
    """Which sentences begin a topic: where the mean of up to three sentences before and that of three from there on
    are less alike than the threshold, and less than one sentence earlier or later."""
    import numpy as np  # noqa: PLC0415  heavy, and only this strategy needs it

    count = len(sentences)
    if count < 2:
        return []
    vectors = np.frombuffer(b"".join(sentence.vector for sentence in sentences), np.float32).reshape(count, -1)
    padded = np.pad(vectors, ((REACH, REACH), (0, 0)))
    sums = padded[: count + REACH].copy()
    for shift in range(1, REACH):
        sums += padded[shift : shift + count + REACH]
    before, after = sums[1:count], sums[1 + REACH : count + REACH]
    lengths = np.linalg.norm(before, axis=1) * np.linalg.norm(after, axis=1)
    likeness = (before * after).sum(axis=1) / np.maximum(lengths, 1e-9)
    edged = np.concatenate([[np.inf], likeness, [np.inf]])
    turns = (likeness < THRESHOLD) & (likeness < edged[:-2]) & (likeness <= edged[2:])
    return [int(gap) for gap in np.flatnonzero(turns) + 1]
