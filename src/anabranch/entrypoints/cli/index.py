"""`anabranch index`: what the search index holds, and making it anew."""

import asyncio
import sqlite3
from pathlib import Path

import click

from anabranch.app.knowledge_opener import folder_of
from anabranch.configuration.settings import Settings
from anabranch.domain.model import Value
from anabranch.entrypoints.cli.options import config_option, configured, json_option
from anabranch.entrypoints.cli.resources import alone, embedding, is_indexed, records, require_model, require_records
from anabranch.entrypoints.cli.terminal import counted, moment, notes, output, print_fields, print_json, progress, size
from anabranch.knowledge.records import facts, jobs
from anabranch.knowledge.records.database import NAME

RECORDS = (NAME, f"{NAME}-wal", f"{NAME}-shm")


class SegmentStatus(Value):
    name: str
    chunks: int
    bytes: int


class IndexStatus(Value):
    """The index as `--json` gives it. `behind_chunks` are in the records and not yet in a segment: searches find them
    all the same, only slower."""

    data_dir: str
    documents: int
    chunks: int
    embedder: str | None
    dimensions: int | None
    generation: int
    built_at: str | None
    segments: tuple[SegmentStatus, ...]
    behind_chunks: int
    waiting_documents: int
    records_bytes: int
    index_bytes: int
    indexer_running: bool


@click.group("index")
def group() -> None:
    """Look at the search index, or make it anew."""


@group.command("status")
@json_option
@config_option
def show(as_json: bool, config: Path | None) -> None:
    """What is in the records and in the index, and whether somebody keeps them together."""
    settings = configured(config)
    require_records(settings)
    found = _status(settings)
    if as_json:
        print_json(found)
        return
    parts = [f"{part.name}: {counted(part.chunks, 'chunk')}, {size(part.bytes)}" for part in found.segments]
    behind = f"{counted(found.behind_chunks, 'chunk')} behind" if found.behind_chunks else "up to date"
    print_fields(
        [
            ("folder", found.data_dir),
            ("documents", found.documents),
            ("chunks", found.chunks),
            ("waiting", counted(found.waiting_documents, "document")),
            ("embedder", f"{found.embedder} ({found.dimensions} numbers)" if found.embedder else "none yet"),
            ("generation", f"{found.generation}, {behind}" + (f", built {found.built_at}" if found.built_at else "")),
            *(("segments" if not at else "", part) for at, part in enumerate(parts)),
            ("on disk", f"{size(found.records_bytes)} records, {size(found.index_bytes)} index"),
            ("indexer", "running" if found.indexer_running else "not running"),
        ]
    )


@group.command()
@click.option("--embed", is_flag=True, help="Embed every chunk anew also if the embedder is the same.")
@json_option
@config_option
def rebuild(embed: bool, as_json: bool, config: Path | None) -> None:
    """Make the index anew from the records.

    If the settings name another embedder than the one that the documents were embedded with, every chunk is embedded
    with the new one first; until that is done, everything stays as it was.
    """
    settings = configured(config)
    require_records(settings)
    require_model(settings)
    with alone(folder_of(settings)):
        embedded = asyncio.run(_rebuild(settings, embed=embed))
    found = _status(settings)
    if as_json:
        print_json({"embedded_chunks": embedded, "status": found})
        return
    if embedded:
        output().print(f"Embedded {counted(embedded, 'chunk')} with {found.embedder}.")
    output().print(f"The index holds {counted(sum(part.chunks for part in found.segments), 'chunk')}.")


async def _rebuild(settings: Settings, *, embed: bool) -> int:
    """How many chunks were embedded anew."""
    from anabranch.knowledge import rebuild as anew  # noqa: PLC0415  numpy loads only where it is needed
    from anabranch.knowledge.index.manifest import Generations  # noqa: PLC0415
    from anabranch.knowledge.index.writer import IndexWriter  # noqa: PLC0415

    embedded = 0
    generations = Generations(folder_of(settings) / "index")
    with records(settings) as database:
        async with embedding(settings, threads=settings.embedding_threads) as embedder:
            known = database.reading(facts.embedder)
            if known is not None and (embed or known[0] != embedder.name):
                notes().print(f"Embedding with {embedder.name} instead of {known[0]}.")
                with progress("Embedding", unit="chunks") as advance:
                    embedded = await anew.embed_anew(database, embedder, generations, advance)
            with progress("Building the index"):
                await asyncio.to_thread(IndexWriter(database, generations, embedder.name).rebuild)
    return embedded


def _status(settings: Settings) -> IndexStatus:
    from anabranch.knowledge.index.manifest import Generations  # noqa: PLC0415
    from anabranch.knowledge.index.writer import IndexWriter  # noqa: PLC0415

    folder = folder_of(settings)
    generations = Generations(folder / "index")
    manifest = generations.current()
    with records(settings) as database:
        documents, chunks = database.reading(_counts)
        known = database.reading(facts.embedder)
        behind, _ = IndexWriter(database, generations, known[0] if known else "").behind()
        waiting = database.reading(jobs.waiting)
    parts = tuple(_segment_status(generations.path(name)) for name in manifest.segments)
    return IndexStatus(
        data_dir=str(folder),
        documents=documents,
        chunks=chunks,
        embedder=known[0] if known else None,
        dimensions=known[1] if known else None,
        generation=manifest.number,
        built_at=moment(manifest.built_at) if manifest.built_at else None,
        segments=parts,
        behind_chunks=behind,
        waiting_documents=waiting,
        records_bytes=sum(file.stat().st_size for file in folder.glob(f"{NAME}*") if file.name in RECORDS),
        index_bytes=sum(file.stat().st_size for file in (folder / "index").rglob("*") if file.is_file()),
        indexer_running=is_indexed(folder),
    )


def _counts(db: sqlite3.Connection) -> tuple[int, int]:
    row = db.execute("SELECT count(*), coalesce(sum(chunk_count), 0) FROM documents").fetchone()
    return int(row[0]), int(row[1])


def _segment_status(folder: Path) -> SegmentStatus:
    files = [file for file in folder.glob("*") if file.is_file()]
    keys = next((file.stat().st_size for file in files if file.name == "keys.bin"), 0)
    return SegmentStatus(name=folder.name, chunks=keys // 8, bytes=sum(file.stat().st_size for file in files))
