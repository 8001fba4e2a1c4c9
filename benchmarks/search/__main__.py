"""python -m benchmarks.search [--chunks N | --million] [--only ENGINE]…: one process per engine, asked in turns."""

import argparse
import asyncio
import json
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from anabranch.models.minilm import MiniLM, ModelMissing
from benchmarks.search import data
from benchmarks.search.engines import ENGINES, Group
from benchmarks.search.worker import LIMIT, answer, load

ROUNDS = 5
KINDS = ("dense", "keyword", "hybrid", "reranked")
RESULTS = Path(__file__).parent.parent / "results" / "search.json"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--chunks", type=int, default=100_000)
    options.add_argument("--million", action="store_true")
    options.add_argument("--queries", type=int, default=60)
    options.add_argument("--only", action="append", choices=list(ENGINES))
    given = options.parse_args()
    chunks = 1_000_000 if given.million else given.chunks
    report: dict[str, Any] = {"chunks": chunks, "queries": given.queries, "engines": {}}
    corpus = data.corpus(chunks)
    queries = data.queries(corpus, given.queries)
    with tempfile.TemporaryDirectory() as place:
        pipes: dict[str, Connection] = {}
        for name in given.only or list(ENGINES):  # one after the other, so that nobody's loading slows another's
            folder = Path(place) / name.replace(" ", "")
            folder.mkdir()
            report["engines"][name] = {"load": _loaded(name, chunks, folder)}
            pipes[name] = _answering(name, folder, queries, corpus)
        _ask(report, pipes, corpus, queries)
    report["embedding_cpu_ms"] = _embedding()
    _show(report)
    if not given.only and chunks >= 100_000:
        path = RESULTS.with_stem("search-million") if given.million else RESULTS
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _loaded(name: str, chunks: int, folder: Path) -> dict[str, float]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    loading = spawn.Process(target=load, args=(name, chunks, folder, theirs), daemon=True)
    loading.start()
    theirs.close()
    loaded: dict[str, float] = ours.recv()
    loading.join()
    rate = chunks / loaded["wall_s"]
    print(f"{name}: {rate:,.0f} chunks/s, {loaded['cpu_s']:.0f} s CPU, {loaded['disk'] / 1e6:,.0f} MB", flush=True)
    return {**loaded, "chunks_per_s": rate}


def _answering(name: str, folder: Path, queries: data.Queries, corpus: data.Corpus) -> Connection:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    spawn.Process(target=answer, args=(name, folder, queries, corpus.groups, theirs), daemon=True).start()
    theirs.close()
    return ours


def _ask(report: dict[str, Any], pipes: dict[str, Connection], corpus: data.Corpus, queries: data.Queries) -> None:
    groups: dict[str, Group] = {"all": None, **{share: (name, 3) for share, (name, _) in data.SHARES.items()}}
    for what in KINDS:
        for share, group in groups.items():
            _measure(report, pipes, what, share, group, len(queries.texts))
    for name, pipe in pipes.items():
        _summarise(report["engines"][name], corpus, queries, groups)
        pipe.send(None)
        report["engines"][name]["rss"] = pipe.recv()


def _measure(
    report: dict[str, Any], pipes: dict[str, Connection], what: str, share: str, group: Group, asked: int
) -> None:
    """In turns, some queries each, so that a noisy moment hits everybody."""
    each = asked // ROUNDS
    for begin in range(-each, asked, each):  # the first round is a rehearsal
        numbers = list(range(max(begin, 0), max(begin, 0) + each))
        for name, pipe in pipes.items():
            pipe.send((what, group, numbers))
            rows = pipe.recv()
            if begin >= 0 and rows[0] is not None:
                kept = report["engines"][name].setdefault(what, {}).setdefault(share, {"rows": []})
                kept["rows"] += list(zip(numbers, rows, strict=True))


def _summarise(engine: dict[str, Any], corpus: data.Corpus, queries: data.Queries, groups: dict[str, Group]) -> None:
    for what in KINDS:
        for share, measured in engine.get(what, {}).items():
            rows = measured.pop("rows")
            for at, clock in enumerate(("cpu", "wall")):
                times = [row[at] for _, row in rows]
                measured |= {f"{clock}_p{p}": round(float(np.percentile(times, p)), 3) for p in (50, 99)}
            if what == "dense":
                group = groups[share]
                allowed = None if group is None else corpus.groups[group[0]] == group[1]
                hits = [len(data.exact(corpus, queries.vectors[n], allowed, LIMIT) & set(row[2])) for n, row in rows]
                measured["recall_10"] = sum(hits) / (LIMIT * len(hits))


def _embedding() -> float | None:
    """What the query's own embedding costs, apart from everything above."""
    try:
        model = MiniLM(Path("~/.cache/anabranch/models").expanduser())
    except ModelMissing:
        return None

    async def run() -> float:
        texts = [f"What is the refund policy for product number {n}?" for n in range(50)]
        await model.embed(texts[:5])
        begun = time.process_time()
        for text in texts:
            await model.embed([text])
        return (time.process_time() - begun) / len(texts) * 1e3

    return asyncio.run(run())


def _show(report: dict[str, Any]) -> None:
    for what in KINDS:
        for name, engine in report["engines"].items():
            for share, m in engine.get(what, {}).items():
                recall = f"  recall@10 {m['recall_10']:.3f}" if "recall_10" in m else ""
                print(
                    f"{what:9} {share:5} {name:14} cpu p50 {m['cpu_p50']:7.2f}  p99 {m['cpu_p99']:7.2f}"
                    f"  wall p50 {m['wall_p50']:7.2f}  p99 {m['wall_p99']:7.2f} ms{recall}"
                )
    for name, engine in report["engines"].items():
        print(f"{name:14} memory {engine['rss'] / 1e6:,.0f} MB, disk {engine['load']['disk'] / 1e6:,.0f} MB")
    if report["embedding_cpu_ms"] is not None:
        print(f"the query's embedding: {report['embedding_cpu_ms']:.1f} ms CPU")


if __name__ == "__main__":
    main()
