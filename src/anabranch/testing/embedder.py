"""An embedder without a model: texts are alike as far as they share words."""

import hashlib
import re
from collections.abc import Sequence
from functools import lru_cache

from anabranch.domain.model import Embedding

WORD = re.compile(r"\w+")
TOKEN = re.compile(r"\w{1,6}|[^\w\s]")


class FakeEmbedder:
    """Each word is a direction of ±1s that its hash decides; a text is the sum of its words, of unit length. Tokens are
    signs and parts of words of up to six letters, so that a cut word has other tokens than the whole one."""

    def __init__(self, *, dimensions: int = 128, window: int = 256) -> None:
        if dimensions % 8 or not 8 <= dimensions <= 512:
            raise ValueError("dimensions must be a multiple of 8, up to 512")
        self.calls: list[tuple[str, ...]] = []
        self._dimensions = dimensions
        self._window = window

    @property
    def name(self) -> str:
        return f"fake-{self._dimensions}"

    @property
    def dimensions(self) -> int:
        return self._dimensions

    @property
    def window(self) -> int:
        return self._window

    def tokens(self, text: str) -> Sequence[tuple[int, int]]:
        return [found.span() for found in TOKEN.finditer(text)]

    async def embed(self, texts: Sequence[str]) -> Sequence[Embedding]:
        self.calls.append(tuple(texts))
        return [self._embedding(text) for text in texts]

    def _embedding(self, text: str) -> Embedding:
        import numpy as np  # noqa: PLC0415

        within = self.tokens(text)[: self._window]
        words = WORD.findall(text[: within[-1][1]].lower()) if within else []
        rows = b"".join(_signs(word, self._dimensions // 8) for word in words)
        bits = np.unpackbits(np.frombuffer(rows or bytes(self._dimensions // 8), np.uint8))
        vector = (2.0 * bits.reshape(-1, self._dimensions) - 1.0).sum(axis=0)
        length = float(np.linalg.norm(vector))
        # Directions that cancel out leave nothing to point with.
        unit = vector / length if length else np.full(self._dimensions, self._dimensions**-0.5)
        return Embedding(vector=unit.astype(np.float32).tobytes(), tokens=rows)


@lru_cache(maxsize=65_536)
def _signs(word: str, size_bytes: int) -> bytes:
    return hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=size_bytes).digest()
