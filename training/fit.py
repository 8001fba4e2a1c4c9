"""Fits the weights that combine the evidence model with rules, on questions that the model was not trained on.

    python -m training.fit --found FILE...
    python -m training.fit --observed FILE...

The files are written by `python -m benchmarks.evidence find` and `observe`. Of what was found: which passage has the
answer, a softmax over the passages of a question. Of what was observed, three logistic regressions with a ridge
penalty: is a unit evidence, do the passages answer, and is another unit evidence too, given the best one. Data sets
have the same weight, those of topic queries half of it. The table shows what folds that were left out of the fit give;
the other lines are for src/anabranch/evidence/weights.py.
"""

import argparse
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from anabranch.evidence import weights
from anabranch.evidence.choice import ENOUGH, FEWEST, passage_features
from anabranch.evidence.features import Observed
from anabranch.evidence.judge import judgement
from anabranch.evidence.pages import PlacedUnit
from anabranch.evidence.quotations import beside, best_unit
from benchmarks.evidence.cases import Case, answers, overlaps

Seen = tuple[Case, Observed]
Floats = npt.NDArray[np.float64]

RIDGE = 1.0
# Topic queries count half: with more, questions without an answer are refused less often.
WEIGHTS = {"cranfield": 0.5, "medline": 0.5}
PASSAGES_RIDGE = 0.05
MOST_READ = 8
FOLDS = 5
STEPS = 40


class Rows(NamedTuple):
    """`groups` are the questions, which are not split between folds; `sets` the data sets."""

    values: Floats
    labels: Floats
    groups: npt.NDArray[np.int64]
    sets: npt.NDArray[np.str_]

    def taken(self, which: npt.NDArray[np.bool_]) -> "Rows":
        return Rows(self.values[which], self.labels[which], self.groups[which], self.sets[which])


def fitted(rows: Rows, ridge: float = RIDGE) -> Floats:
    """One weight for each feature, and the bias last."""
    mean, spread = rows.values.mean(0), rows.values.std(0) + 1e-9
    scaled = np.c_[(rows.values - mean) / spread, np.ones(len(rows.values))]
    each = np.zeros(len(rows.labels))
    names, counts = np.unique(rows.sets, return_counts=True)
    for name, count in zip(names, counts, strict=True):
        each[rows.sets == name] = WEIGHTS.get(str(name), 1.0) * len(each) / len(names) / count
    penalty = ridge * np.eye(scaled.shape[1])
    penalty[-1, -1] = 0
    weights = np.zeros(scaled.shape[1])
    for _ in range(STEPS):
        likely = 1 / (1 + np.exp(-np.clip(scaled @ weights, -30, 30)))
        slope = scaled.T @ (each * (rows.labels - likely)) - penalty @ weights
        curve = (scaled.T * (each * likely * (1 - likely))) @ scaled + penalty
        weights = weights + np.linalg.solve(curve, slope)
    plain: Floats = np.r_[weights[:-1] / spread, weights[-1] - (weights[:-1] / spread) @ mean]
    return plain


def odds(rows: Floats, weights: Floats) -> Floats:
    found: Floats = rows @ weights[:-1] + weights[-1]
    return found


def left_out(rows: Rows, folds: int = FOLDS) -> Floats:
    """The log-odds of each row by weights of the folds that it is not in."""
    order = np.random.default_rng(0).permutation(np.unique(rows.groups))
    found = np.zeros(len(rows.labels))
    for fold in range(folds):
        test = np.isin(rows.groups, order[fold::folds])
        found[test] = odds(rows.values[test], fitted(rows.taken(~test)))
    return found


def auc(values: Floats, labels: Floats) -> float:
    order = values.argsort().argsort() + 1
    positive = labels > 0.5
    count = positive.sum()
    return float((order[positive].sum() - count * (count + 1) / 2) / max(1, count * (len(labels) - count)))


def report(name: str, rows: Rows, say: Callable[[str], None]) -> None:
    found = left_out(rows)
    for one in ("", *np.unique(rows.sets)):
        which = rows.sets == one if one else np.ones(len(found), np.bool_)
        values, labels = found[which], rows.labels[which]
        yes, no = values[labels > 0.5], values[labels < 0.5]
        if not len(yes) or not len(no):
            say(f"  {name:8} {one or 'all':14} n {len(values):6}  below even {float((values < 0).mean()):.3f}")
            continue
        say(
            f"  {name:8} {one or 'all':14} n {len(yes):5} / {len(no):6}  AUC {auc(values, labels):.3f}  "
            f"below even {float((yes < 0).mean()):.3f} / {float((no < 0).mean()):.3f}"
        )


