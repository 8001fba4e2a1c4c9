"""Fits the weights that combine the evidence model with rules, on questions that the model was not trained on.

    python -m training.fit --observed FILE --out src/anabranch/evidence/weights.json

`FILE` is written by `python -m benchmarks.evidence observe`. Two logistic regressions with a ridge penalty: is a unit
evidence, and do the passages answer. Every data set has the same weight. The table shows what folds that were left out
of the fit give.
"""

import argparse
import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from anabranch.evidence.features import SUPPORT_FEATURES, UNIT_FEATURES

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


def named(names: Sequence[str], weights: Floats) -> dict[str, float]:
    return {name: round(float(weight), 4) for name, weight in zip((*names, "bias"), weights, strict=True)}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--observed", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    told = parser.parse_args()
    units, support = pickle.loads(told.observed.read_bytes())  # noqa: S301  written by ourselves
    written = {}
    for name, rows, names in (("unit", units, UNIT_FEATURES), ("support", support, SUPPORT_FEATURES)):
        report(name, rows, print)
        written[name] = named(names, fitted(rows))
        for feature, weight in written[name].items():
            print(f"    {feature:24} {weight:8.3f}")  # noqa: T201
    if told.out:
        told.out.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
