"""Who may come in: by key, by token, or because they sit at this machine; and who only looks as if they did."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from anabranch import Anabranch
from anabranch.configuration.settings import Settings
from anabranch.domain.errors import Unauthorized
from anabranch.domain.model import Endpoint
from anabranch.domain.rights import EVERY_GRANT
from anabranch.entrypoints.http.access import ANYONE, Access, bearer
from anabranch.knowledge.records import collections
from anabranch.testing import Hub, Space
from support.federation import Node, Seeded, node, seeded
from support.knowledge_fixtures import records_in

__all__ = ["seeded"]  # the fixture

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("endpoints")]

LOCAL_HOST = ("host", "127.0.0.1:8001")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hub() -> AsyncIterator[Hub]:
    async with Hub(signing=True) as started:
        yield started


def scope(*headers: tuple[str, str], peer: str | None = "127.0.0.1", version: str = "1.1") -> dict[str, Any]:
    return {
        "type": "http",
        "http_version": version,
        "client": None if peer is None else (peer, 40_000),
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers],
    }


async def is_operator(asked: dict[str, Any], **settings: Any) -> bool:
    async with Anabranch.open(settings=Settings(**settings)) as anabranch:
        return Access(anabranch).grants(asked, ANYONE) == EVERY_GRANT


# --- somebody at this machine


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8001", "127.0.0.1", "127.9.9.9:1", "[::1]:8001", "app.localhost:8001"]
)
async def test_the_operator_uses_a_local_host_name(host: str) -> None:
    assert await is_operator(scope(("host", host)))


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example",
        "evil.example:8001",
        "localhost.evil.example",
        "evil-localhost",
        "notlocalhost",
        "127.0.0.1.nip.io",
        "127.0.0.1.",
        "127.1",
        "2130706433",
        "0x7f.0.0.1",
        "0.0.0.0",
        "[::]",
        "10.0.0.1",
        "[::ffff:10.0.0.1]",
        "[fe80::1]",
        "::1",
        "localhost:",
        "localhost:8001:8001",
        "evil.example@localhost",
        "localhost@evil.example",
        "localhost/evil.example",
        "localhost#evil.example",
        "localhost?evil.example",
        "localhost\\evil.example",
        "localhost evil.example",
        "localhost,evil.example",
        "localhost\t",
        "localho\u00ff",
    ],
)
async def test_a_rebound_host_name_is_not_the_operators(host: str) -> None:
    assert not await is_operator(scope(("host", host)))


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param((), id="no host at all"),
        pytest.param((LOCAL_HOST, ("host", "evil.example")), id="two hosts"),
        pytest.param((("host", "evil.example"), LOCAL_HOST), id="two hosts, the other way round"),
        pytest.param((LOCAL_HOST, LOCAL_HOST), id="the same host twice"),
        pytest.param((LOCAL_HOST, ("origin", "https://evil.example")), id="another origin"),
        pytest.param((LOCAL_HOST, ("origin", "http://127.0.0.1:3000")), id="another port"),
        pytest.param((LOCAL_HOST, ("origin", "http://localhost:8001")), id="another name"),
        pytest.param((LOCAL_HOST, ("origin", "null")), id="a page without an origin"),
        pytest.param((LOCAL_HOST, ("origin", "")), id="an empty origin"),
        pytest.param((LOCAL_HOST, ("origin", "127.0.0.1:8001")), id="an origin without a scheme"),
        pytest.param((LOCAL_HOST, ("origin", "http://evil.example://127.0.0.1:8001")), id="an odd origin"),
        pytest.param(
            (LOCAL_HOST, ("origin", "http://127.0.0.1:8001"), ("origin", "https://evil.example")), id="two origins"
        ),
        pytest.param((LOCAL_HOST, ("sec-fetch-site", "cross-site")), id="an image or a form on a foreign page"),
        pytest.param((LOCAL_HOST, ("sec-fetch-site", "same-site")), id="a page on another port"),
    ],
)
async def test_a_web_page_of_another_site_is_not_the_operator(headers: tuple[tuple[str, str], ...]) -> None:
    assert not await is_operator(scope(*headers))


@pytest.mark.parametrize(
    "headers",
    [
        (LOCAL_HOST, ("origin", "http://127.0.0.1:8001"), ("sec-fetch-site", "same-origin")),
        (LOCAL_HOST, ("sec-fetch-site", "none")),
    ],
)
async def test_a_web_page_of_this_server_is_the_operator(headers: tuple[tuple[str, str], ...]) -> None:
    assert await is_operator(scope(*headers))


@pytest.mark.parametrize(
    "name",
    [
        *(
            "forwarded",
            "via",
            "x-forwarded",
            "x-forwarded-for",
            "x-forwarded-host",
            "x-forwarded-proto",
            "x-forwarded-port",
        ),
        *(
            "x-real-ip",
            "x-client-ip",
            "x-cluster-client-ip",
            "true-client-ip",
            "cf-connecting-ip",
            "cf-ray",
            "cdn-loop",
        ),
        *(
            "fastly-client-ip",
            "fly-client-ip",
            "x-original-forwarded-for",
            "x-original-host",
            "x-envoy-external-address",
        ),
        *("x-amzn-trace-id", "x-azure-clientip", "x-appengine-user-ip"),
    ],
)
async def test_a_forwarded_request_is_not_the_operators(name: str) -> None:
    for value in ("127.0.0.1", ""):
        assert not await is_operator(scope(LOCAL_HOST, (name, value)))


@pytest.mark.parametrize(
    ("peer", "settings", "may"),
    [
        ("127.0.0.1", {}, True),
        ("127.3.2.1", {}, True),
        ("::1", {}, True),
        ("::ffff:127.0.0.1", {}, True),
        ("192.168.0.7", {}, False),
        ("::ffff:192.168.0.7", {}, False),
        ("0.0.0.0", {}, False),
        ("localhost", {}, False),
        ("", {}, False),
        (None, {}, False),
        ("127.0.0.1", {"trusted_proxies": ("127.0.0.1",)}, False),
        ("::ffff:127.0.0.1", {"trusted_proxies": ("127.0.0.0/8",)}, False),
        ("127.0.0.2", {"trusted_proxies": ("127.0.0.1",)}, True),
        ("127.0.0.1", {"auth": "api_key"}, False),
        ("127.0.0.1", {"auth": "jwt"}, False),
        ("192.168.0.7", {"auth": "none"}, True),
        (None, {"auth": "none"}, True),
    ],
)
async def test_the_operator_is_known_by_a_loopback_address(
    peer: str | None, settings: dict[str, Any], may: bool
) -> None:
    assert await is_operator(scope(LOCAL_HOST, peer=peer), **settings) is may


@pytest.mark.parametrize(
    ("headers", "may"),
    [
        pytest.param((("host", "node.example"),), True, id="no page at all"),
        pytest.param((("host", "10.0.0.5:8001"), ("origin", "http://10.0.0.5:8001")), True, id="our page, by address"),
        pytest.param((("host", "node.example"), ("origin", "https://node.example")), True, id="our page, over TLS"),
        pytest.param(
            (LOCAL_HOST, ("origin", "https://ui.example"), ("sec-fetch-site", "same-origin")),
            True,
            id="our page, by a proxy that changes the host",
        ),
        pytest.param((("host", "node.example"), ("origin", "https://app.example")), True, id="a page that is named"),
        pytest.param(
            (("host", "node.example"), ("origin", "https://app.example"), ("sec-fetch-site", "cross-site")),
            True,
            id="a page that is named, and far away",
        ),
        pytest.param((("host", "evil.example"), ("origin", "http://evil.example")), False, id="a rebound name"),
        pytest.param((("host", "node.example"), ("origin", "https://evil.example")), False, id="a foreign page"),
        pytest.param((("host", "node.example"), ("origin", "null")), False, id="a page without an origin"),
        pytest.param((("host", "node.example"), ("origin", "")), False, id="an empty origin"),
        pytest.param(
            (("host", "node.example"), ("origin", "https://app.example"), ("origin", "https://evil.example")),
            False,
            id="two origins",
        ),
        pytest.param((("host", "node.example"), ("sec-fetch-site", "cross-site")), False, id="an image or a form"),
        pytest.param((("host", "node.example"), ("sec-fetch-site", "same-site")), False, id="a page on another port"),
    ],
)
async def test_with_no_login_at_all_only_foreign_pages_are_not_the_operator(
    headers: tuple[tuple[str, str], ...], may: bool
) -> None:
    given: dict[str, Any] = {"auth": "none", "cors_origins": ("*", "https://app.example")}
    assert await is_operator(scope(*headers, peer="192.168.0.7"), **given) is may


async def test_http_1_0_is_not_the_operators() -> None:
    assert not await is_operator(scope(LOCAL_HOST, version="1.0"))


# --- the address of whoever asks


@pytest.mark.parametrize(
    ("peer", "forwarded", "address"),
    [
        ("203.0.113.9", [], "203.0.113.9"),
        ("203.0.113.9", ["198.51.100.7"], "203.0.113.9"),
        ("10.0.0.1", ["198.51.100.7"], "198.51.100.7"),
        ("::ffff:10.0.0.1", ["198.51.100.7"], "198.51.100.7"),
        ("10.0.0.1", ["1.1.1.1, 198.51.100.7, 10.0.0.2"], "198.51.100.7"),
        ("10.0.0.1", ["1.1.1.1", "198.51.100.7"], "198.51.100.7"),
        ("10.0.0.1", ["198.51.100.7:51234"], "198.51.100.7"),
        ("10.0.0.1", ["[2001:db8::1]:51234"], "2001:db8::1"),
        ("10.0.0.1", ["2001:0db8::0001"], "2001:db8::1"),
        ("10.0.0.1", ["10.0.0.3"], "10.0.0.3"),
        ("10.0.0.1", [" , ,"], "10.0.0.1"),
        ("10.0.0.1", ["unknown"], "10.0.0.1"),
        ("10.0.0.1", ["1.1.1.1, <script>"], "10.0.0.1"),
        ("10.0.0.1", ["1.1.1.1, x, 10.0.0.2"], "10.0.0.2"),
        (None, ["198.51.100.7"], None),
    ],
)
async def test_the_callers_address_is_the_last_hop_before_trusted_proxies(
    peer: str | None, forwarded: list[str], address: str
) -> None:
    async with Anabranch.open(settings=Settings(trusted_proxies=("10.0.0.0/8",))) as anabranch:
        headers = [("x-forwarded-for", value) for value in forwarded]
        assert Access(anabranch).address(scope(LOCAL_HOST, *headers, peer=peer)) == address


async def test_a_request_has_one_authorization_header() -> None:
    assert bearer(scope()) is None
    assert bearer(scope(("authorization", "bEaReR  ab_key "))) == "ab_key"
    for values in (["Bearer a", "Bearer a"], ["Bearer"], ["Bearer "], ["Bearer\ta"], ["Basic a"], [""], ["a"]):
        with pytest.raises(Unauthorized):
            bearer(scope(*(("authorization", value) for value in values)))


# --- every surface, with every setting

CHAT = "/api/v1/chat", {"prompt": "?", "retrieval_only": True}
PUBLISHED = "/api/v1/endpoints/canteen/query", {"messages": "?"}
QUERY = "/v1/query", {"query": "When does the canteen open?"}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # by what is brought along: what chat, a published collection and /v1 answer
        (
            {"auth": "auto"},
            {
                "nothing": (200, 200, 200),
                "nothing, by a proxy": (200, 401, 401),
                "nothing, by HTTP/1.0": (200, 401, 401),
                "nothing, for a rebound name": (200, 401, 401),
                "a key": (200, 200, 200),
                "a wrong key": (200, 401, 401),
                "a token for the owner": (200, 200, 401),
                "a token for the node": (200, 401, 401),
                "a guest's token for the owner": (200, 200, 401),
            },
        ),
        (
            {"auth": "auto", "jwt_audience": "node"},
            {
                "a token for the owner": (200, 200, 401),
                "a token for the node": (200, 200, 200),
                "a token for somebody else": (200, 401, 401),
            },
        ),
        (
            {"auth": "none"},
            {
                "nothing": (200, 200, 200),
                "nothing, by a proxy": (200, 200, 200),
                "a key": (200, 200, 200),
                "a wrong key": (200, 401, 401),
                "a token for the owner": (200, 200, 401),
            },
        ),
        (
            {"auth": "api_key"},
            {
                "nothing": (401, 401, 401),
                "a key": (200, 200, 200),
                "a wrong key": (401, 401, 401),
                "a token for the owner": (401, 401, 401),
                "a token for the node": (401, 401, 401),
            },
        ),
        (
            {"auth": "api_key", "jwt_audience": "node"},
            {
                "a key": (200, 200, 200),
                "a token for the owner": (401, 200, 401),
                "a token for the node": (200, 200, 200),
            },
        ),
        (
            {"auth": "jwt", "jwt_audience": "node"},
            {
                "nothing": (401, 401, 401),
                "a key": (401, 401, 401),
                "a token for the owner": (401, 200, 401),
                "a token for the node": (200, 200, 200),
                "a token for somebody else": (401, 401, 401),
                "a guest's token for the owner": (401, 200, 401),
            },
        ),
        (
            {"auth": "jwt"},
            {
                "a key": (401, 401, 401),
                "a token for the owner": (200, 200, 200),
                "a token for the node": (401, 401, 401),
            },
        ),
    ],
    ids=["auto", "auto-hub", "none", "api_key", "api_key-hub", "jwt-hub", "jwt"],
)
async def test_credentials_that_each_surface_requires_by_setting(
    seeded: Seeded, hub: Hub, settings: dict[str, str], expected: dict[str, tuple[int, int, int]]
) -> None:
    brought: dict[str, list[str]] = {
        "nothing": [],
        "nothing, by a proxy": ["X-Forwarded-For: 127.0.0.1"],
        "nothing, by HTTP/1.0": [],
        "nothing, for a rebound name": [],
        "a key": [f"Authorization: Bearer {seeded.secrets['bob']}"],
        "a wrong key": ["Authorization: Bearer ab_wrong"],
        "a token for the owner": [f"Authorization: Bearer {hub.token('alice', sub='17')}"],
        "a guest's token for the owner": [f"Authorization: Bearer {hub.token('alice')}"],
        "a token for the node": [f"Authorization: Bearer {hub.token('node', sub='17')}"],
        "a token for somebody else": [f"Authorization: Bearer {hub.token('zoe', sub='17')}"],
    }
    async with node(seeded.settings(syfthub_url=hub.url, **settings)) as there:
        for what, statuses in expected.items():
            assert await asked(there, what, brought[what]) == statuses, what


async def test_a_user_who_publishes_is_no_audience_until_the_operator_publishes_for_that_user(
    seeded: Seeded, hub: Hub
) -> None:
    """Mallory has a token that Bob's client has sent to a server of hers."""
    sent = f"Authorization: Bearer {hub.token('mallory', sub='17')}"
    hers = {"Authorization": f"Bearer {hub.token('alice', sub='mallory')}"}

    async def taken(there: Node) -> int:
        return (await there.raw(QUERY[0], there.host, sent, body=json.dumps(QUERY[1]))).status

    async with node(seeded.settings(syfthub_url=hub.url, auth="jwt")) as there:
        collections_of, session = f"{there.url}/v1/collections", there.server.session
        async with session.post(collections_of, json={"name": "bait"}, headers=hers) as reply:
            assert reply.status == 201
        async with session.put(f"{collections_of}/bait/endpoint", json={"as": "mallory/bait"}, headers=hers) as reply:
            assert reply.status == 200
        assert await taken(there) == 401
        database = records_in(seeded.folder)
        [bait] = database.reading(lambda db: collections.published(db, "bait"))
        key = bait.collection
        assert database.writing(lambda db: collections.publish(db, "mallory", "bait", key, by_operator=True))
        assert await taken(there) == 200
        database.writing(lambda db: collections.delete(db, key))
        database.close()


