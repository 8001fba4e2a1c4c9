"""`anabranch eval`: nDCG, recall and MRR of each search stage, as a table, JSON and an SVG bar chart; and the
calibration of the embedder."""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import click
import msgspec

from anabranch.configuration.settings import Settings
from anabranch.domain.contracts import Embedder
from anabranch.domain.errors import AnabranchError, ConfigurationError
from anabranch.entrypoints.cli.options import chunking_given, chunking_options, json_option, settings_option
from anabranch.entrypoints.cli.resources import OPERATOR, embedding, index_of, knowledge, records, require_model
from anabranch.entrypoints.cli.terminal import Advance, counted, flat, notes, output, print_json, print_table, progress
from anabranch.knowledge.calibrate import RelevanceFit, TopicFit, fit_relevance, fit_topics
from anabranch.knowledge.evaluate import STAGES, Dataset, Measures, Stage, evaluate, read
from anabranch.knowledge.knowledge import Knowledge
from anabranch.knowledge.model import Chunking, NewDocument

NAMES = {"ndcg_10": "nDCG@10", "recall_10": "Recall@10", "recall_100": "Recall@100", "mrr_10": "MRR@10"}
COLOURS = ("#9aa5b1", "#5b8def", "#2bb3a3", "#e2725b")
LEFT, TOP, HEIGHT, BAR, GAP = 50, 60, 220, 26, 30


