"""`anabranch backup` and `restore`: copies of the records."""

import os
from collections.abc import Iterator
from pathlib import Path

import click

from anabranch.app.records import folder_of
from anabranch.configuration.settings import Settings
from anabranch.domain.audit import AuditEntry
from anabranch.domain.errors import ConfigurationError, Conflict
from anabranch.entrypoints.cli.options import (
    decryption_given,
    decryption_options,
    json_option,
    passphrase_given,
    passphrase_option,
    settings_option,
)
from anabranch.entrypoints.cli.resources import (
    alone,
    audited,
    cleaning_up,
    file_records,
    records,
    require_file,
    require_records,
)
from anabranch.entrypoints.cli.terminal import (
    counted,
    flat,
    notes,
    print_result,
    size,
)
from anabranch.knowledge.records import backup as copies
from anabranch.knowledge.records import documents, keys
from anabranch.knowledge.records.database import Session
from anabranch.knowledge.records.encryption import Encryption
from anabranch.knowledge.records.erasures import Repeated
from anabranch.knowledge.records.sqlite import NAME
from anabranch.models.factory import LocalEmbedder


@click.command("backup")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--encrypt-to",
    multiple=True,
    metavar="RECIPIENT",
    help="Encrypt for the owner of this age public key (age1…); repeatable.",
)
@passphrase_option
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@json_option
@settings_option
def backup(
    file: Path,
    encrypt_to: tuple[str, ...],
    passphrase_file: Path | None,
    force: bool,
    as_json: bool,
    settings: Settings,
) -> None:
    """Copy the records into FILE, also while a server runs.

    The search index is not included: it is rebuilt from the records. The file is encrypted, in the format of age, if
    there is a recipient or a passphrase.
    """
    asked_for_passphrase = passphrase_file is not None or not encrypt_to
    encryption = Encryption(
        recipients=encrypt_to, passphrase=passphrase_given(settings, passphrase_file) if asked_for_passphrase else None
    )
    encryption.check()
    require_file(settings)
    require_records(settings)
    copies.check_target(file, folder_of(settings), replace=force)
    details = {"encrypted": True} if encryption else {}
    entry = AuditEntry(action="records.backed_up", object="file", name=str(file.resolve()), details=details)
    with cleaning_up(), audited(settings, entry), file_records(settings) as database:
        counts = copies.back_up(database, file, encryption, replace=force)
    _print_copy("Backed up and encrypted" if encryption else "Backed up", file, counts, as_json=as_json)


@click.command("restore")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Replace existing records; they are kept in another file.")
@decryption_options
@json_option
@settings_option
def restore(
    file: Path,
    force: bool,
    identity: tuple[Path, ...],
    passphrase_file: Path | None,
    as_json: bool,
    settings: Settings,
) -> None:
    """Replace the records with FILE, a backup."""
    require_file(settings)
    folder = folder_of(settings)
    if os.path.realpath(file) == os.path.realpath(folder / NAME):
        raise ConfigurationError(f"{file} is the file of the records themselves.")
    decryption = decryption_given(settings, identity, passphrase_file)
    with cleaning_up(), alone(folder):
        if not (force or copies.is_empty(folder)):
            raise Conflict(f"There are records in {folder} already; --force replaces them and keeps a copy.")
        with copies.opened(file, decryption, folder) as found:
            aside, repeated = copies.restore(folder, found.db, file)
            counts = copies.contents(found.db)
        with records(settings) as database:  # migrates the schema
            known = database.reading(documents.embedder)
            warnings = [*_erasures_notes(repeated), database.reading(lambda db: _keys_warning(db, aside))]
    if not found.has_checksum:
        notes().print(
            f"{flat(str(file))} has no checksum, so damaged texts in it are not found: it was made by an earlier "
            f"version, or copied by another program."
        )
    if aside is not None:
        notes().print(f"The previous records are kept as {aside}.")
    for warning in filter(None, warnings):
        notes().print(warning)
    wanted = settings.embedding_model or LocalEmbedder.name
    if known is not None and known[0] != wanted:
        notes().print(documents.mismatch(known[0], wanted))
    _print_copy("Restored", file, counts, as_json=as_json)


def _erasures_notes(repeated: Repeated | None) -> Iterator[str]:
    """What became of the erasures that a backup does not know."""
    if repeated is None:
        yield "What was erased after the backup, if anything, is in it. Erase it again: anabranch erase"
        return
    if repeated.erasures:
        since = counted(repeated.erasures, "erasure")
        yield f"Repeated {since} that the backup does not know; a server or the next ingest completes this."
    if repeated.nameless:
        whose = "a user whose name is" if repeated.nameless == 1 else f"{repeated.nameless} users whose names are"
        yield (
            f"Of {whose} forgotten, only the documents were erased again. Erase the rest that the backup has, such as "
            "keys and questions: anabranch erase --user NAME"
        )


def _keys_warning(db: Session, replaced: Path | None) -> str | None:
    """What to know of the keys of restored records: a backup does not know what was revoked after it."""
    count = keys.valid_again(db, replaced) if replaced is not None else None
    if count == 0 or not keys.credentials(db):
        return None
    shown = "anabranch keys lists them; revoke those that should not be valid."
    if count is None:
        return f"API keys that were revoked or rotated after the backup are valid again. {shown}"
    valid = "1 API key is valid that was" if count == 1 else f"{count} API keys are valid that were"
    return f"{valid} not valid before the restore: revoked, rotated or erased after the backup. {shown}"


def _print_copy(done: str, file: Path, counts: dict[str, int], *, as_json: bool) -> None:
    used = file.stat().st_size
    parts = ", ".join(counted(number, table.removesuffix("s")) for table, number in counts.items())
    print_result(
        {"file": str(file), "bytes": used, **counts},
        f"{done} {parts}: {flat(str(file))} ({size(used)}).",
        as_json=as_json,
    )
