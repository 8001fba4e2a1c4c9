"""Evaluation: nDCG, recall and MRR of each search stage on a test collection in BEIR's layout, as in trec_eval."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import numpy as np

from anabranch.domain.contracts import Embedder
from anabranch.domain.errors import ConfigurationError
from anabranch.domain.model import Filters, Query, Value
from anabranch.knowledge.index.reader import IndexReader
from anabranch.knowledge.model import Caller
from anabranch.knowledge.records import documents
from anabranch.knowledge.records.database import Connection, Database
from anabranch.knowledge.search import OVERFETCH, interact, retrieve

Stage = Literal["bm25", "dense", "hybrid", "rerank"]
STAGES: tuple[Stage, ...] = get_args(Stage)
DEEP = 100
# Reranking gets the candidates of an ordinary page, not the wider list that is measured.
PAGE = 20
OPERATOR = Caller(operator=True)


class Dataset(Value):
    """`judged` holds the relevance grade of each judged document, by query."""

    name: str
    documents: Mapping[str, tuple[str, str]]
    queries: Mapping[str, str]
    judged: Mapping[str, Mapping[str, float]]


class Measures(Value):
    ndcg_10: float
    recall_10: float
    recall_100: float
    mrr_10: float
    queries: int


def read(folder: Path) -> Dataset:
    """Read corpus.jsonl, queries.jsonl and qrels.tsv (or qrels/test.tsv)."""
    try:
        judged: dict[str, dict[str, float]] = {}
        for query, document, grade in _judgements(folder):
            judged.setdefault(query, {})[document] = grade
        return Dataset(
            name=folder.resolve().name,
            documents={one["_id"]: (one.get("title") or "", one["text"]) for one in _lines(folder / "corpus.jsonl")},
            queries={one["_id"]: one["text"] for one in _lines(folder / "queries.jsonl")},
            judged=judged,
        )
    except FileNotFoundError as error:
        raise ConfigurationError(f"{folder} is not a dataset in BEIR's layout: {error.filename} is missing.") from None
    except (KeyError, ValueError, TypeError, msgspec.MsgspecError) as error:
        raise ConfigurationError(f"{folder} is not a dataset in BEIR's layout: {error}.") from None


async def evaluate(
    database: Database,
    reader: IndexReader,
    embedder: Embedder,
    dataset: Dataset,
    stages: Sequence[Stage],
    progress: Callable[[int, int], None],
) -> dict[Stage, Measures]:
    """The measures of each stage. A document's `identity` is its id in the dataset."""
    asked = [query for query in dataset.queries if any(grade > 0 for grade in dataset.judged.get(query, {}).values())]
    found: dict[Stage, list[tuple[float, float, float, float]]] = {stage: [] for stage in stages}
    for number, query in enumerate(asked, 1):
        text = dataset.queries[query]
        embeddings = await embedder.embed([text])

        def rank(db: Connection, text: str = text, embeddings: Any = embeddings) -> dict[Stage, list[str]]:
            view = reader.view(db, Filters(), OPERATOR)
            wide = retrieve(view, Query(text=text, limit=DEEP, similarity_threshold=0, rerank=False), embeddings)
            page = retrieve(view, Query(text=text, limit=PAGE, similarity_threshold=0), embeddings)
            best = interact(db, view, page, embeddings[0]).keys.tolist()
            hybrid = wide.keys.tolist()
            ranked: dict[Stage, Sequence[int]] = {
                "bm25": view.lexical(text).best(DEEP * OVERFETCH)[0].tolist(),
                "dense": view.nearest(np.frombuffer(embeddings[0].vector, np.float32), DEEP * OVERFETCH)[0].tolist(),
                "hybrid": hybrid,
                "rerank": [*best, *(key for key in hybrid if key not in set(best))],
            }
            return {stage: _documents(db, ranked[stage]) for stage in stages}

        for stage, ranked in database.reading(rank).items():
            found[stage].append(measure(ranked, dataset.judged[query]))
        progress(number, len(asked))
    return {stage: _mean(rows) for stage, rows in found.items()}


def measure(ranked: Sequence[str], judged: Mapping[str, float]) -> tuple[float, float, float, float]:
    """nDCG@10 with linear gain, Recall@10, Recall@100, MRR@10."""
    gains = [max(judged.get(document, 0.0), 0.0) for document in ranked]
    ideal = sorted((grade for grade in judged.values() if grade > 0), reverse=True)
    relevant = len(ideal)
    first = next((rank for rank, gain in enumerate(gains[:10], 1) if gain > 0), None)
    return (
        _discounted(gains[:10]) / _discounted(ideal[:10]),
        sum(gain > 0 for gain in gains[:10]) / relevant,
        sum(gain > 0 for gain in gains[:100]) / relevant,
        1 / first if first else 0.0,
    )


def _documents(db: Connection, keys: Sequence[int]) -> list[str]:
    """The identities of the chunks' documents, each once, at the rank of its best chunk."""
    found = documents.chunks_by_key(db, keys)
    return list(dict.fromkeys(found[key]["identity"] for key in keys))


def _discounted(gains: Sequence[float]) -> float:
    return sum(gain / math.log2(rank + 1) for rank, gain in enumerate(gains, 1))


def _mean(rows: Sequence[tuple[float, float, float, float]]) -> Measures:
    means = [sum(column) / len(rows) for column in zip(*rows, strict=True)] if rows else [0.0] * 4
    return Measures(ndcg_10=means[0], recall_10=means[1], recall_100=means[2], mrr_10=means[3], queries=len(rows))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                yield msgspec.json.decode(line)


def _judgements(folder: Path) -> Iterator[tuple[str, str, float]]:
    path = folder / "qrels.tsv"
    if not path.is_file():
        path = folder / "qrels" / "test.tsv"
    for line in path.read_text(encoding="utf-8").splitlines()[1:]:
        if line.strip():
            query, document, grade = line.split("\t")[:3]
            yield query, document, float(grade)
