"""Chooses questions from all documents, adds unanswerable ones and near passages, and writes the data file."""

import json
import lzma
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from training.documentation.bm25 import Bm25
from training.documentation.passages import Found, Passage, Prepared, normal
from training.documentation.unanswerable import Names, Unanswerable, unanswerable
from training.documentation.wording import typed

# At most this many answerable questions of a package, of each of its documents, and the largest share of a kind.
MOST_OF_PACKAGE = {"Django": 4_600, "pandas": 2_600, "SQLAlchemy": 3_600}
MOST_OF_OTHERS = 4_000
MOST_OF_DOCUMENT = 320
MOST_OF_KIND = {"thing-what": 0.24, "type": 0.06, "default": 0.17, "version": 0.1, "thing-which": 0.2, "example": 0.1}
NEAR, FOREIGN = 6, 2
CANDIDATES = 60
HELD = "held:"


class Asked(NamedTuple):
    """A question as it is stored; `cut` are the units that its passage loses."""

    text: str
    kind: str
    found: Found
    answerable: bool
    cut: tuple[int, ...] = ()


def chosen(prepared: Iterable[Prepared], random: Random) -> list[Found]:
    """Questions of all documents within the limits; of two that read alike in one package, neither."""
    by_package: dict[str, list[Found]] = defaultdict(list)
    for each in prepared:
        found = [one for one in each.found if not _ambiguous(one, each.found)]
        random.shuffle(found)
        by_package[each.document.package] += found[:MOST_OF_DOCUMENT]
    kept: list[Found] = []
    for package in sorted(by_package):
        same = Counter(_key(found) for found in by_package[package])
        pool = [found for found in by_package[package] if same[_key(found)] == 1]
        random.shuffle(pool)
        kept += _within_shares(pool, min(len(pool), MOST_OF_PACKAGE.get(package, MOST_OF_OTHERS)))
    return kept


def _key(found: Found) -> str:
    return normal(found.question.text)


def _ambiguous(found: Found, others: Sequence[Found]) -> bool:
    """Whether a table question's key is in several rows of the document."""
    if not found.question.kind.startswith("table"):
        return False
    key = found.question.evidence[0]
    return any(
        other.question.kind == found.question.kind
        and other.question.evidence[0] is not key
        and other.question.evidence[0].words == key.words
        for other in others
    )


def _within_shares(pool: Sequence[Found], total: int) -> list[Found]:
    counts: Counter[str] = Counter()
    kept: list[Found] = []
    for found in pool:
        kind = found.question.kind
        if len(kept) < total and counts[kind] < MOST_OF_KIND.get(kind, 1.0) * total:
            counts[kind] += 1
            kept.append(found)
    return kept


def asked(found: Sequence[Found], random: Random) -> list[Asked]:
    """The questions as people type them, and half as many that their passages do not answer."""
    names = Names(found)
    questions = [
        Asked(typed(each.question.text, each.passage.package, random), each.question.kind, each, answerable=True)
        for each in found
    ]
    for each in random.sample(found, len(found)):
        if len(questions) >= 1.5 * len(found):
            break
        made: Unanswerable | None = unanswerable(each, names, random)
        if made is not None:
            text = typed(made.text, each.passage.package, random)
            questions.append(Asked(text, f"{made.kind}-{each.question.kind}", each, answerable=False, cut=made.cut))
    random.shuffle(questions)
    return questions


