"""`anabranch eval`: nDCG, recall and MRR of each search stage, as a table, JSON and an SVG bar chart; the calibration
of the embedder; and the evaluation of answers."""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import click
import msgspec

from anabranch.app.startup import outbound_for
from anabranch.configuration.settings import Settings
from anabranch.domain.contracts import Embedder
from anabranch.entrypoints.cli.answer_evaluation import answers
from anabranch.entrypoints.cli.bar_chart import bar_chart
from anabranch.entrypoints.cli.evaluation_documents import COLLECTION, ingested, text_document, writing
from anabranch.entrypoints.cli.options import chunking_given, chunking_options, json_option, settings_option
from anabranch.entrypoints.cli.resources import OPERATOR, embedding, records, require_model
from anabranch.entrypoints.cli.terminal import counted, notes, output, print_json, print_table, progress
from anabranch.knowledge.calibrate import RelevanceFit, TopicFit, fit_relevance, fit_topics
from anabranch.knowledge.evaluate import STAGES, Dataset, Measures, Stage, evaluate, read
from anabranch.knowledge.knowledge import Knowledge
from anabranch.knowledge.model import Chunking

NAMES = {"ndcg_10": "nDCG@10", "recall_10": "Recall@10", "recall_100": "Recall@100", "mrr_10": "MRR@10"}


@click.group("eval")
def group() -> None:
    """Evaluate the search and the answers."""


group.add_command(answers)

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
        temporary = msgspec.structs.replace(
            settings, data_dir=folder, database_url=None, index_url=None, log_level="ERROR"
        )
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
    from anabranch.app.search_index import open_index  # noqa: PLC0415  numpy loads only where it is needed

    async with _ingested(settings, test, Chunking(strategy="sentence")) as (_, embedder), outbound_for(settings) as out:
        with progress("Searching", unit="queries") as advance, records(settings) as database:
            index = open_index(settings, out, embedder.name)
            relevance = await fit_relevance(database, index, embedder, test, advance)
        with progress("Comparing topics", unit="texts") as advance:
            return relevance, await fit_topics(embedder, test, advance)


@asynccontextmanager
async def _ingested(settings: Settings, test: Dataset, cut: Chunking) -> AsyncIterator[tuple[Knowledge, Embedder]]:
    """The test collection, ingested."""
    documents = [text_document(identity, *texts) for identity, texts in test.documents.items()]
    async with (
        ingested(settings, test.name, documents, cut) as (opened, _),
        embedding(settings, threads=settings.embedding_threads) as embedder,
    ):
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
        with writing(into, "created"):  # before the work, so that it is not lost
            into.mkdir(parents=True, exist_ok=True)
    cut = msgspec.structs.replace(Chunking(), **chunking_given(chunking, chunk_size, overlap))
    with tempfile.TemporaryDirectory(prefix="anabranch-eval-") as folder:
        temporary = msgspec.structs.replace(
            settings, data_dir=folder, database_url=None, index_url=None, log_level="ERROR"
        )
        results = asyncio.run(_evaluate(temporary, test, [stage for stage in STAGES if stage in named], cut))
    if into is not None:
        cut = results["chunking"]
        title = f"{results['dataset']}: {results['embedder']}, {cut.strategy} chunks of {cut.size}"
        with writing(into, "written to"):
            (into / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n")
            (into / "results.svg").write_text(_chart(title, results["stages"]), encoding="utf-8")
    if as_json:
        print_json(results)
    else:
        _show(results)


async def _evaluate(settings: Settings, test: Dataset, stages: Sequence[Stage], cut: Chunking) -> dict[str, Any]:
    """The measures and what they were taken on, as `--json` and results.json have them."""
    from anabranch.app.search_index import open_index  # noqa: PLC0415  numpy loads only where it is needed

    begin = time.perf_counter()
    async with _ingested(settings, test, cut) as (opened, embedder), outbound_for(settings) as out:
        ingested = time.perf_counter()
        with progress("Searching", unit="queries") as advance, records(settings) as database:
            index = open_index(settings, out, embedder.name)
            measured = await evaluate(database, index, embedder, test, stages, advance)
        counts = await opened.collection(OPERATOR, COLLECTION)
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


def _chart(title: str, measured: Mapping[Stage, Measures]) -> str:
    series = {str(stage): [float(getattr(one, field)) for field in NAMES] for stage, one in measured.items()}
    return bar_chart(title, list(NAMES.values()), series)


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
