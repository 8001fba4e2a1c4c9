"""python -m benchmarks.sizes --database URL [--cluster URL --index URL] [--chunks N] [--nodes N]: the same made-up
chunks and questions with records in a SQLite file, in an empty PostgreSQL database, and in another one with an index in
OpenSearch, in one run: CPU and time of POST /v1/query, and what is stored."""

import argparse
import json
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from anabranch.app.search_index import index_writer
from anabranch.configuration.settings import Settings
from anabranch.knowledge.records.postgres import PostgresDatabase
from anabranch.models.factory import LocalEmbedder
from benchmarks.query import REHEARSAL, build, chosen, fill, question, sentences
from benchmarks.room import Room, room
from benchmarks.search import data

RESULT = Path(__file__).parent / "results" / "sizes.json"
PATIENCE_S = 900.0


def nodes(served: ExitStack, folder: Path, models: Path, count: int, **env: str) -> list[Room]:
    """Nodes with data folders of their own, each with a complete index."""
    started = [served.enter_context(room(folder / f"{number}", models, **env)) for number in range(count)]
    for number in range(count):
        wait_for_index(folder / f"{number}")
    return started


def wait_for_index(folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not (folder / "index" / "CURRENT").exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no index in {folder}")
        time.sleep(0.2)


def measured(rooms: dict[str, list[Room]], questions: Sequence[str]) -> dict[str, Any]:
    """Each question once in every size in turn; in a size of several nodes, each question goes to the next node."""
    took: dict[str, list[float]] = {name: [] for name in rooms}
    rehearsed = REHEARSAL * max(map(len, rooms.values()))
    before: dict[str, float] = {}
    for number, text in enumerate(questions):
        if number == rehearsed:
            before = {name: sum(one.cpu_s() for one in several) for name, several in rooms.items()}
            took = {name: [] for name in rooms}
        for name, several in rooms.items():
            began = time.perf_counter()
            several[number % len(several)].ask(text, top_k=10)
            took[name].append((time.perf_counter() - began) * 1_000)
    after = {name: sum(one.cpu_s() for one in several) for name, several in rooms.items()}
    return {
        name: {
            "nodes": len(several),
            "cpu_ms": round(1_000 * (after[name] - before[name]) / (len(questions) - rehearsed), 2),
            "p50_ms": round(float(np.percentile(took[name], 50)), 2),
            "p99_ms": round(float(np.percentile(took[name], 99)), 2),
            "memory_mb": [round(one.memory_mb()) for one in several],
        }
        for name, several in rooms.items()
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--database", required=True, help="the address of an empty PostgreSQL database")
    options.add_argument("--cluster", help="the address of another one, for the cluster size")
    options.add_argument("--index", help="the address of OpenSearch with a name, for the cluster size")
    options.add_argument("--chunks", type=int, default=100_000)
    options.add_argument("--queries", type=int, default=300)
    options.add_argument("--nodes", type=int, default=3)
    options.add_argument("--keep", action="store_true", help="write the figures to benchmarks/results")
    options.add_argument("--models", type=Path, default=Path.home() / ".cache/anabranch/models")
    given = options.parse_args()
    corpus = data.corpus(given.chunks)
    texts, asked = [sentences(text) for text in corpus.texts], chosen(given.queries, given.chunks)
    embedder = LocalEmbedder(given.models, 2)
    with TemporaryDirectory(prefix="anabranch-sizes-") as temporary, ExitStack() as served:
        folder = Path(temporary)
        began = time.perf_counter()
        build(folder / "embedded", texts, corpus, asked, embedder)
        built = {"embedded": time.perf_counter() - began}
        began = time.perf_counter()
        with closing(PostgresDatabase.open(given.database)) as database:
            fill(database, texts, corpus, asked, embedder)
            built["replicated"] = time.perf_counter() - began
            size = database.reading(lambda db: db.size())
        if given.cluster:
            began = time.perf_counter()
            with closing(PostgresDatabase.open(given.cluster)) as database:
                fill(database, texts, corpus, asked, embedder)
                settings = Settings(database_url=given.cluster, index_url=given.index, index_replicas=0)
                with index_writer(settings, database, embedder.name) as writer:
                    writer.rebuild(lambda _done, _total: None)
            built["cluster"] = time.perf_counter() - began
        # The evidence model costs the same in every size, and more than all that is compared here.
        env = {"AGGREGATOR_EVIDENCE": "off"}
        postgres = {**env, "AGGREGATOR_DATABASE_URL": given.database}
        rooms = {
            "embedded": [served.enter_context(room(folder / "embedded", given.models, **env))],
            "replicated": nodes(served, folder / "one", given.models, 1, **postgres),
            f"replicated, {given.nodes} nodes": nodes(
                served, folder / "several", given.models, given.nodes, **postgres
            ),
        }
        if given.cluster:
            env |= {"AGGREGATOR_DATABASE_URL": given.cluster, "AGGREGATOR_INDEX_URL": given.index}
            rooms["cluster"] = [served.enter_context(room(folder / "cluster", given.models, **env))]
        found = measured(rooms, [question(texts[row], row) for row in asked])
        sqlite = sum(file.stat().st_size for file in (folder / "embedded").glob("records.sqlite*"))
        index = sum(file.stat().st_size for file in (folder / "embedded" / "index").rglob("*") if file.is_file())
    result = {
        "chunks": given.chunks,
        "chunks_per_s": {name: round(given.chunks / seconds) for name, seconds in built.items()},
        "records_mb": {"embedded": round(sqlite / 1e6), "replicated": round(size / 1e6)},
        "index_mb": round(index / 1e6),
        "questions": found,
        "load": round(os.getloadavg()[0], 1),
    }
    print(json.dumps(result, indent=2))
    if given.keep:
        RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
