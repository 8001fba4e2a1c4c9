"""Fits the weights of `anabranch.evidence.claim_weights` to what `python -m benchmarks.claims observe` wrote.

    python -m training.fit_claims FILE... [--hold FILE...]

The claims must not be those that the model was trained on. `--hold` files are only reported.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from anabranch.evidence.claim_weights import ClaimFeatures
from benchmarks.claims import Observed, kept
from training.fit import Floats, Rows, auc, fitted, odds

# Differences that an exact check finds can only lower the probability.
LOWERING = range(ClaimFeatures._fields.index("dates"), len(ClaimFeatures._fields))
SHARES = (0.03, 0.05, 0.1, 0.15, 0.2)


def rows_of(observed: Sequence[Observed]) -> Rows:
    """Right claims against changed ones and those beyond the passage, which count half: they are easy."""
    known = [row for row in observed if row.features is not None]
    return Rows(
        values=np.array([row.features for row in known], float),
        labels=np.array([row.kind == "claim" for row in known], float),
        groups=np.arange(len(known)),
        sets=np.array([row.kind for row in known]),
    )


def fit(rows: Rows) -> Floats:
    """Features whose weight would raise the probability for a difference are left out."""
    kept = list(range(rows.values.shape[1]))
    while True:
        found = fitted(rows._replace(values=rows.values[:, kept]))
        wrong = [column for column, weight in zip(kept, found, strict=False) if column in LOWERING and weight > 0]
        if not wrong:
            break
        kept = [column for column in kept if column not in wrong]
    whole = np.zeros(rows.values.shape[1] + 1)
    whole[[*kept, -1]] = found
    return whole


def report(name: str, observed: Sequence[Observed], weights: Floats) -> None:
    rows = rows_of(observed)
    scores = odds(rows.values, weights)
    right = scores[rows.sets == "claim"]
    changed, beyond = scores[rows.sets == "wrong"], scores[rows.sets == "beyond"]
    labels = rows.labels[rows.sets != "beyond"]
    print(f"{name}: AUC against changed claims {auc(scores[rows.sets != 'beyond'], labels):.4f}")
    for share in SHARES:
        least = float(np.quantile(right, share))
        likely = 1 / (1 + np.exp(-least))
        print(
            f"  {share:4.0%} of the right ones below {likely:.3f}: "
            f"not supported {np.mean(changed < least):.1%} of the changed, {np.mean(beyond < least):.1%} beyond"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--hold", type=Path, nargs="*", default=[])
    told = parser.parse_args()
    observed = [row for file in told.files for row in kept(file)]
    weights = fit(rows_of(observed))
    print(
        ", ".join(
            f"{name} {weight:.3f}" for name, weight in zip((*ClaimFeatures._fields, "bias"), weights, strict=True)
        )
    )
    report("fitted", observed, weights)
    for file in told.hold:
        report(file.name, kept(file), weights)


if __name__ == "__main__":
    main()