async def asked(there: Node, what: str, lines: list[str]) -> tuple[int, ...]:
    host = "Host: evil.example" if "rebound" in what else there.host
    version = "1.0" if "1.0" in what else "1.1"
    replies = [
        await there.raw(path, host, *lines, version=version, body=str(body).replace("'", '"').replace("True", "true"))
        for path, body in (CHAT, PUBLISHED, QUERY)
    ]
    return tuple(reply.status for reply in replies)


CONFIGURED = "paid"
OF_OTHERS = ["X-Forwarded-For: 203.0.113.9"]
FOREIGN = ["Origin: https://evil.example"]


@pytest.mark.parametrize(
    ("settings", "who", "may"),
    [
        ({"auth": "auto"}, "nobody", True),
        ({"auth": "auto"}, "nobody, from afar", False),
        ({"auth": "auto"}, "nobody, on a foreign page", False),
        ({"auth": "auto"}, "a key", False),
        ({"auth": "auto"}, "a key, from afar", False),
        ({"auth": "auto"}, "an operator's key, from afar", True),
        ({"auth": "auto", "jwt_audience": "node"}, "a token", False),
        ({"auth": "none"}, "nobody, from afar", True),
        ({"auth": "none"}, "nobody, on a foreign page", False),
        ({"auth": "none"}, "a key", True),
        ({"auth": "none", "cors_origins": ("https://evil.example",)}, "nobody, on a foreign page", True),
        ({"auth": "api_key"}, "nobody", False),
        ({"auth": "api_key"}, "a key", True),
        ({"auth": "api_key"}, "an operator's key, from afar", True),
        ({"auth": "jwt", "jwt_audience": "node"}, "a token", True),
        ({"auth": "jwt", "jwt_audience": "node"}, "a guest's token", False),
    ],
)
async def test_who_may_name_what_is_configured_on_every_surface(
    seeded: Seeded, hub: Hub, settings: dict[str, Any], who: str, may: bool
) -> None:
    tokens = {
        "a key": seeded.secrets["bob"],
        "an operator's key": seeded.secrets["root"],
        "a token": hub.token("node", sub="17"),
        "a guest's token": hub.token("node"),
    }
    token = tokens.get(who.partition(",")[0])
    lines = [
        *([f"Authorization: Bearer {token}"] if token else []),
        *(OF_OTHERS if "afar" in who else []),
        *(FOREIGN if "page" in who else []),
    ]
    ask = {"name": "ask", "arguments": {"question": "Why?", "sources": [CONFIGURED]}}
    requests: dict[str, dict[str, Any]] = {
        "/api/v1/chat": {"prompt": "?", "retrieval_only": True, "data_sources": [{"slug": CONFIGURED}]},
        "/v1/query": {"query": "Why?", "sources": [CONFIGURED]},
        "/rag/stream": {"query": "Why?", "sources": [CONFIGURED]},
        "/mcp": {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": ask},
    }
    accept = "Accept: application/json, text/event-stream"
    async with Space(everything=True) as space:
        paid = {CONFIGURED: Endpoint(slug="docs", url=space.url, operator=True, token="sat-1")}
        async with node(seeded.settings(syfthub_url=hub.url, sources=paid, rate_limit=0, **settings)) as there:
            reached = {}
            for path, body in requests.items():
                before = len(space.requests)
                sent = ["Content-Type: application/json", *([accept] if path == "/mcp" else [])]
                await there.sent(path, there.host, *sent, *lines, body=json.dumps(body))
                reached[path] = len(space.requests) > before
    assert reached == dict.fromkeys(requests, may)


async def test_a_guest_does_not_use_what_the_operator_pays_for(seeded: Seeded, hub: Hub) -> None:
    """With `jwt` everybody can get in as a guest, but only to bring their own."""
    body = {"prompt": "Why?", "model": {"slug": "writer"}}
    async with Space(everything=True) as space:
        paid = {"writer": Endpoint(slug="scribe", url=space.url, operator=True)}
        async with node(seeded.settings(auth="jwt", jwt_audience="node", syfthub_url=hub.url, models=paid)) as there:
            for token, status in ((hub.token("node"), 422), (hub.token("node", sub="17"), 200)):
                headers = {"Authorization": f"Bearer {token}"}
                assert (await there.server.post("/api/v1/chat", body, headers=headers))[0] == status
        assert len(space.requests) == 1


async def test_a_hub_that_is_away_is_a_sentence(seeded: Seeded) -> None:
    async with Hub(signing=True) as gone:
        url, token = gone.url, gone.token("alice")
    async with node(seeded.settings(syfthub_url=url)) as there:
        reply = await there.ask("canteen", token=token)
        assert (reply.status, "cannot be fetched now" in reply.body["detail"]) == (401, True)
        assert (await there.ask("canteen", token=seeded.secrets["bob"])).status == 200


@pytest.mark.parametrize(("origins", "allowed"), [(("*",), None), (("https://app.example",), "https://app.example")])
async def test_which_pages_may_read_what_is_published(
    seeded: Seeded, origins: tuple[str, ...], allowed: str | None
) -> None:
    headers = {"Origin": "https://app.example"}
    async with node(seeded.settings(cors_origins=origins), seeded.secrets) as there:
        reply = await there.ask("canteen", token=seeded.secrets["bob"], headers=headers)
        assert (reply.status, reply.headers.get("Access-Control-Allow-Origin")) == (200, allowed)
        assert (await there.ask("canteen", headers=headers)).status == 401  # being named is not being the operator


async def test_guests_of_published_endpoints_are_rate_limited_on_this_machine_too(seeded: Seeded) -> None:
    """Another Anabranch on this machine may be asking for somebody else."""
    async with node(seeded.settings(rate_limit=1, rate_limit_surfaces=("endpoints",))) as there:
        replies = [await there.ask("alice/docs") for _ in range(2)]
    assert [reply.status for reply in replies] == [200, 429]
    assert replies[0].headers["RateLimit-Remaining"] == "0"
