"""When a sentence counts as supported: the weights that training.fit_claims fitted, and the thresholds.
docs/evidence.md has the figures."""

import math
from typing import NamedTuple

# A sentence is supported from SUPPORTED on, and partly supported from PARTLY on. Below, it is contradicted if a source
# says something else with this probability.
SUPPORTED, PARTLY, CONTRADICTED = 0.5, 0.25, 0.7
# The support of a claim that is at most partly supported.
MOST_IN_PART = 0.49
# The weights were fitted to claims of eight words and more. A shorter one shares its words easily: it is supported only
# if the model gives it this probability.
SHORT_WORDS, SHORT_LEAST = 7, 0.25
# So is one of which the source has few words, such as a true clause with several invented ones. Of 762 right claims of
# the fitted ones, this concerns one.
FEW_SHARED, FEW_SHARED_LEAST = 0.35, 0.5
# Words of a claim with these log-odds are shown as doubtful.
DOUBTED = 0.0


class ClaimFeatures(NamedTuple):
    """What is known of a claim and the units that it was compared with: the model's log-odds that they support it; the
    probability that they say nothing about it; the log-odds that its most doubtful word is right; the share of its
    words in the units, weighted by how rare they are; how near that is to the same wording, where small changes count;
    and the differences that exact checks found, by kind."""

    model: float
    unknown: float
    words: float
    shared: float
    near: float
    dates: float
    units: float
    numbers: float
    names: float
    negation: float
    quantifiers: float
    directions: float


# In the order of the features; the bias is last. Differences only lower the probability.
WEIGHTS = ClaimFeatures(
    0.310, -1.442, 0.298, 1.412, -0.491, -1.638, -0.485, -1.388, -2.190, -0.391, -0.532, -0.871
)  # fmt: skip
# A third of the fitted claims were right; of what models write about passages, far more is. PRIOR is the difference.
PRIOR = 1.43
BIAS = 0.138 + PRIOR
# Log-odds beyond this say nothing more.
MOST = 8.0

# A model that does not judge words is not the one that the weights were fitted to: its own probability counts, lowered
# by differences. NLI models overlook numbers, so a claim with another number, unit or date is never supported.
NEVER = -MOST - 1
OTHER_MODEL = ClaimFeatures(
    model=1.0,
    unknown=0.0,
    words=0.0,
    shared=0.0,
    near=0.0,
    dates=NEVER,
    units=NEVER,
    numbers=NEVER,
    names=-2.5,
    negation=-2.0,
    quantifiers=-1.0,
    directions=-1.0,
)


def is_denied(words: int, shared: float, supported: float) -> bool:
    """Whether the model does not support a claim that is short, or of which the source has few words."""
    return (words <= SHORT_WORDS and supported < SHORT_LEAST) or (shared < FEW_SHARED and supported < FEW_SHARED_LEAST)


def probability(features: ClaimFeatures, *, words_judged: bool = True) -> float:
    weights, bias = (WEIGHTS, BIAS) if words_judged else (OTHER_MODEL, 0.0)
    total = bias + sum(weight * value for weight, value in zip(weights, features, strict=True))
    return 1 / (1 + math.exp(-total))
