"""Embeddings and rerankers behind a breaker, and within a budget."""

import socket

import pytest

from anabranch.domain.errors import EmbeddingFailed
from anabranch.domain.model import Endpoint
from anabranch.domain.signals import BreakerStateChanged, Retried
from anabranch.models.remote import ModelServer, OpenAIEmbeddings
from anabranch.network.addresses import AddressGuard
from anabranch.network.outbound import AiohttpOutbound
from anabranch.policies.breaker import Policy
from anabranch.policies.resilience import Resilience
from anabranch.testing import ManualClock, Recorder


async def no_time(_: float) -> None: ...


async def test_a_server_that_keeps_failing_is_left_alone_and_asked_again_within_the_budget() -> None:
    telemetry, clock = Recorder(), ManualClock()
    resilience = Resilience(Policy(), clock, telemetry)
    outbound = AiohttpOutbound(guard=AddressGuard(), max_reply_bytes=1_000_000)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        attempts = resilience.attempts(Endpoint(slug="vectors", url=url, kind="openai", operator=True), "embeddings")
        embedder = OpenAIEmbeddings(ModelServer(url, outbound, sleep=no_time, attempts=attempts), "vectors")
        for _ in range(8):
            with pytest.raises(EmbeddingFailed, match="No connection could be made"):
                await embedder.embed(["river"])
        with pytest.raises(EmbeddingFailed, match="circuit is open for 10 more seconds"):
            await embedder.embed(["river"])
    await outbound.close()
    assert telemetry.signals.count(Retried(upstream="vectors (embeddings)")) == 2
    assert telemetry.signals[-1] == BreakerStateChanged(upstream="vectors (embeddings)", state="open")
    assert {span.name for span in telemetry.spans} == {"upstream"}
    assert len(telemetry.spans) == 10
