"""The fitted weights of units and of support."""

import math
from collections.abc import Mapping, Sequence

from anabranch.evidence.features import SUPPORT_FEATURES, UNIT_FEATURES

BIAS = "bias"
UNIT: Mapping[str, float] = {"unit": 0.5, "joint": 0.3, "bias": 0.0}
SUPPORT: Mapping[str, float] = {"answerable": 1.0, "bias": 0.0}


def logistic(weights: Mapping[str, float], values: Sequence[float]) -> float:
    names = UNIT_FEATURES if weights is UNIT else SUPPORT_FEATURES
    total = weights[BIAS] + sum(weights.get(name, 0.0) * value for name, value in zip(names, values, strict=True))
    return 1 / (1 + math.exp(-total))
