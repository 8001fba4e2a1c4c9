"""Cite: each mark in the answer, and the words in a passage that carry the sentence before it."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from anabranch.domain.model import Citation, Passage

MARK = re.compile(r"\[([^\[\]\n]{1,500})\]")
WORD = re.compile(r"\d+|\w{4,}")
SENTENCE = re.compile(r"[^\n]+?(?:[.!?][\"')\]]*(?=\s)|(?=\n)|$)", re.DOTALL)
MAX_WORDS = 24
CLOSEST = 3


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
    lowered: dict[int, str] = {}
    found: list[Citation] = []
    for mark in MARK.finditer(text):
        for candidates in _named(mark[1], by_source, len(passages)):
            support = _support(_claim(text, mark.start()), candidates, passages, lowered)
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
    return tuple(found)


def _named(inside: str, by_source: Mapping[str, list[int]], count: int) -> Iterator[list[int]]:
    """The passages that each name inside a mark can mean."""
    for part in re.split(r"[,;]", inside):
        name = part.strip()
        if name in by_source:
            yield by_source[name]
        elif name.isdecimal() and name.isascii() and len(name) < 6 and 0 < int(name) <= count:
            yield [int(name) - 1]


def _claim(text: str, mark_start: int) -> str:
    """The sentence that a mark stands behind, whether the mark comes before or after its full stop."""
    before = text[max(0, mark_start - 2000) : mark_start]
    before = MARK.sub("", before).rstrip(" \t\r\n.!?,;:")
    begin = max(before.rfind(stop) for stop in (". ", "! ", "? ", "\n"))
    return before[begin + 1 :]


def _support(claim: str, candidates: Sequence[int], passages: Sequence[Passage], lowered: dict[int, str]) -> Support:
    """The sentence that shares most with the claim, or the claim itself where a passage has it word for word."""
    for index in candidates:
        if index not in lowered:
            text = passages[index].text
            low = text.lower()
            # Rarely, lowering changes the length and so the offsets; then case has to match.
            lowered[index] = low if len(low) == len(text) else text
    claim = claim.strip().lower()
    for index in candidates:
        at = lowered[index].find(claim) if claim else -1
        if at >= 0:
            return Support(1.0, index, at, at + len(claim))
    return _closest_sentence(claim, candidates, lowered)


def _closest_sentence(claim: str, candidates: Sequence[int], lowered: Mapping[int, str]) -> Support:
    """Words that few of the candidates have count more; only the closest candidates are read sentence by sentence."""
    words = list(dict.fromkeys(WORD.findall(claim)))[:MAX_WORDS]
    within = {index: [word for word in words if word in lowered[index]] for index in candidates}
    spread = Counter(word for found in within.values() for word in found)
    weight = {word: 1 / count for word, count in spread.items()}
    closest = sorted(candidates, key=lambda index: -sum(weight[word] for word in within[index]))[:CLOSEST]
    best = Support(0.0, candidates[0], 0, len(lowered[candidates[0]]))
    for index in closest:
        for match in SENTENCE.finditer(lowered[index]):
            sentence = match[0]
            shared = sum(weight[word] for word in within[index] if word in sentence)
            if shared > best.weight:
                start = match.start() + len(sentence) - len(sentence.lstrip())
                best = Support(shared, index, start, start + len(sentence.strip()))
    return best
