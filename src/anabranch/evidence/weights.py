"""The weights that training.fit fitted; docs/evidence-model.md says on which questions."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from anabranch.evidence.features import SupportFeatures, UnitFeatures

# In the order of the features; the bias is last. Support has the log-odds of the best unit before the bias.
UNIT = (0.278, 0.241, 0.041, 0.691, 0.173, 0.953, 0.315, 1.468, 0.837, -1.612)
SUPPORT = (0.659, -0.237, 0.207, -0.01, -0.104, -0.007, 4.147, 0.051, 1.405, 0.351, -2.842)
# PASSAGES has no bias: passages of one question are compared.
PASSAGES = (6.234, 4.913, 12.533, 13.048, 6.808, 0.417)
NEXT = (0.941, 2.647, 0.996, 0.366, 1.249, -1.469)


def probability_of_unit(features: UnitFeatures) -> float:
    return _logistic(UNIT, features)


def probability_of_support(features: SupportFeatures, best_unit: float) -> float:
    return _logistic(SUPPORT, (*features, log_odds(best_unit)))


class PassageFeatures(NamedTuple):
    """What is known of a passage before it is read: its similarity to the question, compared with the most similar
    one; the score of the words that match, as a share of the best; the weight of the question's words in it, and in its
    title and headings; the similarity of the best passage of its document; and the logarithm of its length."""

    near: float
    matches: float
    words: float
    above: float
    document: float
    length: float


def probabilities_of_passages(passages: Sequence[PassageFeatures]) -> list[float]:
    """That each passage is the one with the answer, if one is."""
    odds = [sum(weight * value for weight, value in zip(PASSAGES, one, strict=True)) for one in passages]
    highest = max(odds, default=0.0)
    each = [math.exp(one - highest) for one in odds]
    whole = sum(each)
    return [one / whole for one in each]


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
