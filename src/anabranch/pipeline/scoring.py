"""Spec 3's relevance scores: keyword match, freshness, server reputation and a length penalty."""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import msgspec
import Stemmer

from anabranch.domain.model import Passage, SourceReply
from anabranch.domain.ranking import DIGITS, NEUTRAL, Breakdown, Ranking
from anabranch.text.normal_forms import normal_form
from anabranch.text.support import STOP

MAX_TERMS = 64
# Up to this length a text has no penalty.
LONG = 2_000
LONGEST_SIGN = 4
# Each Chinese or Japanese character counts as a word.
_SIGN = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
LETTER, PLAIN_LETTER = rf"[^\W_{_SIGN}]", "[a-z0-9]"
SIGN = re.compile(rf"[{_SIGN}]")
WORD = re.compile(rf"[{_SIGN}]|{LETTER}+")
NOTHING = r"(?!)"


class TermMatches(NamedTuple):
    """A passage, its source and rank there, and its count of each matching term."""

    passage: Passage
    source: int
    place: int
    counts: dict[str, int]


class Terms:
    """A question's terms: its distinct stemmed words without stop words, or with them if there are no others."""

    def __init__(self, question: str) -> None:
        self._stemmer = Stemmer.Stemmer("english")
        words = list(dict.fromkeys(WORD.findall(folded(question))))
        stems = [self._stemmer.stemWord(word) for word in words if word not in STOP] or self._stemmer.stemWords(words)
        self.stems: tuple[str, ...] = tuple(dict.fromkeys(stems))[:MAX_TERMS]
        self._wanted = frozenset(self.stems)
        self._stem_of: dict[str, str] = {}
        self._plain = _candidates(self.stems, PLAIN_LETTER)

    @cached_property
    def _any(self) -> re.Pattern[str]:
        """Compiling it takes twenty times as long as the ASCII pattern, and few texts need it."""
        return _candidates(self.stems, LETTER)

    def count(self, text: str) -> dict[str, int]:
        """The count of each term in the text. Only words that begin like a term are stemmed."""
        counts: dict[str, int] = {}
        text = folded(text)
        candidates = self._plain if text.isascii() else self._any
        for word, often in Counter(candidates.findall(text)).items():
            stem = self._stem_of.get(word)
            if stem is None:
                stem = self._stem_of[word] = self._stemmer.stemWord(word)
            if stem in self._wanted:
                counts[stem] = counts.get(stem, 0) + often
        return counts


class Ranker:
    """Reads replies as they arrive, and ranks what it has read."""

    def __init__(self, text: str, ranking: Ranking) -> None:
        self._terms = Terms(text)
        self._ranking = ranking
        self._found: list[TermMatches] = []

    def read(self, index: int, reply: SourceReply) -> None:
        """`index` is the source's place among those that were asked."""
        for place, passage in enumerate(reply.passages):
            counts = self._terms.count(f"{passage.title}\n{passage.text}")
            self._found.append(TermMatches(passage, index, place, counts))

    def ranked(self) -> tuple[Passage, ...]:
        """Every passage, best first, whatever the order of arrival; ties by rank in their source, then by source."""
        rarity = self._rarity()
        shares = self._ranking.weights.shares
        scored: list[tuple[float, int, int, Passage]] = []
        for passage, source, place, counts in self._found:
            parts = self._parts(passage, counts, rarity)
            score = parts.weighted(shares).total
            scored.append((-score, place, source, msgspec.structs.replace(passage, score=score, breakdown=parts)))
        scored.sort(key=lambda one: one[:3])
        return tuple(passage for *_, passage in scored)

    def _rarity(self) -> dict[str, float]:
        """The weight of each term, by inverse document frequency; the weights sum to 1."""
        having = Counter(stem for found in self._found for stem in found.counts)
        total = len(self._found)
        idf = {stem: math.log(1 + (total - having[stem] + 0.5) / (having[stem] + 0.5)) for stem in self._terms.stems}
        whole = math.fsum(idf.values())
        return {stem: value / whole for stem, value in idf.items()}

    def _parts(self, passage: Passage, counts: dict[str, int], rarity: dict[str, float]) -> Breakdown:
        # An exact sum: one that depends on the order of terms could change a rank.
        match = math.fsum(rarity[stem] * often / (often + 1) for stem, often in counts.items())
        return Breakdown(
            keyword_match=_part(match),
            freshness=_part(_freshness(passage.date, self._ranking)),
            server_reputation=_part(self._ranking.reputations.get(passage.source, NEUTRAL)),
            length_penalty=_part(LONG / max(LONG, len(passage.text))),
        )


def folded(text: str) -> str:
    """Lower case without accents. Combining marks are also removed before normalizing: ordering thousands of them takes
    quadratic time."""
    if text.isascii():
        return text.lower()
    return _unmarked(normal_form(_unmarked(text), "NFKD")).lower()


def _unmarked(text: str) -> str:
    marks = {ord(sign): None for sign in set(text) if unicodedata.combining(sign) or _is_long(sign)}
    return text.translate(marks) if marks else text


def _is_long(sign: str) -> bool:
    """Characters such as U+FDFA decompose to a sentence and would make a text eighteen times as long."""
    return len(normal_form(sign, "NFKD")) > LONGEST_SIGN


def _candidates(stems: Sequence[str], letter: str) -> re.Pattern[str]:
    """A pattern for every word with one of these stems, and for some others. Words begin with their stem but for its
    last letter (city: citi, using: use, possibility: possibl), or its last two in -ie (dying: die)."""
    signs = "".join(stem for stem in stems if SIGN.fullmatch(stem))
    beginnings: list[str] = []
    for each in sorted(stem[: -2 if stem.endswith("ie") else -1] or stem[0] for stem in stems):
        if each not in signs and not (beginnings and each.startswith(beginnings[-1])):
            beginnings.append(each)
    heads = "".join(sorted({each[0] for each in beginnings}))
    words = rf"(?=[{heads}])(?<!{letter})(?:{'|'.join(beginnings)}){letter}*"
    return re.compile("|".join([*([f"[{signs}]"] if signs else []), *([words] if beginnings else [])]) or NOTHING)


def _freshness(date: float | None, ranking: Ranking) -> float:
    if date is None or not math.isfinite(date):
        return NEUTRAL
    age_s = ranking.now - date
    if age_s <= 0:
        return 1.0
    return 0.5 ** (age_s / ranking.half_life_s) if ranking.half_life_s > 0 else 0.0


def _part(value: float) -> float:
    """The value clamped to 0 to 1; NaN is neutral."""
    return NEUTRAL if math.isnan(value) else round(min(1.0, max(0.0, value)), DIGITS)
