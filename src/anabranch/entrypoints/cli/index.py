"""`anabranch index`: show the state of the search index, and rebuild it."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import click

from anabranch.app.records import folder_of
from anabranch.configuration.settings import Settings
from anabranch.domain.audit import AuditEntry
from anabranch.entrypoints.cli.options import json_option, settings_option
from anabranch.entrypoints.cli.resources import (
    alone,
    audited,
    embedding,
    is_indexed,
    records,
    require_model,
    require_records,
)
from anabranch.entrypoints.cli.terminal import counted, moment, notes, print_fields, print_result, progress, size
from anabranch.knowledge.records import documents, index_position, jobs
from anabranch.knowledge.records.database import Database, Session
from anabranch.knowledge.records.sqlite import NAME

# By whether an indexer runs.
WHEN_BUILT = {
    True: "The indexer adds them within about a minute.",
    False: "A server adds them when it runs, and so does the next ingest; to do it now: anabranch index rebuild",
}
RECORDS = (NAME, f"{NAME}-wal", f"{NAME}-shm")


@click.group("index")
def group() -> None:
    """Show the state of the search index, or rebuild it."""


@group.command("status")
@json_option
@settings_option
def show(as_json: bool, settings: Settings) -> None:
    """Show what the records and the index hold, and whether an indexer runs."""
    require_records(settings)
    found = _status(settings)
    behind = f"{counted(found['behind_chunks'], 'chunk')} behind" if found["behind_chunks"] else "up to date"
    built = f", built {found['built_at']}" if found["built_at"] else ""
    fields = [
        ("folder", found["data_dir"]),
        ("documents", found["documents"]),
        ("chunks", found["chunks"]),
        ("waiting", counted(found["waiting_documents"], "document")),
        ("embedder", f"{found['embedder']} ({found['dimensions']} numbers)" if found["embedder"] else "none yet"),
        ("generation", f"{found['generation']}, {behind}{built}"),
        *_opensearch(found["opensearch"]),
        *(
            ("" if at else "segments", f"{part['name']}: {counted(part['chunks'], 'chunk')}, {size(part['bytes'])}")
            for at, part in enumerate(found["segments"])
        ),
        ("on disk", f"{size(found['records_bytes'])} records, {size(found['index_bytes'])} index"),
        ("indexer", "running" if found["indexer_running"] else "not running"),
    ]
    print_fields(found, fields, as_json=as_json)
    if found["behind_chunks"] and not as_json:
        notes().print(
            f"Documents that are not in the index yet are searched all the same, more slowly. "
            f"{WHEN_BUILT[found['indexer_running']]}"
        )


@group.command()
@click.option("--embed", is_flag=True, help="Embed every chunk again even if the embedder is the same.")
@json_option
@settings_option
def rebuild(embed: bool, as_json: bool, settings: Settings) -> None:
    """Rebuild the index from the records.

    If the settings name another embedder than the one that the documents were embedded with, every chunk is embedded
    with the new one first; until that has finished, nothing changes.
    """
    require_records(settings)
    require_model(settings)
    with alone(folder_of(settings)), audited(settings, AuditEntry(action="index.rebuilt", details={"embed": embed})):
        embedded = asyncio.run(_rebuild(settings, embed=embed))
    found = _status(settings)
    held = sum(part["chunks"] for part in found["segments"]) if found["opensearch"] is None else found["chunks"]
    line = f"The index holds {counted(held, 'chunk')}."
    if embedded:
        line = f"Embedded {counted(embedded, 'chunk')} with {found['embedder']}.\n{line}"
    print_result({"embedded_chunks": embedded, "status": found}, line, as_json=as_json)


async def _rebuild(settings: Settings, *, embed: bool) -> int:
    """How many chunks were embedded again."""
    from anabranch.app.search_index import drop_index, index_writer  # noqa: PLC0415  numpy loads only where it is needed
    from anabranch.knowledge.index.writer import reembed  # noqa: PLC0415

    embedded = 0
    with records(settings) as database:
        async with embedding(settings, threads=settings.embedding_threads) as embedder:
            known = database.reading(documents.embedder)
            if known is not None and (embed or known[0] != embedder.name):
                notes().print(f"Embedding with {embedder.name} instead of {known[0]}.")
                with progress("Embedding", unit="chunks") as advance:
                    embedded = await reembed(database, embedder, partial(drop_index, settings), advance)
            with (
                index_writer(settings, database, embedder.name) as writer,
                progress("Building the index", unit="chunks") as advance,
            ):
                await asyncio.to_thread(writer.rebuild, advance)
    return embedded


def _status(settings: Settings) -> dict[str, Any]:
    """The state of the index as `--json` prints it. `behind_chunks` are in the records and not yet in a segment:
    searches find them, but more slowly."""
    folder = folder_of(settings)
    with records(settings) as database:
        document_count, chunk_count = database.reading(documents.counts)
        known = database.reading(documents.embedder)
        index = _segments(settings, database) if settings.index_url is None else _elsewhere(database)
        waiting = database.reading(jobs.waiting)
        in_database = database.reading(lambda db: db.size()) if settings.database_url is not None else 0
    in_files = sum(file.stat().st_size for file in folder.glob(f"{NAME}*") if file.name in RECORDS)
    return {
        "data_dir": str(folder),
        "documents": document_count,
        "chunks": chunk_count,
        "embedder": known[0] if known else None,
        "dimensions": known[1] if known else None,
        **index,
        "waiting_documents": waiting,
        "records_bytes": in_database or in_files,
        "index_bytes": sum(file.stat().st_size for file in (folder / "index").rglob("*") if file.is_file()),
        "indexer_running": is_indexed(folder),
    }


def _opensearch(found: dict[str, str | None] | None) -> list[tuple[str, str]]:
    if found is None:
        return []
    building = f", {found['building']} is being built" if found["building"] else ""
    return [("opensearch", f"{found['index'] or 'no index yet'}{building}")]


def _segments(settings: Settings, database: Database) -> dict[str, Any]:
    from anabranch.app.search_index import segments_of  # noqa: PLC0415  numpy loads only where it is needed

    generations = segments_of(settings)
    manifest = generations.current()
    behind, _ = database.reading(lambda db: documents.unindexed(db, manifest.last_chunk))
    return {
        "opensearch": None,
        "generation": manifest.number,
        "built_at": moment(manifest.built_at) if manifest.built_at else None,
        "segments": [_segment(generations.path(name)) for name in manifest.segments],
        "behind_chunks": behind,
    }


def _elsewhere(database: Database) -> dict[str, Any]:
    """Of an index in OpenSearch, the records say what it holds; the generation is its last change."""

    def read(db: Session) -> dict[str, Any]:
        current, building = index_position.current(db), index_position.building(db)
        seq = 0 if current is None else current.seq
        return {
            "opensearch": {
                "index": None if current is None else current.name,
                "building": None if building is None else building.name,
            },
            "generation": seq,
            "built_at": None,
            "segments": [],
            "behind_chunks": documents.changed_chunks(db, seq),
        }

    return database.reading(read)


def _segment(folder: Path) -> dict[str, Any]:
    sizes = {file.name: file.stat().st_size for file in folder.glob("*") if file.is_file()}
    return {"name": folder.name, "chunks": sizes.get("keys.bin", 0) // 8, "bytes": sum(sizes.values())}
