"""`anabranch search`: ranked passages with their position, their scores and an excerpt."""

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, get_args

import click
import msgspec
from rich.padding import Padding
from rich.text import Text

from anabranch.configuration.settings import Settings
from anabranch.domain.model import NEAR_DUPLICATES, ChunkType, Filters, Passage, Query, Scores
from anabranch.entrypoints.cli.options import day, json_option, pairs, settings_option
from anabranch.entrypoints.cli.resources import OPERATOR, knowledge, require_model, require_records
from anabranch.entrypoints.cli.terminal import flat, joined, notes, output, place_of, print_json
from anabranch.knowledge.model import PARTIAL

if TYPE_CHECKING:  # it loads numpy
    from anabranch.knowledge.search import SearchHits

EXCERPT = 220
MAX_COPIES = 5


@click.command("search")
@click.argument("query")
@click.option(
    "-c", "--collection", "collections", multiple=True, help="Search only this collection; repeatable [default: all]."
)
@click.option("-k", "limit", type=click.IntRange(1, 1000), default=10, show_default=True, help="Number of passages.")
@click.option("--tag", "tags", multiple=True, help="Only documents with this tag; repeatable.")
@click.option("--meta", multiple=True, callback=pairs, metavar="KEY=VALUE", help="Only documents with this metadata.")
@click.option(
    "--type",
    "chunk_types",
    multiple=True,
    type=click.Choice(get_args(ChunkType)),
    help="Only passages of this type; repeatable.",
)
@click.option("--since", callback=day, metavar="DATE", help="Only documents dated on or after this day.")
@click.option("--until", callback=day, metavar="DATE", help="Only documents dated on or before this day.")
@click.option("--no-rerank", is_flag=True, help="Skip reranking: order by dense and keyword search only.")
@click.option("--explain", is_flag=True, help="Show all scores of each passage, and timings.")
@json_option
@settings_option
def command(
    query: str,
    collections: tuple[str, ...],
    limit: int,
    tags: tuple[str, ...],
    meta: dict[str, str],
    chunk_types: tuple[ChunkType, ...],
    since: str | None,
    until: str | None,
    no_rerank: bool,
    explain: bool,
    as_json: bool,
    settings: Settings,
) -> None:
    """Search the collections and print the best passages.

    The exit status is 3 if nothing is found.
    """
    if not query.strip():
        raise click.UsageError("The query is empty.")
    require_records(settings)
    require_model(settings)
    search = Query(
        text=query,
        limit=limit,
        similarity_threshold=0.0,
        filters=Filters(
            collections=collections or None, start=since, end=until, metadata=meta, tags=tags, chunk_types=chunk_types
        ),
        rerank=not no_rerank,
        near_duplicates=NEAR_DUPLICATES,
    )
    hits, timings = asyncio.run(_search(settings, search, explain=explain))
    found = hits.passages
    if as_json:
        passages = [msgspec.structs.asdict(passage) | passage.shown_duplicates for passage in found]
        print_json({"query": query, "passages": passages, "timings_ms": timings, "partial": hits.partial})
    else:
        _show(query, found, timings, explain=explain)
    if hits.partial:
        notes().print(PARTIAL)
    sys.exit(0 if found else 3)


async def _search(settings: Settings, query: Query, *, explain: bool) -> "tuple[SearchHits, dict[str, float]]":
    """The passages, and timings: the first search includes loading the model and the index."""
    start = time.perf_counter()
    async with knowledge(settings) as opened:
        for name in query.filters.collections or ():
            await opened.collection(OPERATOR, name)
        ready = time.perf_counter()
        found = await opened.find(query, OPERATOR)
        first = time.perf_counter()
        timings = {"open": ready - start, "first_search": first - ready}
        if explain:
            await opened.search(query, OPERATOR)
            timings["next_search"] = time.perf_counter() - first
    return found, {name: round(1000 * seconds, 1) for name, seconds in timings.items()}


def _show(query: str, found: Sequence[Passage], timings: dict[str, float], *, explain: bool) -> None:
    from anabranch.text.words import terms  # noqa: PLC0415

    console = output()
    wanted = set(terms(query))
    for rank, passage in enumerate(found, 1):
        where = joined(flat(passage.source), place_of(passage))
        console.print(Text.assemble((f"{rank:>2} ", "cyan"), (flat(passage.title), "bold"), (f" · {where}", "dim")))
        console.print(Padding(excerpt(passage.text, wanted), (0, 0, 0, 3), expand=False))
        if passage.also_in:
            titles = list(dict.fromkeys(flat(one.title) for one in passage.also_in))
            names = ", ".join(titles[:MAX_COPIES]) + (" and others" if len(titles) > MAX_COPIES else "")
            console.print(Padding(Text(f"also in {names}", style="dim"), (0, 0, 0, 3), expand=False))
        if explain and passage.place is not None:
            console.print(Padding(Text(_scores(rank, passage.place.scores), style="dim"), (0, 0, 0, 3), expand=False))
    if not found:
        notes().print("Nothing was found.")
    if explain:
        console.print(
            f"{timings['open']:.0f} ms opening · {timings['first_search']:.0f} ms loading and searching · "
            f"{timings['next_search']:.1f} ms searching again",
            style="dim",
        )


def _scores(rank: int, scores: Scores) -> str:
    """All scores; a dash if the passage was not in a list."""
    columns = (
        ("dense", scores.dense, ".3f"),
        ("sparse", scores.sparse, ".2f"),
        ("fused", scores.fused, ".5f"),
        ("rerank", scores.rerank, ".3f"),
    )
    texts = (f"{name} {'–' if score is None else f'{score:{form}}'}" for name, score, form in columns)  # noqa: RUF001
    return joined(f"rank {rank}", *texts)


def excerpt(text: str, wanted: set[int]) -> Text:
    """The part of a passage with most of the wanted terms, which are highlighted."""
    from anabranch.text.words import WORD, terms  # noqa: PLC0415

    line = flat(text)
    hits = [
        (word.start(), word.end(), frozenset(found))
        for word in WORD.finditer(line)
        if (found := wanted.intersection(terms(word[0])))
    ]
    begin = 0
    if len(line) > EXCERPT and hits:
        starts = [max(0, start - EXCERPT // 4) for start, _, _ in hits]
        begin = max(starts, key=lambda start: (_term_counts(hits, start), -start))
        begin = line.rfind(" ", 0, min(begin, len(line) - EXCERPT)) + 1 if begin else 0
    end = len(line) if len(line) - begin <= EXCERPT else line.rfind(" ", begin, begin + EXCERPT)
    end = end if end > begin else begin + EXCERPT
    text_part = Text(line[begin:end])
    for start, stop, _ in hits:
        if begin <= start and stop <= end:
            text_part.stylize("bold yellow", start - begin, stop - begin)
    return Text.assemble("…" if begin else "", text_part, "…" if end < len(line) else "")


def _term_counts(hits: Sequence[tuple[int, int, frozenset[int]]], begin: int) -> tuple[int, int]:
    """The number of different terms, then of all terms, in an excerpt that begins here."""
    within = [found for start, stop, found in hits if begin <= start and stop <= begin + EXCERPT]
    return len(frozenset().union(*within)), len(within)