class Near:
    """Near passages of questions, among passages of one part (training or held out)."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        self.passages = passages
        self._index = Bm25([f"{passage.page.title} {passage.text}" for passage in passages])
        packages = np.array([passage.package for passage in passages])
        self._of_package = {name: packages == name for name in set(packages.tolist())}

    def near(self, question: Asked) -> list[Passage]:
        """Passages with the question's words that do not answer it, most of them of its package."""
        scores = self._index.scores(question.text)
        own = self._of_package[question.found.passage.package]
        answers = Answers(question.found)
        return [
            *self._best(np.where(own, scores, -1), answers, NEAR),
            *self._best(np.where(own, -1, scores), answers, FOREIGN),
        ]

    def _best(self, scores: npt.NDArray[np.float32], answers: "Answers", most: int) -> list[Passage]:
        top = np.argpartition(-scores, min(CANDIDATES, len(scores) - 1))[:CANDIDATES]
        top = top[np.argsort(-scores[top], kind="stable")]
        ordered = (self.passages[number] for number in top if scores[number] > 0)
        return list(islice((passage for passage in ordered if not answers.may_be_in(passage)), most))


class Answers:
    """Knows texts that answer a question: its units, its sentences, and its subject together with the answer."""

    def __init__(self, found: Found) -> None:
        question = found.question
        units = (found.passage.page.units[number].text for number in found.units)
        leaves = (leaf.words for leaf in question.evidence)
        self._passage = found.passage
        self._texts = [text for each in (*units, *leaves) if len((text := normal(each)).split()) > 4]
        self._subject = f" {normal(question.thing.names[0].rpartition('.')[2])} " if question.thing else None
        self._answer = normal(question.answer or "")

    def may_be_in(self, passage: Passage) -> bool:
        if passage is self._passage or any(text in passage.words for text in self._texts):
            return True
        return self._subject is not None and self._subject in f" {passage.words} " and self._answer in passage.words


def written(parts: Mapping[str, Sequence[Asked]], passages: Mapping[str, Sequence[Passage]]) -> dict[str, Any]:
    """The data: `Q` and `held` questions with numbers of passages in `P`, which are those that are used."""
    numbers: dict[Passage, int] = {}
    told: dict[str, list[dict[str, Any]]] = {}
    for part, questions in parts.items():
        near = Near(passages[part])
        told[part] = [_question(question, near.near(question), numbers) for question in questions]
    return {"P": [_passage(passage) for passage in numbers], **told}


def _question(question: Asked, near: Sequence[Passage], numbers: dict[Passage, int]) -> dict[str, Any]:
    def number(passage: Passage) -> int:
        return numbers.setdefault(passage, len(numbers))

    found = question.found
    own = number(found.passage)
    stored: dict[str, Any] = {
        "q": question.text,
        "pos": [own],
        "sup": {str(own): list(found.units)} if question.answerable else {},
        "ans": None,
        "a": int(question.answerable),
        "neg": [number(passage) for passage in near],
        "k": f"docs:{question.kind}",
    }
    if question.answerable and found.answer is not None:
        unit, (start, end) = found.answer
        texts = [unit.text for unit in found.passage.page.units]
        stored["ans"] = [own, sum(map(len, texts[:unit])) + start, texts[unit][start:end]]
    if question.cut:
        stored["cut"] = list(question.cut)
    return stored


def _passage(passage: Passage) -> dict[str, Any]:
    units = passage.page.units
    return {
        "t": passage.page.title,
        "s": [unit.text for unit in units],
        "b": [unit.before for unit in units],
        "g": passage.group,
    }


def save(data: Mapping[str, Any], path: Path) -> None:
    encoded = json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()
    path.write_bytes(lzma.compress(encoded, preset=9 | lzma.PRESET_EXTREME))


def report(parts: Mapping[str, Sequence[Asked]]) -> Iterator[str]:
    """Counts of questions by package and by kind."""
    for part, questions in parts.items():
        yield f"{part}: {len(questions)} questions, {sum(not each.answerable for each in questions)} unanswerable"
        for name, counts in (
            ("package", Counter(each.found.passage.package for each in questions)),
            ("kind", Counter(re.sub(r"^(cut|swap|missing)-.*", r"\1", each.kind) for each in questions)),
        ):
            yield f"  by {name}: " + ", ".join(f"{key} {count}" for key, count in counts.most_common())
