"""Cross-encoders: a local ONNX model, or a server that reranks."""

import asyncio
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt
from tokenizers import Encoding

from anabranch.domain.contracts import RunInThread
from anabranch.domain.errors import RerankFailed, UpstreamError
from anabranch.domain.model import Passage, Value
from anabranch.models.cross_encoder import CrossEncoder
from anabranch.models.minilm import batches
from anabranch.models.remote import UNDECODABLE, ModelServer, api_url

Form = Literal["cohere", "tei"]

# The default batch limit of servers of each form.
BATCH: dict[Form, int] = {"cohere": 100, "tei": 32}


class OnnxCrossEncoder:
    """A Reranker on this machine: `path` is an .onnx file, or a folder with one, and the tokenizer.json is beside it.
    A model with two logits has the second for "relevant"."""

    def __init__(self, path: Path, threads: int = 1, run: RunInThread = asyncio.to_thread) -> None:
        self._run = run
        self._model = CrossEncoder(path, "reranker", threads=threads)

    async def score(self, query: str, passages: Sequence[Passage]) -> Sequence[float]:
        pairs = await self._run(lambda: [self._model.encode(query, each.text) for each in passages])
        scores: dict[int, float] = {}
        for batch in batches([len(pair.ids) for pair in pairs]):
            found = await self._run(self._scores, [pairs[number] for number in batch])
            scores.update(zip(batch, found, strict=True))
        return [scores[number] for number in range(len(pairs))]

    def _scores(self, pairs: list[Encoding]) -> list[float]:
        return _relevance(self._model.logits(pairs), len(pairs))


class RerankEndpoint:
    """A Reranker on a configured server, in the format of Cohere and Jina, or of Hugging Face's
    text-embeddings-inference."""

    def __init__(self, server: ModelServer, form: Form, model: str = "") -> None:
        self._server = server
        self._form = form
        self._model = model

    async def score(self, query: str, passages: Sequence[Passage]) -> Sequence[float]:
        scores: list[float] = []
        while len(scores) < len(passages):
            batch = passages[len(scores) : len(scores) + BATCH[self._form]]
            scores += await self._scores(query, [passage.text for passage in batch])
        return scores

    async def _scores(self, query: str, texts: list[str]) -> list[float]:
        payloads: dict[Form, dict[str, object]] = {
            "cohere": {"model": self._model, "query": query, "documents": texts, "top_n": len(texts)},
            "tei": {"query": query, "texts": texts, "truncate": True},
        }
        try:
            body = await self._server.post(payloads[self._form])
        except UpstreamError as error:
            raise RerankFailed(
                f"The reranker (AGGREGATOR_RERANKER_URL) cannot be asked: {error.message}", **error.details
            ) from error
        return _in_order(_results(body, self._form), len(texts))


class TeiResult(Value):
    index: int
    score: float


class CohereResult(TeiResult):
    score: float = msgspec.field(name="relevance_score")


class CohereReply(Value):
    results: list[CohereResult]


def rerank_url(base: str, form: Form) -> str:
    """text-embeddings-inference has no version in its URL."""
    return api_url(base, "/rerank", ("",) if form == "tei" else ("/v1", "/v2"))


def _results(body: bytes, form: Form) -> Sequence[TeiResult]:
    try:
        if form == "cohere":
            return msgspec.json.decode(body, type=CohereReply).results
        return msgspec.json.decode(body, type=list[TeiResult])
    except UNDECODABLE as error:
        raise RerankFailed("The reranker's reply is not a list of scores.") from error


def _in_order(results: Sequence[TeiResult], count: int) -> list[float]:
    ordered = sorted(results, key=attrgetter("index"))
    if [result.index for result in ordered] != list(range(count)):
        raise RerankFailed(f"The reranker was given {count} passages and its reply does not match them.")
    return [result.score for result in ordered]


def _relevance(logits: npt.NDArray[np.float64], count: int) -> list[float]:
    if logits.size not in (count, 2 * count):
        raise RerankFailed("The reranker gives neither one nor two logits for a passage.")
    if not np.isfinite(logits).all():
        raise RerankFailed("The reranker's scores are not numbers that can be compared.")
    rows = logits.reshape(count, -1)
    scores: list[float] = (rows[:, -1] - (rows[:, 0] if rows.shape[1] == 2 else 0)).tolist()
    return scores
