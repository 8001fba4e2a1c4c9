"""Callers that name private addresses: no connection is made, and the rest of the question is answered."""

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import pytest

from anabranch.domain.model import Endpoint
from anabranch.network.outbound import REFUSED, AiohttpOutbound
from anabranch.testing import Space
from conftest import Server, ref
from support.canary_server import Canary, Names, Watch, reply, watching

Serve = Callable[..., AbstractAsyncContextManager[Server]]

PROMPT = "What is an anabranch?"
UNUSABLE = "The endpoint's URL "
INTERNALS = ("Errno", "aiohttp", "Cannot connect", "Traceback", "127.", "169.254", "::", "0x", "on our side")

LITERAL = [
    "http://127.0.0.1:{port}",
    "http://127.0.0.1:{port}/a/../b",
    "http://@127.0.0.1:{port}",
    " http://127.0.0.1:{port}",
    "HTTP://127.0.0.1:{port}",
    "https://127.0.0.1:{port}",
    "http://[::1]:{port}",
    "http://[0:0:0:0:0:0:0:1]:{port}",
    "http://[::]:{port}",
    "http://[::ffff:127.0.0.1]:{port}",
    "http://[::ffff:7f00:1]:{port}",
    "http://[::127.0.0.1]:{port}",
    "http://[64:ff9b::7f00:1]:{port}",
    "http://[64:ff9b::127.0.0.1]:{port}",
    "http://[2002:7f00:1::]:{port}",
    "http://[fec0::1]:{port}",
    "http://[fe80::1%lo]:{port}",
    "http://[fe80::1%25lo]:{port}",
    "http://[::1%251]:{port}",
    "http://0.0.0.0:{port}",
    "http://192.0.0.192:{port}",
    "http://168.63.129.16:{port}",
    "http://169.254.169.254:{port}",
    "http://169.254.169.254",
    "http://100.64.0.1:{port}",
    "http://10.0.0.1:{port}",
    "http://①②⑦.0.0.1:{port}",
    "http://\uff11\uff12\uff17\uff0e0\uff0e0\uff0e\uff11:{port}",
    "http://127。0。0。1:{port}",
]
RESOLVED = [
    "http://localhost:{port}",
    "http://LocalHost:{port}",
    "http://localhost.:{port}",
    "http://ⓛⓞⓒⓐⓛⓗⓞⓢⓣ:{port}",
    "http://0x7f000001:{port}",
    "http://0x7F.1:{port}",
    "http://127.0.0.1 :{port}",
    "http://private.example:{port}",
    "http://PRIVATE.Example.:{port}",
    "http://both.example:{port}",
    "http://mapped.example:{port}",
    "http://nat64.example:{port}",
    "http://metadata.example",
]
SLOPPY = [
    "http://127.0.0.1.:{port}",
    "http://2130706433:{port}",
    "http://127.1:{port}",
    "http://127.0.1:{port}",
    "http://0:{port}",
    "http://017700000001:{port}",
    "http://0177.0.0.01:{port}",
]
UNPARSED = [
    "http://public.example@127.0.0.1:{port}/",
    "http://public.example:80@127.0.0.1:{port}/",
    "http://public.example\\@127.0.0.1:{port}",
    "http://127.0.0.1:{port}\\@public.example",
    "http:\\\\127.0.0.1:{port}",
    "http:127.0.0.1:{port}",
    "http:///127.0.0.1:{port}",
    "http://127.0.0.1:{port}\r\nHost: public.example",
    "http://127.0.0.1:{port}:80",
    "http://127.0.0.1:99999",
    "http://127.0.0.1:{port}?x=",
    "http://public.example#@127.0.0.1:{port}",
    "//127.0.0.1:{port}",
    "127.0.0.1:{port}",
    "  ",
    "http://",
    "unix:///tmp/x.sock",
    "http+unix://%2Ftmp%2Fx.sock",
    "file:///etc/passwd",
    "ftp://127.0.0.1:{port}",
    "gopher://127.0.0.1:{port}",
    "ws://127.0.0.1:{port}",
    "javascript:alert(1)",
    "http://xn--a:{port}",
    "http://\u202e.example:{port}",
]
NAMES = {
    "localhost": [["127.0.0.1", "::1"]],
    "private.example": [["127.0.0.1"]],
    "both.example": [["93.184.216.34", "127.0.0.1"]],
    "mapped.example": [["::ffff:127.0.0.1"]],
    "nat64.example": [["64:ff9b::7f00:1"]],
    "metadata.example": [["169.254.169.254"]],
}


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return watching(monkeypatch)


