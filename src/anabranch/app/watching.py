"""What a server is watched by: its log, its metrics, and where traces are wanted, those."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from anabranch.runtime.addresses import AddressGuard
from anabranch.runtime.lines import Log
from anabranch.runtime.metrics import Metrics
from anabranch.runtime.observed import Observed
from anabranch.runtime.outbound import AiohttpOutbound
from anabranch.runtime.settings import Settings

MAX_REPLY_BYTES = 64 * 1024


@asynccontextmanager
async def watched(settings: Settings, log: Log, metrics: Metrics) -> AsyncIterator[Observed]:
    """Telemetry for as long as the server lives. Traces leave by connections of their own: a collector that hangs must
    not hold up anything else."""
    if settings.otlp_endpoint is None:
        yield Observed(log, metrics, settings)
        return
    from anabranch.runtime.traces import Traces  # noqa: PLC0415  most have no collector

    outbound = AiohttpOutbound(guard=AddressGuard(()), max_reply_bytes=MAX_REPLY_BYTES)
    traces = Traces(settings, outbound, log, metrics.spans_dropped)
    await traces.start()
    try:
        yield Observed(log, metrics, settings, traces)
    finally:
        await traces.close()
        await outbound.close()
