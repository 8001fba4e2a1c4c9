"""Headers, URLs and bodies of outbound requests."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from anabranch.testing import Space
from conftest import Server, ref
from support.canary_server import Canary, reply

Serve = Callable[..., AbstractAsyncContextManager[Server]]

PROMPT = "What is an anabranch?"
SENT = {"host", "user-agent", "accept", "accept-encoding", "content-type", "content-length", "x-correlation-id"}
UNSENDABLE = ["a\r\nX-Evil: 1", "a\nX-Evil: 1", "a\rb", "a\x00b", "tökén", "a\u2028b", "東京", "a\tb", "a\x7fb"]


def asking(space: Space, *sources: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Two sources at the least: the last one is healthy."""
    return {
        "prompt": PROMPT,
        "model": ref(space, "scribe"),
        "data_sources": [*sources, ref(space, "docs", "alice")],
        **more,
    }


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"])
async def test_outbound_requests_ignore_proxy_variables(
    serve: Serve, space: Space, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with Canary() as proxy:
        monkeypatch.setenv(variable, proxy.url)
        async with serve() as server:
            answer = await server.chat(**asking(space))
        assert proxy.accepted == 0
    assert answer["retrieval_info"][0]["status"] == "success"


async def test_outbound_requests_ignore_netrc(
    serve: Serve, space: Space, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("default login operator password secret\n", encoding="utf-8")
    monkeypatch.setenv("NETRC", str(netrc))
    async with serve() as server:
        await server.chat(**asking(space))
    assert not [sent for sent in space.requests if "Authorization" in sent.headers]


async def test_outbound_requests_keep_no_cookies(server: Server, space: Space) -> None:
    async with Canary(reply(Set_Cookie="session=1; Path=/")) as setting, Canary() as other:
        sources = [{"url": upstream.url, "slug": "docs"} for upstream in (setting, other)]
        for _ in range(2):
            answer = await server.chat(**asking(space, *sources))
            assert {info["status"] for info in answer["retrieval_info"]} == {"success"}
        assert [set(headers) for headers in setting.headers() + other.headers()] == [SENT] * 4
    assert not [sent for sent in space.requests if "Cookie" in sent.headers]


@pytest.mark.parametrize("value", UNSENDABLE)
@pytest.mark.parametrize("part", ["token", "tenant"])
async def test_a_token_or_tenant_with_invalid_header_characters_fails_only_its_source(
    server: Server, space: Space, part: str, value: str
) -> None:
    async with Canary() as upstream:
        bad = {"url": upstream.url, "slug": "docs", "owner_username": "bob"}
        if part == "tenant":
            bad["tenant_name"] = value
        tokens = {"bob": value if part == "token" else "sat-bob", "alice": "sat-alice"}
        answer = await server.chat(**asking(space, bad, endpoint_tokens=tokens))
        assert upstream.accepted == 0
    failed, healthy = answer["retrieval_info"]
    assert (failed["status"], healthy["status"]) == ("error", "success")
    assert "characters that cannot be sent" in failed["error_message"]
    assert value not in failed["error_message"]
    assert [sent.headers["Authorization"] for sent in space.requests if sent.slug == "docs"] == ["Bearer sat-alice"]


@pytest.mark.parametrize("kind", ["space", "openai"])
async def test_a_model_token_with_invalid_header_characters_is_explained(server: Server, kind: str) -> None:
    async with Canary() as upstream:
        model = {"url": upstream.url, "slug": "m", "owner_username": "bob", "kind": kind}
        body = {"prompt": PROMPT, "model": model, "endpoint_tokens": {"bob": "s3cret\r\nX-Evil: 1"}}
        status, said, _ = await server.post("/api/v1/chat", body)
        assert upstream.accepted == 0
    assert (status, said["error"]) == (502, "generation_failed")
    assert "characters that cannot be sent" in said["message"]
    assert "s3cret" not in said["message"]


@pytest.mark.parametrize(
    "given",
    [
        {"slug": "x\r\nX-Evil: 1"},
        {"slug": "x HTTP/1.1\r\nX-Evil: 1\r\n\r\n"},
        {"slug": "x\nX-Evil: 1\n\nGET / HTTP/1.1"},
        {"path": "/a\r\nX-Evil: 1"},
        {"path": "/a HTTP/1.1\r\nX-Evil: 1\r\n\r\nGET /"},
        {"path": "/a%0d%0aX-Evil:%201"},
        {"path": "/a%20HTTP/1.1%0aX-Evil: 1"},
        {"slug": "x", "transaction": '"}\r\n\r\nGET / HTTP/1.1\r\nX-Evil: 1\r\n\r\n'},
        {"slug": "x", "prompt": "a\r\n\r\nGET / HTTP/1.1\r\nX-Evil: 1\r\n\r\n"},
    ],
)
async def test_caller_input_cannot_inject_headers_or_requests(
    server: Server, space: Space, given: dict[str, str]
) -> None:
    async with Canary() as upstream:
        source = {"url": upstream.url + given.get("path", ""), "slug": given.get("slug", "docs"), "owner_username": "o"}
        body = asking(space, source, transaction_tokens={"o": given.get("transaction", "t")})
        answer = await server.chat(**{**body, "prompt": given.get("prompt", PROMPT)})
        assert {info["status"] for info in answer["retrieval_info"]} == {"success"}
        [request] = upstream.received
        [headers] = upstream.headers()
    assert set(headers) == SENT
    method, path, version = request.split(b"\r\n")[0].split(b" ")
    assert (method, version) == (b"POST", b"HTTP/1.1")
    assert path.startswith(b"/")
    assert path.endswith(b"/query")
    assert len(request.partition(b"\r\n\r\n")[2]) == int(headers["content-length"])


@pytest.mark.parametrize("slug", ["..", ".", "../..", "%2e%2e", "a/../../x", "..%2f..", "\\..\\x", "?x=", "#"])
async def test_a_slug_is_escaped_in_the_url_path(server: Server, space: Space, slug: str) -> None:
    async with Canary() as upstream:
        answer = await server.chat(**asking(space, {"url": f"{upstream.url}/base", "slug": slug}))
        paths = [request.split(b" ")[1] for request in upstream.received]
    assert answer["retrieval_info"][-1]["status"] == "success"
    for path in paths:
        assert path.startswith(b"/base/api/v1/endpoints/")
        assert path.endswith(b"/query")
        assert path.count(b"/") == 6


@pytest.mark.parametrize("tail", ["/admin/delete?x=", "/admin/delete#", "/admin/delete#/v1", "?x=/chat/completions"])
async def test_a_model_url_with_a_query_or_fragment_is_refused(server: Server, tail: str) -> None:
    async with Canary() as upstream:
        model = {"url": upstream.url + tail, "slug": "m", "kind": "openai"}
        status, said, _ = await server.post("/api/v1/chat", {"prompt": PROMPT, "model": model})
        paths = [request.split(b" ")[1] for request in upstream.received]
    assert [path for path in paths if not path.endswith(b"/chat/completions") or b"?" in path] == []
    assert (status, said["error"]) == (502, "generation_failed")
    assert "URL is not usable" in said["message"]
