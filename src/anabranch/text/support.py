"""Whether passages support an answer: a fitted score over the question's names, passage titles and similarity."""

import html
import math
import re
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple, TypeVar

from anabranch.domain.model import Passage
from anabranch.text.normal_forms import without_accents

Unit = TypeVar("Unit", str, tuple[str, str])

# A Chinese or Japanese character counts as a word.
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]|[^\W_]+")
SENTENCE = re.compile(r"(?<=[.!?])\s+|\n{2,}")
BRACKETED = re.compile(r"\([^()]*\)")
_STOP = """
a about above after again against all also am an and any are as at be because been before being below between both but
by can could did do does doing done down during each either else ever few for from further had has have having he her
here hers herself him himself his how i if in into is it its itself just let ll may me might more most much must my
myself neither no nor not of off on once one only or other our ours out over own per re s shall she should since so some
such t than that the their theirs them themselves then there these they this those through to too under until up upon us
ve very was we were what when where which while who whom whose why will with within without would yes you your yours
"""
STOP = frozenset(_STOP.split())
MAX_QUESTION = 1_000
MAX_TITLE = 300
MAX_PASSAGES = 25
MAX_READ = 8_000
MAX_READ_ALL = 80_000

# A logistic over the three signals, fitted on questions with and without the paragraphs that answer them; at 0.5 about
# one answerable question in fourteen is refused. docs/extractive.md has the figures.
NAMES, NEAR, ABOUT, BIAS = 6.7, 8.2, 3.2, -12.0
# `about` if titles share no word with the question, and if the question has no names.
UNTITLED, NAMELESS = 0.5, 0.6
# Without a vector similarity, `near` is estimated from the share of the question's words.
NEAR_UNKNOWN, NEAR_SHARE = 0.36, 0.44
# A sentence with this share of the words of a question without names counts as near.
SENTENCE_SHARE = 0.75
# Names weigh this much more than other words.
NAME_WEIGHT = 2.0


class Wording:
    """A question as bit sets: each content word and each pair of adjacent content words has one bit. `words` are the
    words alone, `names` the capitalized words and numbers."""

    def __init__(self, question: str) -> None:
        spelled = WORD.findall(without_accents(question[:MAX_QUESTION]))
        self.stems = [stem(word.lower()) for word in spelled]
        self._words: dict[str, int] = {}
        self._pairs: dict[tuple[str, str], int] = {}
        self.names = self.words = self.everything = 0
        content = [word.lower() not in STOP for word in spelled]
        named = [is_content and _named(spelled, at) for at, is_content in enumerate(content)]
        for at, one in enumerate(self.stems):
            if content[at]:
                self.words |= self._add(self._words, one, is_name=named[at])
                if at and content[at - 1]:
                    self._add(self._pairs, (self.stems[at - 1], one), is_name=named[at] and named[at - 1])
        self._heads = {one[:3] for one in self._words}

    def _add(self, units: dict[Unit, int], unit: Unit, *, is_name: bool) -> int:
        bit = units.setdefault(unit, 1 << len(self._words) + len(self._pairs))
        self.everything |= bit
        if is_name:
            self.names |= bit
        return bit

    def within(self, text: str) -> int:
        """The bits of the words and pairs that occur in the text."""
        found = 0
        before = ""
        for word in WORD.findall(without_accents(text).lower()):
            one = stem(word) if word[:3] in self._heads else ""
            bit = self._words.get(one, 0)
            if bit:
                found |= bit | self._pairs.get((before, one), 0)
            before = one
        return found

    def spells(self, title: str) -> bool:
        """Whether the question contains the whole title, without its parenthesized parts."""
        words = [stem(word.lower()) for word in WORD.findall(without_accents(bare(title)))]
        return bool(words) and f" {' '.join(words)} " in f" {' '.join(self.stems)} "


class Signals(NamedTuple):
    """The inputs of the score, each from 0 to 1: the share of the question's names in the best two passages, the
    highest similarity, and the share of the question that is a passage's title."""

    names: float
    near: float
    about: float


def support(question: str, passages: Sequence[Passage]) -> float:
    """From 0 to 1; below 0.5 the passages do not answer the question."""
    if not passages:
        return 0.0
    seen = signals(Wording(question), passages)
    return 1 / (1 + math.exp(-(NAMES * seen.names + NEAR * seen.near + ABOUT * seen.about + BIAS)))


