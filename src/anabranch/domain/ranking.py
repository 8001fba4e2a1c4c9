"""Ranking of aggregated results: weights, score breakdowns and their sum."""

import math
from collections.abc import Mapping

import msgspec

# The score of an unknown part.
NEUTRAL = 0.5
DIGITS = 6


class Weights(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The weight of each part; `shares` are normalized to sum to 1."""

    keyword_match: float = 0.4
    freshness: float = 0.3
    server_reputation: float = 0.2
    length_penalty: float = 0.1

    @property
    def shares(self) -> "Weights":
        total = self.keyword_match + self.freshness + self.server_reputation + self.length_penalty
        return Weights(
            keyword_match=self.keyword_match / total,
            freshness=self.freshness / total,
            server_reputation=self.server_reputation / total,
            length_penalty=self.length_penalty / total,
        )

    @property
    def rounded(self) -> "Weights":
        return Weights(**{name: round(getattr(self, name), DIGITS) for name in self.__struct_fields__})


class Breakdown(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The parts of a score, each from 0 to 1; `length_penalty` 1 is no penalty."""

    keyword_match: float
    freshness: float
    server_reputation: float
    length_penalty: float

    def weighted(self, shares: Weights) -> "Breakdown":
        """The weighted parts. If rounding makes their sum exceed 1, the largest is reduced."""
        added = [
            round(self.keyword_match * shares.keyword_match, DIGITS),
            round(self.freshness * shares.freshness, DIGITS),
            round(self.server_reputation * shares.server_reputation, DIGITS),
            round(self.length_penalty * shares.length_penalty, DIGITS),
        ]
        if (over := round(math.fsum(added) - 1, DIGITS)) > 0:
            largest = added.index(max(added))
            added[largest] = round(added[largest] - over, DIGITS)
        match, freshness, reputation, length = added
        return Breakdown(keyword_match=match, freshness=freshness, server_reputation=reputation, length_penalty=length)

    @property
    def total(self) -> float:
        """The score: the sum of weighted parts."""
        return round(
            math.fsum((self.keyword_match, self.freshness, self.server_reputation, self.length_penalty)), DIGITS
        )


class Ranking(msgspec.Struct, frozen=True, kw_only=True):
    """How the `aggregate` profile merges. `now` is in seconds since 1970; `reputations` are by source, NEUTRAL where
    none is given; of two results whose similarity is strictly above `threshold` the lower one is left out."""

    weights: Weights = Weights()
    limit: int = 30
    threshold: float = 0.8
    half_life_s: float = 90 * 86_400.0
    now: float = 0.0
    reputations: Mapping[str, float] = {}
