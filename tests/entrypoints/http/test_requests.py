"""What is wrong with a request is said before anything is asked."""

from typing import Any

import pytest
from starlette.datastructures import QueryParams

from anabranch.entrypoints.http import operations
from anabranch.testing import Space
from conftest import Server, ref


@pytest.mark.parametrize("path", ["/api/v1/chat", "/api/v1/chat/stream"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": "  \n "}, "The prompt is empty"),
        ({"prompt": None}, "prompt"),
        ({"top_k": 21}, "from 1 to 20"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": "many"}, "top_k"),
        ({"temperature": 2.5}, "temperature"),
        ({"similarity_threshold": -1}, "similarity_threshold"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"data_sources": [{"url": "http://x", "slug": "s"}] * 11}, "names 11 sources; at most 10"),
        ({"data_sources": [{"url": "", "slug": ""}] * 1_001}, "length <= 1000"),
        ({"messages": [{"role": "user", "content": "x"}] * 1_001}, "length <= 1000"),
        ({"endpoint_tokens": {str(number): "x" for number in range(1_001)}}, "length <= 1000"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "role"),
        ({"model": {"url": "http://x", "slug": ""}}, "model has a url but no slug"),
        (
            {"model": {"slug": "nobody"}},
            "no model 'nobody' that you may use; name one of: extractive, default, or send",
        ),
        ({"model": {"slug": "n" * 5_000}}, f"no model '{'n' * 99}…' that"),
        ({"endpoint_tokens": {"a": 1}}, "endpoint_tokens"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_wrong_request_is_422_and_says_why(
    server: Server, space: Space, path: str, change: dict[str, Any], says: str
) -> None:
    request = {"prompt": "Why?", "model": ref(space, "scribe"), "data_sources": [ref(space, "docs")], **change}
    status, body, _ = await server.post(path, request)
    assert (status, body["error"]) == (422, "invalid_request")
    assert says in body["message"]
    assert set(body) == {"error", "message", "detail", "details"}
    assert space.requests == []


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"prompt": "\xff"}', b"[" * 200_000])
async def test_what_is_not_json_is_422(server: Server, body: bytes) -> None:
    async with server.session.post(f"{server.url}/api/v1/chat", data=body) as response:
        assert response.status == 422
        assert (await response.json())["error"] == "invalid_request"


async def test_unknown_fields_and_nulls_are_accepted(server: Server, space: Space) -> None:
    answer = await server.chat(
        prompt="Why?",
        model=ref(space, "scribe", name=None, tenant_name=None, colour="blue"),
        data_sources=[ref(space, "docs", reranker={"a": 1})],
        endpoint_tokens=None,
        transaction_tokens=None,
        top_k=None,
        messages=None,
        stream=False,
        rerank=True,
        future={"x": []},
    )
    assert answer["response"]


async def test_other_addresses_and_methods_answer_in_the_same_form(server: Server) -> None:
    async with server.session.get(f"{server.url}/nowhere") as response:
        assert (response.status, (await response.json())["error"]) == (404, "not_found")
    async with server.session.get(f"{server.url}/api/v1/chat") as response:
        assert (response.status, (await response.json())["error"]) == (405, "method_not_allowed")


async def test_a_request_of_hundreds_of_thousands_of_objects_is_refused_before_it_is_decoded(server: Server) -> None:
    body = b'{"prompt": "x", "data_sources": [' + b"{}," * 300_000 + b"{}]}"
    async with server.session.post(f"{server.url}/api/v1/chat", data=body) as response:
        assert response.status == 422
        assert (await response.json())["message"] == "The request has more than 250,000 objects and lists."


async def test_a_query_string_is_parsed_once_for_each_request(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []

    def params(query: bytes) -> QueryParams:
        parsed.append(query)
        return QueryParams(query)

    monkeypatch.setattr(operations, "QueryParams", params)
    async with server.session.get(f"{server.url}/v1/documents?limit=1&status=ready&sort=title") as response:
        await response.read()
    assert parsed == [b"limit=1&status=ready&sort=title"]
