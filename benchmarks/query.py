"""python -m benchmarks.query [--chunks N] [--data DIR] [--docs DIR]: CPU and time of POST /v1/query, with and without
the evidence model. The chunks are made up; with --docs, questions are about documentation among them."""

import argparse
import asyncio
import json
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from anabranch.domain.model import Embedding
from anabranch.evidence.judge import MAX_S
from anabranch.knowledge.index.manifest import Generations
from anabranch.knowledge.index.writer import IndexWriter
from anabranch.knowledge.model import CollectionSettings, DocumentDraft, Permissions, Piece
from anabranch.knowledge.records import collections, documents
from anabranch.knowledge.records.database import Database, Session, new_id
from anabranch.knowledge.records.sqlite import NAME, SqliteDatabase
from anabranch.models.factory import LocalEmbedder
from anabranch.text.words import STOPWORDS
from benchmarks.room import Room, room
from benchmarks.search import data

SENTENCE = 14
ASKED_WORDS = 8
REHEARSAL = 20
BATCH = 16
STARTS = 3
QUESTIONS = Path(__file__).parent / "questions" / "validation.json"
WAYS = {"with evidence": {}, "without": {"AGGREGATOR_EVIDENCE": "off"}}


def sentences(text: str) -> str:
    """The made-up words as sentences, so that there is something to quote."""
    words = text.split()
    each = (" ".join(words[at : at + SENTENCE]).capitalize() for at in range(0, len(words), SENTENCE))
    return ". ".join(each) + "."


def chosen(count: int, chunks: int) -> list[int]:
    """The chunks that are asked about."""
    return [int(row) for row in np.random.default_rng(5).choice(chunks, count, replace=False)]


def question(text: str, seed: int) -> str:
    """Some neighbouring words of a chunk, as a question."""
    words = [word.strip(".").lower() for word in text.split()]
    words = [word for word in words if word not in STOPWORDS]
    begin = np.random.default_rng(seed).integers(0, max(1, len(words) - ASKED_WORDS))
    return f"what is {' '.join(words[begin : begin + ASKED_WORDS])}?"


def build(folder: Path, texts: list[str], corpus: data.Corpus, asked: list[int], embedder: LocalEmbedder) -> None:
    """Records in the folder, and an index."""
    with closing(SqliteDatabase.open(folder)) as database:
        fill(database, texts, corpus, asked, embedder)
        writer = IndexWriter(database, Generations(folder / "index"), embedder.name)
        writer.fold()
        writer.compact()


def made_up_document(number: int, collection: int, texts: Sequence[str], **metadata: str) -> DocumentDraft:
    """A public document of these chunks."""
    content = " ".join(texts)
    return DocumentDraft(
        id=new_id(),
        collection=collection,
        owner="",
        source="text",
        identity=str(number),
        filename=None,
        url=None,
        title=f"Document {number}",
        content=content,
        content_hash=str(number),
        recipe="made-up",
        metadata=metadata,
        permissions=Permissions(visibility="public"),
        day=738000,
        pages=None,
        size=len(content) + 1,
    )


def fill(database: Database, texts: list[str], corpus: data.Corpus, asked: list[int], embedder: LocalEmbedder) -> None:
    """Vectors and token bits are made up, except for the chunks that are asked about: those are the model's own. The
    chunks are added to the collection of the records, if there is one."""
    real = dict(zip(asked, asyncio.run(embedder.embed([texts[row] for row in asked])), strict=True))
    if not database.reading(collections.listed):
        own = CollectionSettings(embedding_model=embedder.name)
        database.writing(partial(collections.create, owner="", name="all", description="", settings=own))
    made = database.reading(collections.listed)[0]
    database.writing(lambda db: documents.require_embedder(db, embedder.name, embedder.dimensions))

    def insert(db: Session, number: int) -> None:
        rows = range(number * data.CHUNKS_PER_DOCUMENT, (number + 1) * data.CHUNKS_PER_DOCUMENT)
        ends = np.cumsum([len(texts[row]) + 1 for row in rows]).tolist()
        pieces = [
            Piece(start=end - 1 - len(texts[row]), end=end - 1, tokens=150) for row, end in zip(rows, ends, strict=True)
        ]
        embeddings = [
            real.get(row)
            or Embedding(vector=corpus.vectors[row].tobytes(), tokens=corpus.tokens[row % len(corpus.tokens)])
            for row in rows
        ]
        draft = made_up_document(number, made.key, [texts[row] for row in rows])
        documents.insert(db, draft, pieces, embeddings)

    def insert_all(db: Session, numbers: Iterable[int]) -> None:
        for number in numbers:
            insert(db, number)

    for begin in range(0, corpus.documents, BATCH):
        batch = range(begin, min(begin + BATCH, corpus.documents))
        database.writing(partial(insert_all, numbers=batch))


