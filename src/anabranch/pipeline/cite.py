"""Cite: maps each citation mark in the answer to the words of a passage that support it."""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import NamedTuple

from anabranch.domain.model import Citation, Delta, Passage
from anabranch.text.citation_marks import MARK, code_spans

NAMES = re.compile(r"[,;]|(?<=\d) (?:and|&) (?=\d)")
# A passage by its number, or several: 3, 1-3, Source 1, ^1.
NUMBER = re.compile(
    r"(?:(?:source|passage|document|doc|ref|reference|citation)s?[ :#]{0,3}|[#^])?"
    r"([0-9]{1,5})(?:\s?[-\u2010-\u2014]\s?([0-9]{1,5}))?",
    re.IGNORECASE,
)
# A number of at most so many digits can only be a citation, even if there is no passage of that number.
SHORT = 3
# A source, by its owner and name.
SOURCE_PATH = re.compile(r"[\w.-]{1,100}/[\w.-]{1,100}")
# Brackets that are an index, as in code: behind a variable of one letter (but not behind a unit, as in "20 l"), behind
# a call, within a word, or the first of all.
INDEX = re.compile(r"(?<=(?<![^\s(=])[a-z_])(?<!\d\s[a-z])|(?<=\(\))|(?a:(?<=\w)\[(?:[^\[\]\n]{1,500}\](?=\w)|0\]))")
WORD = re.compile(r"\d+|\w{4,}")
SENTENCE = re.compile(r"[^\n]+?(?:[.!?][\"')\]]*(?=\s)|(?=\n)|$)", re.DOTALL)
MAX_WORDS = 24
CLOSEST = 3
MAX_CITATIONS = 500
# Of a hostile answer, no more is read: names in marks, characters of a claim, and characters and sentences of passages.
MAX_NAMES = 20_000
MAX_CLAIM = 1_000
MAX_READ, MAX_SENTENCES = 4_000_000, 50_000
# For an answer or passages with more characters, citations are looked for in a thread.
INLINE_ANSWER, INLINE_PASSAGES = 10_000, 300_000


class SupportingSpan(NamedTuple):
    weight: float
    passage: int
    start: int
    end: int


def cite(text: str, passages: Sequence[Passage]) -> tuple[Citation, ...]:
    """Citations for the marks that name a source (`[owner/slug]`, several with commas) or a passage (`[3]`)."""
    marks = Marks(passages)
    supporting = SupportingWords(passages)
    found: list[Citation] = []
    last = 0
    for mark, read in marks.read(text):
        named = list(filter(None, read))
        if not named:
            continue
        claim = _claim(text, mark.start())
        since = text[max(last, mark.start() - MAX_CLAIM) : mark.start()].strip().lower()
        last = mark.end()
        for candidates in named:
            support = supporting.find(claim, candidates, since)
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


def is_short(text: str, passages: Sequence[Passage]) -> bool:
    """Whether citations are found so soon that it needs no thread."""
    return len(text) <= INLINE_ANSWER and sum([len(passage.text) for passage in passages]) <= INLINE_PASSAGES


def cited(delta: Delta, offset: int, passages: Sequence[Passage]) -> Iterator[Citation]:
    """The citations of a part that says itself what it quotes; it begins at `offset`. The mark at its end counts, and
    within a line also the others, which stand for references of the document."""
    last = delta.text.rfind(delta.mark)
    inline = delta.text[:last].endswith(" ")
    at = delta.text.find(delta.mark) if inline else last
    while at >= 0:
        for quote in delta.quotes:
            yield Citation(
                start=offset + at,
                end=offset + at + len(delta.mark),
                source=passages[quote.passage].source,
                passage=quote.passage,
                passage_start=quote.start,
                passage_end=quote.end,
            )
        at = delta.text.find(delta.mark, at + 1)


class WrittenMark(NamedTuple):
    """A name in a citation mark of an answer, and the passages that it names; none, if it is wrong."""

    start: int
    end: int
    named: Sequence[int]


