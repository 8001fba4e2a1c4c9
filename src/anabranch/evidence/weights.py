"""The weights that training.fit fitted; docs/evidence-model.md says on which questions."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from anabranch.evidence.features import SupportFeatures, UnitFeatures

# In the order of the features; the bias is last. Support has the log-odds of the best unit before the bias.
UNIT = (0.168, 0.308, 0.06, 1.21, 1.579, 0.428, 0.308, 1.549, 0.931, -2.142)
SUPPORT = (0.501, 0.058, 0.245, -0.149, -0.153, 0.129, 7.937, -0.011, -4.16)
NEXT = (0.913, 2.75, 1.659, 0.585, 1.276, -1.65)


def probability_of_unit(features: UnitFeatures) -> float:
    return _logistic(UNIT, features)


def probability_of_support(features: SupportFeatures, best_unit: float) -> float:
    return _logistic(SUPPORT, (*features, log_odds(best_unit)))


class NextFeatures(NamedTuple):
    """Of a unit beside the best one: its log-odds, the weight of the question's words that it adds, whether the best
    one names its document, whether both are in one passage, and the weight of the words that the best one lacks."""

    unit: float
    added: float
    named: float
    same_passage: float
    missing: float


def probability_of_next(features: NextFeatures) -> float:
    return _logistic(NEXT, features)


def log_odds(probability: float) -> float:
    inside = min(0.9999, max(0.0001, probability))
    return math.log(inside / (1 - inside))


def _logistic(weights: Sequence[float], values: Sequence[float]) -> float:
    *slopes, bias = weights
    total = bias + sum(weight * value for weight, value in zip(slopes, values, strict=True))
    return 1 / (1 + math.exp(-min(50.0, max(-50.0, total))))
