"""The training data in memory: passages, questions and claims of several files, tokenized once.

A file is JSON, compressed with xz: `P` passages (`t` title, `s` units, `b` what is read before each unit, `g` group),
`Q` questions (`q`, `pos` passages that answer or seem to, `sup` evidence units by passage, `ans` [passage, character,
text], `a` 1 if answerable, `neg` near passages, `cut` units to leave out, `m` 1 or 2 if several passages are needed,
`k` the set), `C` claims ([claim, evidence, label, set], sometimes a title, and sometimes the numbers of the evidence's
units that the claim needs and the claim as it would be right; evidence of several units is a list). `held` is never
read here."""

import hashlib
import json
import lzma
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

Ids = npt.NDArray[np.uint16]


class Answer(NamedTuple):
    """An answer's place: tokens from `first` to `last` of a unit."""

    passage: int
    unit: int
    first: int
    last: int
    text: str


class Question(NamedTuple):
    text: str
    source: str
    positives: tuple[int, ...]
    negatives: tuple[int, ...]
    # The evidence units of a passage. A passage that is not here may have evidence, but nobody has marked it.
    evidence: Mapping[int, tuple[int, ...]]
    answer: Answer | None
    answerable: bool
    # True if one passage is not enough.
    several: bool
    # True if only some of the passages that it needs are known.
    incomplete: bool
    cut: tuple[int, ...]


class Passage(NamedTuple):
    title: str
    units: tuple[str, ...]
    before: tuple[str, ...]
    source: str


HELD = "held"
UNUSED = Passage("", (), (), "")


class Claim(NamedTuple):
    """`label` is 0 supported, 1 unknown, 2 contradicted, -1 one of the last two. `needed` has the units of the evidence
    that decide; None if nobody has marked them."""

    text: str
    evidence: tuple[str, ...]
    title: str
    label: int
    source: str
    needed: tuple[int, ...] | None = None
    # As the evidence supports it: where the two differ, the claim is wrong. None if nobody has written that.
    right: str | None = None


class Texts:
    """Token ids of many texts, in one array: processes that fork share it."""

    def __init__(self, ids: Iterable[Sequence[int]]) -> None:
        parts = [np.asarray(each, np.uint16) for each in ids]
        self._ends = np.cumsum([0, *map(len, parts)])
        self._ids: Ids = np.concatenate(parts) if parts else np.zeros(0, np.uint16)

    def __getitem__(self, number: int) -> list[int]:
        found: list[int] = self._ids[self._ends[number] : self._ends[number + 1]].tolist()
        return found

    def lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self._ends)


class Corpus:
    def __init__(self, paths: Sequence[Path], tokenizer: Tokenizer, sample: int | None = None) -> None:
        """`sample` takes only so many questions and claims of each file, for a quick try."""
        self.passages: list[Passage] = []
        self.questions: list[Question] = []
        self.claims: list[Claim] = []
        self.sha256 = {}
        self._tokenizer = tokenizer
        self.misplaced_answers = 0
        for path in paths:
            compressed = path.read_bytes()
            self.sha256[path.name] = hashlib.sha256(compressed).hexdigest()
            self._add(json.loads(lzma.decompress(compressed)), sample)
        self._tokenize()

    def ids(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def _add(self, data: dict[str, Any], sample: int | None) -> None:
        first = len(self.passages)
        self.passages += [
            Passage(
                title=row["t"],
                units=tuple(row["s"]),
                before=tuple(row.get("b") or [""] * len(row["s"])),
                source=source_of(row.get("g", "")),
            )
            for row in data["P"]
        ]
        questions, claims = data["Q"], data.get("C", [])
        if sample is not None:
            questions, claims = (rows[:: max(1, len(rows) // sample)][:sample] for rows in (questions, claims))
        self.questions += [self._question(row, first) for row in questions]
        for row in claims:
            self.claims.append(_claim(*row))

    def _question(self, row: dict[str, Any], first: int) -> Question:
        evidence = {first + int(passage): tuple(units) for passage, units in (row.get("sup") or {}).items()}
        return Question(
            text=row["q"],
            source=source_of(row["k"]),
            positives=tuple(first + number for number in row["pos"]),
            # Passages of held-out documents are not even shown as wrong ones.
            negatives=tuple(
                first + number for number in row.get("neg") or () if self.passages[first + number].source != HELD
            ),
            evidence=evidence,
            answer=self._answer(row["ans"], first, evidence) if row.get("ans") else None,
            answerable=bool(row["a"]),
            several=bool(row.get("m")),
            incomplete=row.get("m") == 2,
            cut=tuple(row.get("cut") or ()),
        )

    def _answer(self, found: list[Any], first: int, evidence: Mapping[int, tuple[int, ...]]) -> Answer | None:
        number, start, text = found
        passage = self.passages[first + number]
        unit, begin = _place(passage.units, start, text, evidence.get(first + number, ()))
        if unit < 0:
            self.misplaced_answers += 1
            return None
        offsets = self._tokenizer.encode(passage.units[unit], add_special_tokens=False).offsets
        tokens = [token for token, (a, b) in enumerate(offsets) if b > begin and a < begin + len(text)]
        return Answer(first + number, unit, tokens[0], tokens[-1], text) if tokens else None

    def _tokenize(self) -> None:
        self.used = {number for question in self.questions for number in (*question.positives, *question.negatives)}
        # Passages of no question keep their numbers, but are not tokenized.
        read = [passage if number in self.used else UNUSED for number, passage in enumerate(self.passages)]
        self.titles = self._texts([passage.title for passage in read])
        self.units = self._texts([unit for passage in read for unit in passage.units])
        self.before = self._texts([text for passage in read for text in passage.before])
        self.heads = self._texts([question.text for question in self.questions])
        self.claim_heads = self._texts([claim.text for claim in self.claims])
        self.claim_titles = self._texts([claim.title for claim in self.claims])
        self.claim_units = self._texts([unit for claim in self.claims for unit in claim.evidence])
        self.first_claim_unit = np.cumsum([0, *(len(claim.evidence) for claim in self.claims)])
        # The number of the first unit of each passage.
        self.first_unit = np.cumsum([0, *(len(passage.units) for passage in read)])
        # Tokens that each unit takes in an input: what is before it, its marker, its text.
        self.sizes = self.units.lengths() + self.before.lengths() + 1

    def _texts(self, texts: list[str]) -> Texts:
        return Texts(each.ids for each in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False))


def _claim(
    text: str,
    evidence: str | list[str],
    label: int,
    source: str,
    title: str = "",
    needed: list[int] | None = None,
    right: str | None = None,
) -> Claim:
    return Claim(
        text=text,
        evidence=(evidence,) if isinstance(evidence, str) else tuple(evidence),
        title=title,
        label=label,
        source=source,
        needed=None if needed is None else tuple(needed),
        right=text if label == 0 else right,
    )


def _place(units: Sequence[str], start: int, text: str, evidence: Sequence[int]) -> tuple[int, int]:
    """The unit with the answer and where it begins there. `start` counts characters of the joined units; where the
    text is not found there, it is looked for in the evidence."""
    base = 0
    for number, unit in enumerate(units):
        if base <= start < base + len(unit):
            if unit.startswith(text[: base + len(unit) - start], start - base):
                return number, start - base
            break
        base += len(unit)
    return next(((number, units[number].find(text)) for number in evidence if text in units[number]), (-1, 0))


def source_of(name: str) -> str:
    """The set without what follows: "docs" of "docs:tables", "covid" of "covid1092"."""
    name = name.partition(":")[0]
    return next((known for known in ("docs", "covid") if name.startswith(known)), name)
