"""python -m benchmarks.query [--chunks N] [--data DIR]: CPU and time of POST /v1/query of a served process."""

import argparse
import asyncio
import os
import sqlite3
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from anabranch.domain.model import Embedding
from anabranch.knowledge.index.reader import Generations
from anabranch.knowledge.index.writer import IndexWriter
from anabranch.knowledge.model import CollectionSettings, DocumentDraft, Permissions, Piece
from anabranch.knowledge.records import collections, documents
from anabranch.knowledge.records.database import NAME, Database, new_id
from anabranch.models.factory import LocalEmbedder
from anabranch.text.words import STOPWORDS
from benchmarks.room import Room, room
from benchmarks.search import data

SENTENCE = 14
ASKED_WORDS = 8
REHEARSAL = 20
BATCH = 16


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
    """Vectors and token bits are made up, except for the chunks that are asked about: those are the model's own."""
    real = dict(zip(asked, asyncio.run(embedder.embed([texts[row] for row in asked])), strict=True))
    database = Database.open(folder)
    made = database.writing(
        lambda db: collections.create(
            db, owner="", name="all", description="", settings=CollectionSettings(embedding_model=embedder.name)
        )
    )
    assert made is not None
    database.writing(lambda db: documents.require_embedder(db, embedder.name, embedder.dimensions))

    def insert(db: sqlite3.Connection, number: int) -> None:
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
        draft = DocumentDraft(
            id=new_id(),
            collection=made.key,
            owner="",
            source="text",
            identity=str(number),
            filename=None,
            url=None,
            title=f"Document {number}",
            content=" ".join(texts[row] for row in rows),
            content_hash=str(number),
            recipe="made-up",
            metadata={},
            permissions=Permissions(),
            day=738000,
            pages=None,
            size=ends[-1],
        )
        documents.insert(db, draft, pieces, embeddings)

    def insert_all(db: sqlite3.Connection, numbers: Iterable[int]) -> None:
        for number in numbers:
            insert(db, number)

    for begin in range(0, corpus.documents, BATCH):
        batch = range(begin, min(begin + BATCH, corpus.documents))
        database.writing(partial(insert_all, numbers=batch))
    writer = IndexWriter(database, Generations(folder / "index"), embedder.name)
    writer.fold()
    writer.compact()
    database.close()


def measure(asking: Room, questions: list[str]) -> None:
    for text in questions[:REHEARSAL]:
        asking.ask(text)
    walls: list[float] = []
    refused = 0
    cpu = asking.cpu_s()
    for text in questions:
        began = time.perf_counter()
        refused += asking.ask(text)["refused"]
        walls.append((time.perf_counter() - began) * 1_000)
    cpu_ms = (asking.cpu_s() - cpu) * 1_000 / len(questions)
    print(
        f"POST /v1/query, {len(questions)} questions: {cpu_ms:.1f} ms CPU each; "
        f"{np.percentile(walls, 50):.1f} ms (p50), {np.percentile(walls, 99):.1f} ms (p99); {refused} refused"
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--chunks", type=int, default=100_000)
    options.add_argument("--queries", type=int, default=200)
    options.add_argument("--data", type=Path, help="a folder to keep what was built in, and to take it from")
    options.add_argument("--models", type=Path, default=Path.home() / ".cache/anabranch/models")
    given = options.parse_args()
    with TemporaryDirectory(prefix="anabranch-query-") as temporary:
        folder = given.data or Path(temporary)
        corpus = data.corpus(given.chunks)
        texts = [sentences(text) for text in corpus.texts]
        asked = chosen(given.queries, given.chunks)
        if not (folder / NAME).is_file():
            began = time.monotonic()
            build(folder, texts, corpus, asked, LocalEmbedder(given.models, 2))
            print(f"{given.chunks:,} chunks in {time.monotonic() - began:.0f} s")
        questions = [question(texts[row], row) for row in asked]
        del corpus, texts
        print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        with room(folder, given.models) as asking:
            measure(asking, questions)
        print(f"load of the machine: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
