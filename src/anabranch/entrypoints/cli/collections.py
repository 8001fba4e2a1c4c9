"""`anabranch collections`: what there is, made, shown and deleted."""

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from anabranch.configuration.settings import Settings
from anabranch.domain.model import Value
from anabranch.entrypoints.cli.options import (
    ListsByDefault,
    chunking_given,
    chunking_options,
    config_option,
    configured,
    json_option,
    permission_options,
    permissions_given,
)
from anabranch.entrypoints.cli.resources import OPERATOR, exist, knowledge, require_records
from anabranch.entrypoints.cli.terminal import (
    counted,
    flat,
    moment,
    notes,
    output,
    print_fields,
    print_json,
    print_table,
    size,
)
from anabranch.knowledge.model import Permissions
from anabranch.knowledge.parsed import Chunking

if TYPE_CHECKING:
    from anabranch.knowledge.knowledge import CollectionCounts


class CollectionView(Value):
    """A collection as `--json` gives it."""

    id: str
    name: str
    owner: str
    description: str
    documents: int
    chunks: int
    tokens: int
    bytes: int
    permissions: Permissions
    chunking: Chunking
    embedding_model: str
    created_at: str


@click.group("collections", cls=ListsByDefault)
def group() -> None:
    """List, make, show and delete collections."""


@group.command("list")
@json_option
@config_option
def listed(as_json: bool, config: Path | None) -> None:
    """Every collection and how much is in it."""
    settings = configured(config)
    found = [_view(one) for one in asyncio.run(_all(settings))] if exist(settings) else []
    if as_json:
        print_json(found)
    elif found:
        rows = [(one.name, one.documents, one.chunks, one.permissions.visibility, one.owner) for one in found]
        owned = any(one.owner for one in found)
        columns = ("collection", "documents", "chunks", "visibility", "owner")
        print_table(columns if owned else columns[:-1], rows if owned else [row[:-1] for row in rows])
    else:
        notes().print("There is no collection yet. Make one with: anabranch ingest FOLDER --collection NAME")


@group.command()
@click.argument("name")
@click.option("--description", default="", help="What is in it.")
@chunking_options
@permission_options
@json_option
@config_option
def create(
    name: str,
    description: str,
    chunking: str | None,
    chunk_size: int | None,
    overlap: int | None,
    visibility: str | None,
    users: tuple[str, ...],
    groups: tuple[str, ...],
    as_json: bool,
    config: Path | None,
) -> None:
    """Make an empty collection, and say how its documents are cut and who may see them."""
    settings = configured(config)
    permissions = permissions_given(visibility, users, groups) or Permissions()
    chosen = msgspec.structs.replace(Chunking(), **chunking_given(chunking, chunk_size, overlap))

    async def run() -> "CollectionCounts":
        async with knowledge(settings) as room:
            made = await room.create_collection(
                OPERATOR, name, description=description, chunking=chosen, default_permissions=permissions
            )
            return await room.collection(OPERATOR, made.id)

    _print(_view(asyncio.run(run())), as_json=as_json)


@group.command()
@click.argument("name")
@json_option
@config_option
def show(name: str, as_json: bool, config: Path | None) -> None:
    """One collection, by its NAME or id."""
    _print(_view(_one(configured(config), name)), as_json=as_json)


@group.command()
@click.argument("name")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@json_option
@config_option
def delete(name: str, yes: bool, as_json: bool, config: Path | None) -> None:
    """Delete a collection and everything in it, by its NAME or id."""
    settings = configured(config)
    found = _one(settings, name)
    if found.documents and not yes and sys.stdin.isatty():
        count = counted(found.documents, "document")
        click.confirm(f"Delete {flat(found.collection.name)!r} with {count}?", abort=True, err=True)

    async def run() -> int:
        async with knowledge(settings) as room:
            return await room.delete_collection(OPERATOR, found.collection.id)

    gone = asyncio.run(run())
    if as_json:
        print_json({"id": found.collection.id, "name": found.collection.name, "documents": gone})
    else:
        output().print(f"Deleted {flat(found.collection.name)} and {counted(gone, 'document')}.")


async def _all(settings: Settings) -> "list[CollectionCounts]":
    async with knowledge(settings) as room:
        return await room.collections(OPERATOR)


def _one(settings: Settings, name: str) -> "CollectionCounts":
    require_records(settings)

    async def run() -> "CollectionCounts":
        async with knowledge(settings) as room:
            return await room.collection(OPERATOR, name)

    return asyncio.run(run())


def _view(one: "CollectionCounts") -> CollectionView:
    kept = one.collection
    return CollectionView(
        id=kept.id,
        name=kept.name,
        owner=kept.owner,
        description=kept.description,
        documents=one.documents,
        chunks=one.chunks,
        tokens=one.tokens,
        bytes=one.size,
        permissions=kept.settings.default_permissions,
        chunking=kept.settings.chunking,
        embedding_model=kept.settings.embedding_model,
        created_at=moment(kept.created_at),
    )


def _print(one: CollectionView, *, as_json: bool) -> None:
    if as_json:
        print_json(one)
        return
    cut = one.chunking
    named = ", ".join((*one.permissions.allowed_users, *(f"group {name}" for name in one.permissions.allowed_groups)))
    fields: list[tuple[str, str | int]] = [
        ("collection", one.name),
        ("id", one.id),
        ("owner", one.owner),
        ("description", one.description),
        ("documents", one.documents),
        ("chunks", one.chunks),
        ("tokens", one.tokens),
        ("size", size(one.bytes)),
        ("visibility", f"{one.permissions.visibility} ({named})" if named else one.permissions.visibility),
        ("chunking", f"{cut.strategy}, at most {cut.size} tokens, {cut.overlap} repeated"),
        ("embedder", one.embedding_model),
        ("created", one.created_at),
    ]
    print_fields([(name, value) for name, value in fields if value != ""])
