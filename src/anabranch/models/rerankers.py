"""Cross-encoders: a local ONNX model, or a server that reranks."""

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, assert_never

import msgspec
import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

from anabranch.domain.errors import ConfigurationError, RerankFailed, UpstreamError
from anabranch.domain.model import Passage, Value
from anabranch.models.minilm import batches, padded, session
from anabranch.models.remote import UNDECODABLE, ModelServer, api_url

Form = Literal["cohere", "tei"]

MAX_PAIR_TOKENS = 512
KNOWN_INPUTS = {"input_ids", "attention_mask", "token_type_ids"}
PADS = ("[PAD]", "<pad>")
# The default batch limit of servers of each form.
BATCH: dict[Form, int] = {"cohere": 100, "tei": 32}


class OnnxCrossEncoder:
    """A Reranker on this machine: `path` is an .onnx file, or a folder with one, and the tokenizer.json is beside it.
    A model with two logits has the second for "relevant"."""

    def __init__(self, path: Path, threads: int = 1) -> None:
        model, tokenizer = _files(path)
        try:
            self._tokenizer = Tokenizer.from_file(str(tokenizer))
            self._session = session(str(model), threads)
        except Exception as error:  # both libraries raise bare exceptions for a file that they cannot read
            raise ConfigurationError(f"The reranker in {path} cannot be loaded: {error}") from error
        self._inputs = {
            each.name: np.int32 if each.type == "tensor(int32)" else np.int64 for each in self._session.get_inputs()
        }
        if "input_ids" not in self._inputs or self._inputs.keys() - KNOWN_INPUTS:
            names = ", ".join(sorted(self._inputs))
            raise ConfigurationError(f"The reranker in {path} is not a cross-encoder: it takes in {names}.")
        self._output = self._session.get_outputs()[0].name
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(MAX_PAIR_TOKENS, strategy="longest_first")
        self._pad = next((pad for each in PADS if (pad := self._tokenizer.token_to_id(each)) is not None), 0)

    async def score(self, query: str, passages: Sequence[Passage]) -> Sequence[float]:
        texts = [passage.text for passage in passages]
        pairs = await asyncio.to_thread(lambda: [self._tokenizer.encode(query, text) for text in texts])
        scores = [0.0] * len(pairs)
        for batch in batches([len(pair.ids) for pair in pairs]):
            found = await asyncio.to_thread(self._scores, [pairs[number] for number in batch])
            for number, score in zip(batch, found, strict=True):
                scores[number] = score
        return scores

    def _scores(self, pairs: list[Encoding]) -> list[float]:
        ids, mask = padded([np.array(pair.ids, np.int32) for pair in pairs], self._pad)
        types, _ = padded([np.array(pair.type_ids, np.int32) for pair in pairs])
        given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
        feed = {name: given[name].astype(kind) for name, kind in self._inputs.items()}
        logits = self._session.run([self._output], feed)[0]
        return _relevance(np.asarray(logits, np.float64), len(pairs))


class RerankEndpoint:
    """A Reranker on a configured server, in the format of Cohere and Jina, or of Hugging Face's
    text-embeddings-inference."""

    def __init__(self, server: ModelServer, form: Form, model: str = "") -> None:
        self._server = server
        self._form = form
        self._model = model

    async def score(self, query: str, passages: Sequence[Passage]) -> Sequence[float]:
        texts = [passage.text for passage in passages]
        scores: list[float] = []
        while len(scores) < len(texts):
            scores += await self._scores(query, texts[len(scores) : len(scores) + BATCH[self._form]])
        return scores

    async def _scores(self, query: str, texts: list[str]) -> list[float]:
        try:
            body = await self._server.post(self._payload(query, texts))
        except UpstreamError as error:
            raise RerankFailed(f"The reranker cannot be asked: {error.message}", **error.details) from error
        return _in_order(_results(body, self._form), len(texts))

    def _payload(self, query: str, texts: list[str]) -> dict[str, object]:
        match self._form:
            case "cohere":
                return {"model": self._model, "query": query, "documents": texts, "top_n": len(texts)}
            case "tei":
                return {"query": query, "texts": texts, "truncate": True}
            case _:
                assert_never(self._form)


class CohereResult(Value):
    index: int
    relevance_score: float


class CohereReply(Value):
    results: list[CohereResult]


class TeiResult(Value):
    index: int
    score: float


def rerank_url(base: str, form: Form) -> str:
    """text-embeddings-inference has no version in its URL."""
    return api_url(base, "/rerank", ("",) if form == "tei" else ("/v1", "/v2"))


def _results(body: bytes, form: Form) -> list[tuple[int, float]]:
    try:
        match form:
            case "cohere":
                cohere = msgspec.json.decode(body, type=CohereReply).results
                return [(result.index, result.relevance_score) for result in cohere]
            case "tei":
                tei = msgspec.json.decode(body, type=list[TeiResult])
                return [(result.index, result.score) for result in tei]
            case _:
                assert_never(form)
    except UNDECODABLE as error:
        raise RerankFailed("The reranker's reply is not a list of scores.") from error


def _in_order(results: list[tuple[int, float]], count: int) -> list[float]:
    ordered = sorted(results)
    if [place for place, _ in ordered] != list(range(count)):
        raise RerankFailed(f"The reranker was given {count} passages and its reply does not match them.")
    if not all(math.isfinite(score) for _, score in ordered):
        raise RerankFailed("The reranker's scores are not numbers that can be compared.")
    return [score for _, score in ordered]


def _relevance(logits: npt.NDArray[np.float64], count: int) -> list[float]:
    rows = logits.reshape(count, -1) if logits.size in (count, 2 * count) else None
    if rows is None:
        raise RerankFailed("The reranker gives neither one nor two logits for a passage.")
    if not np.isfinite(rows).all():
        raise RerankFailed("The reranker's scores are not numbers that can be compared.")
    scores: list[float] = (rows[:, -1] - (rows[:, 0] if rows.shape[1] == 2 else 0)).tolist()
    return scores


def _files(path: Path) -> tuple[Path, Path]:
    models = [path] if path.suffix == ".onnx" else [path / "model.onnx", path / "onnx" / "model.onnx"]
    for model in models:
        for tokenizer in (model.parent / "tokenizer.json", model.parent.parent / "tokenizer.json"):
            if model.is_file() and tokenizer.is_file():
                return model, tokenizer
    raise ConfigurationError(f"There is no reranker in {path}: it needs model.onnx, and tokenizer.json beside it.")
