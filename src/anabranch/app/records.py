"""Opens the records: in a file of the data folder, or in PostgreSQL."""

import os
import uuid
from contextlib import suppress
from pathlib import Path

from anabranch.configuration.extras import require
from anabranch.configuration.settings import Settings
from anabranch.domain.errors import ConfigurationError
from anabranch.knowledge.durable_files import replace_file
from anabranch.knowledge.records.database import Database
from anabranch.knowledge.records.sqlite import NAME, SqliteDatabase

NODE = "node"


def folder_of(settings: Settings) -> Path:
    return Path(settings.data_dir).expanduser()


def open_records(settings: Settings) -> Database:
    """The records of the settings; they are created or migrated if needed."""
    if settings.database_url is None:
        return SqliteDatabase.open(folder_of(settings))
    require("postgres", "AGGREGATOR_DATABASE_URL names a PostgreSQL database")
    from anabranch.knowledge.records.postgres import PostgresDatabase  # noqa: PLC0415  an extra

    return PostgresDatabase.open(settings.database_url)


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


def node_of(settings: Settings) -> str:
    """What identifies this node among those that share the records: the id of its data folder. Empty if the records are
    in that folder."""
    if settings.database_url is None:
        return ""
    file = folder_of(settings) / NODE
    with suppress(OSError, ValueError):
        return str(uuid.UUID(file.read_text().strip()))
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
