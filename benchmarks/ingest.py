"""python -m benchmarks.ingest [--documents N]: how fast ten-page PDFs are taken in, and where the time goes."""

import argparse
import asyncio
import hashlib
import io
import os
import random
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from reportlab.lib.pagesizes import A4
from reportlab.lib.styles import getSampleStyleSheet
from reportlab.platypus import PageBreak, Paragraph, SimpleDocTemplate

from anabranch.domain.contracts import Embedder
from anabranch.domain.model import Embedding
from anabranch.knowledge.index.manifest import Generations
from anabranch.knowledge.index.writer import IndexWriter
from anabranch.knowledge.ingest import Fetched, Indexer, Ingestion
from anabranch.knowledge.model import Caller, Chunking, Collection, CollectionSettings, NewDocument, Strategy
from anabranch.knowledge.parse import ParseLimits, Parsers
from anabranch.knowledge.records import collections, jobs
from anabranch.knowledge.records.database import Session, new_id
from anabranch.knowledge.records.sqlite import SqliteDatabase
from anabranch.models.calibration import MINILM
from anabranch.models.factory import LocalEmbedder
from anabranch.models.minilm import Vocabulary, read

PAGES = 10
WORDS_A_PAGE = 500
SWAPPED = 0.3
CHUNKING = ("Ruler", "_fixed", "_sentence", "_sections", "_turning", "_pieces")


