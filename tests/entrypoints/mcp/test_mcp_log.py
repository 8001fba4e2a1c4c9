"""With AGGREGATOR_LOG_LEVEL=debug, the libraries beneath /mcp write nothing of questions, answers or headers."""

import io
import json
import logging
import sys
from pathlib import Path
from typing import Literal

import httpx2
import pytest
import yaml
from mcp import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

from anabranch.configuration.settings import Settings
from anabranch.telemetry.log import configured_log
from support.mcp_tool_client import ERAS, STUB
from support.server_process import serving

pytestmark = pytest.mark.xdist_group("mcp-stdio")

QUESTION = "What is a wandering oxbow?"
ANSWER = "leaves the river and joins it again"
HEADER = "a-header-of-the-callers"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    servers = {"rivers": {"command": sys.executable, "args": ["-I", "-S", str(STUB), "rivers", "0"]}}
    file = tmp_path / "anabranch.yaml"
    file.write_text(yaml.safe_dump({"mcpServers": servers}), encoding="utf-8")
    return file


async def aggregate(client: Client) -> None:
    result = await client.call_tool("aggregate", {"query_text": QUESTION})
    assert ANSWER in str(result.structured_content)


def assert_silent(log: str) -> None:
    for words in (QUESTION, ANSWER, HEADER):
        assert words not in log, words


async def test_a_debug_log_has_no_answer_of_an_mcp_server(tmp_path: Path, config: Path) -> None:
    variables = {"AGGREGATOR_LOG_LEVEL": "debug"}
    async with serving("--config", str(config), home=tmp_path, variables=variables) as program:
        for mode in ERAS:
            async with (
                httpx2.AsyncClient(headers={"X-Note": HEADER}, timeout=30) as web,
                Client(streamable_http_client(f"{program.url}/mcp", http_client=web), mode=mode) as client,
            ):
                await aggregate(client)
        await program.until(lambda: program.text.count("chat_request_completed") == len(ERAS))
        assert_silent(program.text)


@pytest.mark.parametrize("mode", ERAS)
async def test_a_debug_log_over_stdio_has_no_answer_of_an_mcp_server(
    tmp_path: Path, config: Path, mode: Literal["legacy", "auto"]
) -> None:
    written = tmp_path / "log"
    command = StdioServerParameters(
        command=sys.executable,
        args=["-m", "anabranch", "mcp", "--config", str(config)],
        env={"AGGREGATOR_LOG_LEVEL": "debug", "AGGREGATOR_DATA_DIR": str(tmp_path / "data")},
    )
    with written.open("w", encoding="utf-8") as errors:
        async with Client(stdio_client(command, errlog=errors), mode=mode) as client:
            await aggregate(client)
    log = written.read_text(encoding="utf-8")
    assert "chat_request_completed" in log
    assert_silent(log)


@pytest.mark.parametrize("level", ["DEBUG", "INFO"])
def test_libraries_are_heard_from_warnings_on_and_the_http_server_from_its_start(
    level: Literal["DEBUG", "INFO"],
) -> None:
    stream = io.StringIO()
    log = configured_log(Settings(log_level=level), stream)
    for name in ("sse_starlette.sse", "mcp.server.streamable_http", "some.library", "uvicorn.error"):
        for said in ("debug", "info", "warning"):
            getattr(logging.getLogger(name), said)(f"{name} {said}")
    log.info("our own")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == [
        "sse_starlette.sse warning",
        "mcp.server.streamable_http warning",
        "some.library warning",
        "uvicorn.error info",
        "uvicorn.error warning",
        "our own",
    ]
