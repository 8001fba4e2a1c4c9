"""`anabranch collections`, `documents`, `publish`, `unpublish` and `published`."""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, get_args

import click
import msgspec

from anabranch.app.publishing import EndpointPath, public_documents
from anabranch.configuration.settings import Settings
from anabranch.domain.errors import Conflict, InvalidQuestion, NotFound
from anabranch.entrypoints.cli.ingest import retry
from anabranch.entrypoints.cli.options import (
    ListsByDefault,
    chunking_given,
    chunking_options,
    json_option,
    permission_options,
    permissions_given,
    permissions_required,
    settings_option,
    yes_option,
)
from anabranch.entrypoints.cli.resources import OPERATOR, exist, read, require_model, require_records, run, write
from anabranch.entrypoints.cli.terminal import (
    Cell,
    confirm_deletion,
    counted,
    fitting,
    flat,
    moment,
    notes,
    one_line,
    output,
    permissions_text,
    print_fields,
    print_list,
    print_result,
    printable,
    size,
    write_text,
)
from anabranch.knowledge.collection_counts import CollectionCounts
from anabranch.knowledge.knowledge import Knowledge
from anabranch.knowledge.model import Chunking, Collection, DocumentStatus, StoredDocument
from anabranch.knowledge.records import collections as records_of_collections
from anabranch.knowledge.records.erasures import Erasure

PAGE = 500
# In a list of documents, so many text columns are truncated on a narrow terminal: title, file and collection.
FLEXIBLE = 3
document_argument = click.argument("document", metavar="DOCUMENT")


@click.group("collections", cls=ListsByDefault)
def collections() -> None:
    """List, create, show and delete collections."""


@collections.command("list")
@json_option
@settings_option
def list_collections(as_json: bool, settings: Settings) -> None:
    """List all collections with their size."""
    found = run(settings, lambda knowledge: knowledge.collections(OPERATOR)) if exist(settings) else []
    print_list(
        [_collection_view(one) for one in found],
        {
            "collection": lambda one: one["name"],
            "documents": lambda one: one["documents"],
            "chunks": lambda one: one["chunks"],
            "visibility": lambda one: one["permissions"].visibility,
            **({"owner": lambda one: one["owner"]} if any(one.collection.owner for one in found) else {}),
        },
        empty="There is no collection yet. Create one with: anabranch ingest FOLDER --collection NAME",
        as_json=as_json,
    )


@collections.command()
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
    permissions = permissions_given(visibility, users, groups)
    chosen = msgspec.structs.replace(Chunking(), **chunking_given(chunking, chunk_size, overlap))

    async def work(knowledge: Knowledge) -> CollectionCounts:
        created = await knowledge.create_collection(
            OPERATOR, name, description=description, chunking=chosen, default_permissions=permissions
        )
        return await knowledge.collection(OPERATOR, created.id)

    _print_collection(run(settings, work, create=True), as_json=as_json)


@collections.command("show")
@click.argument("name")
@json_option
@settings_option
def show_collection(name: str, as_json: bool, settings: Settings) -> None:
    """Show a collection, by its NAME or id."""
    _print_collection(run(settings, lambda knowledge: knowledge.collection(OPERATOR, name)), as_json=as_json)


@collections.command("delete")
@click.argument("name")
@yes_option
@json_option
@settings_option
def delete_collection(name: str, yes: bool, as_json: bool, settings: Settings) -> None:
    """Delete a collection with all its documents, by its NAME or id.

    The command asks first, unless the collection is empty. The exit status is 1 if the answer is no. Without a terminal
    --yes is necessary.
    """
    found = run(settings, lambda knowledge: knowledge.collection(OPERATOR, name))
    stored = found.collection
    if found.documents and not yes:
        confirm_deletion(f"{flat(stored.name)!r} with {counted(found.documents, 'document')}")
    deleted, erasure = run(settings, lambda knowledge: knowledge.delete_collection(OPERATOR, stored.id))
    _print_deleted(
        {"id": stored.id, "name": stored.name, "documents": deleted},
        f"Deleted {flat(stored.name)} and {counted(deleted, 'document')}.",
        erasure,
        as_json=as_json,
    )


