"""Private addresses on the allow-list are open to the operator and to callers with a key or a token."""

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from anabranch.domain.model import Endpoint
from anabranch.entrypoints.cli.resources import alone
from anabranch.knowledge.records import keys
from anabranch.knowledge.records.sqlite import SqliteDatabase
from anabranch.network.outbound import REFUSED, AiohttpOutbound
from anabranch.policies.breaker import Policy, Upstreams
from anabranch.testing import ManualClock, Recorder
from conftest import LOCAL, Server
from support.canary_server import Canary, Names, Watch, reply, watching
from support.collection_server import Issuer
from support.planner_fixtures import Desk

Serve = Callable[..., AbstractAsyncContextManager[Server]]

FAR = {"X-Forwarded-For": "203.0.113.9"}
PAGE = {"Origin": "https://page.example"}
NAMED = ("https://page.example",)
NAMES = {"inside.example": [["127.0.0.1"]], "public.example": [["93.184.216.34"]]}
MODEL_REPLY = reply(body=b'{"choices":[{"message":{"content":"Words."}}],"summary":{"message":{"content":"Words."}}}')


@pytest.fixture
async def inside() -> AsyncIterator[Canary]:
    """A service in the operator's own network."""
    async with Canary() as listening:
        yield listening


@pytest.fixture
def secrets(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Keys to a server that starts no indexer, as the lock is taken: there is nothing to index."""
    with closing(SqliteDatabase.open(tmp_path / "data")) as database:
        made = {
            who: database.writing(partial(keys.create, user=who, operator=who == "root"))[1]
            for who in ("alice", "root")
        }
    with alone(tmp_path / "data"):
        yield made


def retrieval(url: str, slug: str = "docs") -> dict[str, Any]:
    return {"prompt": "?", "retrieval_only": True, "data_sources": [{"url": url, "slug": slug}]}


async def asked(server: Server, url: str, headers: dict[str, str]) -> tuple[str, str | None]:
    status, answer, _ = await server.post("/api/v1/chat", retrieval(url), headers=headers)
    assert status == 200, answer
    [info] = answer["retrieval_info"]
    return info["status"], info["error_message"]


# For each configuration: who sends a request, with which headers, and whether that may name a private address.
CALLERS: list[tuple[dict[str, Any], list[tuple[str | None, dict[str, str], bool]]]] = [
    (
        {},
        [
            (None, {}, True),
            (None, FAR, False),
            (None, PAGE, False),
            (None, {"Host": "page.example"}, False),
            (None, {"Sec-Fetch-Site": "cross-site"}, False),
            ("alice", FAR, True),
            ("alice", PAGE, True),
            ("root", FAR, True),
            ("stranger", FAR, False),
            ("token", FAR, True),
            ("guest", FAR, False),
        ],
    ),
    ({"cors_origins": NAMED}, [(None, PAGE, False)]),
    (
        {"auth": "none"},
        [
            (None, FAR, True),
            (None, PAGE, False),
            (None, {"Host": "page.example", "Origin": "http://page.example"}, False),
            ("alice", PAGE, True),
        ],
    ),
    ({"auth": "none", "cors_origins": NAMED}, [(None, PAGE, True)]),
    ({"auth": "api_key"}, [("alice", FAR, True)]),
    ({"auth": "jwt"}, [("token", FAR, True), ("guest", FAR, False)]),
    ({"endpoint_allowlist_public": True}, [(None, FAR, True), (None, PAGE, True)]),
]


@pytest.mark.parametrize("entry", ["block", "origin"])
@pytest.mark.parametrize(("settings", "callers"), CALLERS)
async def test_who_may_name_a_private_address(
    serve: Serve,
    secrets: dict[str, str],
    entry: str,
    settings: dict[str, Any],
    callers: list[tuple[str | None, dict[str, str], bool]],
) -> None:
    async with AsyncExitStack() as stack:
        hub = await stack.enter_async_context(Issuer())
        # One for each caller: a connection that another has opened would hide a refusal.
        inside = [await stack.enter_async_context(Canary()) for _ in callers]
        tokens = {"stranger": "ab_nobody", "token": hub.token(sub="17"), "guest": hub.token(sub="guest"), **secrets}
        allowlist = LOCAL if entry == "block" else tuple(canary.url for canary in inside)
        given = {"syfthub_url": hub.url, "jwt_audience": "library", "endpoint_allowlist": allowlist, **settings}
        server = await stack.enter_async_context(serve(**given))
        for (who, headers, may), canary in zip(callers, inside, strict=True):
            sent = {**headers, **({"Authorization": f"Bearer {tokens[who]}"} if who is not None else {})}
            found = await asked(server, canary.url, sent)
            assert found == (("success", None) if may else ("error", REFUSED)), (who, headers)
            assert canary.accepted == may, (who, headers)


@pytest.mark.parametrize("kind", ["space", "openai"])
async def test_private_model_addresses_are_open_to_permitted_callers_only(serve: Serve, kind: str) -> None:
    async with Canary(MODEL_REPLY) as inside, serve() as server:
        request = {"prompt": "?", "model": {"url": inside.url, "slug": "m", "kind": kind}}
        status, body, _ = await server.post("/api/v1/chat", request, headers=PAGE)
        assert (status, body["message"]) == (502, f"Model generation failed: {REFUSED}")
        assert inside.accepted == 0
        await server.post("/api/v1/chat", request)
        assert inside.accepted == 1


async def test_a_web_page_cannot_reuse_a_private_connection_of_other_callers(serve: Serve, inside: Canary) -> None:
    async with serve() as server:
        assert await asked(server, inside.url, {}) == ("success", None)
        assert await asked(server, inside.url, PAGE) == ("error", REFUSED)
        assert await asked(server, inside.url, {}) == ("success", None)
    assert (inside.accepted, len(inside.received)) == (1, 2)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return watching(monkeypatch)


async def test_the_resolved_address_decides_who_may_use_a_host_name(
    serve: Serve, inside: Canary, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "anabranch.network.outbound.AiohttpOutbound", partial(AiohttpOutbound, resolver=lambda: Names(NAMES))
    )
    async with serve() as server:
        assert await asked(server, f"http://inside.example:{inside.port}", {}) == ("success", None)
        assert await asked(server, f"http://inside.example:{inside.port}", PAGE) == ("error", REFUSED)
        assert await asked(server, "http://public.example:81", PAGE) == (
            "error",
            "No connection could be made: public.example:81.",
        )
    assert ("93.184.216.34", 81) in watch.dialled
    assert inside.accepted == 1


async def test_refusals_do_not_reveal_the_state_of_a_private_address(serve: Serve) -> None:
    """Its breaker is open for those who may ask it; to others it is an address like any other."""
    async with Canary(reply(500)) as failing, serve(breaker_calls=1) as server:
        await asked(server, failing.url, {})
        _, last = await asked(server, failing.url, {})
        assert last is not None
        assert "failed too often" in last
        assert await asked(server, failing.url, PAGE) == ("error", REFUSED)


def test_refused_addresses_do_not_open_the_circuit_breaker() -> None:
    known = Upstreams(Policy(min_calls=1), ManualClock(), Recorder())
    theirs, ours = (Endpoint(slug="docs", url="http://10.0.0.5", public_only=only) for only in (True, False))
    breaker = known.of(theirs).breaker
    breaker.leave(breaker.enter(), good=False)
    assert known.of(theirs).breaker.state == "open"
    assert known.of(ours).breaker.state == "closed"


async def test_planner_steps_with_a_key_may_use_a_private_subagent_address(
    serve: Serve, secrets: dict[str, str]
) -> None:
    answer = json.dumps({"status": "success", "payload": {"found": "inside"}}).encode()
    async with Canary(reply(body=answer)) as subagent, serve() as server:
        planner = Desk(server, secrets)
        await planner.begin("s", "p", {"key": "lookup", "url": subagent.url}, who="alice")
        async with planner.stream("s", "p", who="alice") as stream:
            frames = await stream.rest()
        assert subagent.accepted == 1
    assert '"found": "inside"' in json.dumps([frame.data for frame in frames])
