"""One engine in processes of its own: one that loads, one that answers."""

import os
import resource
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.search import data
from benchmarks.search.engines import ENGINES, Groups

LIMIT = 10


def load(name: str, chunks: int, folder: Path, pipe: Connection) -> None:
    corpus = data.corpus(chunks)
    engine: Any = ENGINES[name]()
    wall, cpu = time.perf_counter(), time.process_time()
    engine.load(corpus, folder)
    pipe.send({"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu, "disk": _size(folder)})


def answer(name: str, folder: Path, queries: data.Queries, groups: Groups, pipe: Connection) -> None:
    """What the pipe asks, with CPU and wall time of each call."""
    os.environ["RUST_LOG"] = "error"  # LanceDB would tell of every deprecation, for every query
    engine: Any = ENGINES[name]()
    engine.open(folder, queries, groups)
    while (order := pipe.recv()) is not None:
        what, group, numbers = order
        call = getattr(engine, what, None)
        rows: list[Any] = []
        for number in numbers:
            wall, cpu = time.perf_counter(), time.process_time()
            found = call(number, LIMIT, group) if call else None
            took = (time.process_time() - cpu) * 1e3, (time.perf_counter() - wall) * 1e3
            rows.append(None if found is None else (*took, list(found)))
        pipe.send(rows)
    pipe.send(_rss())


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _rss() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()
