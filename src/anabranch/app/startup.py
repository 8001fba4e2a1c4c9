"""What every process sets up at its start: logging, telemetry, the HTTP client."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

from anabranch.app import knowledge_opener
from anabranch.configuration.settings import Settings, secrets_of
from anabranch.domain.contracts import Exchange
from anabranch.models.factory import check_evidence
from anabranch.network import redaction
from anabranch.network.addresses import AddressGuard
from anabranch.policies.connections import max_open_files
from anabranch.telemetry.endpoint_history import EndpointHistory
from anabranch.telemetry.log import Log
from anabranch.telemetry.metrics import CombinedTelemetry, Metrics

if TYPE_CHECKING:
    from anabranch.network.outbound import AiohttpOutbound

COLLECTOR_REPLY_BYTES = 64 * 1024
# Each of the client's three pools may have this part of the files; half of them are for incoming connections.
POOL_SHARE = 8


class LazyOutbound:
    """An Outbound whose HTTP client is loaded with the first request: most commands, and most runs of the indexer, make
    none, and loading takes longer than their work."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._client: AiohttpOutbound | None = None
        # From the first request on it is the client's.
        self.request: Callable[..., AbstractAsyncContextManager[Exchange]] = self._first_request

    def load(self) -> None:
        """Load the client now: a server must not do it during its first question."""
        from anabranch.network import outbound  # noqa: PLC0415

        if self._client is None:
            self._client = outbound.AiohttpOutbound(**self._options)
            self.request = self._client.request

    def _first_request(self, *args: Any, **given: Any) -> AbstractAsyncContextManager[Exchange]:
        self.load()
        return self.request(*args, **given)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()


@asynccontextmanager
async def outbound_for(settings: Settings, max_reply_bytes: int | None = None) -> AsyncIterator[LazyOutbound]:
    """A client that reaches public addresses, and what the settings allow besides. While it is open, the secrets of the
    settings are removed from texts of upstreams."""
    opened = LazyOutbound(
        guard=AddressGuard(settings.allowed_networks),
        allowed_origins=settings.allowed_origins,
        max_reply_bytes=settings.max_reply_bytes if max_reply_bytes is None else max_reply_bytes,
        max_connections=max_open_files() // POOL_SHARE,
    )
    redaction.learn(opened, secrets_of(settings))
    try:
        yield opened
    finally:
        redaction.forget(opened)
        await opened.close()


NO_STREAMS = (
    "Several workers without a Redis can keep neither planner steps nor resumable answers: set AGGREGATOR_REDIS_URL "
    "or serve with one worker."
)

NO_COLLECTIONS = (
    "There can be no collections: give this user permission to write, or set AGGREGATOR_DATA_DIR to another folder."
)

TO_EVERYBODY = (
    "Everybody who can reach the chat surface, also web pages of other origins, may have these addresses asked "
    "(AGGREGATOR_ENDPOINT_ALLOWLIST_PUBLIC)."
)


def check(settings: Settings, log: Log) -> None:
    knowledge_opener.check(settings, log)
    check_evidence(settings)
    if not knowledge_opener.is_writable(settings):
        log.warning("data_folder_not_writable", folder=settings.data_dir, hint=NO_COLLECTIONS)
    if settings.redis_url is not None:
        from anabranch.redis.client import Connections  # noqa: PLC0415  most have no Redis

        Connections(settings.redis_url)
    if settings.otlp_headers is not None:
        from anabranch.telemetry.otlp import headers  # noqa: PLC0415  most have no collector

        headers(settings.otlp_headers)
    if not settings.streams_kept:
        log.warning("streams_refused", workers=settings.workers, hint=NO_STREAMS)
    if settings.workers > 1 and settings.redis_url is None and settings.rate_limit:
        log.warning("limits_not_shared", workers=settings.workers, hint="AGGREGATOR_REDIS_URL is not set")


def announce(settings: Settings, log: Log) -> None:
    """Log which surfaces are switched off, and who may use the private addresses on the allow-list."""
    if settings.switched_off:
        log.info("surfaces_off", surfaces=list(settings.switched_off))
    if settings.endpoint_allowlist_public and settings.endpoint_allowlist:
        log.warning(
            "private_addresses_allowed", addresses=settings.endpoint_allowlist, to="everybody", hint=TO_EVERYBODY
        )
    elif settings.endpoint_allowlist:
        log.info("private_addresses_allowed", addresses=settings.endpoint_allowlist, to="the operator, keys and tokens")


@asynccontextmanager
async def watched(
    settings: Settings, log: Log, metrics: Metrics, history: EndpointHistory | None = None
) -> AsyncIterator[CombinedTelemetry]:
    """Telemetry for the life of the server. Traces have their own HTTP client: a collector that hangs delays nothing
    else."""
    if settings.otlp_endpoint is None:
        yield CombinedTelemetry(log, metrics, settings, history=history)
        return
    from anabranch.telemetry.otlp import Traces  # noqa: PLC0415  most have no collector

    async with outbound_for(settings, COLLECTOR_REPLY_BYTES) as outbound:
        traces = Traces(settings, outbound, log, metrics.spans_dropped)
        traces.start()
        try:
            yield CombinedTelemetry(log, metrics, settings, traces, history=history)
        finally:
            await traces.close()
