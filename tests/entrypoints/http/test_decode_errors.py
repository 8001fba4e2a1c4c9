"""A request with a wrong value: the error names the field, what it takes, and what was sent."""

from typing import Any

import aiohttp
import pytest

from conftest import Server

DAY = "filters.date_range.start takes a day such as 2026-01-31."
TEXTS = 'sources takes a list: [a text, …] or "all", not '
VISIBLE = 'takes "collection", "private", "public" or "restricted", not'
SOURCE = 'data_sources[0] takes an object such as {"slug": "handbook"}, not a text.'
RATING = 'rating takes "thumbs_down" or "thumbs_up", not'


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/api/v1/chat", {"prompt": "a", "data_sources": ["bees"]}, 422, SOURCE),
        ("/api/v1/chat", {"prompt": "a", "top_k": "x"}, 422, "top_k takes a whole number, not a text."),
        (
            "/api/v1/chat",
            {"prompt": "a", "messages": [{"role": "r", "content": ""}]},
            422,
            'messages[0].role takes "assistant", "system" or "user", not \'r\'.',
        ),
        ("/v1/query", {"query": "a", "sources": "bees"}, 400, f"{TEXTS}'bees'."),
        ("/v1/query", {"query": "a", "sources": 5}, 400, f"{TEXTS}a number."),
        ("/v1/query", {"query": "a", "filters": {"date_range": {"start": "soon"}}}, 400, DAY),
        ("/rag/stream", {"query": "a", "filters": {"date_range": {"start": "soon"}}}, 400, DAY),
        (
            "/v1/ingest",
            {
                "collection_id": "a",
                "documents": [{"source": {"type": "text", "content": ""}, "permissions": {"visibility": "x"}}],
            },
            400,
            f"documents[0].permissions.visibility {VISIBLE} 'x'.",
        ),
        ("/v1/feedback", {"query_id": "a", "rating": "good"}, 400, f"{RATING} 'good'."),
        # A value of any length is shown in part.
        ("/v1/feedback", {"query_id": "a", "rating": "x" * 9_000}, 400, f"{RATING} '{'x' * 98}…."),
    ],
)
async def test_an_error_says_what_the_field_takes(
    server: Server, path: str, body: dict[str, Any], status: int, said: str
) -> None:
    async with aiohttp.ClientSession(server.url) as session, session.post(path, json=body) as response:
        assert response.status == status
        found = await response.json()
    message = found["data"]["message"] if path == "/rag/stream" else found["message"]
    assert message == f"The request is not valid: {said}"


async def test_a_wrong_parameter_of_the_query_log_says_what_it_takes(server: Server) -> None:
    async with aiohttp.ClientSession(server.url) as session, session.get("/v1/feedback?rating=good") as response:
        assert response.status == 400
        assert (await response.json())["message"] == f"The request is not valid: {RATING} 'good'."


async def test_other_errors_of_a_request_stay_as_they_are(server: Server) -> None:
    async with aiohttp.ClientSession(server.url) as session, session.post("/api/v1/chat", json={}) as response:
        assert (await response.json())["message"] == (
            "The request is not valid: Object missing required field `prompt`"
        )