class Marks:
    """What the citation marks of an answer name."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        self._count = len(passages)
        self._by_source: dict[str, list[int]] = {}
        for index, passage in enumerate(passages):
            self._by_source.setdefault(passage.source, []).append(index)

    @cached_property
    def _by_path(self) -> bool:
        return any(map(SOURCE_PATH.fullmatch, self._by_source))

    def named(self, inside: str) -> list[list[int]]:
        """The candidate passages of each name inside a mark."""
        if inside in self._by_source:
            return [self._by_source[inside]]
        meant: list[list[int]] = []
        for part in NAMES.split(inside):
            name = part.strip()
            if name in self._by_source:
                meant.append(self._by_source[name])
            elif number := NUMBER.fullmatch(name):
                first, last = int(number[1]), int(number[2] or number[1])
                meant += ([one - 1] for one in range(max(1, first), min(last, self._count) + 1))
        return meant

    def read(self, text: str) -> Iterator[tuple[re.Match[str], list[list[int]]]]:
        """The marks of a text with the passages that each of their names names: none, if it is wrong. Brackets directly
        behind others that are no mark are none either."""
        end, left = 0, MAX_NAMES
        for mark in MARK.finditer(text):
            left -= 1 + mark[1].count(",") + mark[1].count(";")
            if left < 0:
                break
            start = mark.start()
            if text[max(end, start - 2) : start] not in ("", "]") and (
                text[start - 1] == "]" or INDEX.match(text, start)
            ):
                continue
            if named := self.named(mark[1]) or ([[]] if self._is_wrong(mark[1].strip()) else []):
                end = mark.end()
                yield mark, named

    def _is_wrong(self, name: str) -> bool:
        """Whether a name that names nothing can only be meant for a passage or a source."""
        return _is_short(name) or (self._by_path and SOURCE_PATH.fullmatch(name) is not None)

    def written(self, text: str, offset: int = 0) -> Iterator[WrittenMark]:
        """The marks of a text that begins at `offset`, also those that are wrong. A mark with two names comes twice.
        What is in brackets in code is no mark."""
        code = code_spans(text)
        for mark, named in self.read(text):
            before = bisect_right(code, (mark.start(), len(text))) - 1
            if before < 0 or mark.start() >= code[before][1]:
                yield from (WrittenMark(offset + mark.start(), offset + mark.end(), one) for one in named)


def _is_short(name: str) -> bool:
    number = NUMBER.fullmatch(name)
    return number is not None and max(len(one or "") for one in number.groups()) <= SHORT


def _claim(text: str, mark_start: int) -> str:
    """The sentence that a mark belongs to, whether the mark comes before or after its full stop."""
    before = text[max(0, mark_start - MAX_CLAIM) : mark_start]
    before = MARK.sub("", before).rstrip(" \t\r\n.!?,;:")
    begin = max(before.rfind(stop) for stop in (". ", "! ", "? ", "\n"))
    return before[begin + 1 :].strip().lower()


class SupportingWords:
    """Finds the words that support claims. What it reads is bounded, against hostile answers; past the bound it cites
    whole passages."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        self._passages = passages
        self._lowered: dict[int, str] = {}
        self._left, self._sentences_left = MAX_READ, MAX_SENTENCES

    def find(self, claim: str, candidates: Sequence[int], since: str = "") -> SupportingSpan:
        """All text since the last mark, or the claim, if a passage has it verbatim; else the sentence that shares most
        words with the claim."""
        first, texts = candidates[0], list(map(self._low, candidates))
        self._left -= sum(map(len, texts))
        if self._left < 0:
            return SupportingSpan(0.0, first, 0, len(self._passages[first].text))
        for said in dict.fromkeys(filter(None, (since, claim))):
            for index, text in zip(candidates, texts, strict=True):
                at = text.find(said)
                if at >= 0:
                    return SupportingSpan(1.0, index, at, at + len(said))
        return self._closest_sentence(claim, candidates)

    def _closest_sentence(self, claim: str, candidates: Sequence[int]) -> SupportingSpan:
        """Rare words among the candidates weigh more; only the closest passages are read sentence by sentence."""
        words = list(dict.fromkeys(WORD.findall(claim)))[:MAX_WORDS]
        within = {index: [word for word in words if word in self._low(index)] for index in candidates}
        spread = Counter(word for found in within.values() for word in found)
        weight = {word: 1 / count for word, count in spread.items()}
        closest = sorted(candidates, key=lambda index: -sum(weight[word] for word in within[index]))[:CLOSEST]
        best = SupportingSpan(0.0, candidates[0], 0, len(self._low(candidates[0])))
        for index in (index for index in closest if within[index]):
            for match in islice(SENTENCE.finditer(self._low(index)), self._sentences_left):
                self._sentences_left -= 1
                sentence = match[0]
                shared = sum(weight[word] for word in within[index] if word in sentence)
                if shared > best.weight:
                    start = match.start() + len(sentence) - len(sentence.lstrip())
                    best = SupportingSpan(shared, index, start, start + len(sentence.strip()))
        return best

    def _low(self, index: int) -> str:
        if (known := self._lowered.get(index)) is not None:
            return known
        text = self._passages[index].text
        low = text.lower()
        # Rarely, lowering changes the length and so the offsets; then case has to match.
        self._lowered[index] = low = low if len(low) == len(text) else text
        return low
