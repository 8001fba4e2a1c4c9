"""Questions with the passages that were found for them, from test sets of different forms."""

import asyncio
import json
import lzma
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from anabranch import Anabranch
from anabranch.configuration.settings import Settings
from anabranch.domain.model import Passage, Place, Scores, Until
from anabranch.models.minilm import MiniLM

MARKUP = re.compile(r"[`*_\"“”]+")
SPACE = re.compile(r"\s+")
PASSAGES = 8

Span = tuple[int, int]
# One of these must be in a right answer; of a tuple, all parts.
Wanted = tuple[tuple[str, ...], ...]


class Case(NamedTuple):
    """`gold` are the spans of each passage that are right to quote, `unread` those of passages that were not chosen. A
    case is answerable if it has any, or if an `answer` is wanted: search may have missed the passage."""

    dataset: str
    kind: str
    question: str
    passages: tuple[Passage, ...]
    gold: tuple[tuple[Span, ...], ...]
    answers: Wanted
    answerable: bool
    unread: int = 0


def answers(case: Case) -> bool:
    """Whether the passages answer: of topics it is not known which words do."""
    return case.answerable and (case.kind == "topic" or any(case.gold))


def plain(text: str) -> str:
    """As answers are compared: without markup, case and line breaks."""
    return SPACE.sub(" ", MARKUP.sub("", text)).strip().lower()


def holds(text: str, answers: Wanted) -> bool:
    said = plain(text)
    return any(all(plain(part) in said for part in parts) for parts in answers)


def lowered(case: Case) -> Case:
    return case._replace(question=case.question.lower())


class Embedded:
    """Cosines of questions and texts, which are embedded together."""

    def __init__(self, model: MiniLM, texts: Iterable[str]) -> None:
        self._at = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        found = asyncio.run(model.embed(list(self._at)))
        self._vectors = np.stack([np.frombuffer(one.vector, np.float32) for one in found])

    def cosine(self, one: str, other: str) -> float:
        return float(self._vectors[self._at[one]] @ self._vectors[self._at[other]])


class Paragraphs(NamedTuple):
    """A question and paragraphs as a data set has them: a title, and sentences of which some are evidence."""

    question: str
    paragraphs: tuple[tuple[str, tuple[str, ...]], ...]
    evidence: frozenset[tuple[int, int]]
    answers: Wanted


def cases(dataset: str, rows: Sequence[Paragraphs], model: MiniLM) -> Iterator[Case]:
    """Each question with its paragraphs, nearest first, and again without those that have evidence."""
    embedded = Embedded(model, [t for row in rows for t in (row.question, *("".join(s) for _, s in row.paragraphs))])
    for row in rows:
        having = {paragraph for paragraph, _ in row.evidence}
        placed = [_placed(row, number, embedded) for number in range(len(row.paragraphs))]
        order = sorted(range(len(placed)), key=lambda number: -placed[number][0].score)
        for answerable in (True, False) if row.evidence else (False,):
            kept = [number for number in order if answerable or number not in having][:PASSAGES]
            yield Case(
                dataset=dataset,
                kind="answerable" if answerable else "unanswerable",
                question=row.question,
                passages=tuple(placed[number][0] for number in kept),
                gold=tuple(placed[number][1] for number in kept),
                answers=row.answers if answerable else (),
                answerable=answerable,
            )


def _placed(row: Paragraphs, number: int, embedded: Embedded) -> tuple[Passage, tuple[Span, ...]]:
    title, sentences = row.paragraphs[number]
    text = "".join(sentences)
    cosine = embedded.cosine(row.question, text)
    place = Place(chunk_id=str(number), collection="c", start=0, end=len(text), tokens=0, scores=Scores(dense=cosine))
    spans: list[Span] = []
    at = 0
    for order, sentence in enumerate(sentences):
        if (number, order) in row.evidence:
            spans.append((at, at + len(sentence.rstrip())))
        at += len(sentence)
    found = Passage(
        source="c", title=title, text=text, score=max(0.0, cosine), document_id=title or text[:40], place=place
    )
    return found, tuple(spans)


def hotpot(folder: Path) -> list[Paragraphs]:
    """questions.json as HotpotQA has it."""
    found: list[Paragraphs] = []
    for row in json.loads((folder / "questions.json").read_text(encoding="utf-8")):
        context = [(title, tuple(each)) for title, each in row["context"] if "".join(each).strip()]
        at = {title: number for number, (title, _) in enumerate(context)}
        evidence = frozenset((at[title], order) for title, order in row["supporting_facts"] if title in at)
        answers = () if row["answer"] in ("yes", "no") else ((row["answer"],),)
        found.append(Paragraphs(row["question"], tuple(context), evidence, answers))
    return found


def five(file: Path, name: str) -> list[Paragraphs]:
    """The five-passage tasks: the passages that answer and the nearest others."""
    data: dict[str, Any] = json.loads(lzma.decompress(file.read_bytes()))
    found: list[Paragraphs] = []
    for row in data[name]:
        gold = list(row["gold"])
        numbers = [*gold, *map(str, row["near"][: 5 - len(gold)])]
        paragraphs = tuple((data["P2"][number][0], tuple(data["P2"][number][1])) for number in numbers)
        evidence = frozenset((at, order) for at, number in enumerate(gold) for order in row["gold"][number])
        found.append(Paragraphs(row["q"], paragraphs, evidence, tuple((a,) for a in dict.fromkeys(row["a"]))))
    return found


