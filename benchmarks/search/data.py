"""Made-up chunks: words by Zipf's law, vectors in clusters, both the same for every engine and every run."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from anabranch.text.words import STOPWORDS

DIMENSIONS = 384
CHUNKS_PER_DOCUMENT = 10
WORDS = 110
VOCABULARY = 60_000
CLUSTERS = 4_000
TOKEN_BYTES = 48
SYLLABLES = "ba be bi bo da de di do fa fe fi ga ge go ka ke ko la le li lo ma me mi mo na ne no pa pe po ra re ri ro"
SHARES = {"10%": ("g10", 10), "1%": ("g100", 100), "0.1%": ("g1000", 1_000)}


class Corpus(NamedTuple):
    texts: list[str]
    vectors: NDArray[np.float32]
    groups: dict[str, NDArray[np.int64]]
    tokens: list[bytes]

    @property
    def documents(self) -> int:
        return len(self.texts) // CHUNKS_PER_DOCUMENT


class Queries(NamedTuple):
    texts: list[str]
    vectors: NDArray[np.float32]
    tokens: list[bytes]


def corpus(count: int) -> Corpus:
    chance = np.random.default_rng(1)
    words = _words()
    centres = _centres()
    ranks = chance.zipf(1.25, size=(count, WORDS)) % VOCABULARY
    texts = [" ".join(words[rank] for rank in row) for row in ranks.tolist()]
    cluster = chance.integers(0, CLUSTERS, count)
    vectors = np.empty((count, DIMENSIONS), np.float32)
    for begin in range(0, count, 50_000):
        end = min(count, begin + 50_000)
        vectors[begin:end] = _near(centres[cluster[begin:end]], chance)
    document = np.arange(count) // CHUNKS_PER_DOCUMENT
    groups = {name: (document * 7919) % many for name, many in SHARES.values()}
    bits = chance.integers(0, 256, (997, 100 * TOKEN_BYTES), dtype=np.uint8)
    return Corpus(texts, vectors, groups, [row.tobytes() for row in bits])


def queries(corpus: Corpus, count: int) -> Queries:
    """Six words of some chunk, and a vector near it."""
    chance = np.random.default_rng(2)
    chosen = chance.integers(0, len(corpus.texts), count)
    texts = []
    for row in chosen:
        words = [word for word in corpus.texts[row].split() if word not in STOPWORDS]
        texts.append(" ".join(chance.choice(words, 6)))
    bits = chance.integers(0, 256, (count, 10 * TOKEN_BYTES), dtype=np.uint8)
    return Queries(texts, _near(corpus.vectors[chosen], chance), [row.tobytes() for row in bits])


def exact(corpus: Corpus, query: NDArray[np.float32], allowed: NDArray[np.bool_] | None, limit: int) -> set[int]:
    scores = corpus.vectors @ query
    if allowed is not None:
        scores = np.where(allowed, scores, -2)
    return set(np.argpartition(-scores, limit)[:limit].tolist())


def _words() -> Sequence[str]:
    chance = np.random.default_rng(3)
    syllables = SYLLABLES.split()
    # The commonest words are English ones that say nothing: every engine leaves them out, as it would in real text.
    made = dict.fromkeys(sorted(STOPWORDS)) | dict.fromkeys(
        "".join(chance.choice(syllables, chance.integers(2, 5))) for _ in range(VOCABULARY * 2)
    )
    return list(made)[:VOCABULARY]


def _centres() -> NDArray[np.float32]:
    chance = np.random.default_rng(4)
    return (chance.standard_normal((CLUSTERS, DIMENSIONS)) * np.linspace(2, 0.1, DIMENSIONS)).astype(np.float32)


def _near(centres: NDArray[np.float32], chance: np.random.Generator) -> NDArray[np.float32]:
    spread = chance.standard_normal(centres.shape) * np.linspace(2, 0.1, DIMENSIONS) * 0.7
    size = np.linalg.norm(centres, axis=1, keepdims=True) / np.linalg.norm(np.linspace(2, 0.1, DIMENSIONS))
    moved = centres + spread * size
    return np.asarray(moved / np.linalg.norm(moved, axis=1, keepdims=True), np.float32)
