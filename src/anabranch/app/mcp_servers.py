"""The configured MCP servers and the pool of connections to them."""

import asyncio
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

import msgspec

from anabranch.configuration.settings import Settings
from anabranch.domain.contracts import Clock, Outbound, Source, Telemetry
from anabranch.domain.mcp import Aggregation, McpServer, ServerHealth
from anabranch.domain.model import Endpoint
from anabranch.network import redaction
from anabranch.policies.resilience import Resilience

if TYPE_CHECKING:  # it loads the MCP SDK, which takes half a second
    from anabranch.sources.mcp.pool import Pool

POOL = "anabranch.sources.mcp.pool"


class McpServers:
    """The MCP SDK is loaded and servers are connected to with the first query, or with `warm`."""

    def __init__(
        self, settings: Settings, *, outbound: Outbound, resilience: Resilience, clock: Clock, telemetry: Telemetry
    ) -> None:
        self.configured: Mapping[str, McpServer] = settings.mcp_servers
        self.aggregation: Aggregation = settings.aggregation
        self._max_reply_bytes = settings.max_reply_bytes
        self._outbound = outbound
        self._resilience = resilience
        self._clock = clock
        self._telemetry = telemetry
        self._pool: Pool | None = None
        self._is_warm = False
        self._keep_secrets()

    def endpoints(self) -> Mapping[str, Endpoint]:
        """The enabled servers as endpoints, by name."""
        return {name: endpoint_of(name) for name, server in self.configured.items() if server.enabled}

    def source(self, endpoint: Endpoint) -> Source:
        return self._opened().source(endpoint.slug)

    async def warm(self) -> None:
        """Connect to all servers, and to those that are configured later."""
        self._is_warm = True
        if self.configured:
            await asyncio.to_thread(import_module, POOL)
            self._opened().warm()

    async def update(self, configured: Mapping[str, McpServer], aggregation: Aggregation) -> None:
        """Replace the configuration. Running calls keep theirs."""
        if configured:
            await asyncio.to_thread(import_module, POOL)
        self.configured, self.aggregation = configured, aggregation
        self._keep_secrets()
        if configured or self._pool is not None:
            self._opened().update(configured, aggregation.server_timeout_s)
        if configured and self._is_warm:
            self._opened().warm()

    def health(self) -> tuple[ServerHealth, ...]:
        if not self.configured:
            return ()
        breakers = self._resilience.upstreams.states()
        return tuple(
            msgspec.structs.replace(health, breaker=breakers.get(health.name, "closed"))
            for health in self._opened().health()
        )

    async def settled(self) -> None:
        """Wait until each server is ready, or has failed once."""
        if self._pool is not None:
            await self._pool.settled()

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()
        redaction.forget(self)

    def _keep_secrets(self) -> None:
        """Also those of servers that are gone: calls to them may be under way."""
        for server in self.configured.values():
            redaction.learn(self, redaction.of_server(server, certain=True))

    def _opened(self) -> "Pool":
        if self._pool is None:
            module = import_module(POOL)
            services = module.PoolServices(
                outbound=self._outbound,
                clock=self._clock,
                telemetry=self._telemetry,
                max_reply_bytes=self._max_reply_bytes,
            )
            self._pool = module.Pool(self.configured, services, self.aggregation.server_timeout_s)
        return self._pool


def endpoint_of(name: str) -> Endpoint:
    return Endpoint(slug=name, kind="mcp", operator=True)
