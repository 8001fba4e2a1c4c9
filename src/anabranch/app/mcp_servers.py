"""The configured MCP servers and the pool of connections to them."""

from collections.abc import Mapping, Sequence

import msgspec

from anabranch.configuration.mcp_servers import matching
from anabranch.configuration.settings import Settings
from anabranch.domain.contracts import Clock, Outbound, Source, Telemetry
from anabranch.domain.mcp import Aggregation, McpServer, ServerHealth, ServerRule
from anabranch.domain.model import Endpoint
from anabranch.network import redaction
from anabranch.policies.resilience import Resilience
from anabranch.sources.mcp.pool import Pool
from anabranch.sources.mcp.services import PoolServices


class McpServers:
    """The MCP SDK is loaded and servers are connected to with the first query, or with `pool.warm`."""

    def __init__(
        self, settings: Settings, *, outbound: Outbound, resilience: Resilience, clock: Clock, telemetry: Telemetry
    ) -> None:
        self.configured: Mapping[str, McpServer] = settings.mcp_servers
        self.aggregation: Aggregation = settings.aggregation
        self._resilience = resilience
        services = PoolServices(
            outbound=outbound, clock=clock, telemetry=telemetry, max_reply_bytes=settings.max_reply_bytes
        )
        self.pool = Pool(self.configured, services, self.aggregation.server_timeout_s)
        self._learn_secrets()

    def endpoints(self) -> Mapping[str, Endpoint]:
        """The enabled servers as endpoints, by name."""
        return {name: endpoint_of(name) for name, server in self.configured.items() if server.enabled}

    def routed(self, question: str) -> Mapping[str, Endpoint]:
        """The servers for a question that names none: those of the first routing rule that matches, else all enabled
        ones. None if every server of that rule is disabled."""
        _, names = selected(question, self.configured, self.aggregation.server_rules)
        return {name: endpoint_of(name) for name in names}

    def source(self, endpoint: Endpoint) -> Source:
        return self.pool.source(endpoint.slug)

    def update(self, configured: Mapping[str, McpServer], aggregation: Aggregation, *, retry_failed: bool) -> None:
        """Replace the configuration. Running calls keep theirs."""
        self.configured, self.aggregation = configured, aggregation
        self._learn_secrets()
        self.pool.update(configured, aggregation.server_timeout_s, retry_failed=retry_failed)

    def health(self) -> tuple[ServerHealth, ...]:
        breakers = self._resilience.upstreams.states()
        return tuple(
            msgspec.structs.replace(health, breaker=breakers.get(health.name, "closed"))
            for health in self.pool.health()
        )

    async def close(self) -> None:
        await self.pool.close()
        redaction.forget(self)

    def _learn_secrets(self) -> None:
        """Secrets of removed servers are kept, too: calls to them may be under way."""
        for server in self.configured.values():
            redaction.learn(self, redaction.of_server(server, certain=True))


def selected(
    question: str, configured: Mapping[str, McpServer], rules: Sequence[ServerRule]
) -> tuple[ServerRule | None, list[str]]:
    """The first rule that matches the question, and the enabled servers that it selects: all of them without a rule."""
    on = [name for name, server in configured.items() if server.enabled]
    rule = matching(rules, question)
    return rule, on if rule is None else [name for name in dict.fromkeys(rule.servers) if name in on]


def endpoint_of(name: str) -> Endpoint:
    return Endpoint(slug=name, kind="mcp", operator=True)
