"""The OpenAPI description: compared with the router, and tried by Schemathesis."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

CONFIG = """
[checks]
# A model that cannot be reached is the upstream's failure, and documented as such.
not_a_server_error.expected-statuses = ["2xx", "4xx", "502", "503", "504"]
# Numbers are taken from strings too, as existing clients expect.
negative_data_rejection.enabled = false

# What a schema cannot say: base64 or a URL by type; a valid cursor; 5.0 is not an integer; JSON-RPC.
[[operations]]
include-name = [
    "POST /v1/collections", "PATCH /v1/collections/{name}", "POST /v1/ingest", "GET /v1/documents", "POST /v1/query",
    "POST /mcp",
]
[operations.checks]
positive_data_acceptance.enabled = false

# Nor which models there are, and that a conversation has a question.
[[operations]]
include-name = ["POST /v1/chat/completions", "POST /v1/responses", "POST /v1/embeddings"]
[operations.checks]
positive_data_acceptance.enabled = false

# The same of cursors, days and times, and of names of collections.
[[operations]]
include-name = ["GET /v1/queries", "GET /v1/feedback", "GET /v1/audit", "GET /v1/documents/{document}/chunks"]
[operations.checks]
positive_data_acceptance.enabled = false

# Nor that result keys differ, that two ids agree, or who is expected.
[[operations]]
include-path-regex = "^/planner/"
include-method = "POST"
[operations.checks]
positive_data_acceptance.enabled = false

# The stream of a step that runs has no end yet.
[[operations]]
include-name = ["GET /planner/sessions/{session}/steps/{step}/stream"]
enabled = false
"""


SOAK = [pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("phases", "examples"), [("fuzzing", 2), pytest.param("examples,coverage,fuzzing,stateful", 200, marks=SOAK)]
)
async def test_no_request_breaks_the_server(serve: Any, tmp_path: Path, phases: str, examples: int) -> None:
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    async with serve(
        endpoint_allowlist=(), retrieval_timeout=0.3, generation_timeout=0.3, data_dir=str(tmp_path / "data")
    ) as server:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "schemathesis.cli",
            "--config-file",
            str(tmp_path / "schemathesis.toml"),
            "run",
            f"{server.url}/openapi.json",
            f"--phases={phases}",
            f"--max-examples={examples}",
            "--continue-on-failure",
            "--no-color",
            "--suppress-health-check=all",
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()[-6000:]


@pytest.mark.parametrize("debug", [False, True])
async def test_openapi_describes_every_operation_that_the_router_knows(serve: Any, debug: bool) -> None:
    async with serve(debug=debug) as server:
        described = (await fetch(server, "/openapi.json"))[1]
        found = {(path, method) for path, methods in described["paths"].items() for method in methods}
        table = {
            (one.path, "get" if one.method == "WEBSOCKET" else one.method.lower()) for one in server.service.operations
        }
        assert found == table
        assert len(table) == len(server.service.operations)
        assert ("/docs" in described["paths"]) == debug
        for path, method in found:
            status, body = await fetch(server, path, method)
            assert status != 405, path
            assert status != 404 or "nothing at this address" not in str(body), path


async def fetch(server: Any, path: str, method: str = "get") -> tuple[int, Any]:
    async with server.session.request(method, server.url + path) as response:
        return response.status, await (response.json() if "json" in response.content_type else response.text())


REFUSED = [("POST", "/api/v1/chat"), ("POST", "/api/v1/chat/stream"), ("GET", "/metrics"), ("POST", "/mcp")]
REFUSED += [("GET", "/v1/collections"), ("POST", "/v1/query"), ("POST", "/rag/stream")]
REFUSED += [("POST", "/api/v1/endpoints/a/query"), ("DELETE", "/planner/sessions/s/steps/p")]


async def test_every_401_names_the_bearer_scheme(serve: Any) -> None:
    async with serve(auth="api_key") as server:
        for method, path in REFUSED:
            async with server.session.request(method, server.url + path) as response:
                assert (response.status, response.headers.get("WWW-Authenticate")) == (401, "Bearer"), path


async def test_openapi_names_the_events_of_a_chat_stream(server: Any) -> None:
    async with aiohttp.ClientSession() as session, session.get(f"{server.url}/openapi.json") as response:
        described = await response.json()
    stream = described["paths"]["/api/v1/chat/stream"]["post"]["responses"]["200"]
    assert "text/event-stream" in stream["content"]
    assert set(described["components"]["schemas"]["ChatEvent"]["properties"]) == {
        "retrieval_start",
        "source_complete",
        "retrieval_complete",
        "generation_start",
        "token",
        "done",
        "error",
    }
