"""What the operator has configured: the sources, models and MCP servers of anabranch.yaml, and those added over the
API."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

from anabranch.app.knowledge_opener import KnowledgeOpener
from anabranch.app.mcp_servers import McpServers
from anabranch.configuration.added_sources import (
    MAX_ADDED,
    AddedBlocks,
    AddedSources,
    AddedSourcesFile,
    Block,
    Stamp,
    checked,
    decoded,
    encoded,
)
from anabranch.configuration.mcp_servers import RESERVED
from anabranch.configuration.settings import Settings
from anabranch.domain.audit import AuditEntry
from anabranch.domain.contracts import Telemetry
from anabranch.domain.errors import ConfigurationError, Conflict, NotFound
from anabranch.domain.mcp import Aggregation, McpServer
from anabranch.domain.model import Endpoint
from anabranch.domain.signals import AddedSourcesUnreadable
from anabranch.network import redaction

# Makes a change, with its record in the audit log.
Recorded = Callable[[AuditEntry, Callable[[], AddedSources]], Awaitable[AddedSources]]
Change = Callable[[AddedBlocks], AddedBlocks]

# Names with a meaning in requests.
TAKEN = (*RESERVED, "default", "all", "test")


class AddedSourcesStore(Protocol):
    """Where the added ones are kept. ConfigurationError if they cannot be read or changed."""

    async def stamp(self) -> Any:
        """What identifies the version that is there now; None if nothing was added yet."""

    async def read(self) -> AddedBlocks: ...

    async def change(self, change: Change, entry: AuditEntry) -> AddedSources:
        """Read, change, check and write, while nobody else does, with a record in the audit log."""


class SourcesInFile:
    """In the file of the data folder, for all workers there."""

    def __init__(self, file: AddedSourcesFile, recorded: Recorded) -> None:
        self._file = file
        self._recorded = recorded

    async def stamp(self) -> Stamp:
        return await asyncio.to_thread(self._file.stamp)

    async def read(self) -> AddedBlocks:
        return await asyncio.to_thread(self._file.read)

    async def change(self, change: Change, entry: AuditEntry) -> AddedSources:
        return await self._recorded(entry, partial(self._file.change, change))


class SourcesInRecords:
    """In the records, for all nodes that share them."""

    def __init__(self, knowledge: KnowledgeOpener) -> None:
        self._knowledge = knowledge

    async def stamp(self) -> str | None:
        return await (await self._knowledge()).added_sources()

    async def read(self) -> AddedBlocks:
        return decoded((await self.stamp() or "{}").encode())

    async def change(self, change: Change, entry: AuditEntry) -> AddedSources:
        def changed(stored: str | None) -> str:
            blocks = change(decoded((stored or "{}").encode()))
            checked(blocks)
            return encoded(blocks).decode()

        return checked(decoded((await (await self._knowledge()).change_added_sources(changed, entry)).encode()))


class EndpointCatalog:
    """The configured endpoints by name: those of the file first. An added one whose name the file has, too, is not used
    until it is renamed there. `note` says why the added ones cannot be read, if they cannot."""

    def __init__(self, settings: Settings, servers: McpServers, store: AddedSourcesStore, telemetry: Telemetry) -> None:
        self._settings = settings
        self._servers = servers
        self._store = store
        self._telemetry = telemetry
        self._file_servers: Mapping[str, McpServer] = settings.mcp_servers
        self._stamp: Any = None
        self._changing = asyncio.Lock()
        self.note: str | None = None
        self.added = AddedSources()
        self.sources: Mapping[str, Endpoint] = settings.sources
        self.models: Mapping[str, Endpoint] = settings.models

    @property
    def file_names(self) -> set[str]:
        """The names that the file and the settings have."""
        model = self._settings.default_model
        own = [model.slug] if self._settings.model_url is not None and model is not None else []
        return {*self._settings.sources, *self._settings.models, *self._file_servers, *own, *TAKEN}

    @property
    def servers(self) -> Mapping[str, McpServer]:
        return self._servers.configured

    def is_added(self, name: str) -> bool:
        """Whether the entry in use under this name was added over the API."""
        return name in self.added.names and name not in self.file_names

    async def refresh(self) -> None:
        """Use what was added until now, if that has changed. What cannot be read changes nothing."""
        async with self._changing:
            stamp = await self._store.stamp()
            if stamp == self._stamp:
                return
            self._stamp = stamp
            try:
                self._use(checked(await self._store.read()))
                self.note = None
            except ConfigurationError as error:
                self.note = f"{error.message} Repair or remove it; until then the sources added before are used."
                self._telemetry.noted(AddedSourcesUnreadable(reason=error.message))

    async def watch(self, every_s: float) -> None:
        """Notice what other workers and nodes add and remove."""
        while True:
            await asyncio.sleep(every_s)
            try:
                await self.refresh()
            except Exception as error:  # noqa: BLE001  the task's boundary: it looks again
                self._telemetry.noted(AddedSourcesUnreadable(reason=f"Unexpected error: {type(error).__name__}."))

    def close(self) -> None:
        redaction.forget(self)

    def reconfigure(self, servers: Mapping[str, McpServer], aggregation: Aggregation) -> None:
        """Use these MCP servers of the file from now on, besides those that were added."""
        self._file_servers = servers
        self._use(self.added, aggregation)

    async def add(self, block: Block, name: str, entry: Mapping[str, Any]) -> None:
        """Add an entry. Conflict if its name is in use, or if the file cannot be changed."""
        if name in self.file_names:
            where = "is reserved" if name in TAKEN else "is in anabranch.yaml"
            raise Conflict(f"The name {name!r} {where}; choose another.")

        def adding(blocks: AddedBlocks) -> AddedBlocks:
            if name in blocks.names:
                raise Conflict(f"The name {name!r} is in use; remove that source first, or choose another name.")
            if len(blocks.names) >= MAX_ADDED:
                raise Conflict(f"{MAX_ADDED} sources were added, which is the limit; remove one first.")
            return blocks.adding(block, name, entry)

        await self._change(adding, AuditEntry(action="source.added", object=f"source:{name}", details={"block": block}))

    async def remove(self, name: str) -> None:
        if name not in self.added.names:
            if name in TAKEN:
                raise Conflict(f"{name!r} is built in and cannot be removed.")
            if name in self.file_names:
                raise Conflict(f"{name!r} is configured in anabranch.yaml: remove it there.")
            raise NotFound(f"There is no source {name!r} that was added here.")
        await self._change(
            lambda blocks: blocks.without(name), AuditEntry(action="source.removed", object=f"source:{name}")
        )

    async def _change(self, change: Change, entry: AuditEntry) -> None:
        async with self._changing:
            try:
                self._use(await self._store.change(change, entry))
            except ConfigurationError as error:
                raise Conflict(f"{error.message} Nothing was changed.") from None
            self._stamp = await self._store.stamp()
            self.note = None

    def _use(self, added: AddedSources, aggregation: Aggregation | None = None) -> None:
        self.added = added
        redaction.learn(self, _secrets(added))
        taken = self.file_names
        self.sources = {**self._settings.sources, **_unless(taken, added.sources)}
        self.models = {**self._settings.models, **_unless(taken, added.models)}
        servers = {**self._file_servers, **_unless(taken, added.servers)}
        # A reload of the file also connects failed servers again.
        if aggregation is not None or servers != self._servers.configured:
            self._servers.update(
                servers, aggregation or self._servers.aggregation, retry_failed=aggregation is not None
            )


def _unless(taken: set[str], added: Mapping[str, Any]) -> dict[str, Any]:
    return {name: one for name, one in added.items() if name not in taken}


def _secrets(added: AddedSources) -> Iterator[str]:
    """Those of removed entries stay known, too: calls with them may be under way."""
    for endpoint in (*added.sources.values(), *added.models.values()):
        yield from redaction.secret_parts(endpoint.token or "")