def signals(wording: Wording, passages: Sequence[Passage]) -> Signals:
    titles = [wording.within(bare(passage.title)) for passage in passages[:MAX_PASSAGES]]
    found = [title | wording.within(text) for title, text in zip(titles, readable(passages), strict=True)]
    near = max(
        nearness(passage, share(bits, wording.everything)) for passage, bits in zip(passages, found, strict=False)
    )
    if not wording.names and (shared := _best_sentence_share(wording, passages)) >= SENTENCE_SHARE:
        near = max(near, NEAR_UNKNOWN + NEAR_SHARE * shared)
    return Signals(
        names=share(_best_pair(found, wording.names), wording.names) if wording.names else 1.0,
        near=near,
        about=_about(wording, passages, titles),
    )


def _about(wording: Wording, passages: Sequence[Passage], titles: Sequence[int]) -> float:
    """The share of the question that is the title of a passage; neutral for titles that share no word with the
    question, such as file names, and for a question without names."""
    spelled = 0
    for passage, title in zip(passages, titles, strict=False):
        if title and wording.spells(passage.title):
            spelled |= title
    known = max(share(spelled, wording.everything), share(spelled, wording.names))
    if not wording.names:
        return max(known, NAMELESS)
    return known if any(titles) else UNTITLED


def _best_sentence_share(wording: Wording, passages: Sequence[Passage]) -> float:
    """The largest share of the question's words in one sentence; 0 for a single word."""
    if wording.words.bit_count() < 2:
        return 0.0
    return max(
        (
            share(wording.within(sentence) & wording.words, wording.words)
            for text in readable(passages)
            for sentence in SENTENCE.split(text)
        ),
        default=0.0,
    )


def nearness(passage: Passage, shared: float) -> float:
    """The cosine similarity of passage and question, else an estimate from the shared words."""
    dense = passage.place.scores.dense if passage.place else None
    return NEAR_UNKNOWN + NEAR_SHARE * shared if dense is None or math.isnan(dense) else min(1.0, max(-1.0, dense))


def readable(passages: Sequence[Passage]) -> list[str]:
    """The start of each passage: enough for any chunk, bounded against hostile sources."""
    left = MAX_READ_ALL
    read: list[str] = []
    for passage in passages[:MAX_PASSAGES]:
        read.append(passage.text[: min(left, MAX_READ)])
        left -= len(read[-1])
    return read


def bare(title: str) -> str:
    """A title without its disambiguation, as in Mercury (planet)."""
    title = title[:MAX_TITLE]
    return BRACKETED.sub(" ", html.unescape(title) if "&" in title else title)


def stem(word: str) -> str:
    """A light stemmer for plurals and verbs; a full stemmer gave the same figures."""
    size = len(word)
    if size > 4:
        if word.endswith("ies"):
            return word[:-3] + "y"
        if word.endswith("ing") and size > 5:
            return word[:-3]
        if word.endswith(("ed", "es")):
            return word[:-2]
    if size > 3 and (word.endswith("e") or (word.endswith("s") and not word.endswith("ss"))):
        return word[:-1]
    return word


def _named(spelled: Sequence[str], at: int) -> bool:
    """Whether a word is a number or capitalized; the first word counts only if a capitalized word follows."""
    word = spelled[at]
    if at or word[0].isdigit():
        return word[0].isdigit() or word[0].isupper()
    return word[0].isupper() and len(spelled) > 1 and spelled[1][0].isupper() and spelled[1].lower() not in STOP


def _best_pair(found: Sequence[int], wanted: int) -> int:
    """The wanted bits of the best pair of passages: a question may need two."""
    pairs = ((one | other) & wanted for one, other in combinations(found, 2))
    return max(pairs, key=int.bit_count, default=found[0] & wanted)


def share(found: int, wanted: int) -> float:
    return (found & wanted).bit_count() / wanted.bit_count() if wanted else 0.0


def word_weights(wording: Wording, within: Sequence[int]) -> dict[int, float]:
    """The weights of the question's words, which sum to 1: rare words and names weigh more."""
    weights: dict[int, float] = {}
    for bit in each_bit(wording.everything):
        having = sum(1 for bits in within if bits & bit)
        rarity = 0.3 + math.log(1 + (len(within) - having + 0.5) / (having + 0.5))
        weights[bit] = rarity * (NAME_WEIGHT if wording.names & bit else 1.0)
    whole = sum(weights.values())
    return {bit: weight / whole for bit, weight in weights.items()}


def each_bit(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest
        bits ^= lowest