class Text:
    """English sentences, no two alike: those of the model's calibration, with words that changed places."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        text = (files("anabranch.models") / "calibration.txt").read_text(encoding="utf-8")
        self._sentences = re.split(r"(?<=[.?!])\s+", text.strip())
        self._words: list[str] = re.findall(r"[a-z]{4,}", text)

    def page(self) -> list[str]:
        """Paragraphs."""
        paragraphs, count = [], 0
        while count < WORDS_A_PAGE:
            sentences = [self._sentence() for _ in range(self._chance.randint(3, 7))]
            count += sum(len(sentence.split()) for sentence in sentences)
            paragraphs.append(" ".join(sentences))
        return paragraphs

    def _sentence(self) -> str:
        words = self._chance.choice(self._sentences).split()
        return " ".join(self._swapped(word) for word in words)

    def _swapped(self, word: str) -> str:
        if not word.isalpha() or not word.islower() or len(word) < 4 or self._chance.random() > SWAPPED:
            return word
        return self._chance.choice(self._words)


def pdf(seed: int) -> bytes:
    text, style = Text(seed), getSampleStyleSheet()["BodyText"]
    style.fontSize, style.leading = 9, 11
    story: list[Any] = []
    for number in range(PAGES):
        story += [Paragraph(paragraph, style) for paragraph in text.page()]
        story += [PageBreak()] if number < PAGES - 1 else []
    target = io.BytesIO()
    SimpleDocTemplate(target, pagesize=A4, title=f"Document {seed}").build(story)
    return target.getvalue()


class Precomputed:
    """The model's own tokenizer, and vectors from nowhere: what ingestion takes besides the embedding."""

    name = "precomputed"
    dimensions = 384
    window = 254
    calibration = MINILM

    def __init__(self, folder: Path) -> None:
        self._vocabulary = Vocabulary(read(folder).tokenizer)

    def tokens(self, text: str) -> Sequence[tuple[int, int]]:
        return self._vocabulary.offsets(text)

    async def embed(self, texts: Sequence[str]) -> Sequence[Embedding]:
        return [self._made(text) for text in texts]

    def _made(self, text: str) -> Embedding:
        import numpy as np

        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        vector = np.random.default_rng(seed).standard_normal(self.dimensions, np.float32)
        vector /= np.linalg.norm(vector)
        return Embedding(vector=vector.tobytes(), tokens=bytes(48 * (len(text) // 9)))


class Stages:
    """CPU seconds by stage. Whatever runs in a thread is timed there; what nobody claims is the embedder's own."""

    def __init__(self) -> None:
        self.cpu_s: Counter[str] = Counter()
        self._inner = threading.local()

    def timed(self, stage: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """A stage that another one calls counts for itself only."""

        def run(*args: Any, **more: Any) -> Any:
            outer, self._inner.cpu_s = getattr(self._inner, "cpu_s", 0.0), 0.0
            began = time.thread_time()
            try:
                return work(*args, **more)
            finally:
                spent = time.thread_time() - began
                self.cpu_s[stage] += spent - self._inner.cpu_s
                self._inner.cpu_s = outer + spent

        return run

    @contextmanager
    def threads(self) -> Iterator[None]:
        """Chunking goes through `asyncio.to_thread`: there it is told from the rest."""
        plain = asyncio.to_thread

        async def told_apart(work: Any, /, *args: Any, **more: Any) -> Any:
            is_chunking = getattr(work, "__name__", "") in CHUNKING
            return await plain(self.timed("chunk", work) if is_chunking else work, *args, **more)

        asyncio.to_thread = told_apart
        try:
            yield
        finally:
            asyncio.to_thread = plain


class Measured(NamedTuple):
    documents: int
    chunks: int
    wall_s: float
    cpu_s: dict[str, float]


async def measured(documents: Sequence[bytes], strategy: Strategy, embedder: Embedder, folder: Path) -> Measured:
    """Everything as the indexer's process has it, but for the embedder and the clocks."""
    stages = Stages()
    database = SqliteDatabase.open(folder)
    database.writing = stages.timed("commit", database.writing)  # type: ignore[method-assign]
    if not isinstance(embedder, Precomputed):
        await embedder.embed(["warm"])
        assert isinstance(embedder, LocalEmbedder)
        vocabulary = embedder.loaded()._vocabulary
        vocabulary.ids = stages.timed("tokenise", Vocabulary.ids.__get__(vocabulary))  # type: ignore[method-assign]
        vocabulary.offsets = stages.timed("tokenise", Vocabulary.offsets.__get__(vocabulary))  # type: ignore[method-assign]
    else:
        embedder.tokens = stages.timed("tokenise", embedder.tokens)  # type: ignore[method-assign]
    writer = IndexWriter(database, Generations(folder / "index"), embedder.name)
    writer.fold = stages.timed("fold", writer.fold)  # type: ignore[method-assign]
    parsers = Parsers(ParseLimits())
    await parsers.parse(documents[0], "warm.pdf")
    ingestion = Ingestion(database, embedder, parsers.parse, _nowhere, _in_thread)
    indexer = Indexer(database, ingestion, writer, retention_days=30)
    collection = _collection(database, embedder.name)
    for begin in range(0, len(documents), 100):
        arrived = [
            NewDocument(source="file", data=data, filename=f"{new_id()}.pdf") for data in documents[begin:][:100]
        ]
        chunking = Chunking(strategy=strategy, size=embedder.window, overlap=50)
        database.writing(lambda db, a=arrived, c=chunking: jobs.create(db, collection, Caller(operator=True), a, c))
    stages.cpu_s.clear()
    parser = psutil.Process(parsers.pids[0])
    began, cpu, parsing, loop = time.monotonic(), time.process_time(), _cpu(parser), time.thread_time()
    with stages.threads():
        work = asyncio.create_task(indexer.run())
        while database.reading(jobs.waiting):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        await asyncio.to_thread(writer.fold)
        wall_s = time.monotonic() - began
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work
    spent = {"parse": _cpu(parser) - parsing, **stages.cpu_s, "the loop": time.thread_time() - loop}
    if not isinstance(embedder, Precomputed):
        spent["embed"] = time.process_time() - cpu - sum(spent.values()) + spent["parse"]
    chunks = database.reading(_counted)
    await parsers.close()
    database.close()
    return Measured(len(documents), chunks, wall_s, spent)


def _counted(db: Session) -> int:
    done = db.execute("SELECT count(*) FROM items WHERE status = 'completed'").fetchone()[0]
    assert done == db.execute("SELECT count(*) FROM items").fetchone()[0]
    return int(db.execute("SELECT count(*) FROM chunks").fetchone()[0])


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _collection(database: SqliteDatabase, embedder: str) -> Collection:
    settings = CollectionSettings(embedding_model=embedder)
    made = database.writing(lambda db: collections.create(db, owner="", name="all", description="", settings=settings))
    assert made is not None
    return made


async def _in_thread(work: Callable[..., Any], *args: Any) -> Any:
    return await asyncio.to_thread(work, *args)  # which `threads` replaces


async def _nowhere(url: str) -> Fetched:
    raise NotImplementedError(url)


def show(name: str, found: Measured) -> None:
    each = 1_000 / found.documents
    cpu = sum(found.cpu_s.values())
    print(
        f"{name}: {found.documents} documents, {found.chunks} chunks, {found.wall_s:.1f} s: "
        f"{found.documents / found.wall_s * 60:,.0f} documents a minute; {cpu * each:.0f} ms CPU each "
        f"({found.documents / cpu * 60:,.0f} a minute and core)"
    )
    for stage, seconds in sorted(found.cpu_s.items(), key=lambda one: -one[1]):
        print(f"    {stage:10} {seconds * each:8.1f} ms CPU a document")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--documents", type=int, default=60, help="for the embedding runs; five times as many without")
    options.add_argument("--threads", type=int, default=2, help="of the embedder")
    options.add_argument("--only", action="append", choices=["precomputed", "sentence", "semantic"])
    options.add_argument("--models", type=Path, default=Path.home() / ".cache/anabranch/models")
    given = options.parse_args()
    wanted = given.only or ["precomputed", "sentence", "semantic"]
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    many = given.documents * (5 if "precomputed" in wanted else 1)
    documents = [pdf(seed) for seed in range(many)]
    for name in wanted:
        with tempfile.TemporaryDirectory(prefix="anabranch-ingest-") as folder:
            if name == "precomputed":
                found = asyncio.run(measured(documents, "sentence", Precomputed(given.models), Path(folder)))
            else:
                embedder = LocalEmbedder(given.models, given.threads)
                strategy: Strategy = "semantic" if name == "semantic" else "sentence"
                found = asyncio.run(measured(documents[: given.documents], strategy, embedder, Path(folder)))
        show(name, found)
    print(f"load of the machine: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
