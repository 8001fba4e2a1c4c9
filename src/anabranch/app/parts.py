"""What a running Anabranch is put together from."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

from anabranch.app.adapters import Adapters
from anabranch.app.asking import Asking
from anabranch.app.knowledge import Rooms
from anabranch.app.naming import Names
from anabranch.app.outbound import outbound
from anabranch.app.policies import Policies
from anabranch.app.publishing import Publishing
from anabranch.app.revocations import Revocations
from anabranch.app.river import river
from anabranch.app.servers import Servers
from anabranch.app.streaming import Streams, streams
from anabranch.domain.contracts import Answerer, Clock, Telemetry
from anabranch.domain.model import Context, Question
from anabranch.knowledge.records import keys
from anabranch.pipeline.run import Run
from anabranch.runtime.clock import SystemClock
from anabranch.runtime.hub import Hub
from anabranch.runtime.hubtokens import HubTokens
from anabranch.runtime.settings import Settings


class Parts(NamedTuple):
    answerer: Answerer
    rooms: Rooms
    publishing: Publishing
    asking: Asking
    policies: Policies
    hub_tokens: HubTokens
    revocations: Revocations
    streams: Streams
    servers: Servers
    clock: Clock
    telemetry: Telemetry


@asynccontextmanager
async def parts(
    settings: Settings,
    telemetry: Telemetry,
    *,
    start: Callable[[Question, Context], Run],
    indexing: bool,
    indexer_died: Callable[[int], None],
    streaming: bool,
    keys_every_s: float,
) -> AsyncIterator[Parts]:
    """All of them, wired to each other, and closed in good order; `start` begins a Run."""
    clock = SystemClock()
    policies = Policies(settings, clock, telemetry)
    async with outbound(settings) as out, AsyncExitStack() as leaving:
        rooms = Rooms(
            settings,
            out,
            indexing=indexing,
            remembered=policies.embedder,
            resilience=policies.resilience,
            died=indexer_died,
        )
        servers = Servers(settings, outbound=out, resilience=policies.resilience, clock=clock, telemetry=telemetry)
        directory = Adapters(
            out, rooms, policies.resilience, servers.source, model_streaming=settings.model_streaming_enabled
        )
        pipeline = river(settings, directory, clock, telemetry)
        names = Names(settings, rooms, Hub(settings.syfthub_url, out), servers.endpoints)
        asking = Asking(settings, names)
        revocations = Revocations(lambda: _valid_keys(rooms), every_s=keys_every_s)
        for close in (policies.close, rooms.close, servers.close, revocations.close):
            leaving.push_async_callback(close)
        policies.start()
        keeping = streams(
            settings,
            policies,
            outbound=out,
            rooms=rooms,
            model=asking.model,
            start=start,
            clock=clock,
            telemetry=telemetry,
        )
        kept = await leaving.enter_async_context(keeping) if streaming else Streams()
        yield Parts(
            answerer=policies.remembered(pipeline, rooms),
            rooms=rooms,
            publishing=Publishing(settings, rooms, directory, pipeline, clock, telemetry),
            asking=asking,
            policies=policies,
            hub_tokens=HubTokens(settings.syfthub_url, out, clock, settings.syfthub_jwks_cache_ttl),
            revocations=revocations,
            streams=kept,
            servers=servers,
            clock=clock,
            telemetry=telemetry,
        )


async def _valid_keys(rooms: Rooms) -> set[str]:
    return await (await rooms()).database.read(keys.valid)
