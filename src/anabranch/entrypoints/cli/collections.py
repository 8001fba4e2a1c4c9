"""`anabranch collections`: list, create, show and delete collections."""

import sys
from typing import TYPE_CHECKING, Any

import click
import msgspec

from anabranch.configuration.settings import Settings
from anabranch.entrypoints.cli.options import (
    ListsByDefault,
    chunking_given,
    chunking_options,
    json_option,
    permission_options,
    permissions_given,
    settings_option,
)
from anabranch.entrypoints.cli.resources import OPERATOR, exist, run
from anabranch.entrypoints.cli.terminal import (
    counted,
    flat,
    moment,
    permissions_text,
    print_fields,
    print_list,
    print_result,
    size,
)
from anabranch.knowledge.model import Chunking, Permissions

if TYPE_CHECKING:
    from anabranch.knowledge.knowledge import CollectionCounts, Knowledge


@click.group("collections", cls=ListsByDefault)
def group() -> None:
    """List, create, show and delete collections."""


@group.command("list")
@json_option
@settings_option
def listed(as_json: bool, settings: Settings) -> None:
    """List all collections with their size."""
    found = run(settings, lambda knowledge: knowledge.collections(OPERATOR)) if exist(settings) else []
    views = [_view(one) for one in found]
    print_list(
        views,
        {
            "collection": lambda one: one["name"],
            "documents": lambda one: one["documents"],
            "chunks": lambda one: one["chunks"],
            "visibility": lambda one: one["permissions"].visibility,
            **({"owner": lambda one: one["owner"]} if any(one["owner"] for one in views) else {}),
        },
        empty="There is no collection yet. Create one with: anabranch ingest FOLDER --collection NAME",
        as_json=as_json,
    )


@group.command()
@click.argument("name")
@click.option("--description", default="", help="What the collection contains.")
@chunking_options
@permission_options
@json_option
@settings_option
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
    settings: Settings,
) -> None:
    """Create an empty collection with its chunking and default permissions."""
    permissions = permissions_given(visibility, users, groups) or Permissions()
    chosen = msgspec.structs.replace(Chunking(), **chunking_given(chunking, chunk_size, overlap))

    async def work(knowledge: "Knowledge") -> "CollectionCounts":
        made = await knowledge.create_collection(
            OPERATOR, name, description=description, chunking=chosen, default_permissions=permissions
        )
        return await knowledge.collection(OPERATOR, made.id)

    _print(run(settings, work, create=True), as_json=as_json)


@group.command()
@click.argument("name")
@json_option
@settings_option
def show(name: str, as_json: bool, settings: Settings) -> None:
    """Show a collection, by its NAME or id."""
    _print(run(settings, lambda knowledge: knowledge.collection(OPERATOR, name)), as_json=as_json)


@group.command()
@click.argument("name")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@json_option
@settings_option
def delete(name: str, yes: bool, as_json: bool, settings: Settings) -> None:
    """Delete a collection with all its documents, by its NAME or id."""
    found = run(settings, lambda knowledge: knowledge.collection(OPERATOR, name))
    kept = found.collection
    if found.documents and not yes and sys.stdin.isatty():
        count = counted(found.documents, "document")
        click.confirm(f"Delete {flat(kept.name)!r} with {count}?", abort=True, err=True)
    deleted = run(settings, lambda knowledge: knowledge.delete_collection(OPERATOR, kept.id))
    print_result(
        {"id": kept.id, "name": kept.name, "documents": deleted},
        f"Deleted {flat(kept.name)} and {counted(deleted, 'document')}.",
        as_json=as_json,
    )


def _view(one: "CollectionCounts") -> dict[str, Any]:
    """A collection as `--json` prints it."""
    kept = one.collection
    return {
        "id": kept.id,
        "name": kept.name,
        "owner": kept.owner,
        "description": kept.description,
        "documents": one.documents,
        "chunks": one.chunks,
        "tokens": one.tokens,
        "bytes": one.size,
        "permissions": kept.settings.default_permissions,
        "chunking": kept.settings.chunking,
        "embedding_model": kept.settings.embedding_model,
        "created_at": moment(kept.created_at),
    }


def _print(one: "CollectionCounts", *, as_json: bool) -> None:
    kept = one.collection
    chunking = kept.settings.chunking
    fields = [
        ("collection", kept.name),
        ("id", kept.id),
        ("owner", kept.owner),
        ("description", kept.description),
        ("documents", one.documents),
        ("chunks", one.chunks),
        ("tokens", one.tokens),
        ("size", size(one.size)),
        ("visibility", permissions_text(kept.settings.default_permissions)),
        ("chunking", f"{chunking.strategy}, at most {chunking.size} tokens, {chunking.overlap} repeated"),
        ("embedder", kept.settings.embedding_model),
        ("created", moment(kept.created_at)),
    ]
    print_fields(_view(one), fields, as_json=as_json)