@collections.command("permissions")
@click.argument("name")
@permission_options
@json_option
@settings_option
def collection_permissions(name: str, as_json: bool, settings: Settings, **given: Any) -> None:
    """Change who may see a collection, by its NAME or id, and its documents without permissions of their own."""
    chosen = permissions_required(**given)

    async def work(knowledge: Knowledge) -> CollectionCounts:
        changed = await knowledge.describe_collection(OPERATOR, name, permissions=chosen)
        return await knowledge.collection(OPERATOR, changed.id)

    found = run(settings, work)
    print_result(
        _collection_view(found),
        f"{flat(found.collection.name)} is {flat(permissions_text(chosen))} now.",
        as_json=as_json,
    )


def _collection_view(one: CollectionCounts) -> dict[str, Any]:
    """A collection as `--json` prints it."""
    stored = one.collection
    return {
        "id": stored.id,
        "name": stored.name,
        "address": stored.address,
        "owner": stored.owner,
        "description": stored.description,
        "documents": one.documents,
        "chunks": one.chunks,
        "tokens": one.tokens,
        "bytes": one.size,
        "storage_bytes": one.storage_bytes,
        "permissions": stored.settings.default_permissions,
        "chunking": stored.settings.chunking,
        "embedding_model": stored.settings.embedding_model,
        "created_at": moment(stored.created_at),
    }


def _print_collection(one: CollectionCounts, *, as_json: bool) -> None:
    view = _collection_view(one)
    chunking = view["chunking"]
    fields = [
        ("collection", view["name"]),
        *((name, view[name]) for name in ("id", "owner", "description", "documents", "chunks", "tokens")),
        ("size", size(one.size)),
        ("storage", size(one.storage_bytes)),
        ("visibility", permissions_text(view["permissions"])),
        ("chunking", f"{chunking.strategy}, at most {chunking.size} tokens, {chunking.overlap} repeated"),
        ("embedder", view["embedding_model"]),
        ("created", view["created_at"]),
    ]
    print_fields(view, fields, as_json=as_json)


@click.group("documents", cls=ListsByDefault)
def documents() -> None:
    """List, show, retry and delete documents, and change their permissions.

    DOCUMENT is an id, a file name or a title.
    """


@documents.command("list")
@click.option("-c", "--collection", metavar="NAME", help="Only documents of this collection.")
@click.option(
    "--status",
    type=click.Choice((*get_args(DocumentStatus), "all")),
    help="Only documents in this state, also if no version of them is stored [default: stored documents].",
)
@click.option("--connector", metavar="ID", help="Only documents that this connector has sent.")
@click.option("--limit", type=click.IntRange(1), help="Maximum number of documents.")
@json_option
@settings_option
def list_documents(
    collection: str | None,
    status: DocumentStatus | None,
    connector: str | None,
    limit: int | None,
    as_json: bool,
    settings: Settings,
) -> None:
    """List documents, oldest first."""
    found: list[StoredDocument] = []
    total = 0
    if exist(settings):
        pages = partial(_read_pages, collection=collection, status=status, connector=connector)
        found, total = run(settings, lambda knowledge: pages(knowledge, limit or sys.maxsize))
    names = _collection_names(settings)
    print_list(
        [_document_view(one, names) for one in found], _document_columns(found), flexible=FLEXIBLE, as_json=as_json
    )
    failed = [one for one in found if one.error] if not as_json else []
    for at, one in enumerate(failed):
        output().print(f"{'' if at else chr(10)}{flat(one.title)}: {flat(one.error or '')}")
    if not found and status == "failed" and not as_json:
        filtered = collection is not None or connector is not None
        notes().print("No document that matches has failed." if filtered else "No document has failed.")
    elif not as_json and (len(found) < total or not found):
        notes().print(f"{len(found):,} of {counted(total, 'document')}.")


def _document_columns(found: Sequence[StoredDocument]) -> Mapping[str, Cell]:
    """The columns of a list of documents, without those that would say nothing."""
    columns: dict[str, Cell] = {"document": lambda one: one_line(one["title"])}
    if any((one.filename or one.url or one.title) != one.title for one in found):
        columns["file"] = lambda one: one_line(one["filename"] or one["url"] or "")
    columns |= {
        "collection": lambda one: one_line(one["collection"]),
        "chunks": lambda one: one["chunks"],
        "visibility": lambda one: one["permissions"].visibility,
        "id": lambda one: one["id"],
    }
    if any(one.status != "completed" for one in found):
        columns["status"] = lambda one: one["status"]
    return fitting(("document", "file", "collection", "id", "status"), **columns)


def _collection_names(settings: Settings) -> dict[int, str]:
    return {one.key: one.name for one in read(settings, records_of_collections.listed)}


