"""Cite: each mark in the answer, and the words in a passage that carry the sentence before it."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from anabranch.domain.model import Citation, Passage

MARK = re.compile(r"\[([^\[\]\n]{1,500})\]")
WORD = re.compile(r"\w{3,}")
SENTENCE_END = re.compile(r"[.!?][\"')\]]*\s+|\n+")
MAX_WORDS = 32
MAX_HITS = 16


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
    """The sentence that shares most with the claim; words that few of the candidates have count more."""
    words = list(dict.fromkeys(WORD.findall(claim.lower())))[:MAX_WORDS]
    hits: dict[int, dict[str, list[int]]] = {}
    for index in candidates:
        if index not in lowered:
            low = passages[index].text.lower()
            # Rarely, lowering changes the length and so the offsets; then case has to match.
            lowered[index] = low if len(low) == len(passages[index].text) else passages[index].text
        hits[index] = {word: places for word in words if (places := _places(word, lowered[index]))}
    weight = {word: 1 / sum(word in found for found in hits.values()) for found in hits.values() for word in found}
    best = Support(0.0, candidates[0], 0, len(passages[candidates[0]].text))
    for index in candidates:
        if sum(weight[word] for word in hits[index]) > best.weight:
            best = max(best, _best_sentence(index, passages[index].text, hits[index], weight), key=lambda s: s.weight)
    return best


def _places(word: str, text: str) -> list[int]:
    """Where words begin with this word: 'refund' is found in 'refunds', not in 'nonrefundable'."""
    places: list[int] = []
    at = text.find(word)
    while at >= 0 and len(places) < MAX_HITS:
        if at == 0 or not text[at - 1].isalnum():
            places.append(at)
        at = text.find(word, at + len(word))
    return places


def _best_sentence(index: int, text: str, hits: Mapping[str, list[int]], weight: Mapping[str, float]) -> Support:
    best = Support(0.0, index, 0, len(text))
    start = 0
    for end, after in [*((match.end(), match.end()) for match in SENTENCE_END.finditer(text)), (len(text), len(text))]:
        shared = sum(weight[word] for word, places in hits.items() if any(start <= at < end for at in places))
        if shared > best.weight:
            best = Support(shared, index, start, start + len(text[start:end].rstrip()))
        start = after
    return best
