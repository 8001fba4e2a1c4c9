"""Signing in from a browser: the cookie, whom it stands for, and the requests that may not use it."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from yarl import URL

from anabranch import Anabranch
from anabranch.configuration.settings import Settings
from anabranch.entrypoints.http.access import Access
from anabranch.knowledge.records import keys
from support.collection_server import Library, Reply, library, text
from support.knowledge_fixtures import records_in

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("sessions")]

SAME = {"Sec-Fetch-Site": "same-origin"}
CSRF = {**SAME, "X-Anabranch-CSRF": "1"}
ELSEWHERE = {"X-Forwarded-For": "203.0.113.9"}
SECRET = "The vault opens with the number 4711."


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shelf(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> AsyncIterator[Library]:
    async with library(tmp_path_factory.mktemp("data"), models_dir) as opened:
        await opened.collection("vault", who="alice", default_permissions={"visibility": "private"})
        await opened.ingest("vault", text(SECRET, title="Vault"), who="alice")
        yield opened


def cookie_of(shelf: Library) -> str:
    """The name of the cookie of a server: each port of a machine has its own."""
    return f"anabranch_key_{URL(shelf.server.url).port}"


def with_cookie(shelf: Library, who: str, headers: Any = SAME) -> dict[str, str]:
    return {**headers, "Cookie": f"theme=dark; {cookie_of(shelf)}={shelf.secrets[who]}; anabranch_key_1=ab_other; x=1"}


async def collections(shelf: Library, headers: Any, **more: Any) -> Reply:
    return await shelf.call("GET", "/v1/collections", headers=headers, **more)


def owners(reply: Reply) -> list[str]:
    assert reply.status == 200, reply
    return [one["name"] for one in reply.body["collections"]]


# --- signing in and out


async def test_signing_in_sets_a_cookie_that_no_script_reads(shelf: Library) -> None:
    key = shelf.secrets["alice"]
    reply = await shelf.call("POST", "/v1/session", {"key": key}, headers={**SAME, **ELSEWHERE})
    assert reply.status == 200
    assert reply.headers["Set-Cookie"] == (
        f"{cookie_of(shelf)}={key}; HttpOnly; SameSite=Strict; Path=/; Max-Age={30 * 24 * 3600}"
    )
    assert reply.headers["Cache-Control"] == "no-store"
    assert (reply.body["user"], reply.body["groups"], reply.body["signed_in"]) == ("alice", ["staff"], True)
    assert key not in str(reply.body)


@pytest.mark.parametrize("key", ["ab_unknown", "a b", "x\r\nSet-Cookie: a=b", "ab_;Path=/", "é", "a.b.c"])
async def test_an_unknown_key_does_not_sign_in(shelf: Library, key: str) -> None:
    reply = await shelf.call("POST", "/v1/session", {"key": key}, headers=SAME)
    assert (reply.status, reply.code) == (401, "UNAUTHORIZED")
    assert "Set-Cookie" not in reply.headers
    assert key not in str(reply.body)


@pytest.mark.parametrize("body", [{}, {"key": ""}, {"key": 1}, {"key": "x" * 4001}, []])
async def test_a_sign_in_without_a_key_is_refused(shelf: Library, body: Any) -> None:
    assert (await shelf.call("POST", "/v1/session", body, headers=SAME)).status == 400


async def test_a_page_of_another_site_signs_nobody_in_or_out(shelf: Library) -> None:
    for foreign in ({"Sec-Fetch-Site": "cross-site"}, {"Origin": "https://evil.example"}, {"Origin": "null"}):
        for method, body in (("POST", {"key": shelf.secrets["bob"]}), ("DELETE", None)):
            reply = await shelf.call(method, "/v1/session", body, headers=with_cookie(shelf, "alice", foreign))
            assert (reply.status, "Set-Cookie" in reply.headers) == (403, False)


async def test_signing_out_clears_the_cookie_also_of_a_revoked_key(shelf: Library) -> None:
    for value in (shelf.secrets["alice"], "ab_revoked"):
        headers = {**CSRF, **ELSEWHERE, "Cookie": f"{cookie_of(shelf)}={value}"}
        reply = await shelf.call("DELETE", "/v1/session", headers=headers)
        assert (reply.status, reply.body["signed_in"], reply.body["user"]) == (200, False, None)
        assert reply.headers["Set-Cookie"].startswith(
            f"{cookie_of(shelf)}=; HttpOnly; SameSite=Strict; Path=/; Max-Age=0"
        )


@pytest.mark.parametrize(
    ("peer", "scheme", "forwarded", "secure"),
    [
        ("203.0.113.9", "https", None, True),
        ("203.0.113.9", "http", "https", False),
        ("10.0.0.1", "http", "https", True),
        ("10.0.0.1", "http", "http, https", True),
        ("10.0.0.1", "http", "https, http", False),
        ("10.0.0.1", "http", None, False),
    ],
)
async def test_only_a_trusted_proxy_says_that_a_request_came_over_https(
    peer: str, scheme: str, forwarded: str | None, secure: bool
) -> None:
    headers = [] if forwarded is None else [(b"x-forwarded-proto", forwarded.encode())]
    asked = {"type": "http", "scheme": scheme, "client": (peer, 1), "headers": headers}
    async with Anabranch.open(settings=Settings(trusted_proxies=("10.0.0.0/8",))) as anabranch:
        assert Access(anabranch).is_https(asked) is secure


# --- who the caller is


async def test_everybody_can_ask_who_they_are(shelf: Library) -> None:
    local = await shelf.good("GET", "/v1/session")
    assert {**local, "version": ""} == {
        "user": None,
        "groups": [],
        "operator": True,
        "signed_in": False,
        "needs_key": False,
        "local": True,
        "may_use_configured": True,
        "version": "",
        "query_log": True,
        "streams": True,
        "auth": "auto",
    }
    guest = await shelf.good("GET", "/v1/session", headers=ELSEWHERE)
    assert (guest["signed_in"], guest["needs_key"], guest["operator"], guest["local"]) == (False, True, False, False)
    assert not guest["may_use_configured"]
    for headers in (with_cookie(shelf, "bob", {**SAME, **ELSEWHERE}), {**shelf.key("bob"), **ELSEWHERE}):
        bob = await shelf.good("GET", "/v1/session", headers=headers)
        assert (bob["user"], bob["signed_in"], bob["needs_key"], bob["operator"]) == ("bob", True, True, False)
    root = await shelf.good("GET", "/v1/session", headers=with_cookie(shelf, "root"))
    assert (root["user"], root["operator"], root["local"], root["may_use_configured"]) == ("root", True, False, True)


async def test_an_invalid_cookie_is_cleared_and_never_an_error(shelf: Library) -> None:
    database = records_in(shelf.folder)
    key, secret = database.writing(lambda db: keys.create(db, user="dora"))
    database.writing(lambda db: keys.revoke(db, key.id))
    database.close()
    headers = {**SAME, **ELSEWHERE, "Cookie": f"{cookie_of(shelf)}={secret}"}
    reply = await shelf.call("GET", "/v1/session", headers=headers)
    assert (reply.status, reply.body["signed_in"], reply.body["needs_key"]) == (200, False, True)
    assert "Max-Age=0" in reply.headers["Set-Cookie"]
    assert (await collections(shelf, headers)).status == 401
    for kept in (with_cookie(shelf, "bob"), with_cookie(shelf, "bob", {"Sec-Fetch-Site": "none"})):
        assert "Set-Cookie" not in (await shelf.call("GET", "/v1/session", headers=kept)).headers
    wrong = {**with_cookie(shelf, "bob"), "Authorization": "Bearer ab_wrong"}
    reply = await shelf.call("GET", "/v1/session", headers=wrong)
    assert (reply.status, reply.body["signed_in"], "Set-Cookie" in reply.headers) == (200, False, False)


# --- what the cookie stands for


async def test_the_cookie_identifies_its_user_also_on_this_machine(shelf: Library) -> None:
    assert owners(await collections(shelf, with_cookie(shelf, "alice"))) == ["vault"]
    assert owners(await collections(shelf, with_cookie(shelf, "bob"))) == []
    headers = with_cookie(shelf, "alice", {**CSRF, **ELSEWHERE})
    answer = await shelf.good("POST", "/v1/query", {"query": "Which number opens the vault?"}, headers=headers)
    assert "4711" in answer["answer"]
    logged = await shelf.good("GET", f"/v1/queries/{answer['query_id']}", headers=with_cookie(shelf, "alice"))
    assert logged["id"] == answer["query_id"]


async def test_the_header_counts_before_the_cookie(shelf: Library) -> None:
    both = {**with_cookie(shelf, "alice", {}), **shelf.key("bob")}
    assert owners(await collections(shelf, both)) == []
    assert (
        await collections(shelf, {**with_cookie(shelf, "alice", {}), "Authorization": "Bearer ab_no"})
    ).status == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "none"},
        {"Sec-Fetch-Site": "same-origin, cross-site"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "ftp://{host}"},
    ],
)
async def test_a_request_of_another_site_has_no_cookie(shelf: Library, headers: dict[str, str]) -> None:
    host = shelf.server.url.partition("://")[2]
    foreign = {name: value.format(host=host) for name, value in headers.items()}
    assert (await collections(shelf, with_cookie(shelf, "alice", {**foreign, **ELSEWHERE}))).status == 401


async def test_an_origin_equal_to_the_host_may_use_the_cookie(shelf: Library) -> None:
    for own in ({"Origin": shelf.server.url}, {}):
        reply = await collections(shelf, with_cookie(shelf, "alice", {**own, **ELSEWHERE}))
        assert owners(reply) == ["vault"]


@pytest.mark.parametrize("value", [None, "", "0", "true"])
async def test_a_change_with_the_cookie_needs_the_header_against_forgery(shelf: Library, value: str | None) -> None:
    sent = {} if value is None else {"X-Anabranch-CSRF": value}
    headers = with_cookie(shelf, "alice", {**SAME, **sent})
    for method, path, body in (
        ("POST", "/v1/collections", {"name": "forged"}),
        ("DELETE", "/v1/collections/vault", None),
        ("PUT", "/v1/collections/vault/endpoint", {"as": "alice/vault"}),
    ):
        reply = await shelf.call(method, path, body, headers=headers)
        assert (reply.status, reply.code) == (403, "FORBIDDEN")
        assert "X-Anabranch-CSRF: 1" in reply.body["message"]


@pytest.mark.parametrize("value", ["{name}={}; {name}={}", "{name}=", "x{name}={}", "anabranch_key={}", "=;=,"])
async def test_an_odd_cookie_is_none(shelf: Library, value: str) -> None:
    headers = {
        **SAME,
        **ELSEWHERE,
        "Cookie": value.replace("{}", shelf.secrets["alice"]).replace("{name}", cookie_of(shelf)),
    }
    assert (await collections(shelf, headers)).status == 401


async def test_a_resumable_answer_belongs_to_the_signed_in_user(shelf: Library) -> None:
    asked = {**with_cookie(shelf, "alice", CSRF), "Accept": "text/event-stream", "Prefer": "resumable"}
    reply = await shelf.call("POST", "/v1/query", {"query": "Which number opens the vault?"}, headers=asked)
    path = f"/v1/streams/{reply.headers['Stream-Id']}"
    assert "4711" in (await shelf.call("GET", path, headers=with_cookie(shelf, "alice"))).body
    assert (await shelf.call("GET", path, who="alice")).status == 200, "the key is the same user"
    assert (await shelf.call("GET", path, headers=with_cookie(shelf, "bob"))).status == 404


async def test_a_websocket_with_the_cookie_names_its_origin(shelf: Library) -> None:
    path = f"{shelf.server.url}/planner/sessions/s/steps/p/ws"
    statuses = []
    for origin in ({"Origin": shelf.server.url}, {}, {"Origin": "https://evil.example"}):
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await shelf.server.session.ws_connect(path, headers=with_cookie(shelf, "alice", {**origin, **ELSEWHERE}))
        statuses.append(refused.value.status)
    assert statuses == [404, 401, 403], "there is no such step for alice; nobody is identified; refused"


async def test_the_chat_knows_who_is_signed_in(shelf: Library) -> None:
    body = {
        "prompt": "Which number opens the vault?",
        "data_sources": [{"slug": "collections"}],
        "retrieval_only": True,
    }
    reply = await shelf.call("POST", "/api/v1/chat", body, headers=with_cookie(shelf, "root", CSRF))
    assert (reply.status, "4711" in str(reply.body)) == (200, True)