@documents.command("show")
@document_argument
@click.option("--content", is_flag=True, help="Print the document's text.")
@json_option
@settings_option
def show_document(document: str, content: bool, as_json: bool, settings: Settings) -> None:
    """Show the properties of a document, or its text."""
    found = run(settings, lambda knowledge: knowledge.document(OPERATOR, document, content=content))
    if content and not as_json:
        # Unchanged into a pipe; made safe for a terminal.
        text = found.content or ""
        write_text(printable(text.expandtabs(4)) if sys.stdout.isatty() else text)
        return
    view = _document_view(found, _collection_names(settings))
    newer = " (the version before it is stored and found)" if found.searchable else ""
    fields = [
        *((name, view[name]) for name in ("title", "id", "collection", "owner")),
        ("status", found.status if found.status == "completed" else f"{found.status}{newer}"),
        ("error", found.error),
        ("file", found.filename),
        ("address", found.url),
        ("connector", found.connector_id),
        *((name, str(value)) for name, value in found.metadata.items()),
        ("visibility", permissions_text(found.permissions)),
        *((name, view[name]) for name in ("pages", "chunks", "tokens")),
        ("size", size(found.size)),
        ("created", view["created_at"]),
        ("updated", view["updated_at"]),
        ("processed", view["processed_at"]),
    ]
    print_fields(view, fields, as_json=as_json)


def _print_deleted(deleted: dict[str, Any], line: str, erasure: Erasure, *, as_json: bool) -> None:
    erased_by = moment(erasure.complete_by)
    print_result({**deleted, "erased_by": erased_by}, line, as_json=as_json)
    notes().print(f"Its text is erased everywhere by {erased_by}, while a server runs.")


@documents.command("delete")
@document_argument
@yes_option
@json_option
@settings_option
def delete_document(document: str, yes: bool, as_json: bool, settings: Settings) -> None:
    """Delete a document; the next search no longer finds it.

    On a terminal, the command asks first. The exit status is 1 if the answer is no.
    """
    if not yes and sys.stdin.isatty():  # elsewhere the name of one document is enough
        found = run(settings, lambda knowledge: knowledge.document(OPERATOR, document))
        confirm_deletion(f"{flat(found.title)!r} ({found.id})")
        document = found.id
    deleted, erasure = run(settings, lambda knowledge: knowledge.delete_document(OPERATOR, document))
    name = deleted.id if document == deleted.id else f"{deleted.title} ({deleted.id})"
    _print_deleted(
        {"id": deleted.id, "title": deleted.title, "chunks": deleted.chunk_count},
        f"Deleted {flat(name)} and its {counted(deleted.chunk_count, 'chunk')}."
        if deleted.searchable
        else f"Deleted {flat(name)}, which was {deleted.status}.",
        erasure,
        as_json=as_json,
    )


@documents.command("retry")
@click.argument("names", nargs=-1, metavar="[DOCUMENT]...")
@click.option("--failed", is_flag=True, help="All documents that have failed.")
@click.option("-c", "--collection", metavar="NAME", help="With --failed, only those of this collection.")
@click.option("--no-wait", is_flag=True, help="Do not wait; a running server ingests the documents.")
@json_option
@settings_option
def retry_documents(
    names: tuple[str, ...], failed: bool, collection: str | None, no_wait: bool, as_json: bool, settings: Settings
) -> None:
    """Ingest documents again that have failed, from what was uploaded.

    The exit status is 1 if any of them failed again or cannot be retried.
    """
    if bool(names) == failed or (collection is not None and not failed):
        raise click.UsageError("Name documents, or use --failed, alone or with --collection.")
    require_records(settings)
    require_model(settings)
    if failed:
        pages = partial(_read_pages, collection=collection, status="failed")
        found, _ = run(settings, lambda knowledge: pages(knowledge, sys.maxsize))
        chosen = {one.id: one.filename or one.title for one in found}
    else:
        chosen = {name: name for name in names}
    if not chosen:
        print_result({"counts": {}, "documents": []}, "No document has failed.", as_json=as_json)
        return
    sys.exit(retry(settings, chosen, wait=not no_wait, as_json=as_json))


@documents.command()
@document_argument
@permission_options
@json_option
@settings_option
def permissions(document: str, as_json: bool, settings: Settings, **given: Any) -> None:
    """Change who may see a document; the next question sees the change."""
    chosen = permissions_required(**given)
    changed = run(settings, lambda knowledge: knowledge.describe(OPERATOR, document, permissions=chosen))
    print_result(
        _document_view(changed, _collection_names(settings)),
        f"{flat(changed.title)} is {flat(permissions_text(changed.permissions))} now.",
        as_json=as_json,
    )


