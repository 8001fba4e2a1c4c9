"""Opens the records: in a file of the data folder, or in PostgreSQL."""

import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from anabranch.configuration.extras import require
from anabranch.configuration.settings import Settings
from anabranch.domain.errors import AnabranchError, ConfigurationError
from anabranch.knowledge.durable_files import replace_file
from anabranch.knowledge.records.database import Database
from anabranch.knowledge.records.sqlite import NAME, SqliteDatabase

if TYPE_CHECKING:
    from anabranch.knowledge.records.postgres import PostgresDatabase

NODE = "node"
IN_POSTGRES = "Keeping the records in PostgreSQL (AGGREGATOR_DATABASE_URL)"
# What the errors of a database that cannot be reached give as their reason, and `/ready`.
UNREACHABLE: Literal["records_unreachable"] = "records_unreachable"


def folder_of(settings: Settings) -> Path:
    return Path(settings.data_dir).expanduser()


def open_records(settings: Settings) -> Database:
    """The records of the settings; they are created or migrated if needed."""
    if settings.database_url is None:
        return SqliteDatabase.open(folder_of(settings))
    return _postgres().open(settings.database_url)


def shared_records(settings: Settings) -> Database | None:
    """The records that nodes share, as they are: neither created nor migrated. None if they are in the data folder."""
    return None if settings.database_url is None else _postgres().open(settings.database_url, as_they_are=True)


def _postgres() -> "type[PostgresDatabase]":
    require("postgres", IN_POSTGRES)
    try:
        from anabranch.knowledge.records.postgres import PostgresDatabase  # noqa: PLC0415  an extra
    except ImportError:
        raise ConfigurationError(
            f"{IN_POSTGRES} needs libpq, which psycopg cannot load: pip install 'anabranch[postgres]'"
        ) from None
    return PostgresDatabase


def is_unreachable(error: AnabranchError) -> bool:
    """Whether this is because the database is down, or cannot be connected to."""
    return error.details.get("reason") == UNREACHABLE


def has_records(settings: Settings) -> bool:
    """Whether there are records. Those in PostgreSQL are created when they are opened."""
    if settings.database_url is not None:
        return True
    folder = folder_of(settings)
    try:
        return (folder / NAME).is_file()
    except PermissionError:
        raise ConfigurationError(
            f"AGGREGATOR_DATA_DIR: this user may not read {folder}. Change its permissions, or set another folder."
        ) from None


def node_of(settings: Settings, *, create: bool = True) -> str:
    """What identifies this node among those that share the records: the id of its data folder. Empty if the records are
    in that folder, or if it has none yet and none is to be created."""
    if settings.database_url is None:
        return ""
    file = folder_of(settings) / NODE
    with suppress(OSError, ValueError):
        return str(uuid.UUID(file.read_text().strip()))
    return _new_node(file) if create else ""


def _new_node(file: Path) -> str:
    made = str(uuid.uuid4())
    beside = file.with_name(f".{file.name}.{made}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_file(beside, made.encode())
        with suppress(FileExistsError):  # another worker was first
            os.link(beside, file)
        beside.unlink()
        return str(uuid.UUID(file.read_text().strip()))
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"AGGREGATOR_DATA_DIR: {file} cannot be written or read ({error}). A node keeps its id there."
        ) from None
