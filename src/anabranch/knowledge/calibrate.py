"""Fits an embedder's calibration to a test collection in BEIR's layout."""

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from anabranch.domain.contracts import Embedder
from anabranch.domain.errors import ConfigurationError
from anabranch.domain.model import Embedding, Query, RelevanceCurve, Value
from anabranch.knowledge.chunking import topics
from anabranch.knowledge.evaluate import DEEP, OPERATOR, Dataset
from anabranch.knowledge.index.contract import Index, in_thread
from anabranch.knowledge.index.view import View
from anabranch.knowledge.records import documents
from anabranch.knowledge.records.database import Database, Session
from anabranch.knowledge.search import asking, retrieve
from anabranch.text.sentences import sentences

# A score of 0.5 or more for this share of the relevant passages.
KEPT = 0.95
# Weak, so that a score that separates perfectly does not become a step.
RIDGE = 1e-4
ROUNDS = 25
# Texts of several documents in a row, whose beginnings are the topic changes to find.
TEXTS, IN_A_ROW = 80, 5
MIN_SENTENCES = 4
THRESHOLDS = tuple(round(0.05 * step, 2) for step in range(1, 20))

Floats = NDArray[np.float64]


class RelevanceFit(Value):
    """A fitted curve. A score of 0.5 keeps the share `kept` of relevant passages, and `others_kept` of the others."""

    curve: RelevanceCurve
    kept: float
    others_kept: float


class TopicFit(Value):
    """The threshold with the best F1 of the topic changes that it finds, within one sentence."""

    threshold: float
    f1: float


async def fit_relevance(
    database: Database,
    index: Index,
    embedder: Embedder,
    dataset: Dataset,
    progress: Callable[[int, int], None],
) -> RelevanceFit:
    """Logistic regression between the passages of relevant documents and the others that a search finds, moved so that
    0.5 keeps 95% of the relevant ones."""
    judged = {
        query: {document for document, grade in grades.items() if grade > 0} for query, grades in dataset.judged.items()
    }
    queries = [query for query in dataset.queries if judged.get(query)]
    rows: list[Floats] = []
    for number, query in enumerate(queries, 1):
        embeddings = await embedder.embed([dataset.queries[query]])
        deep = Query(text=dataset.queries[query], limit=DEEP, similarity_threshold=0, rerank=False)
        read = partial(_rows, deep=deep, embeddings=embeddings, relevant=judged[query])
        rows.append(await index.find(in_thread(database), asking(deep, OPERATOR, embeddings), read))
        progress(number, len(queries))
    found = np.concatenate(rows) if rows else np.empty((0, 3))
    features, labels = found[:, :2], found[:, 2] > 0
    if not labels.any() or labels.all():
        raise ConfigurationError(f"{dataset.name} has no questions with both relevant and other passages.")
    near, shared, _ = logistic(features, labels)
    scores = features @ np.array([near, shared])
    bias = -float(np.quantile(scores[labels], 1 - KEPT))
    return RelevanceFit(
        curve=RelevanceCurve(near=round(near, 2), shared=round(shared, 2), bias=round(bias, 2)),
        kept=float(np.mean(scores[labels] + bias >= 0)),
        others_kept=float(np.mean(scores[~labels] + bias >= 0)),
    )


def _rows(db: Session, view: View, deep: Query, embeddings: Sequence[Embedding], relevant: set[str]) -> Floats:
    """Cosine, share of words, and whether it is relevant, of each passage that a search finds."""
    flat, wanted = RelevanceCurve(near=0, shared=0, bias=0), asking(deep, OPERATOR, embeddings).limit
    found, _ = retrieve(db, view, deep, embeddings, flat, wanted)
    rows = documents.chunks_by_key(db, OPERATOR, found.keys.tolist())
    labels = [rows[key]["identity"] in relevant for key in found.keys.tolist()]
    return np.column_stack((found.dense, found.shared, np.array(labels, np.float64)))


def logistic(features: Floats, labels: NDArray[np.bool_]) -> tuple[float, float, float]:
    """The factors and the constant of a logistic regression in which both classes have the same weight."""
    inputs = np.column_stack((features, np.ones(len(features))))
    weights = np.where(labels, 0.5 / labels.sum(), 0.5 / (~labels).sum())
    factors = np.zeros(3)
    penalty = RIDGE * np.array([1.0, 1.0, 0.0])
    for _ in range(ROUNDS):
        chance = 1 / (1 + np.exp(-inputs @ factors))
        gradient = inputs.T @ (weights * (chance - labels)) + penalty * factors
        curvature = (inputs * (weights * chance * (1 - chance))[:, None]).T @ inputs + np.diag(penalty + 1e-9)
        factors -= np.linalg.solve(curvature, gradient)
    return float(factors[0]), float(factors[1]), float(factors[2])


async def fit_topics(embedder: Embedder, dataset: Dataset, progress: Callable[[int, int], None]) -> TopicFit:
    """The best threshold on texts that are made of several documents in a row."""
    found: list[tuple[Sequence[Embedding], set[int]]] = []
    texts = list(_rows_of_documents(dataset))
    if not texts:
        raise ConfigurationError(f"{dataset.name} has too few documents of {MIN_SENTENCES} sentences or more.")
    for number, parts in enumerate(texts, 1):
        begins = np.cumsum([len(part) for part in parts])[:-1].tolist()
        found.append((await embedder.embed([sentence for part in parts for sentence in part]), set(begins)))
        progress(number, len(texts))
    scored = [(f1([(topics(read, at), begins) for read, begins in found]), at) for at in THRESHOLDS]
    best = max(score for score, _ in scored)
    # In the middle of those that do as well.
    equal = [at for score, at in scored if score >= best - 0.005]
    return TopicFit(threshold=equal[len(equal) // 2], f1=best)


def _rows_of_documents(dataset: Dataset) -> Iterator[list[list[str]]]:
    """Texts of several documents, each as the sentences of its parts; the same ones every time."""
    read = ([text[begin:end] for begin, end in sentences(text)] for _, text in dataset.documents.values())
    parts = [part for part in read if len(part) >= MIN_SENTENCES]
    random.Random(1).shuffle(parts)  # noqa: S311  no secret
    for begin in range(0, min(len(parts), TEXTS * IN_A_ROW) - IN_A_ROW + 1, IN_A_ROW):
        yield parts[begin : begin + IN_A_ROW]


def f1(found: Sequence[tuple[Sequence[int], set[int]]]) -> float:
    """The F1 of the begins that were found against the true ones; one sentence off counts."""
    hits = sum(any(abs(one - true) <= 1 for one in begins) for begins, truth in found for true in truth)
    right = sum(any(abs(one - true) <= 1 for true in truth) for begins, truth in found for one in begins)
    true_count = sum(len(truth) for _, truth in found)
    found_count = sum(len(begins) for begins, _ in found)
    if not hits or not right:
        return 0.0
    precision, recall = right / found_count, hits / true_count
    return 2 * precision * recall / (precision + recall)
