"""`anabranch documents`: listed, shown, deleted, and who may see them."""

import asyncio
import io
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from anabranch.configuration.settings import Settings
from anabranch.domain.model import Value
from anabranch.entrypoints.cli.options import (
    ListsByDefault,
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
    printable,
    size,
)
from anabranch.knowledge.model import Permissions, StoredDocument

if TYPE_CHECKING:
    from anabranch.knowledge.knowledge import Knowledge

T = TypeVar("T")

PAGE = 500


class DocumentView(Value):
    """A document as `--json` gives it."""

    id: str
    title: str
    owner: str
    source: str
    filename: str | None
    url: str | None
    metadata: dict[str, Any]
    permissions: Permissions
    chunks: int
    tokens: int
    bytes: int
    pages: int | None
    content_hash: str
    created_at: str
    updated_at: str
    content: str | None = None


@click.group("documents", cls=ListsByDefault)
def group() -> None:
    """List, show and delete documents, and say who may see them."""


@group.command("list")
@click.option("-c", "--collection", metavar="NAME", help="Only those of this collection.")
@click.option("--limit", type=click.IntRange(1), help="At most so many.")
@json_option
@config_option
def listed(collection: str | None, limit: int | None, as_json: bool, config: Path | None) -> None:
    """The documents, in the order in which they came."""
    settings = configured(config)
    found, total = _run(settings, lambda room: _listed(room, collection, limit)) if exist(settings) else ([], 0)
    if as_json:
        print_json([_view(one) for one in found])
        return
    if found:
        rows = [(one.title, one.chunk_count, one.permissions.visibility, one.id) for one in found]
        print_table(("document", "chunks", "visibility", "id"), rows)
    if len(found) < total or not found:
        notes().print(f"{len(found):,} of {counted(total, 'document')}.")


@group.command()
@click.argument("identifier", metavar="ID")
@click.option("--content", is_flag=True, help="Print the document's text.")
@json_option
@config_option
def show(identifier: str, content: bool, as_json: bool, config: Path | None) -> None:
    """What is known of a document, or its text."""
    settings = configured(config)
    require_records(settings)
    found = _run(settings, lambda room: room.document(OPERATOR, identifier, content=content))
    if as_json:
        print_json(_view(found))
    elif content:
        _write(found.content or "")
    else:
        _print(found)


@group.command()
@click.argument("identifier", metavar="ID")
@json_option
@config_option
def delete(identifier: str, as_json: bool, config: Path | None) -> None:
    """Delete a document; from now on nobody finds it."""
    settings = configured(config)
    require_records(settings)
    gone = _run(settings, lambda room: room.delete_document(OPERATOR, identifier))
    if as_json:
        print_json({"id": identifier, "chunks": gone})
    else:
        output().print(f"Deleted {flat(identifier)} and its {counted(gone, 'chunk')}.")


@group.command()
@click.argument("identifier", metavar="ID")
@permission_options
@json_option
@config_option
def permissions(
    identifier: str,
    visibility: str | None,
    users: tuple[str, ...],
    groups: tuple[str, ...],
    as_json: bool,
    config: Path | None,
) -> None:
    """Say who may see a document; it holds from the next question on."""
    settings = configured(config)
    chosen = permissions_given(visibility, users, groups)
    if chosen is None:
        raise click.UsageError("Say who may see it with --visibility, --user or --group.")
    require_records(settings)
    changed = _run(settings, lambda room: room.describe(OPERATOR, identifier, permissions=chosen))
    if as_json:
        print_json(_view(changed))
    else:
        output().print(f"{flat(changed.title)} is {_seen_by(changed.permissions)} now.")


def _run(settings: Settings, work: "Callable[[Knowledge], Awaitable[T]]") -> T:
    async def run() -> T:
        async with knowledge(settings) as room:
            return await work(room)

    return asyncio.run(run())


async def _listed(room: "Knowledge", collection: str | None, limit: int | None) -> tuple[list[StoredDocument], int]:
    found: list[StoredDocument] = []
    after, total = 0, 1
    while len(found) < (total if limit is None else min(limit, total)):
        wanted = PAGE if limit is None else min(PAGE, limit - len(found))
        page, total = await room.documents(OPERATOR, collection, after, wanted)
        if not page:
            break
        found += page
        after = page[-1].key
    return found, total


def _view(one: StoredDocument) -> DocumentView:
    return DocumentView(
        id=one.id,
        title=one.title,
        owner=one.owner,
        source=one.source,
        filename=one.filename,
        url=one.url,
        metadata=dict(one.metadata),
        permissions=one.permissions,
        chunks=one.chunk_count,
        tokens=one.tokens,
        bytes=one.size,
        pages=one.pages,
        content_hash=one.content_hash,
        created_at=moment(one.created_at),
        updated_at=moment(one.updated_at),
        content=one.content,
    )


def _print(one: StoredDocument) -> None:
    fields: list[tuple[str, str | int | None]] = [
        ("title", one.title),
        ("id", one.id),
        ("owner", one.owner or None),
        ("file", one.filename),
        ("address", one.url),
        *((name, str(value)) for name, value in one.metadata.items()),
        ("visibility", _seen_by(one.permissions)),
        ("pages", one.pages),
        ("chunks", one.chunk_count),
        ("tokens", one.tokens),
        ("size", size(one.size)),
        ("created", moment(one.created_at)),
        ("updated", moment(one.updated_at)),
    ]
    print_fields([(flat(name), value) for name, value in fields if value is not None])


def _seen_by(permissions: Permissions) -> str:
    named = (*permissions.allowed_users, *(f"group {name}" for name in permissions.allowed_groups))
    return permissions.visibility + (f" ({', '.join(flat(name) for name in named)})" if named else "")


def _write(text: str) -> None:
    """As it is into a pipe, made safe for a terminal."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    sys.stdout.write(printable(text.expandtabs(4)) if sys.stdout.isatty() else text)
    if not text.endswith("\n"):
        sys.stdout.write("\n")
