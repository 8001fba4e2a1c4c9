"""Where the guard's threshold belongs: how similar what is found is to questions that it answers, and to others."""

import argparse
import asyncio
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from anabranch.app.indexer import indexer
from anabranch.configuration.settings import Settings, load
from anabranch.domain.model import QUERY, Filters, Passage, Query, SourceReply, Status
from anabranch.entrypoints.cli.resources import OPERATOR, knowledge
from anabranch.knowledge.evaluate import read
from anabranch.knowledge.knowledge import Knowledge
from anabranch.knowledge.model import NewDocument
from anabranch.models.extractive import SUPPORTED
from anabranch.pipeline.ground import BEST, similarity
from anabranch.pipeline.merge import merge
from anabranch.text.support import support

TOP_K = 5
# The first so many of each collection; each of them is a tag on most documents.
QUESTIONS = 100
BATCH = 500
KINDS = ("answerable", "answer removed", "foreign")


class Asked(NamedTuple):
    """A question, and which documents answer it."""

    text: str
    carrying: frozenset[str]


class Corpus(NamedTuple):
    """Documents (title and text) by name, and the questions that belong to them."""

    name: str
    documents: Mapping[str, tuple[str, str]]
    questions: Sequence[Asked]


def corpus(folder: Path) -> Corpus:
    """HotpotQA's form (questions.json) or BEIR's."""
    if (folder / "questions.json").is_file():
        rows = json.loads((folder / "questions.json").read_text(encoding="utf-8"))
        paragraphs = {title: "".join(sentences) for row in rows for title, sentences in row["context"]}
        return Corpus(
            folder.name,
            {title: (title, text) for title, text in paragraphs.items() if text.strip()},
            [
                Asked(row["question"], frozenset(title for title, _ in row["supporting_facts"]))
                for row in rows[:QUESTIONS]
            ],
        )
    dataset = read(folder)
    judged = {
        query: frozenset(name for name, grade in grades.items() if grade > 0)
        for query, grades in dataset.judged.items()
    }
    questions = [Asked(text, judged[query]) for query, text in dataset.queries.items() if judged.get(query)]
    return Corpus(folder.name, dataset.documents, questions[:QUESTIONS])


async def take_in(room: Knowledge, settings: Settings, corpora: Sequence[Corpus]) -> None:
    """Each into a collection of its own; a tag says of each question that a document does not answer it."""
    for one in corpora:
        await room.create_collection(OPERATOR, one.name)
        documents = [
            NewDocument(
                source="text",
                data=text.encode(),
                title=title or None,
                identity=name,
                metadata={
                    "tags": [_without(at) for at, asked in enumerate(one.questions) if name not in asked.carrying]
                },
            )
            for name, (title, text) in one.documents.items()
            if text.strip()
        ]
        for at in range(0, len(documents), BATCH):
            await room.ingest(OPERATOR, one.name, documents[at : at + BATCH])
    async with indexer(settings) as taking:
        await taking.drain()


async def found(
    room: Knowledge, text: str, collection: str, weight: float | None, without: int | None = None
) -> tuple[Passage, ...]:
    """What an answer would be built on; `without` leaves out what answers the question of that number."""
    tags = () if without is None else (_without(without),)
    filters = Filters(collections=(collection,), tags=tags)
    query = Query(text=text, limit=TOP_K, similarity_threshold=0.0, filters=filters, diversity=weight)
    passages = tuple(await room.search(query, OPERATOR))
    return merge([SourceReply(path=collection, status=Status.SUCCESS, passages=passages)], QUERY)


def _without(question: int) -> str:
    return f"without-{question}"


class Case(NamedTuple):
    """A question asked of a collection, and what became of it."""

    similarity: float
    abstains: bool
    of_use: float


class Row(NamedTuple):
    """One line of the table: whose questions, asked of what."""

    kind: str
    asking: str
    holding: str
    cases: Sequence[Case]


async def measured(room: Knowledge, corpora: Sequence[Corpus], weight: float | None) -> list[Row]:
    rows: list[Row] = []
    for asking, holding in itertools.product(corpora, corpora):
        kinds = ("answerable", "answer removed") if asking is holding else ("foreign",)
        for kind in kinds:
            cases = [
                await _case(room, asked.text, holding.name, weight, at, removed=kind == "answer removed")
                for at, asked in enumerate(asking.questions)
            ]
            rows.append(Row(kind, asking.name, holding.name, cases))
    return sorted(rows, key=lambda row: KINDS.index(row.kind))


async def _case(room: Knowledge, text: str, collection: str, weight: float | None, at: int, *, removed: bool) -> Case:
    passages = await found(room, text, collection, weight, at if removed else None)
    right = [one for one in passages if one.place and _without(at) not in one.place.metadata.get("tags", ())]
    return Case(similarity(passages) if passages else 0.0, support(text, passages) < SUPPORTED, len(right) / TOP_K)


def show(console: Console, rows: Sequence[Row], threshold: float, weight: float | None) -> None:
    how = "without variety" if weight is None else f"with variety, λ = {weight}"
    table = Table(title=f"The mean similarity of the best {BEST} of {TOP_K}, {how}", title_justify="left")
    for heading in (
        "questions",
        "of",
        "to",
        "number",
        "10%",
        "median",
        "90%",
        f"< {threshold}",
        "or abstains",
        "of use",
    ):
        table.add_column(heading, justify="left" if heading in ("questions", "of", "to") else "right")
    for row in rows:
        means = np.array([case.similarity for case in row.cases])
        weak = means < threshold
        refused = weak | np.array([case.abstains for case in row.cases])
        of_use = np.mean([case.of_use for case in row.cases])
        table.add_row(
            row.kind,
            row.asking,
            row.holding,
            str(len(means)),
            *(f"{value:.2f}" for value in np.quantile(means, (0.1, 0.5, 0.9))),
            f"{weak.mean():.0%}",
            f"{refused.mean():.0%}",
            f"{of_use:.0%}" if row.kind == "answerable" else "",
        )
    console.print(table)
    own = np.array([case.similarity for row in rows if row.kind == "answerable" for case in row.cases])
    console.print(f"One answerable question in ten is below {np.quantile(own, 0.1):.2f}.\n")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--data", type=Path, required=True, help="a folder of test collections, each in HotpotQA's or BEIR's form"
    )
    parser.add_argument("--threshold", type=float, default=0.55)
    parser.add_argument("--variety", type=float, default=0.5, help="the λ of maximal marginal relevance")
    told = parser.parse_args()
    corpora = [corpus(folder) for folder in sorted(told.data.iterdir()) if folder.is_dir()]
    console = Console(highlight=False, width=120)
    with TemporaryDirectory(prefix="anabranch-guardrail-") as folder:
        # With the embedder that the environment names, for its scale is what is measured.
        settings = msgspec.structs.replace(load(), data_dir=folder, log_level="ERROR")
        async with knowledge(settings) as room:
            await take_in(room, settings, corpora)
            for weight in (None, told.variety):
                show(console, await measured(room, corpora, weight), told.threshold, weight)


if __name__ == "__main__":
    asyncio.run(main())
