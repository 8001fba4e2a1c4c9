"""What the tests of resilience share: upstreams that do as they are told, and time that passes only when told to."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.test_utils import TestServer

from anabranch.domain.errors import FailureKind, GenerationFailed
from anabranch.domain.model import Context, Delta, Endpoint, Message, Prompt, Query, SourceReply, Status
from anabranch.network.addresses import AddressGuard
from anabranch.network.outbound import AiohttpOutbound
from anabranch.policies.breaker import Policy
from anabranch.policies.resilience import Resilience
from anabranch.testing import ManualClock, Recorder

PATH = "alice/docs"
QUERY = Query(text="Why?", limit=3, similarity_threshold=0.0)
PROMPT = Prompt(
    question="Why?",
    messages=(Message(role="user", content="Why?"),),
    max_tokens=10,
    temperature=0.0,
    passages=(),
    version="test",
)
GOOD = SourceReply(path=PATH, status=Status.SUCCESS)
BROKEN = SourceReply(path=PATH, status=Status.ERROR, error="It broke.", fault=True)
REFUSED = SourceReply(path=PATH, status=Status.ACCESS_DENIED, error="It denied access (403).")
ENDPOINT = Endpoint(slug="docs", owner="alice", url="http://first.example", operator=True)
DOUBLE = Endpoint(
    slug="docs", owner="alice", url="http://first.example", alternate="http://second.example", operator=True
)

Step = str | BaseException


def down(wait_s: float | None = None) -> GenerationFailed:
    return GenerationFailed("It answered with an error (503).", FailureKind.DOWN, wait_s, upstream_status=503)


class Scripted:
    """A Generator that goes through one line of its script for each time it is asked, and the last for ever: words are
    said, an exception is raised. `contexts` are those that it was asked in."""

    def __init__(self, *script: Sequence[Step]) -> None:
        self.script = list(script)
        self.contexts: list[Context] = []

    async def generate(self, prompt: Prompt, context: Context) -> AsyncGenerator[Delta, None]:
        self.contexts.append(context)
        for step in self.script.pop(0) if len(self.script) > 1 else self.script[0]:
            if isinstance(step, BaseException):
                raise step
            await asyncio.sleep(0)
            yield Delta(text=step)


class Held:
    """A Source that replies when it is told to; cancelled ones are counted."""

    def __init__(self) -> None:
        self.asked = 0
        self.cancelled = 0
        self._waiting: list[asyncio.Future[SourceReply]] = []

    async def search(self, query: Query, context: Context) -> SourceReply:
        self.asked += 1
        reply: asyncio.Future[SourceReply] = asyncio.get_running_loop().create_future()
        self._waiting.append(reply)
        try:
            return await reply
        except asyncio.CancelledError:
            self.cancelled += 1
            self._waiting.remove(reply)
            raise

    def reply(self, reply: SourceReply) -> None:
        self._waiting.pop(0).set_result(reply)


class Bench:
    """A Resilience with time of its own: waiting lets it pass."""

    def __init__(self, policy: Policy | None = None, chance: float = 1.0) -> None:
        self.clock = ManualClock(1_000.0)
        self.telemetry = Recorder()
        self.slept: list[float] = []
        self.resilience = Resilience(
            policy or Policy(), self.clock, self.telemetry, sleep=self._sleep, random=lambda: chance
        )

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.clock.advance(seconds)
        await asyncio.sleep(0)

    def context(self, left_s: float = 100.0) -> Context:
        return Context(correlation_id="c", deadline=self.clock.monotonic() + left_s)

    def count(self, kind: type) -> int:
        return sum(isinstance(signal, kind) for signal in self.telemetry.signals)


async def until(condition: Callable[[], object]) -> None:
    """Let the loop turn until the condition holds."""
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110  a condition may look at anything
            await asyncio.sleep(0.001)


async def turns() -> None:
    """Let the loop turn a few times: whatever does not wait for anything has happened after that."""
    for _ in range(20):
        await asyncio.sleep(0)


@asynccontextmanager
async def reaching_out() -> AsyncIterator[AiohttpOutbound]:
    outbound = AiohttpOutbound(guard=AddressGuard(), max_reply_bytes=1_000_000)
    try:
        yield outbound
    finally:
        await outbound.close()


@asynccontextmanager
async def answering(answer: Callable[[], web.Response]) -> AsyncIterator[str]:
    """The URL of a server that answers everything so."""

    async def respond(request: web.Request) -> web.StreamResponse:
        return answer()

    app = web.Application()
    app.router.add_post("/{path:.*}", respond)
    async with TestServer(app) as server:
        yield f"http://127.0.0.1:{server.port}"
