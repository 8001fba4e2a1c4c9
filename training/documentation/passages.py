"""Documents cut into passages and units as the product does it, and where the evidence of a question is in them."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from anabranch.domain.contracts import Embedder
from anabranch.domain.evidence import EvidencePage
from anabranch.knowledge.chunking import chunk
from anabranch.knowledge.model import Chunking
from anabranch.knowledge.parse.builder import ParseLimits
from anabranch.knowledge.parse.dispatch import parse
from anabranch.text.pages import page
from anabranch.text.sentences import Span
from anabranch.text.units import Unit, units
from training.documentation.asking import Place, Question
from training.documentation.generators import questions
from training.documentation.markdown import written
from training.documentation.prose import reads_well
from training.documentation.sources import Document
from training.documentation.structure import Leaf, Section, leaves_of, read

# The share of documents that are read as reStructuredText; the others are written as Markdown.
AS_WRITTEN = 0.4
# These are asked in two wordings: they are closest to what people ask, and there are fewer of them.
REPHRASED = frozenset(("heading-how", "heading-what", "heading-topic", "code", "list", "prose", "table", "item"))
# These are made of phrases of the document, which may have been cut in the wrong place.
FROM_PHRASES = frozenset(("heading-how", "code", "list"))
# A unit is evidence if it holds this share of a leaf, or if this share of it is of the leaf.
SHARE = 0.5


@dataclass(slots=True, eq=False)
class Passage:
    """A chunk of a document, with its units as spans of the chunk's text."""

    start: int
    text: str
    units: Sequence[Unit]
    page: EvidencePage
    group: str
    package: str
    # The text in lower case, words only: to see whether it has an answer.
    words: str = field(default="")

    def __post_init__(self) -> None:
        self.words = normal(f"{self.page.title} {self.text}")


class Found(NamedTuple):
    """A question with its passage, the numbers of the units that answer, and where the short answer is: the number of
    the unit and the span in it. `rest` are the units that would also have to go for the passage not to answer."""

    question: Question
    passage: Passage
    units: tuple[int, ...]
    answer: tuple[int, Span] | None
    rest: tuple[int, ...]


class Prepared(NamedTuple):
    document: Document
    passages: Sequence[Passage]
    found: Sequence[Found]


def normal(text: str) -> str:
    return " ".join(re.findall(r"[a-z0-9_]+", text.lower()))


async def prepared(document: Document, group: str, chunking: Chunking, embedder: Embedder, random: Random) -> Prepared:
    """The document in one of its forms, cut into passages, with its questions."""
    nodes = read(document.text)
    title = next((node.title.words for node in nodes if isinstance(node, Section)), document.name)
    asked = list(questions(nodes, Place(document.package), random))
    texts = {question.text.lower() for question in asked}
    again = questions(nodes, Place(document.package), random)
    asked += [each for each in again if each.kind in REPHRASED and each.text.lower() not in texts]
    spans: dict[Leaf, Span]
    if random.random() < AS_WRITTEN:
        text, name = document.text, document.name.rpartition("/")[2]
        spans = {leaf: (leaf.start, leaf.end) for node in nodes for leaf in leaves_of(node)}
        # A file's title is its name, unless who uploads it gives another.
        title = random.choice((name, title))
    else:
        text, spans = written(document.text, nodes, random)
        name = "document.md"
    parsed = parse(text.encode(), name if name.endswith((".rst", ".txt", ".md")) else f"{name}.rst", ParseLimits())
    if parsed.text != text:
        return Prepared(document, (), ())
    pieces = await chunk(parsed, chunking, embedder)
    passages = []
    for piece in pieces:
        part = text[piece.start : piece.end]
        found = units(part)
        if found:
            shown = page(title, piece.headers, part, found)
            passages.append(Passage(piece.start, part, found, shown, group, document.package))
    good = (each for each in asked if each.kind not in FROM_PHRASES or reads_well(each.text))
    placed = (_placed(question, passages, spans) for question in good)
    return Prepared(document, passages, [each for each in placed if each is not None])


def _placed(question: Question, passages: Sequence[Passage], spans: dict[Leaf, Span]) -> Found | None:
    """The question in its passage; None if its evidence is not in one."""
    found = placed_units(question, passages, [spans[leaf] for leaf in question.evidence if leaf in spans])
    if found is None or len(found.units) == len(found.passage.units) > 8:
        return None
    # A table that was not read row by row is no evidence for one of its cells.
    if question.kind.startswith("table") and any(found.passage.units[one].kind != "row" for one in found.units):
        return None
    scope = [spans[leaf] for leaf in leaves_of(question.scope) if leaf in spans] if question.scope else []
    return found._replace(rest=tuple(set(_numbers(found.passage, scope)) - set(found.units)))


def placed_units(question: Question, passages: Sequence[Passage], where: Sequence[Span]) -> Found | None:
    """The question with the units that hold these spans of the document, in the passage that has most of them; None if
    none has half of them."""
    wanted = sum(end - start for start, end in where)
    best = max(passages, key=lambda each: _held(each, where), default=None)
    if best is None or not wanted or _held(best, where) < SHARE * wanted:
        return None
    numbers = _numbers(best, where)
    return Found(question, best, numbers, _answer(question, best, numbers, where), ()) if numbers else None


def _held(passage: Passage, where: Iterable[Span]) -> int:
    end = passage.start + len(passage.text)
    return sum(max(0, min(end, high) - max(passage.start, low)) for low, high in where)


def _numbers(passage: Passage, where: Iterable[Span]) -> tuple[int, ...]:
    """The units that hold these spans."""
    found = set()
    for low, high in where:
        for number, unit in enumerate(passage.units):
            start, end = passage.start + unit.start, passage.start + unit.end
            shared = min(end, high) - max(start, low)
            if shared > 0 and (shared >= SHARE * (high - low) or shared >= SHARE * (end - start)):
                found.add(number)
    return tuple(sorted(found))


def _answer(
    question: Question, passage: Passage, numbers: Iterable[int], where: Iterable[Span]
) -> tuple[int, Span] | None:
    """The short answer inside the evidence; its words may have other markup there."""
    words = (question.answer or "").split()
    if not words or len(words) > 25:
        return None
    pattern = re.compile(r"[\s`*\\|]+".join(re.escape(word) for word in words))
    for low, high in where:
        found = pattern.search(passage.text, max(0, low - passage.start), max(0, high - passage.start))
        for number in numbers if found else ():
            unit = passage.units[number]
            if found and unit.start <= found.start() and found.end() <= unit.end:
                return number, (found.start() - unit.start, found.end() - unit.start)
    return None
