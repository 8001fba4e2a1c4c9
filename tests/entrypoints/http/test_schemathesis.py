"""Schemathesis over the OpenAPI description."""

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

# What a schema cannot say: base64 or a URL by type; a cursor is one that was given; 5.0 is no whole number.
[[operations]]
include-name = ["POST /v1/collections", "POST /v1/ingest", "GET /v1/documents", "POST /v1/query"]
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


@pytest.mark.parametrize("examples", [15, pytest.param(200, marks=[pytest.mark.soak, pytest.mark.timeout(600)])])
async def test_no_request_breaks_the_server(serve: Any, tmp_path: Path, examples: int) -> None:
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


async def test_the_description_is_whole(server: Any) -> None:
    async with aiohttp.ClientSession() as session, session.get(f"{server.url}/openapi.json") as response:
        described = await response.json()
    assert set(described["paths"]) == {
        "/api/v1/chat",
        "/api/v1/chat/stream",
        "/v1/collections",
        "/v1/collections/{name}",
        "/v1/collections/{name}/stats",
        "/v1/ingest",
        "/v1/ingest/{job}",
        "/v1/documents",
        "/v1/documents/{document}",
        "/v1/query",
        "/v1/feedback",
        "/rag/stream",
        "/planner/sessions/{session}/steps",
        "/planner/sessions/{session}/steps/{step}",
        "/planner/sessions/{session}/steps/{step}/subagents/{key}/events",
        "/planner/sessions/{session}/steps/{step}/progress",
        "/planner/sessions/{session}/steps/{step}/safety",
        "/planner/sessions/{session}/steps/{step}/events",
        "/planner/sessions/{session}/steps/{step}/stream",
        "/v1/streams/{stream}",
        "/metrics",
        "/health",
        "/ready",
    }
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