def measure(rooms: Mapping[str, Room], questions: Sequence[str]) -> None:
    """Each question once in every room in turn, so that no answer comes from a cache."""
    for text in questions[:REHEARSAL]:
        for asking in rooms.values():
            asking.ask(text)
    # The CPU time before each question: what a server does after its answer counts too.
    cpu: dict[str, list[float]] = {name: [] for name in rooms}
    walls: dict[str, list[float]] = {name: [] for name in rooms}
    refused = dict.fromkeys(rooms, 0)
    for text in questions[REHEARSAL:]:
        for name, asking in rooms.items():
            cpu[name].append(asking.cpu_s())
            began = time.perf_counter()
            refused[name] += asking.ask(text)["refused"]
            walls[name].append(time.perf_counter() - began)
    for name, asking in rooms.items():
        each = np.diff([*cpu[name], asking.cpu_s()]) * 1_000
        wall = np.array(walls[name]) * 1_000
        print(
            f"{name}, {len(wall)} questions: {each.mean():.1f} ms CPU each, {np.percentile(each, 90):.0f} ms (p90); "
            f"wall {np.percentile(wall, 50):.1f} ms (p50), {np.percentile(wall, 99):.1f} ms (p99), "
            f"{(wall > MAX_S * 1_000).sum()} over {MAX_S:.0f} s; "
            f"{refused[name]} refused; {asking.memory_mb():.0f} MB"
        )


def first_answer_s(folder: Path, models: Path, text: str, env: Mapping[str, str]) -> float:
    with room(folder, models, **env) as asking:
        began = time.perf_counter()
        asking.ask(text)
        return time.perf_counter() - began


def made_up(folder: Path, given: argparse.Namespace) -> list[str]:
    """Questions about made-up chunks; the chunks are built if the folder is empty."""
    corpus = data.corpus(given.chunks)
    texts = [sentences(text) for text in corpus.texts]
    asked = chosen(given.queries, given.chunks)
    if not (folder / NAME).is_file():
        build(folder, texts, corpus, asked, LocalEmbedder(given.models, 2))
    return [question(texts[row], row) for row in asked]


def documentation(folder: Path, given: argparse.Namespace) -> list[str]:
    """Questions to documentation; if the folder is empty, it becomes a copy of --docs with made-up chunks besides."""
    if not (folder / NAME).is_file():
        shutil.copytree(given.docs, folder, dirs_exist_ok=True)
        with closing(SqliteDatabase.open(folder)) as database:
            _, real = database.reading(documents.counts)
        corpus = data.corpus(given.chunks - real)
        build(folder, [sentences(text) for text in corpus.texts], corpus, [], LocalEmbedder(given.models, 2))
    texts = [row["question"] for row in json.loads(QUESTIONS.read_text(encoding="utf-8"))["questions"]]
    return [texts[row] for row in chosen(min(given.queries, len(texts)), len(texts))]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--chunks", type=int, default=100_000)
    options.add_argument("--queries", type=int, default=200)
    options.add_argument("--data", type=Path, help="a folder to keep what was built in, and to take it from")
    options.add_argument(
        "--docs", type=Path, help=f"a data folder with the documents of {QUESTIONS.name}, in one collection"
    )
    options.add_argument("--models", type=Path, default=Path.home() / ".cache/anabranch/models")
    given = options.parse_args()
    with TemporaryDirectory(prefix="anabranch-query-") as temporary:
        folder = given.data or Path(temporary)
        questions = (made_up if given.docs is None else documentation)(folder, given)
        print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        for _ in range(STARTS):
            first = {name: first_answer_s(folder, given.models, questions[0], env) for name, env in WAYS.items()}
            print("first answer after the start: " + ", ".join(f"{s:.2f} s {name}" for name, s in first.items()))
        with ExitStack() as served:
            rooms = {name: served.enter_context(room(folder, given.models, **env)) for name, env in WAYS.items()}
            measure(rooms, questions)
        print(f"load of the machine: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