async def _read_pages(
    knowledge: Knowledge,
    limit: int,
    *,
    collection: str | None,
    status: DocumentStatus | None = None,
    connector: str | None = None,
) -> tuple[list[StoredDocument], int]:
    """The documents up to the limit, and how many there are."""
    found: list[StoredDocument] = []
    after, total = 0, 1
    while len(found) < min(limit, total):
        size_of_page = min(PAGE, limit - len(found))
        page, total = await knowledge.documents(
            OPERATOR, collection, after, size_of_page, status=status, connector_id=connector
        )
        if not page:
            break
        found += page
        after = page[-1].key
    return found, total


def _document_view(one: StoredDocument, collection_names: Mapping[int, str]) -> dict[str, Any]:
    """A document as `--json` prints it."""
    return {
        "id": one.id,
        "title": one.title,
        "collection": collection_names.get(one.collection, ""),
        "owner": one.owner,
        "source": one.source,
        "filename": one.filename,
        "url": one.url,
        "connector_id": one.connector_id,
        "metadata": one.metadata,
        "permissions": one.permissions,
        "status": one.status,
        "error": one.error,
        "searchable": one.searchable,
        "chunks": one.chunk_count,
        "tokens": one.tokens,
        "bytes": one.size,
        "pages": one.pages,
        "content_hash": one.content_hash,
        "created_at": moment(one.created_at),
        "updated_at": moment(one.updated_at),
        "processed_at": None if one.processed_at is None else moment(one.processed_at),
        "content": one.content,
    }


@click.command("publish")
@click.argument("collection")
@click.option("--as", "path", required=True, metavar="OWNER/SLUG", help="The path under which it is queried.")
@json_option
@settings_option
def publish(collection: str, path: str, as_json: bool, settings: Settings) -> None:
    """Let others query a COLLECTION as owner/slug."""
    owner, slug = endpoint = _path(path)
    if path in settings.published_models:
        raise Conflict(
            f"{path} is the model {settings.published_models[path]!r} of your configuration; choose another path."
        )

    async def publish_and_count(knowledge: Knowledge) -> tuple[Collection, int]:
        found = await knowledge.publish(OPERATOR, collection, owner, slug)
        return found, await public_documents(knowledge, found)

    found, public = run(settings, publish_and_count)
    address = endpoint.url_path
    view = {"path": path, "collection": found.name, "query_path": address, "public_documents": public}
    print_result(view, f"{flat(found.name)} is published as {path}.", as_json=as_json)
    if as_json:
        return
    notes().print(
        f"Others ask it with: anabranch ask -s {endpoint.source('URL')} …, or POST URL{address}. URL is the address of "
        f"your server (on this machine http://127.0.0.1:{settings.port}).",
    )
    if not public:
        notes().print(
            "None of its documents is public: only callers with a key find something, in documents that are shared "
            f"with them (anabranch keys create; anabranch collections permissions {flat(found.name)} …).",
        )


@click.command("unpublish")
@click.argument("path", metavar="PATH")
@json_option
@settings_option
def unpublish(path: str, as_json: bool, settings: Settings) -> None:
    """Withdraw what is published as PATH (owner/slug)."""
    owner, slug = _path(path)
    require_records(settings)
    if not write(settings, lambda db: records_of_collections.withdraw(db, owner, slug)):
        raise NotFound(f"Nothing is published as {path}.")
    print_result({"path": path, "withdrawn": True}, f"{path} is no longer published.", as_json=as_json)


@click.command("published")
@json_option
@settings_option
def published(as_json: bool, settings: Settings) -> None:
    """List what is published."""
    views = [
        {
            "path": endpoint.path,
            "owner": endpoint.owner,
            "slug": endpoint.slug,
            "collection": endpoint.collection_name,
            "collection_id": endpoint.collection_id,
            "published_at": moment(endpoint.created_at),
        }
        for endpoint in read(settings, records_of_collections.published)
    ]
    print_list(
        views,
        {
            "collection": lambda one: one["collection"],
            "path": lambda one: one["path"],
            "since": lambda one: one["published_at"],
        },
        empty="Nothing is published. Publish a collection with: anabranch publish COLLECTION --as OWNER/SLUG",
        as_json=as_json,
    )


def _path(text: str) -> EndpointPath:
    try:
        return EndpointPath.parse(text)
    except InvalidQuestion as error:
        raise click.UsageError(error.message) from None
