"""Sources, MCP servers and models that an operator adds over the API: the same blocks as in anabranch.yaml, checked by
the same rules, and kept as JSON, in a file of the data folder or in the records that nodes share."""

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec

from anabranch.configuration import config_file, mcp_servers
from anabranch.configuration.config_file import ConfigFile, File
from anabranch.domain.errors import ConfigurationError
from anabranch.domain.mcp import McpServer
from anabranch.domain.model import Endpoint, Value

FILE = "sources.json"
LOCK = "sources.lock"
MAX_ADDED = 200
MAX_BYTES = 4 * 1024 * 1024
ONLY_URLS = (
    "an MCP server that is a command comes only from anabranch.yaml; give the url of one that is served over HTTP"
)
NO_VARIABLES = "write the value itself: variables (${NAME}) are expanded only in anabranch.yaml"

Block = Literal["sources", "models", "mcpServers"]
Entries = Mapping[str, Mapping[str, Any]]
# What identifies a version of the file; None if there is none.
Stamp = tuple[int, int, int] | None


class AddedBlocks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The content of the file."""

    sources: Entries = {}
    models: Entries = {}
    mcpServers: Entries = {}  # noqa: N815  as in anabranch.yaml

    def __repr__(self) -> str:
        return f"AddedBlocks({', '.join(self.names)})"

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.sources, *self.models, *self.mcpServers)

    def adding(self, block: Block, name: str, entry: Mapping[str, Any]) -> "AddedBlocks":
        return msgspec.structs.replace(self, **{block: {**getattr(self, block), name: entry}})

    def without(self, name: str) -> "AddedBlocks":
        kept = {block: {one: entry for one, entry in getattr(self, block).items() if one != name} for block in BLOCKS}
        return AddedBlocks(**kept)


BLOCKS = AddedBlocks.__struct_fields__


class AddedSources(Value):
    """The entries by name, as anabranch.yaml would give them."""

    sources: Mapping[str, Endpoint] = {}
    models: Mapping[str, Endpoint] = {}
    servers: Mapping[str, McpServer] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.sources, *self.models, *self.servers)


def checked(blocks: AddedBlocks) -> AddedSources:
    """ConfigurationError, which names the field, if anabranch.yaml would not take an entry. Its message contains no
    token and no header."""
    for block in BLOCKS:
        for name, entry in getattr(blocks, block).items():
            if not mcp_servers.NAME.fullmatch(name):
                raise ConfigurationError(f"{FILE}: {block}: a name is 1 to 64 letters, digits, _ . or -.")
            if any("${" in text for text in _texts(entry)):
                raise ConfigurationError(f"{FILE}: {block}.{name}: {NO_VARIABLES}.")
    for name, entry in blocks.mcpServers.items():
        if "command" in entry:
            raise ConfigurationError(f"{FILE}: mcpServers.{name}: {ONLY_URLS}.")
    file = File(sources={**blocks.sources}, models={**blocks.models}, mcpServers={**blocks.mcpServers} or None)
    sources, models, _ = config_file.endpoints(file, {}, FILE)
    servers = mcp_servers.servers(ConfigFile(Path(FILE), file, file.mcpServers), {})
    return AddedSources(sources=sources, models=models, servers=servers)


def decoded(content: bytes) -> AddedBlocks:
    try:
        return msgspec.json.decode(content, type=AddedBlocks)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        # Not the whole error: it may quote what is in the file.
        raise ConfigurationError(f"{FILE}: this is not JSON with sources, models and mcpServers.") from None


def encoded(blocks: AddedBlocks) -> bytes:
    content = msgspec.json.format(msgspec.json.encode(blocks)) + b"\n"
    if len(content) > MAX_BYTES:
        raise ConfigurationError(
            f"{FILE}: with this entry the file is larger than {MAX_BYTES:,} bytes; remove another entry first, or "
            "shorten this one."
        )
    return content


def _texts(value: object) -> Iterator[str]:
    match value:
        case str():
            yield value
        case Mapping():
            for one in value.values():
                yield from _texts(one)
        case list():
            for one in value:
                yield from _texts(one)


def _regular_file(path: Path) -> int:
    """Opens a file; a pipe or a device of that name is none, and opening it could wait for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a file")
    return descriptor


class AddedSourcesFile:
    """The file. It holds secrets: only the user of the server may read it. `replace` writes a file atomically, with a
    mode."""

    def __init__(self, folder: Path, replace: Callable[[Path, bytes, int], None]) -> None:
        self._path = folder / FILE
        self._replace = replace

    def stamp(self) -> Stamp:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def read(self) -> AddedBlocks:
        """What was added; nothing without a file. ConfigurationError if it cannot be read."""
        try:
            with os.fdopen(_regular_file(self._path), "rb") as file:
                content = file.read(MAX_BYTES + 1)
        except FileNotFoundError:
            return AddedBlocks()
        except OSError as error:
            raise ConfigurationError(f"{FILE}: the file cannot be read ({error.strerror}).") from None
        return decoded(content)

    def change(self, change: Callable[[AddedBlocks], AddedBlocks]) -> AddedSources:
        """Read, change, check and write, while no other process does."""
        try:
            with self._locked():
                changed = change(self.read())
                found, content = checked(changed), encoded(changed)
                self._replace(self._path, content, 0o600)
        except OSError as error:
            raise ConfigurationError(f"{FILE}: the file cannot be written ({error.strerror}).") from None
        return found

    @contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self._path.with_name(LOCK), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
