"""Summarises measured answers, and compares two configurations with a paired bootstrap."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from anabranch.app.answer_evaluation import MeasuredAnswer
from anabranch.domain.model import Value

Floats = npt.NDArray[np.float64]
# Resamples of the questions, how many are computed at once, and the bounds of the interval in percent.
RESAMPLES, BLOCK, SEED = 10_000, 200, 16
INTERVAL = (2.5, 97.5)


class Estimate(Value):
    """A value with its 95% interval; of how many questions."""

    value: float
    low: float
    high: float
    questions: int


def _mean_of(field: str) -> Callable[[MeasuredAnswer], float | None]:
    return lambda one: getattr(one, field)


def _refused(*, answerable: bool) -> Callable[[MeasuredAnswer], float | None]:
    return lambda one: float(one.abstained) if one.answerable is answerable and one.failed is None else None


# What is measured of each answer; the last two are percentiles, the others means.
VALUES: Mapping[str, Callable[[MeasuredAnswer], float | None]] = {
    **{
        field: _mean_of(field)
        for field in (
            "citation_recall",
            "citation_precision",
            "gold_recall",
            "gold_precision",
            "faithfulness",
            "containment",
            "token_f1",
        )
    },
    "answerable_refused": _refused(answerable=True),
    "unanswerable_refused": _refused(answerable=False),
    "latency_p50_ms": _mean_of("latency_ms"),
    "latency_p95_ms": _mean_of("latency_ms"),
}
PERCENTILES = {"latency_p50_ms": 50.0, "latency_p95_ms": 95.0}


def summary(answers: Sequence[MeasuredAnswer]) -> dict[str, Estimate]:
    """Each measure that applies to some of the answers."""
    found = {name: _column(name, answers) for name in VALUES}
    return {name: _estimate(name, [values]) for name, values in found.items() if not np.isnan(values).all()}


def differences(first: Sequence[MeasuredAnswer], second: Sequence[MeasuredAnswer]) -> dict[str, Estimate]:
    """The second minus the first of each measure. The answers are to the same questions in the same order: a resample
    has the same questions for both."""
    found = {name: [_column(name, first), _column(name, second)] for name in VALUES}
    return {
        name: _estimate(name, columns)
        for name, columns in found.items()
        if not any(np.isnan(one).all() for one in columns)
    }


def _column(name: str, answers: Sequence[MeasuredAnswer]) -> Floats:
    values = [VALUES[name](one) for one in answers]
    return np.array([np.nan if value is None else value for value in values], np.float64)


def _estimate(name: str, columns: Sequence[Floats]) -> Estimate:
    """Of one column its value, of two their difference."""
    # Questions that a measure applies to in no configuration would only make the resamples larger.
    kept = ~np.isnan(np.stack(columns)).all(axis=0)
    columns = [one[kept] for one in columns]
    count = int(kept.sum())
    whole = _statistic(name, columns, np.arange(count)[None, :])
    random = np.random.default_rng(SEED)
    resampled = np.concatenate(
        [_statistic(name, columns, random.integers(0, count, (BLOCK, count))) for _ in range(RESAMPLES // BLOCK)]
    )
    low, high = np.nanpercentile(resampled, INTERVAL)
    # Adding 0 makes -0.0 a plain zero.
    value, low, high = (round(float(one), 4) + 0.0 for one in (whole[0], low, high))
    return Estimate(value=value, low=low, high=high, questions=count)


def _statistic(name: str, columns: Sequence[Floats], chosen: npt.NDArray[np.int64]) -> Floats:
    """The value of each row of chosen questions. A row without a value has none."""
    found = [_of_rows(name, one[chosen]) for one in columns]
    return found[-1] - found[0] if len(found) > 1 else found[0]


def _of_rows(name: str, rows: Floats) -> Floats:
    there = ~np.isnan(rows)
    if name in PERCENTILES:
        # Only failed questions have no time. `nanpercentile` is far slower than `percentile`.
        if there.all():
            return np.asarray(np.percentile(rows, PERCENTILES[name], axis=1), np.float64)
        each = zip(rows, there, strict=True)
        return np.array([np.percentile(row[has], PERCENTILES[name]) if has.any() else np.nan for row, has in each])
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(there, rows, 0.0).sum(axis=1) / there.sum(axis=1), np.float64)
