"""`anabranch documents`: list, show and delete documents, and change their permissions."""

import io
import sys
from typing import TYPE_CHECKING, Any

import click

from anabranch.configuration.settings import Settings
from anabranch.entrypoints.cli.options import (
    ListsByDefault,
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
    notes,
    permissions_text,
    print_fields,
    print_list,
    print_result,
    printable,
    size,
)
from anabranch.knowledge.model import StoredDocument

if TYPE_CHECKING:
    from anabranch.knowledge.knowledge import Knowledge

PAGE = 500


@click.group("documents", cls=ListsByDefault)
def group() -> None:
    """List, show and delete documents, and change their permissions."""


@group.command("list")
@click.option("-c", "--collection", metavar="NAME", help="Only documents of this collection.")
@click.option("--limit", type=click.IntRange(1), help="Maximum number of documents.")
@json_option
@settings_option
def listed(collection: str | None, limit: int | None, as_json: bool, settings: Settings) -> None:
    """List documents, oldest first."""
    found: list[StoredDocument] = []
    total = 0
    if exist(settings):
        found, total = run(settings, lambda knowledge: _listed(knowledge, collection, limit))
    print_list(
        [_view(one) for one in found],
        {
            "document": lambda one: one["title"],
            "chunks": lambda one: one["chunks"],
            "visibility": lambda one: one["permissions"].visibility,
            "id": lambda one: one["id"],
        },
        as_json=as_json,
    )
    if not as_json and (len(found) < total or not found):
        notes().print(f"{len(found):,} of {counted(total, 'document')}.")


@group.command()
@click.argument("identifier", metavar="ID")
@click.option("--content", is_flag=True, help="Print the document's text.")
@json_option
@settings_option
def show(identifier: str, content: bool, as_json: bool, settings: Settings) -> None:
    """Show the properties of a document, or its text."""
    found = run(settings, lambda knowledge: knowledge.document(OPERATOR, identifier, content=content))
    if content and not as_json:
        _write(found.content or "")
        return
    fields = [
        ("title", found.title),
        ("id", found.id),
        ("owner", found.owner),
        ("file", found.filename),
        ("address", found.url),
        *((name, str(value)) for name, value in found.metadata.items()),
        ("visibility", permissions_text(found.permissions)),
        ("pages", found.pages),
        ("chunks", found.chunk_count),
        ("tokens", found.tokens),
        ("size", size(found.size)),
        ("created", moment(found.created_at)),
        ("updated", moment(found.updated_at)),
    ]
    print_fields(_view(found), fields, as_json=as_json)


@group.command()
@click.argument("identifier", metavar="ID")
@json_option
@settings_option
def delete(identifier: str, as_json: bool, settings: Settings) -> None:
    """Delete a document; the next search no longer finds it."""
    deleted = run(settings, lambda knowledge: knowledge.delete_document(OPERATOR, identifier))
    print_result(
        {"id": identifier, "chunks": deleted},
        f"Deleted {flat(identifier)} and its {counted(deleted, 'chunk')}.",
        as_json=as_json,
    )


@group.command()
@click.argument("identifier", metavar="ID")
@permission_options
@json_option
@settings_option
def permissions(
    identifier: str,
    visibility: str | None,
    users: tuple[str, ...],
    groups: tuple[str, ...],
    as_json: bool,
    settings: Settings,
) -> None:
    """Change who may see a document; the next question sees the change."""
    chosen = permissions_given(visibility, users, groups)
    if chosen is None:
        raise click.UsageError("Give the permissions with --visibility, --user or --group.")
    changed = run(settings, lambda knowledge: knowledge.describe(OPERATOR, identifier, permissions=chosen))
    print_result(
        _view(changed),
        f"{flat(changed.title)} is {flat(permissions_text(changed.permissions))} now.",
        as_json=as_json,
    )


async def _listed(
    knowledge: "Knowledge", collection: str | None, limit: int | None
) -> tuple[list[StoredDocument], int]:
    found: list[StoredDocument] = []
    after, total = 0, 1
    while len(found) < (total if limit is None else min(limit, total)):
        wanted = PAGE if limit is None else min(PAGE, limit - len(found))
        page, total = await knowledge.documents(OPERATOR, collection, after, wanted)
        if not page:
            break
        found += page
        after = page[-1].key
    return found, total


def _view(one: StoredDocument) -> dict[str, Any]:
    """A document as `--json` prints it."""
    return {
        "id": one.id,
        "title": one.title,
        "owner": one.owner,
        "source": one.source,
        "filename": one.filename,
        "url": one.url,
        "metadata": one.metadata,
        "permissions": one.permissions,
        "chunks": one.chunk_count,
        "tokens": one.tokens,
        "bytes": one.size,
        "pages": one.pages,
        "content_hash": one.content_hash,
        "created_at": moment(one.created_at),
        "updated_at": moment(one.updated_at),
        "content": one.content,
    }


def _write(text: str) -> None:
    """Unchanged into a pipe; made safe for a terminal."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    sys.stdout.write(printable(text.expandtabs(4)) if sys.stdout.isatty() else text)
    if not text.endswith("\n"):
        sys.stdout.write("\n")