def held(file: Path, most: int) -> list[Paragraphs]:
    """Questions that were held out of training, with up to four of their near passages; `most` of each set."""
    data: dict[str, Any] = json.loads(lzma.decompress(file.read_bytes()))
    passages = data["P"]
    count: dict[str, int] = {}
    found: list[Paragraphs] = []
    for row in data["held"]:
        kind = f"{row['k']} {row['a']}"
        if count.get(kind, 0) >= most:
            continue
        count[kind] = count.get(kind, 0) + 1
        numbers = [*row["pos"], *row.get("neg", [])[: 5 - len(row["pos"])]]
        paragraphs = tuple((passages[n]["t"], tuple(passages[n]["s"])) for n in numbers)
        sup = {int(number): orders for number, orders in row["sup"].items()} if row["a"] else {}
        evidence = frozenset((at, order) for at, number in enumerate(numbers) for order in sup.get(number, ()))
        answers = ((row["ans"][2],),) if row["ans"] and row["a"] else ()
        if evidence or not row["a"]:
            found.append(Paragraphs(row["q"], paragraphs, evidence, answers))
    return found


def topics(folder: Path, others: Path, model: MiniLM, dataset: str) -> Iterator[Case]:
    """Topic queries: to the ten nearest documents of their own collection, and of another, which does not answer."""
    queries, own = collection(folder)
    _, foreign = collection(others)
    embedded = Embedded(model, [*queries, *(text for _, text in own), *(text for _, text in foreign)])
    for query in queries:
        for answerable, corpus in ((True, own), (False, foreign)):
            nearest = sorted(corpus, key=lambda one: -embedded.cosine(query, one[1]))[:PASSAGES]
            rows = Paragraphs(query, tuple((title, (text,)) for title, text in nearest), frozenset(), ())
            placed = tuple(_placed(rows, number, embedded)[0] for number in range(len(nearest)))
            kind = "topic" if answerable else "foreign topic"
            yield Case(dataset, kind, query, placed, ((),) * len(placed), (), answerable)


def collection(folder: Path) -> tuple[list[str], list[tuple[str, str]]]:
    """queries.jsonl and corpus.jsonl as BEIR has them."""
    queries = [json.loads(line)["text"] for line in (folder / "queries.jsonl").read_text("utf-8").splitlines()]
    rows = [json.loads(line) for line in (folder / "corpus.jsonl").read_text("utf-8").splitlines()]
    return queries, [(row.get("title", ""), row["text"]) for row in rows if row["text"].strip()]


class Documentation(NamedTuple):
    """Questions to documentation: benchmarks/questions, and the folder with the unpacked source distributions, one
    folder `package-version` each."""

    questions: Path
    sources: Path

    def read(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.questions.read_text(encoding="utf-8"))
        return found

    def text(self, package: str, document: str) -> str:
        name = package.removesuffix(" user guide")
        version = self.read()["packages"][package]["version"]
        return (self.sources / f"{name}-{version}" / document).read_bytes().decode()


async def documentation(dataset: str, asked: Documentation, settings: Settings, *, deep: bool) -> list[Case]:
    """The questions with what search finds in the collection `docs`; `deep` is how it searches for evidence, whether or
    not a model then orders what is found."""
    data = asked.read()
    found: list[Case] = []
    async with Anabranch.open(settings=settings) as anabranch:
        for row in data["questions"]:
            question = await anabranch.questions.library(row["question"], ["docs"], None, (), None, None, Until.MERGE)
            question = msgspec.structs.replace(question, evidence="rank" if deep else "off")
            answer = await anabranch.start(question, anabranch.context(operator=True)).value()
            passages = answer.passages
            wanted = [asked.text(row["package"], one["document"])[one["start"] : one["end"]] for one in row["evidence"]]
            gold = tuple(tuple(_spans(passage.text, wanted)) for passage in passages)
            answers = tuple((one,) if isinstance(one, str) else tuple(one) for one in row["answers"])
            found.append(Case(dataset, row["kind"], row["question"], passages, gold, answers, bool(answers)))
    return found


def _spans(text: str, wanted: Sequence[str]) -> Iterator[Span]:
    """Where the passage has the evidence, or a part of it where a chunk ends inside."""
    for evidence in wanted:
        at = text.find(evidence)
        if at >= 0:
            yield at, at + len(evidence)
        else:
            yield from _overlap(text, evidence)


def _overlap(text: str, evidence: str) -> Iterator[Span]:
    """Lines of the evidence that the passage has; short ones are no sign."""
    for line in map(str.strip, evidence.splitlines()):
        at = text.find(line) if len(line) > 30 else -1
        if at >= 0:
            yield at, at + len(line)


def overlaps(quoted: Sequence[Span], gold: Sequence[Span]) -> bool:
    """Whether a quoted span and a right one share more than half of the shorter."""
    return any(
        min(end, high) - max(start, low) > 0.5 * min(end - start, high - low)
        for start, end in quoted
        for low, high in gold
    )


def interval(right: float, count: int) -> tuple[float, float]:
    """The 95% interval of a share (Wilson)."""
    if not count:
        return 0.0, 1.0
    z = 1.96
    middle = (right + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(right * (1 - right) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return middle - half, middle + half