@pytest.fixture
async def canary() -> AsyncIterator[Canary]:
    async with Canary() as listening:
        yield listening


@pytest.fixture
def guarded(
    serve: Serve, space: Space, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., AbstractAsyncContextManager[Server]]:
    """A server with no allowlist; the healthy source and the model are the operator's own, under their names."""
    monkeypatch.setattr(
        "anabranch.network.outbound.AiohttpOutbound", partial(AiohttpOutbound, resolver=lambda: Names(NAMES))
    )
    own = {
        "sources": {"docs": Endpoint(slug="docs", url=space.url, operator=True)},
        "models": {"scribe": Endpoint(slug="scribe", url=space.url, operator=True)},
    }
    return lambda **given: serve(**{"endpoint_allowlist": (), **own, **given})


async def asked(server: Server, *sources: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    """Ask the given sources, and a healthy one, which must answer; what became of the others."""
    body = {"prompt": PROMPT, "model": {"slug": "scribe"}, "data_sources": [*sources, {"slug": "docs"}], **more}
    answer = await server.chat(**body)
    others: list[dict[str, Any]]
    *others, healthy = answer["retrieval_info"]
    assert healthy["status"] == "success", healthy
    assert "[docs]" in answer["response"]
    return others


def named(url: str, **more: Any) -> dict[str, Any]:
    return {"url": url, "slug": "docs", "owner_username": "mallory", **more}


def assert_failed(info: dict[str, Any], message: str) -> None:
    assert (info["status"], info["documents_retrieved"]) == ("error", 0)
    assert info["error_message"].startswith(message), info
    assert not [detail for detail in INTERNALS if detail in info["error_message"]]


@pytest.mark.parametrize("url", LITERAL + RESOLVED)
async def test_a_private_address_is_refused_in_every_notation(
    guarded: Serve, canary: Canary, watch: Watch, space: Space, url: str
) -> None:
    async with guarded() as server:
        [info] = await asked(server, named(url.format(port=canary.port)))
        own = {int(address.rpartition(":")[2]) for address in (server.url, space.url)}
    assert_failed(info, REFUSED)
    assert canary.accepted == 0
    assert watch.ports() == own


@pytest.mark.parametrize("url", UNPARSED)
async def test_an_invalid_url_is_refused(guarded: Serve, canary: Canary, watch: Watch, space: Space, url: str) -> None:
    async with guarded() as server:
        [info] = await asked(server, named(url.format(port=canary.port)))
        own = {int(address.rpartition(":")[2]) for address in (server.url, space.url)}
    assert_failed(info, UNUSABLE)
    assert canary.accepted == 0
    assert watch.ports() == own


@pytest.mark.parametrize("url", SLOPPY)
async def test_a_malformed_address_is_refused(
    guarded: Serve, canary: Canary, watch: Watch, space: Space, url: str
) -> None:
    """By the client's library or by the guard, whichever sees it first."""
    async with guarded() as server:
        [info] = await asked(server, named(url.format(port=canary.port)))
        own = {int(address.rpartition(":")[2]) for address in (server.url, space.url)}
    assert info["error_message"] in (REFUSED, f"{UNUSABLE}is not usable.")
    assert_failed(info, info["error_message"])
    assert canary.accepted == 0
    assert watch.ports() == own


async def test_a_tunneling_url_is_explained(guarded: Serve) -> None:
    async with guarded() as server:
        [info] = await asked(server, named("tunneling:alice"))
    assert_failed(info, "Endpoints behind a tunnel")


async def test_the_system_resolver_is_guarded(serve: Serve, space: Space, canary: Canary) -> None:
    own = {name: Endpoint(slug=name, url=space.url, operator=True) for name in ("docs", "scribe")}
    async with serve(endpoint_allowlist=(), sources=own, models=own) as server:
        [info] = await asked(server, named(f"http://localhost:{canary.port}"))
    assert_failed(info, REFUSED)
    assert canary.accepted == 0


@pytest.mark.parametrize("kind", ["space", "openai"])
@pytest.mark.parametrize("url", ["http://127.0.0.1:{port}", "http://localhost:{port}", "http://[::ffff:7f00:1]:{port}"])
async def test_model_addresses_are_guarded_like_sources(guarded: Serve, canary: Canary, kind: str, url: str) -> None:
    model = {"url": url.format(port=canary.port), "slug": "m", "kind": kind}
    async with guarded() as server:
        status, body, _ = await server.post("/api/v1/chat", {"prompt": PROMPT, "model": model})
        events = await server.stream(prompt=PROMPT, model=model)
    assert (status, body["error"]) == (502, "generation_failed")
    assert body["message"] == f"Model generation failed: {REFUSED}"
    assert (events[-1].name, events[-1].data["message"]) == ("error", body["message"])
    assert canary.accepted == 0


async def test_a_refusal_does_not_reveal_whether_a_port_is_open(guarded: Serve, canary: Canary, watch: Watch) -> None:
    """The same words, and no connect in either case, so that not even the time can tell."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        silent = closed.getsockname()[1]
        hosts = ["127.0.0.1", "localhost", "[::1]", "0x7f.1"]
        urls = [f"http://{host}:{port}" for host in hosts for port in (canary.port, silent, 22)]
        async with guarded(max_data_sources=20) as server:
            infos = await asked(server, *(named(url, slug=f"s{number}") for number, url in enumerate(urls)))
    assert {info["error_message"] for info in infos} == {REFUSED}
    assert not watch.ports() & {canary.port, silent, 22}


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("where", ["http://127.0.0.1:{port}/x", "//127.0.0.1:{port}/x", "http://localhost:{port}/"])
async def test_a_redirect_is_not_followed(guarded: Serve, canary: Canary, status: int, where: str) -> None:
    async with Canary(reply(status, b"", Location=where.format(port=canary.port))) as redirecting:
        async with guarded(endpoint_allowlist=(redirecting.url,)) as server:
            [info] = await asked(server, named(redirecting.url), endpoint_tokens={"mallory": "sat-1"})
        assert redirecting.headers()[0]["authorization"] == "Bearer sat-1"
    assert_failed(info, "It answered with a redirect, which is not followed.")
    assert canary.accepted == 0


async def test_a_redirect_to_an_allowed_address_is_not_followed(guarded: Serve, canary: Canary) -> None:
    async with (
        Canary(reply(307, b"", Location=canary.url)) as redirecting,
        guarded(endpoint_allowlist=("127.0.0.0/8",)) as server,
    ):
        [info] = await asked(server, named(redirecting.url), endpoint_tokens={"mallory": "sat-1"})
    assert_failed(info, "It answered with a redirect")
    assert canary.accepted == 0


async def test_requests_to_an_allowed_block_reach_only_that_block(guarded: Serve, canary: Canary) -> None:
    async with Canary(host="127.0.0.2") as allowed, guarded(endpoint_allowlist=("127.0.0.2/32",)) as server:
        inside, outside, by_name = await asked(
            server, named(allowed.url), named(canary.url), named(f"http://localhost:{canary.port}")
        )
        assert allowed.accepted == 1
    assert inside["status"] == "success"
    assert_failed(outside, REFUSED)
    assert_failed(by_name, REFUSED)
    assert canary.accepted == 0


async def test_requests_to_an_allowed_origin_reach_only_that_origin(guarded: Serve, canary: Canary) -> None:
    async with Canary() as allowed, guarded(endpoint_allowlist=(allowed.url.upper(),)) as server:
        port = allowed.port
        others = [f"http://{host}:{port}" for host in ("localhost", "0x7f.1", "127.0.0.2", "[::1]")]
        inside, *outside = await asked(
            server,
            named(f"{allowed.url}/any/path"),
            named(canary.url),
            named(f"https://127.0.0.1:{port}"),
            *map(named, others),
        )
        assert allowed.accepted == 1
    assert inside["status"] == "success"
    for info in outside:
        assert_failed(info, REFUSED)
    assert canary.accepted == 0


async def test_callers_cannot_use_addresses_of_the_operators_endpoints(
    guarded: Serve, space: Space, watch: Watch
) -> None:
    """Also not over the connection that the operator's own call has left open."""
    async with guarded() as server:
        await asked(server)
        assert space.open_connections > 0
        before, dialled = len(space.requests), len(watch.dialled)
        [info] = await asked(server, ref(space, "docs", "mallory"))
        assert_failed(info, REFUSED)
        assert len(space.requests) - before == 2
        assert len(watch.dialled) == dialled
        page = {"Origin": "https://page.example"}
        request = {"prompt": PROMPT, "data_sources": [{"slug": "docs"}], "retrieval_only": True}
        _, answer, _ = await server.post("/api/v1/chat", request, headers=page)
    assert answer["retrieval_info"][0]["status"] == "error"
    assert len(space.requests) - before == 2