class Builder:
    """Collects rows."""

    def __init__(self) -> None:
        self._rows: list[tuple[Sequence[float], float, int, str]] = []

    def add(self, values: Sequence[float], label: bool, group: int, dataset: str) -> None:
        self._rows.append((tuple(values), float(label), group, dataset))

    def rows(self) -> Rows:
        values, labels, groups, sets = zip(*self._rows, strict=True)
        return Rows(np.array(values, float), np.array(labels), np.array(groups), np.array(sets))


def is_gold(case: Case, placed: PlacedUnit) -> bool:
    return overlaps([(placed.unit.start, placed.unit.end)], case.gold[placed.passage])


def fit_units(seen: Sequence[Seen]) -> Rows:
    built = Builder()
    for number, (case, found) in enumerate(seen):
        if case.answerable and any(case.gold):
            for placed, features in zip(found.placed, found.units, strict=True):
                built.add(features, is_gold(case, placed), number, case.dataset)
    return built.rows()


def fit_support(seen: Sequence[Seen]) -> Rows:
    built = Builder()
    for number, (case, found) in enumerate(seen):
        best = max(map(weights.probability_of_unit, found.units), default=0.0)
        built.add((*found.support, weights.log_odds(best)), answers(case), number, case.dataset)
    return built.rows()


def fit_next(seen: Sequence[Seen]) -> Rows:
    built = Builder()
    for number, (case, found) in enumerate(seen):
        if case.answerable and any(case.gold):
            judged = judgement(found, range(len(case.passages)), len(case.passages))
            for unit, features in beside(best_unit(judged), case.passages, judged):
                built.add(features, is_gold(case, unit.placed), number, case.dataset)
    return built.rows()


class Found(NamedTuple):
    """The passages of a question: their features, and which have evidence."""

    values: Floats
    gold: npt.NDArray[np.bool_]
    dataset: str


def found_passages(cases: Sequence[Case]) -> list[Found]:
    return [
        Found(
            np.array(passage_features(case.question, case.passages)), np.array(list(map(bool, case.gold))), case.dataset
        )
        for case in cases
        if any(case.gold)
    ]


def fit_passages(rows: Sequence[Found], ridge: float = PASSAGES_RIDGE) -> Floats:
    """The weights with which a softmax over the passages of a question gives most probability to those with evidence,
    by Newton's method."""
    counts = {name: sum(row.dataset == name for row in rows) for name in {row.dataset for row in rows}}
    spread = np.concatenate([row.values for row in rows]).std(0) + 1e-9
    weights = np.zeros(len(spread))
    for _ in range(STEPS):
        slope, curve = -ridge * weights, ridge * np.eye(len(weights))
        for row in rows:
            values, share = row.values / spread, 1 / len(counts) / counts[row.dataset]
            likely = _softmax(values @ weights)
            right = np.where(row.gold, likely, 0) / likely[row.gold].sum()
            mean = likely @ values
            slope += share * (right @ values - mean)
            curve += share * ((values.T * likely) @ values - np.outer(mean, mean))
        weights = weights + np.linalg.solve(curve, slope)
    plain: Floats = weights / spread
    return plain


def _softmax(odds: Floats) -> Floats:
    each = np.exp(odds - odds.max())
    found: Floats = each / each.sum()
    return found


def report_passages(rows: Sequence[Found], say: Callable[[str], None]) -> None:
    """For each data set, with weights of the others: how often evidence is among those that would be read."""
    for name in sorted({row.dataset for row in rows}):
        others = [row for row in rows if row.dataset != name]
        weights = fit_passages(others or rows)
        read, found = [], []
        for row in rows:
            if row.dataset == name:
                likely = _softmax(row.values @ weights)
                order = np.argsort(-likely, kind="stable")
                enough = int(np.searchsorted(np.cumsum(likely[order]), ENOUGH)) + 1
                read.append(min(MOST_READ, max(FEWEST, enough)))
                found.append(row.gold[order[: read[-1]]].any())
        say(f"  passages {name:14} n {len(read):5}  read {np.mean(read):.2f}  with evidence {np.mean(found):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--found", type=Path, nargs="+", default=[])
    parser.add_argument("--observed", type=Path, nargs="+", default=[])
    told = parser.parse_args()
    if told.found:
        rows = found_passages([case for file in told.found for case in pickle.loads(file.read_bytes())])  # noqa: S301
        report_passages(rows, print)
        print(f"PASSAGES = {tuple(round(float(weight), 3) for weight in fit_passages(rows))}")
    if told.observed:
        fit_observed(told.observed)


def fit_observed(files: Sequence[Path]) -> None:
    seen: list[Seen] = [row for file in files for row in pickle.loads(file.read_bytes())]  # noqa: S301
    for name, made in (("UNIT", fit_units), ("SUPPORT", fit_support), ("NEXT", fit_next)):
        rows = made(seen)
        report(name.lower(), rows, print)
        found = tuple(round(float(weight), 3) for weight in fitted(rows))
        # The next ones use the units' weights.
        setattr(weights, name, found)
        print(f"{name} = {found}")


if __name__ == "__main__":
    main()
