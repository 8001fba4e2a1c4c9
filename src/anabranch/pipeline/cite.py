"""Cite: each mark in the answer, and the words in a passage that carry the sentence before it."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from anabranch.domain.model import Citation, Passage

MARK = re.compile(r"\[([^\[\]\n]{1,500})\]")
WORD = re.compile(r"\d+|\w{4,}")
SENTENCE = re.compile(r"[^\n]+?(?:[.!?][\"')\]]*(?=\s)|(?=\n)|$)", re.DOTALL)
MAX_WORDS = 24
CLOSEST = 3
MAX_CITATIONS = 500
MAX_CLAIM = 1_000
MAX_READ = 4_000_000


class Support(NamedTuple):
    weight: float
    passage: int
    start: int
    end: int


def cite(text: str, passages: Sequence[Passage]) -> tuple[Citation, ...]:
    """The marks that name a source (`[owner/slug]`, several with commas) or a passage (`[3]`); others are text."""
    by_source: dict[str, list[int]] = {}
    for index, passage in enumerate(passages):
        by_source.setdefault(passage.source, []).append(index)
    evidence = Evidence(passages)
    found: list[Citation] = []
    last = 0
    for mark in MARK.finditer(text):
        named = _named(mark[1], by_source, len(passages))
        if not named:
            continue
        claim = _claim(text, mark.start())
        since = text[max(last, mark.start() - MAX_CLAIM) : mark.start()].strip().lower()
        last = mark.end()
        for candidates in named:
            support = evidence.behind(claim, candidates, since)
            found.append(
                Citation(
                    start=mark.start(),
                    end=mark.end(),
                    source=passages[support.passage].source,
                    passage=support.passage,
                    passage_start=support.start,
                    passage_end=support.end,
                )
            )
            if len(found) == MAX_CITATIONS:
                return tuple(found)
    return tuple(found)


def _named(inside: str, by_source: Mapping[str, list[int]], count: int) -> list[list[int]]:
    """The passages that each name inside a mark can mean."""
    meant: list[list[int]] = []
    for part in re.split(r"[,;]", inside):
        name = part.strip()
        if name in by_source:
            meant.append(by_source[name])
        elif name.isdecimal() and name.isascii() and len(name) < 6 and 0 < int(name) <= count:
            meant.append([int(name) - 1])
    return meant


def _claim(text: str, mark_start: int) -> str:
    """The sentence that a mark stands behind, whether the mark comes before or after its full stop."""
    before = text[max(0, mark_start - MAX_CLAIM) : mark_start]
    before = MARK.sub("", before).rstrip(" \t\r\n.!?,;:")
    begin = max(before.rfind(stop) for stop in (". ", "! ", "? ", "\n"))
    return before[begin + 1 :].strip().lower()


class Evidence:
    """Finds the words behind claims. What it reads in all is bounded, so that a hostile answer over a long context
    costs little; past the bound it points at whole passages."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        self._passages = passages
        self._lowered: dict[int, str] = {}
        self._left = MAX_READ

    def behind(self, claim: str, candidates: Sequence[int], since: str = "") -> Support:
        """All that was said since the last mark, or the claim, where a passage has it word for word; else the sentence
        that shares most with the claim."""
        first = candidates[0]
        self._left -= sum(len(self._low(index)) for index in candidates)
        if self._left < 0:
            return Support(0.0, first, 0, len(self._passages[first].text))
        for said in dict.fromkeys(filter(None, (since, claim))):
            for index in candidates:
                at = self._low(index).find(said)
                if at >= 0:
                    return Support(1.0, index, at, at + len(said))
        return self._closest_sentence(claim, candidates)

    def _closest_sentence(self, claim: str, candidates: Sequence[int]) -> Support:
        """Words that few of the candidates have count more; only the closest are read sentence by sentence."""
        words = list(dict.fromkeys(WORD.findall(claim)))[:MAX_WORDS]
        within = {index: [word for word in words if word in self._low(index)] for index in candidates}
        spread = Counter(word for found in within.values() for word in found)
        weight = {word: 1 / count for word, count in spread.items()}
        closest = sorted(candidates, key=lambda index: -sum(weight[word] for word in within[index]))[:CLOSEST]
        best = Support(0.0, candidates[0], 0, len(self._low(candidates[0])))
        for index in (index for index in closest if within[index]):
            for match in SENTENCE.finditer(self._low(index)):
                sentence = match[0]
                shared = sum(weight[word] for word in within[index] if word in sentence)
                if shared > best.weight:
                    start = match.start() + len(sentence) - len(sentence.lstrip())
                    best = Support(shared, index, start, start + len(sentence.strip()))
        return best

    def _low(self, index: int) -> str:
        if index not in self._lowered:
            text = self._passages[index].text
            low = text.lower()
            # Rarely, lowering changes the length and so the offsets; then case has to match.
            self._lowered[index] = low if len(low) == len(text) else text
        return self._lowered[index]
