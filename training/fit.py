"""Fits the weights that combine the evidence model with rules, on questions that the model was not trained on.

    python -m training.fit --observed FILE...

The files are written by `python -m benchmarks.evidence observe`. Three logistic regressions with a ridge penalty: is a
unit evidence, do the passages answer, and is another unit evidence too, given the best one. Every data set has the same
weight. The table shows what folds that were left out of the fit give; the other lines are for
src/anabranch/evidence/weights.py.
"""

import argparse
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from anabranch.evidence import weights
from anabranch.evidence.features import Observed
from anabranch.evidence.judge import judgement
from anabranch.evidence.pages import PlacedUnit
from anabranch.evidence.quotations import beside, best_unit
from benchmarks.evidence.cases import Case, answers, overlaps

Seen = tuple[Case, Observed]
Floats = npt.NDArray[np.float64]

RIDGE = 1.0
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
        each[rows.sets == name] = len(each) / len(names) / count
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--observed", type=Path, nargs="+", required=True)
    told = parser.parse_args()
    seen: list[Seen] = [row for file in told.observed for row in pickle.loads(file.read_bytes())]  # noqa: S301
    for name, made in (("UNIT", fit_units), ("SUPPORT", fit_support), ("NEXT", fit_next)):
        rows = made(seen)
        report(name.lower(), rows, print)
        found = tuple(round(float(weight), 3) for weight in fitted(rows))
        # The next ones use the units' weights.
        setattr(weights, name, found)
        print(f"{name} = {found}")


if __name__ == "__main__":
    main()
