"""Evaluation: nDCG, recall and MRR of each search stage on a test collection in BEIR's layout, as in trec_eval."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import numpy as np

from anabranch.domain.contracts import Embedder
from anabranch.domain.errors import ConfigurationError
from anabranch.domain.model import Embedding, Query, RelevanceCurve, Value
from anabranch.knowledge.index.contract import Index, in_thread
from anabranch.knowledge.index.view import View
from anabranch.knowledge.model import Caller
from anabranch.knowledge.records import documents
from anabranch.knowledge.records.database import Database, Session
from anabranch.knowledge.search import asking, interact, retrieve

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
        judgements = folder / "qrels.tsv" if (folder / "qrels.tsv").is_file() else folder / "qrels" / "test.tsv"
        for line in filter(str.strip, judgements.read_text(encoding="utf-8").splitlines()[1:]):
            query, document, grade = line.split("\t")[:3]
            judged.setdefault(query, {})[document] = float(grade)
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
    index: Index,
    embedder: Embedder,
    dataset: Dataset,
    stages: Sequence[Stage],
    progress: Callable[[int, int], None],
) -> dict[Stage, Measures]:
    """The measures of each stage. A document's `identity` is its id in the dataset."""
    queries = [query for query in dataset.queries if any(grade > 0 for grade in dataset.judged.get(query, {}).values())]
    found: dict[Stage, list[tuple[float, float, float, float]]] = {stage: [] for stage in stages}
    for number, query in enumerate(queries, 1):
        text = dataset.queries[query]
        embeddings = await embedder.embed([text])
        wide = Query(text=text, limit=DEEP, similarity_threshold=0, rerank=False)
        rank = partial(_ranked, wide=wide, embeddings=embeddings, curve=embedder.calibration.relevance)
        ranked = await index.find(in_thread(database), asking(wide, OPERATOR, embeddings), rank)
        for stage in stages:
            found[stage].append(measure(ranked[stage], dataset.judged[query]))
        progress(number, len(queries))
    return {stage: _mean(rows) for stage, rows in found.items()}


def _ranked(
    db: Session, view: View, wide: Query, embeddings: Sequence[Embedding], curve: RelevanceCurve
) -> dict[Stage, list[str]]:
    """The ids of the documents as each stage ranks them, each once, at the rank of its best chunk."""
    deep = asking(wide, OPERATOR, embeddings).limit
    hybrid, _ = retrieve(db, view, wide, embeddings, curve, deep)
    narrow = Query(text=wide.text, limit=PAGE, similarity_threshold=0)
    page, _ = retrieve(db, view, narrow, embeddings, curve, asking(narrow, OPERATOR, embeddings).limit)
    best = interact(db, page, embeddings[0])
    keys: dict[Stage, list[int]] = {
        "bm25": view.lexical(wide.text).best(deep)[0].tolist(),
        "dense": view.nearest(np.frombuffer(embeddings[0].vector, np.float32), deep)[0].tolist(),
        "hybrid": hybrid.keys.tolist(),
        "rerank": list(dict.fromkeys((*best.keys.tolist(), *hybrid.keys.tolist()))),
    }
    rows = documents.chunks_by_key(db, OPERATOR, list(chain.from_iterable(keys.values())))
    return {stage: list(dict.fromkeys(rows[key]["identity"] for key in chunks)) for stage, chunks in keys.items()}


def measure(ranked: Sequence[str], judged: Mapping[str, float]) -> tuple[float, float, float, float]:
    """nDCG@10 with linear gain, Recall@10, Recall@100, MRR@10."""
    gains = [max(judged.get(document, 0.0), 0.0) for document in ranked]
    ideal = sorted((grade for grade in judged.values() if grade > 0), reverse=True)
    return (
        _discounted(gains[:10]) / _discounted(ideal[:10]),
        sum(gain > 0 for gain in gains[:10]) / len(ideal),
        sum(gain > 0 for gain in gains[:100]) / len(ideal),
        next((1 / rank for rank, gain in enumerate(gains[:10], 1) if gain > 0), 0.0),
    )


def _discounted(gains: Sequence[float]) -> float:
    return sum(gain / math.log2(rank + 1) for rank, gain in enumerate(gains, 1))


def _mean(rows: Sequence[tuple[float, float, float, float]]) -> Measures:
    means = [sum(column) / len(rows) for column in zip(*rows, strict=True)] if rows else [0.0] * 4
    return Measures(ndcg_10=means[0], recall_10=means[1], recall_100=means[2], mrr_10=means[3], queries=len(rows))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        yield from map(msgspec.json.decode, filter(bytes.strip, file))
