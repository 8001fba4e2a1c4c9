"""Embedders behind OpenAI's /v1/embeddings."""

import re
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from anabranch.domain.errors import EmbeddingFailed, UpstreamError
from anabranch.domain.model import Embedding, Value
from anabranch.models.model_server import ModelServer
from anabranch.models.replies import UNDECODABLE

MAX_BATCH = 96
# The dimensions are unknown before the first reply, and a reply must stay within its size limit.
FIRST_BATCH = 16
REPLY_BYTES = 2_000_000
BYTES_PER_NUMBER = 24
MAX_DIMENSIONS = 16_384
# One ideograph, up to six letters, up to three digits, or one symbol.
PIECE = re.compile(
    r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\d_\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]{1,6}|\d{1,3}|[^\w\s]|_"
)


class EmbeddingItem(Value):
    embedding: list[float]
    index: int | None = None


class EmbeddingsReply(Value):
    data: list[EmbeddingItem]


class OpenAIEmbeddings:
    """An Embedder on a configured server. `dimensions` is 0 until the first reply; later replies must have the same."""

    def __init__(self, server: ModelServer, model: str, window: int = 8000) -> None:
        self.name = model
        self.window = window
        self.dimensions = 0
        self._server = server

    def tokens(self, text: str) -> Sequence[tuple[int, int]]:
        """An estimate, since the server's tokenizer is unknown: close to common vocabularies for English, too high
        rather than too low for other languages."""
        return [piece.span() for piece in PIECE.finditer(text)]

    async def embed(self, texts: Sequence[str]) -> Sequence[Embedding]:
        found: list[Embedding] = []
        while len(found) < len(texts):
            batch = texts[len(found) : len(found) + self._batch()]
            found += await self._embedded([self._sendable(text) for text in batch])
        return found

    def _batch(self) -> int:
        if not self.dimensions:
            return FIRST_BATCH
        return max(1, min(MAX_BATCH, REPLY_BYTES // (BYTES_PER_NUMBER * self.dimensions)))

    def _sendable(self, text: str) -> str:
        """Truncated to the window, and never empty, which servers reject."""
        if len(text) > self.window:
            pieces = self.tokens(text)
            if len(pieces) > self.window:
                text = text[: pieces[self.window - 1][1]]
        return text.encode(errors="replace").decode() or " "

    async def _embedded(self, texts: list[str]) -> list[Embedding]:
        try:
            body = await self._server.post({"model": self.name, "input": texts, "encoding_format": "float"})
        except UpstreamError as error:
            raise EmbeddingFailed(f"The embedding model cannot be asked: {error.message}", **error.details) from error
        vectors = _vectors(body, len(texts))
        if self.dimensions and vectors.shape[1] != self.dimensions:
            raise EmbeddingFailed(
                f"The embedding model's vectors have changed their length from {self.dimensions} to {vectors.shape[1]}."
            )
        self.dimensions = vectors.shape[1]
        return [Embedding(vector=vector.tobytes()) for vector in vectors]


def _vectors(body: bytes, count: int) -> npt.NDArray[np.float32]:
    """The reply's vectors in the order of the texts, each of unit length."""
    try:
        items = msgspec.json.decode(body, type=EmbeddingsReply).data
    except UNDECODABLE as error:
        raise EmbeddingFailed("The embedding model's reply is not a list of embeddings.") from error
    places = [item.index if item.index is not None else number for number, item in enumerate(items)]
    if sorted(places) != list(range(count)):
        raise EmbeddingFailed(f"The embedding model was given {count} texts and its reply does not match them.")
    lengths = {len(item.embedding) for item in items}
    if len(lengths) != 1 or not 0 < max(lengths) <= MAX_DIMENSIONS:
        raise EmbeddingFailed("The embedding model's vectors are not of one usable length.")
    vectors = np.empty((count, *lengths), np.float64)
    for place, item in zip(places, items, strict=True):
        vectors[place] = item.embedding
    with np.errstate(over="ignore"):
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    if not (np.isfinite(norms).all() and (norms > 0).all()):
        raise EmbeddingFailed("The embedding model's vectors hold numbers that cannot be compared.")
    unit: npt.NDArray[np.float32] = (vectors / norms).astype(np.float32)
    return unit
