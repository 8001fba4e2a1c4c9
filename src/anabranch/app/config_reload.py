"""The file read again while the service runs: MCP servers and the `aggregator:` block change, the rest at a restart."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from anabranch.configuration.settings import BLOCKS, Settings, load
from anabranch.domain.errors import ConfigurationError
from anabranch.domain.mcp import Aggregation, McpServer
from anabranch.telemetry.log import Log

Take = Callable[[Mapping[str, McpServer], Aggregation], Awaitable[None]]


class ConfigReload:
    """Hands on what has changed. A file that is wrong changes nothing, and the log says why."""

    def __init__(self, settings: Settings, take: Take, log: Log, read: Callable[[], Settings] = load) -> None:
        self._started = settings
        self._servers, self._aggregation = settings.mcp_servers, settings.aggregation
        self._take = take
        self._log = log
        self._read = read

    async def again(self) -> None:
        try:
            # Not on the loop: the file may be on another machine.
            found = await asyncio.to_thread(self._read)
            self._check(found)
            await self._take(found.mcp_servers, found.aggregation)
        except ConfigurationError as error:
            self._log.error("configuration_refused", reason=error.message)
        except Exception as error:  # noqa: BLE001  the task's boundary: the service goes on as it is
            self._log.error("configuration_refused", reason="This is our own fault.", exc_info=error)
        else:
            self._say(found)
            self._servers, self._aggregation = found.mcp_servers, found.aggregation

    def _say(self, found: Settings) -> None:
        """Names only: there are secrets in the rest."""
        before, after = self._servers, found.mcp_servers
        self._log.info(
            "configuration_reloaded",
            added=[name for name in after if name not in before],
            removed=[name for name in before if name not in after],
            changed=[name for name in after if name in before and before[name] != after[name]],
            aggregator_changed=found.aggregation != self._aggregation,
            restart_needed=_elsewhere(self._started, found),
        )

    def _check(self, found: Settings) -> None:
        for name in found.mcp_servers:
            if name in self._started.sources:
                raise ConfigurationError(
                    f"mcpServers.{name}: a source that is being asked has this name; it is free after a restart."
                )


def _elsewhere(before: Settings, after: Settings) -> list[str]:
    """The blocks of the file that have changed and are read at the start only."""
    changed = {name for name in before.__struct_fields__ if getattr(before, name) != getattr(after, name)}
    blocks = {
        "settings": changed.difference(BLOCKS),
        "sources": changed & {"sources"},
        "models": changed & {"models", "published_models"},
    }
    return [name for name, fields in blocks.items() if fields]
