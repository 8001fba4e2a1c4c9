"""Finds near passages that a trained model takes for right, to be drawn more often in the next training.

A passage that the model finds as answerable as the right one is left out: it is likely that it does answer."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from anabranch.models.evidence_input import SINGLE, InputIds, PageIds, UnitIds, laid_out
from training.corpus import Corpus
from training.inputs import plain_tokenizer

# Harder than this many others of the same question, and not hopeless: log-odds of being relevant.
HARDEST, LEAST_RELEVANCE = 3, -4.0
# Questions that are scored at a time.
SLICE = 4096


class OtherData(Exception):
    """The mined passages belong to other data."""


def mined(path: Path, corpus: Corpus) -> dict[int, tuple[int, ...]]:
    """Hard near passages by question."""
    found = json.loads(path.read_text(encoding="utf-8"))
    same = list(found["data_sha256"].items()) == list(corpus.sha256.items())
    if not same or found["questions"] != len(corpus.questions):
        raise OtherData(f"{path} was made from other data, or from files in another order.")
    return {int(question): tuple(passages) for question, passages in found["hard"].items()}


def hard(scores: dict[int, tuple[float, float]], right: int) -> list[int]:
    """The hardest passages, by (relevance, answerable) of each; `right` is the one that answers."""
    limit = scores[right][1]
    near = [
        (relevance, number)
        for number, (relevance, answerable) in scores.items()
        if number != right and relevance > LEAST_RELEVANCE and answerable < limit
    ]
    return [number for _, number in sorted(near, reverse=True)[:HARDEST]]


def inputs(corpus: Corpus, questions: range) -> Iterator[tuple[int, int, InputIds]]:
    """Question, passage and input, for each passage of each question that has one right passage and near ones."""
    for number in questions:
        question = corpus.questions[number]
        if question.answerable and len(question.positives) == 1 and not question.several:
            for passage in (*question.positives, *question.negatives) if question.negatives else ():
                yield number, passage, laid_out(corpus.heads[number], [page(corpus, passage)], SINGLE)


def page(corpus: Corpus, passage: int) -> PageIds:
    first, end = corpus.first_unit[passage : passage + 2].tolist()
    return PageIds(
        corpus.titles[passage], [UnitIds(corpus.before[unit], corpus.units[unit]) for unit in range(first, end)]
    )


def main() -> None:
    from training.evaluate import torch_model  # noqa: PLC0415  training reads mined passages without it

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, required=True, help="the folder that training wrote")
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="the same files as for training")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sample", type=int, help="take only so many questions of each file, as in training")
    arguments = parser.parse_args()
    with np.load(arguments.base) as base:
        corpus = Corpus(arguments.data, plain_tokenizer(bytes(base["tokenizer"])), arguments.sample)
    model = torch_model(arguments.base, arguments.weights)
    found: dict[int, list[int]] = {}
    for first in range(0, len(corpus.questions), SLICE):
        rows = list(inputs(corpus, range(first, min(first + SLICE, len(corpus.questions)))))
        passages = model.passages([row[2] for row in rows])
        scores: dict[int, dict[int, tuple[float, float]]] = {}
        for (question, passage, _), values in zip(rows, passages, strict=True):
            scores.setdefault(question, {})[passage] = float(values[0]), float(values[1])
        found |= {number: hard(each, corpus.questions[number].positives[0]) for number, each in scores.items()}
    kept = {number: passages for number, passages in found.items() if passages}
    record = {"data_sha256": corpus.sha256, "questions": len(corpus.questions), "hard": kept}
    arguments.out.write_text(json.dumps(record) + "\n", encoding="utf-8")
    print(f"{len(kept):,} of {len(found):,} questions have near passages that are hard: {arguments.out}")


if __name__ == "__main__":
    main()
