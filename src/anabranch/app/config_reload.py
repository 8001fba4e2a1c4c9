"""Reloads the configuration file: MCP servers and the `aggregator:` block apply at once, the rest at a restart."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from anabranch.configuration.settings import BLOCKS, Settings, load
from anabranch.domain.audit import AuditEntry, acting, on_this_machine
from anabranch.domain.errors import AnabranchError, ConfigurationError
from anabranch.domain.mcp import Aggregation, McpServer
from anabranch.telemetry.log import Log

Apply = Callable[[Mapping[str, McpServer], Aggregation], Awaitable[None]]
Record = Callable[[AuditEntry], Awaitable[None]]


async def _unrecorded(_entry: AuditEntry) -> None:
    """Where there is no audit log."""


ACTION = "configuration.reloaded"


class ConfigReload:
    """Applies what has changed. An invalid file changes nothing and is logged."""

    def __init__(
        self,
        settings: Settings,
        apply: Apply,
        log: Log,
        read: Callable[[], Settings] = load,
        record: Record = _unrecorded,
    ) -> None:
        self._started = settings
        self._servers, self._aggregation = settings.mcp_servers, settings.aggregation
        self._apply = apply
        self._log = log
        self._read = read
        self._record = record

    async def again(self) -> None:
        acting.set(lambda: on_this_machine("signal"))
        try:
            # In a thread: the file may be on a network share.
            found = await asyncio.to_thread(self._read)
            self._check(found)
            changes = self._changes(found)
            await self._record(AuditEntry(action=ACTION, details=changes))
            await self._apply(found.mcp_servers, found.aggregation)
        except ConfigurationError as error:
            self._log.error("configuration_refused", reason=error.message)
            with suppress(AnabranchError):
                await self._record(AuditEntry(action=ACTION, outcome="failed"))
        except Exception as error:  # noqa: BLE001  the task's boundary: the service goes on as it is
            self._log.error("configuration_refused", reason="unexpected error", exc_info=error)
        else:
            self._log.info("configuration_reloaded", **changes)
            self._servers, self._aggregation = found.mcp_servers, found.aggregation

    def _changes(self, found: Settings) -> dict[str, Any]:
        """Names only: values may be secrets."""
        before, after = self._servers, found.mcp_servers
        return {
            "added": [name for name in after if name not in before],
            "removed": [name for name in before if name not in after],
            "changed": [name for name in after if name in before and before[name] != after[name]],
            "aggregator_changed": found.aggregation != self._aggregation,
            "restart_needed": _blocks_for_restart(self._started, found),
        }

    def _check(self, found: Settings) -> None:
        for name in found.mcp_servers:
            if name in self._started.sources:
                raise ConfigurationError(f"mcpServers.{name}: a source has this name; it can be used after a restart.")


def _blocks_for_restart(before: Settings, after: Settings) -> list[str]:
    """The changed blocks of the file that are read at the start only."""
    changed = {name for name in before.__struct_fields__ if getattr(before, name) != getattr(after, name)}
    blocks = {
        "settings": changed.difference(BLOCKS),
        "sources": changed & {"sources"},
        "models": changed & {"models", "published_models"},
    }
    return [name for name, fields in blocks.items() if fields]
