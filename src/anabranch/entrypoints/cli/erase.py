"""`anabranch erase`: removes a document or a user from everything that this node keeps."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import click

from anabranch.app.erasure import eraser_for
from anabranch.app.records import folder_of
from anabranch.configuration.settings import Settings
from anabranch.domain.errors import AnabranchError, Conflict
from anabranch.entrypoints.cli.options import json_option, settings_option, yes_option
from anabranch.entrypoints.cli.resources import alone, read, records, require_records, run
from anabranch.entrypoints.cli.terminal import (
    confirm_deletion,
    counted,
    flat,
    moment,
    notes,
    print_json,
    print_list,
    print_table,
    progress,
)
from anabranch.knowledge.records import erasures
from anabranch.knowledge.records.database import Database
from anabranch.knowledge.records.erasures import Erasure

MAX_LISTED = 20
POLL_S = 0.1
# A server begins within a second; the pass itself takes as long as the records are large.
PATIENCE_S = 600.0


@click.command("erase")
@click.option("--document", metavar="ID", help="A document, by its id, file name or title; a deleted one by its id.")
@click.option("--user", metavar="NAME", help="A user, with all that the user has stored and asked.")
@click.option("--wait", is_flag=True, help="Wait for the second pass as well.")
@yes_option
@json_option
@settings_option
def command(document: str | None, user: str | None, wait: bool, yes: bool, as_json: bool, settings: Settings) -> None:
    """Erase a document or a user everywhere; without an option, list the erasures.

    Erased are documents with their chunks, vectors and uploads, the questions for which they were found (answers,
    feedback and the later turns of the conversation), kept streams, caches, recordings, and the old bytes of the search
    index and of the records; of a user also collections, keys, and the name. A second pass, when the questions that ran
    at that time have ended, erases what they have written.
    """
    if document is not None and user is not None:
        raise click.UsageError("--document and --user exclude each other.")
    if document is None and user is None:
        _print_all(settings, as_json=as_json)
        return
    require_records(settings)
    if not yes:
        confirm_deletion(f"everything of the user {flat(user)!r}" if user is not None else f"{flat(document or '')!r}")
    erasure, warning = run(settings, lambda knowledge: knowledge.erase(document=document, user=user))
    erasure = _followed(settings, erasure, lambda one: one.state != "due")
    if wait:
        erasure = _followed(settings, erasure, lambda one: one.state == "complete")
    _print(settings, erasure, warning, as_json=as_json)
    if erasure.state == "failed":
        raise AnabranchError(f"Not everything could be erased; it is tried again. {erasure.error}")


def _followed(settings: Settings, erasure: Erasure, until: Callable[[Erasure], bool]) -> Erasure:
    """The erasure when that is so. The indexer of a server runs its passes; without one, this process does."""

    async def follow() -> Erasure:
        with records(settings) as database:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    found = database.reading(lambda db: erasures.by_id(db, erasure.id))
                    assert found is not None, "erasures are kept"
                    if until(found) or found.state == "failed":
                        return found
                    await _run_pass(settings, database)
                    await asyncio.sleep(POLL_S)

    try:
        with progress("Erasing"):
            return asyncio.run(follow())
    except TimeoutError:
        raise AnabranchError(f"The erasure {erasure.id} goes on; its state is shown by: anabranch erase") from None


async def _run_pass(settings: Settings, database: Database) -> None:
    from anabranch.app.search_index import embedder_of, index_writer  # noqa: PLC0415  numpy loads only where it is needed

    embedder = embedder_of(settings)
    with suppress(Conflict), alone(folder_of(settings)), index_writer(settings, database, embedder) as writer:
        await eraser_for(settings, database, writer).erase_due()


def _print(settings: Settings, erasure: Erasure, warning: str | None, *, as_json: bool) -> None:
    backups = read(settings, lambda db: erasures.backups_before(db, erasure.requested_at))
    if as_json:
        print_json({**_view(erasure), "backups": [str(path) for path in backups], "warning": warning})
        return
    if warning is not None:
        notes().print(flat(warning))
    print_table(("store", "removed"), [(store, f"{removed:,}") for store, removed in erasure.erased])
    what = _subject(erasure) if warning is None else "what is outside of the records"
    if erasure.state == "complete":
        notes().print(f"Erased {what}; complete at {moment(erasure.completed_at or 0)}.")
    elif erasure.state == "settling":
        notes().print(
            f"Erased {what}. A second pass at {moment(erasure.complete_by)} erases what questions that "
            "run now may still write; a server or the next ingest does it."
        )
    if backups:
        notes().print(
            "It may remain in these backups; delete them, or make them again (anabranch backup FILE --force):"
        )
        for path in backups:
            notes().print(f"  {path}")
    else:
        notes().print("Copies that were made otherwise, and logs that were sent elsewhere, are not erased.")


def _print_all(settings: Settings, *, as_json: bool) -> None:
    print_list(
        [_view(one) for one in read(settings, lambda db: erasures.listed(db, MAX_LISTED))],
        {
            "requested": lambda one: one["requested_at"],
            "what": lambda one: one["what"],
            "documents": lambda one: str(one["documents"]),
            "state": lambda one: one["state"],
            "complete by": lambda one: one["completed_at"] or one["complete_by"],
            "error": lambda one: one["error"] or "",
        },
        empty="Nothing was erased yet. Erase with: anabranch erase --document ID, or --user NAME",
        as_json=as_json,
    )


def _view(erasure: Erasure) -> dict[str, Any]:
    """An erasure as `--json` prints it."""
    return {
        "id": erasure.id,
        "what": erasure.what,
        "documents": len(erasure.subject.documents),
        "state": erasure.state,
        "requested_at": moment(erasure.requested_at),
        "complete_by": moment(erasure.complete_by),
        "completed_at": None if erasure.completed_at is None else moment(erasure.completed_at),
        "error": erasure.error,
        "erased": dict(erasure.erased),
    }


def _subject(erasure: Erasure) -> str:
    documents = counted(len(erasure.subject.documents), "document")
    return f"the user and {documents}" if erasure.what == "user" else documents
