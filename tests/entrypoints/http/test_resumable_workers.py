"""Resumable answers of several workers: one writes, all can read, and a Redis that is gone costs nobody an answer."""

import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from anabranch.domain.eventlog import epoch
from conftest import Server
from support.scripted_subagent import END, Heard, Speaker, asking, resuming
from support.server_process import Program, serving
from support.valkey_server import Valkey, running_valkey

pytestmark = pytest.mark.xdist_group("resumable")

Serve = Callable[..., AbstractAsyncContextManager[Server]]

CHAT = "/api/v1/chat/stream"


@pytest.fixture
async def speaker() -> AsyncIterator[Speaker]:
    async with Speaker() as started:
        yield started


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Valkey]:
    with running_valkey(tmp_path) as started:
        yield started


def question(speaker: Speaker) -> dict[str, Any]:
    return {"prompt": "Why?", "model": speaker.endpoint, "data_sources": []}


def said(heard: list[Heard]) -> str:
    return "".join(one.data["content"] for one in heard if one.name == "token")


async def test_another_worker_resumes_the_answer(serve: Serve, speaker: Speaker, valkey: Valkey) -> None:
    async with serve(redis_url=valkey.url) as one, serve(redis_url=valkey.url) as other:
        async with asking(one, CHAT, question(speaker)) as line:
            heard = await line.hear(3)
            speaker.says("One ")
            heard += await line.hear(1)
            stream = line.stream
            line.cut()
        async with resuming(other, stream, heard[-1].id) as line, resuming(other, stream) as again:
            speaker.says("two ")
            heard += await line.hear(1)
            speaker.says("three.", END)
            heard += await line.rest()
            assert await again.rest() == heard
        assert said(heard) == "One two three."
        assert heard[-1].name == "done"
        async with resuming(one, stream) as line:
            assert await line.rest() == heard
        async with resuming(other, stream, heard[-1].id) as line:
            assert line.status == 204


async def test_without_its_redis_an_answer_begins_again_for_those_who_follow_it(
    serve: Serve, speaker: Speaker, valkey: Valkey
) -> None:
    async with serve(redis_url=valkey.url) as server, asking(server, CHAT, question(speaker)) as line:
        heard = await line.hear(3)
        speaker.says("One ")
        heard += await line.hear(1)
        valkey.kill()
        speaker.says("two.", END)
        rest = await line.rest()
        names = [event.name for event in rest]
        assert "reset" in names
        again = rest[names.index("reset") + 1 :]
        assert said(again) == "One two."
        assert again[-1].name == "done"
        assert {epoch(event.id) for event in again} != {epoch(event.id) for event in heard}
        async with resuming(server, line.stream, again[-2].id) as late:
            assert await late.rest() == again[-1:]


async def test_without_redis_no_answer_is_resumable_and_every_answer_is_given(
    serve: Serve, speaker: Speaker, valkey: Valkey
) -> None:
    async with serve(redis_url=valkey.url) as server:
        valkey.kill()
        async with asking(server, CHAT, question(speaker)) as line:
            assert line.status == 200
            assert "Stream-Id" not in line.headers
            speaker.says("Words.", END)
            heard = await line.rest()
            assert said(heard) == "Words."
        async with resuming(server, "x" * 32) as line:
            assert line.status == 503
            assert "Retry-After" in line.headers


@asynccontextmanager
async def two_workers(valkey: Valkey, folder: Path) -> AsyncIterator[tuple[Program, Server, Server]]:
    """As processes; the first one can be told to go."""
    variables = {"AGGREGATOR_REDIS_URL": valkey.url, "AGGREGATOR_STREAM_LEASE": "1", "AGGREGATOR_LOG_LEVEL": "INFO"}
    homes = [folder / "one", folder / "other"]
    for home in homes:
        home.mkdir()
    nothing: Any = None
    async with (
        serving(home=homes[0], variables=variables) as one,
        serving(home=homes[1], variables=variables) as other,
        aiohttp.ClientSession() as session,
    ):
        yield one, Server(one.url, session, nothing), Server(other.url, session, nothing)


@pytest.mark.soak
async def test_the_answer_of_a_worker_that_was_killed_ends_where_it_was(
    speaker: Speaker, valkey: Valkey, tmp_path: Path
) -> None:
    async with two_workers(valkey, tmp_path) as (one, first, second):
        async with asking(first, CHAT, question(speaker)) as line:
            heard = await line.hear(3)
            speaker.says("One ")
            heard += await line.hear(1)
            stream = line.stream
            async with resuming(second, stream, heard[1].id) as follower:
                assert await follower.hear(2) == heard[2:]
                one.send(signal.SIGKILL)
                (end,) = await follower.rest()
            line.cut()
        assert (end.name, end.data["error"]) == ("error", "worker_lost")
        async with resuming(second, stream) as line:
            assert await line.rest() == [*heard, end]


@pytest.mark.soak
async def test_a_worker_that_is_told_to_go_finishes_the_answer_that_nobody_hears_from_it(
    speaker: Speaker, valkey: Valkey, tmp_path: Path
) -> None:
    async with two_workers(valkey, tmp_path) as (one, first, second):
        async with asking(first, CHAT, question(speaker)) as line:
            heard, stream = await line.hear(3), line.stream
            line.cut()
        async with resuming(second, stream, heard[-1].id) as follower:
            speaker.says("One ")
            heard += await follower.hear(1)
            one.send(signal.SIGTERM)
            await one.until(lambda: "Waiting for application shutdown." in one.text)
            speaker.says("two.", END)
            heard += await follower.rest()
        assert said(heard) == "One two."
        assert heard[-1].name == "done"
        assert await one.ended() == 0
