"""The fitted weights of units and of support."""

import json
import math
import os
from collections.abc import Mapping, Sequence

from anabranch.evidence.features import SUPPORT_FEATURES, UNIT_FEATURES

BIAS = "bias"
_F = (
    json.load(open(os.environ.get("W", "/tmp/ev/weights.json")))
    if os.path.exists(os.environ.get("W", "/tmp/ev/weights.json"))
    else {"unit": {"bias": 0}, "support": {"bias": 0}}
)
UNIT: Mapping[str, float] = _F["unit"]
SUPPORT: Mapping[str, float] = _F["support"]


def logistic(weights: Mapping[str, float], values: Sequence[float]) -> float:
    names = UNIT_FEATURES if weights is UNIT else SUPPORT_FEATURES
    total = weights[BIAS] + sum(weights.get(name, 0.0) * value for name, value in zip(names, values, strict=True))
    return 1 / (1 + math.exp(-total))