def chart(title: str, measured: Mapping[Stage, Measures]) -> str:
    """An SVG bar chart: one group per measure, one bar per stage."""
    group = BAR * len(measured) + GAP
    width = LEFT + group * len(NAMES) + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {TOP + HEIGHT + 60}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="{LEFT}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for line in range(6):
        y = TOP + HEIGHT * (1 - line / 5)
        parts += [
            f'<line x1="{LEFT}" y1="{y:.1f}" x2="{width - GAP}" y2="{y:.1f}" stroke="#e5e7eb"/>',
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#555">{line / 5:.1f}</text>',
        ]
    for number, (field, name) in enumerate(NAMES.items()):
        begin = LEFT + GAP / 2 + group * number
        for at, measures in enumerate(measured.values()):
            parts += _bar(begin + BAR * at, float(getattr(measures, field)), COLOURS[at % len(COLOURS)])
        middle = begin + BAR * len(measured) / 2
        parts.append(f'<text x="{middle:.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{name}</text>')
    for at, stage in enumerate(measured):
        x = LEFT + 90 * at
        parts += [
            f'<rect x="{x}" y="{TOP + HEIGHT + 34}" width="12" height="12" fill="{COLOURS[at % 4]}"/>',
            f'<text x="{x + 18}" y="{TOP + HEIGHT + 44}">{stage}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def _bar(x: float, value: float, colour: str) -> list[str]:
    y = TOP + HEIGHT * (1 - value)
    return [
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{BAR - 3}" height="{HEIGHT * value:.1f}" fill="{colour}"/>',
        f'<text x="{x + (BAR - 3) / 2:.1f}" y="{y - 4:.1f}" text-anchor="middle" font-size="9">{value:.2f}</text>',
    ]


BATCH = 500
POLL_S = 0.2


@click.group("eval")
def group() -> None:
    """Evaluate the search."""


dataset_option = click.option(
    "--dataset",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="A folder in BEIR's layout: corpus.jsonl, queries.jsonl, qrels.tsv.",
)


@group.command()
@dataset_option
@json_option
@settings_option
def calibration(dataset: Path, as_json: bool, settings: Settings) -> None:
    """Fit the relevance score and the topic threshold to the configured embedder, and print them as settings.

    The documents are ingested into a temporary folder. Use documents like your own: at least 30 questions with judged
    documents, and documents of several sentences.
    """
    require_model(settings)
    test = read(dataset)
    with tempfile.TemporaryDirectory(prefix="anabranch-eval-") as folder:
        temporary = msgspec.structs.replace(settings, data_dir=folder, log_level="ERROR")
        relevance, topics = asyncio.run(_calibrate(temporary, test))
    if as_json:
        print_json({"dataset": test.name, "relevance": relevance, "topics": topics})
        return
    curve = relevance.curve
    console = output()
    console.print(f"AGGREGATOR_EMBEDDING_RELEVANCE={curve.near},{curve.shared},{curve.bias}")
    console.print(f"AGGREGATOR_EMBEDDING_TOPIC_THRESHOLD={topics.threshold}")
    notes().print(
        f"0.5 keeps {relevance.kept:.0%} of the relevant passages and {relevance.others_kept:.0%} of the others; "
        f"topic changes are found with F1 {topics.f1:.2f}."
    )


async def _calibrate(settings: Settings, test: Dataset) -> tuple[RelevanceFit, TopicFit]:
    from anabranch.knowledge.index.reader import IndexReader  # noqa: PLC0415

    async with _ingested(settings, test, Chunking(strategy="sentence")) as (_, embedder):
        with progress("Searching", unit="queries") as advance, records(settings) as database:
            reader = IndexReader(index_of(settings))
            relevance = await fit_relevance(database, reader, embedder, test, advance)
        with progress("Comparing topics", unit="texts") as advance:
            return relevance, await fit_topics(embedder, test, advance)


@asynccontextmanager
async def _ingested(settings: Settings, test: Dataset, cut: Chunking) -> AsyncIterator[tuple[Knowledge, Embedder]]:
    """The test collection, ingested."""
    async with (
        knowledge(settings) as opened,
        embedding(settings, threads=settings.embedding_threads) as embedder,
    ):
        await opened.create_collection(OPERATOR, "test", chunking=cut)
        with progress(f"Ingesting {flat(test.name)}", unit="documents") as advance:
            await _ingest(opened, settings, test, advance)
        yield opened, embedder


@group.command()
@dataset_option
@click.option("--stages", default=",".join(STAGES), show_default=True, help="Search stages to measure.")
@chunking_options
@click.option(
    "--output",
    "into",
    type=click.Path(file_okay=False, path_type=Path),
    help="A folder for results.json and results.svg.",
)
@json_option
@settings_option
def retrieval(
    dataset: Path,
    stages: str,
    chunking: str | None,
    chunk_size: int | None,
    overlap: int | None,
    into: Path | None,
    as_json: bool,
    settings: Settings,
) -> None:
    """Measure how well each stage of the search ranks a test collection.

    The documents are ingested into a temporary folder, with the configured embedder.
    """
    named = [stage.strip() for stage in stages.split(",") if stage.strip()]
    if not named or not set(named) <= set(STAGES):
        raise click.UsageError(f"--stages takes a comma-separated list of {', '.join(STAGES)}.")
    require_model(settings)
    test = read(dataset)
    if into is not None:
        with _writing(into, "created"):  # before the work, so that it is not lost
            into.mkdir(parents=True, exist_ok=True)
    cut = msgspec.structs.replace(Chunking(), **chunking_given(chunking, chunk_size, overlap))
    with tempfile.TemporaryDirectory(prefix="anabranch-eval-") as folder:
        temporary = msgspec.structs.replace(settings, data_dir=folder, log_level="ERROR")
        results = asyncio.run(_evaluate(temporary, test, [stage for stage in STAGES if stage in named], cut))
    if into is not None:
        cut = results["chunking"]
        title = f"{results['dataset']}: {results['embedder']}, {cut.strategy} chunks of {cut.size}"
        with _writing(into, "written to"):
            (into / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n")
            (into / "results.svg").write_text(chart(title, results["stages"]), encoding="utf-8")
    if as_json:
        print_json(results)
    else:
        _show(results)


async def _evaluate(settings: Settings, test: Dataset, stages: Sequence[Stage], cut: Chunking) -> dict[str, Any]:
    """The measures and what they were taken on, as `--json` and results.json have them."""
    from anabranch.knowledge.index.reader import IndexReader  # noqa: PLC0415  numpy loads only where it is needed

    begin = time.perf_counter()
    async with _ingested(settings, test, cut) as (opened, embedder):
        ingested = time.perf_counter()
        with progress("Searching", unit="queries") as advance, records(settings) as database:
            measured = await evaluate(database, IndexReader(index_of(settings)), embedder, test, stages, advance)
        counts = await opened.collection(OPERATOR, "test")
        return {
            "dataset": test.name,
            "embedder": embedder.name,
            "chunking": counts.collection.settings.chunking,
            "documents": counts.documents,
            "chunks": counts.chunks,
            "queries": max((measures.queries for measures in measured.values()), default=0),
            "ingest_s": round(ingested - begin, 1),
            "ask_s": round(time.perf_counter() - ingested, 1),
            "stages": measured,
        }


async def _ingest(opened: Knowledge, settings: Settings, test: Dataset, advance: Advance) -> None:
    from anabranch.app.indexer import indexer  # noqa: PLC0415

    documents = [
        NewDocument(source="text", data=f"{title}\n\n{text}".encode(), title=title or None, identity=identity)
        for identity, (title, text) in test.documents.items()
        if (title + text).strip()
    ]
    if not documents:
        raise ConfigurationError(f"There is no document with text in {test.name}.")
    accepted = [
        await opened.ingest(OPERATOR, "test", documents[at : at + BATCH]) for at in range(0, len(documents), BATCH)
    ]

    async def report_progress() -> None:
        while True:
            advance(len(documents) - await opened.waiting(), len(documents))
            await asyncio.sleep(POLL_S)

    async with indexer(settings) as indexing:
        reporting = asyncio.create_task(report_progress())
        try:
            await indexing.drain()
        finally:
            reporting.cancel()
    items = [item for job in accepted for item in (await opened.job(OPERATOR, job)).items]
    failed = [item for item in items if item.status == "failed"]
    if failed:
        notes().print(f"{counted(len(failed), 'document')} failed; the first: {flat(failed[0].error or '')}")
    if len(failed) == len(items):
        raise AnabranchError("No document of the dataset could be ingested.")


@contextmanager
def _writing(folder: Path, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"--output: {folder} cannot be {what} ({error.strerror}).") from None


def _show(results: Mapping[str, Any]) -> None:
    print_table(
        ("stage", *NAMES.values()),
        [(stage, *(f"{getattr(one, field):.3f}" for field in NAMES)) for stage, one in results["stages"].items()],
    )
    cut = results["chunking"]
    output().print(
        f"{results['dataset']}: {counted(results['documents'], 'document')} in {counted(results['chunks'], 'chunk')} "
        f"({cut.strategy}, {cut.size}) ingested in {results['ingest_s']:.0f} s, {results['queries']:,} queries in "
        f"{results['ask_s']:.0f} s, {results['embedder']}"
    )
