"""`anabranch keys`, `backup` and `restore`: API keys, and copies of the records."""

from pathlib import Path
from typing import Any

import click
import msgspec

from anabranch.app.knowledge_opener import folder_of
from anabranch.configuration.settings import Settings
from anabranch.domain.audit import AuditEntry
from anabranch.domain.errors import ConfigurationError, Conflict, NotFound
from anabranch.entrypoints.cli.options import ListsByDefault, json_option, settings_option
from anabranch.entrypoints.cli.resources import alone, audited, read, records, require_records, write
from anabranch.entrypoints.cli.terminal import (
    counted,
    flat,
    moment,
    notes,
    print_json,
    print_list,
    print_result,
    size,
)
from anabranch.knowledge.records import backup as copies
from anabranch.knowledge.records import documents
from anabranch.knowledge.records import keys as api_keys
from anabranch.knowledge.records.database import NAME
from anabranch.models.factory import LocalEmbedder


@click.group("keys", cls=ListsByDefault)
def keys() -> None:
    """Create, list and revoke API keys."""


@keys.command()
@click.option("--user", required=True, help="The user that requests with this key act as.")
@click.option("--group", "groups", multiple=True, help="A group of the user; repeatable.")
@click.option("--operator", is_flag=True, help="The key may see and change everything.")
@click.option("--note", default="", help="What the key is for.")
@json_option
@settings_option
def create(user: str, groups: tuple[str, ...], operator: bool, note: str, as_json: bool, settings: Settings) -> None:
    """Create a key. Its secret is printed once and not stored."""
    name = user.strip()
    if not name:
        raise click.UsageError("--user is empty; give a user name.")
    key, secret = write(
        settings, lambda db: api_keys.create(db, user=name, groups=groups, operator=operator, note=note)
    )
    if as_json:
        print_json({**_view(key), "secret": secret})
        return
    click.echo(secret)
    rights = " and may see and change everything" if operator else ""
    notes().print(
        f"Key {key.id}: requests that send it (Authorization: Bearer …) act as {flat(user)}{rights}. It is not shown "
        f"again; revoke it with: anabranch keys revoke {key.id}",
    )


@keys.command("list")
@json_option
@settings_option
def list_keys(as_json: bool, settings: Settings) -> None:
    """List the keys, without their secrets."""
    print_list(
        [_view(key) for key in read(settings, api_keys.listed)],
        {
            "user": lambda key: key["user"],
            "id": lambda key: key["id"],
            "groups": lambda key: ", ".join(key["groups"]),
            "rights": lambda key: "operator" if key["operator"] else "",
            "created": lambda key: key["created_at"][:10],
            "state": lambda key: "revoked" if key["revoked_at"] else "",
            "note": lambda key: key["note"],
        },
        empty="There is no key yet. Create one with: anabranch keys create --user NAME",
        as_json=as_json,
    )


@keys.command()
@click.argument("identifier", metavar="ID")
@json_option
@settings_option
def revoke(identifier: str, as_json: bool, settings: Settings) -> None:
    """Revoke a key. The next request with it is refused, and its streams end within seconds."""
    require_records(settings)
    if not write(settings, lambda db: api_keys.revoke(db, identifier)):
        raise NotFound(f"There is no key {identifier!r} that could be revoked.")
    print_result({"id": identifier, "revoked": True}, f"Revoked {identifier}.", as_json=as_json)


def _view(key: api_keys.ApiKey) -> dict[str, Any]:
    """A key as `--json` prints it."""
    return msgspec.structs.asdict(key) | {
        "created_at": moment(key.created_at),
        "revoked_at": moment(key.revoked_at) if key.revoked_at else None,
    }


@click.command("backup")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@json_option
@settings_option
def backup(file: Path, force: bool, as_json: bool, settings: Settings) -> None:
    """Copy the records into FILE, also while a server runs.

    The search index is not included: it is rebuilt from the records.
    """
    require_records(settings)
    if file.exists() and not force:
        raise ConfigurationError(f"{file} exists already; --force replaces it.")
    if file.resolve() == (folder_of(settings) / NAME).resolve():
        raise ConfigurationError(f"{file} is the file of the records themselves.")
    entry = AuditEntry(action="records.backed_up", object="file", name=str(file.resolve()))
    with audited(settings, entry), records(settings) as database:
        copies.back_up(database, file)
    _print_copy("Backed up", file, as_json=as_json)


@click.command("restore")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Replace existing records; they are kept in another file.")
@json_option
@settings_option
def restore(file: Path, force: bool, as_json: bool, settings: Settings) -> None:
    """Replace the records with FILE, a backup."""
    folder = folder_of(settings)
    copies.validate(file)
    with alone(folder):
        if not (force or copies.is_empty(folder)):
            raise Conflict(f"There are records in {folder} already; --force replaces them and keeps a copy.")
        aside = copies.restore(folder, file)
        with records(settings) as database:  # migrates the schema
            known = database.reading(documents.embedder)
    if aside is not None:
        notes().print(f"The previous records are kept as {aside}.")
    wanted = settings.embedding_model or LocalEmbedder.name
    if known is not None and known[0] != wanted:
        notes().print(documents.mismatch(known[0], wanted))
    _print_copy("Restored", file, as_json=as_json)


def _print_copy(done: str, file: Path, *, as_json: bool) -> None:
    counts, used = copies.contents(file), file.stat().st_size
    parts = ", ".join(counted(number, table.removesuffix("s")) for table, number in counts.items())
    print_result(
        {"file": str(file), "bytes": used, **counts}, f"{done} {parts}: {file} ({size(used)}).", as_json=as_json
    )
