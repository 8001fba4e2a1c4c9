"""`anabranch mcp --print-config` and `anabranch mcp servers` as a person runs them, and a server that has to stop."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from mcp import Client

from anabranch.domain.mcp import Aggregation
from support.mcp_tool_client import STUB
from support.server_process import serving

pytestmark = pytest.mark.xdist_group("mcp-stdio")


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("AGGREGATOR_")}
    done = subprocess.run(
        [sys.executable, "-m", "anabranch", "mcp", *arguments],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        cwd=folder,
        env={**inherited, "AGGREGATOR_DATA_DIR": str(folder / "data"), **variables},
        stdin=subprocess.DEVNULL,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def configure(folder: Path, **servers: dict[str, Any]) -> Path:
    file = folder / "anabranch.yaml"
    file.write_text(yaml.safe_dump({"mcpServers": servers}, sort_keys=False), encoding="utf-8")
    return file


def stub(name: str, seconds: float = 0.0) -> dict[str, Any]:
    return {"command": sys.executable, "args": [str(STUB), name, str(seconds)]}


def test_printed_client_configuration_works_from_any_directory(tmp_path: Path) -> None:
    file = configure(tmp_path)
    done = run(tmp_path, "--print-config")
    entry = json.loads(done.stdout)["mcpServers"]["anabranch"]
    assert entry["args"][-3:] == ["mcp", "--config", str(file)]
    assert entry["env"] == {"AGGREGATOR_DATA_DIR": str(tmp_path / "data")}
    assert "http://127.0.0.1:8001/mcp" in done.stderr
    assert "Authorization" in done.stderr
    started = subprocess.run(
        [entry["command"], *entry["args"]],
        env={**os.environ, **entry["env"]},
        cwd="/",
        input='{"jsonrpc": "2.0", "id": 1, "method": "ping"}\n',
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    assert json.loads(started.stdout)["id"] == 1


def test_printed_client_configuration_names_variables_without_values(tmp_path: Path) -> None:
    docs = {"url": "http://127.0.0.1:9/mcp", "headers": {"Authorization": "Bearer ${DOCS_TOKEN}"}}
    configure(tmp_path, docs=docs, off={"command": "${OFF_ONLY}", "enabled": False})
    done = run(
        tmp_path, "--print-config", DOCS_TOKEN="hush-hush", OFF_ONLY="x", AGGREGATOR_MODEL_URL="http://m.example"
    )
    assert 'under "env": AGGREGATOR_MODEL_URL, DOCS_TOKEN.' in done.stderr
    assert "hush" not in done.stdout + done.stderr
    assert json.loads(done.stdout)["mcpServers"]["anabranch"]["env"].keys() == {"AGGREGATOR_DATA_DIR"}


def test_mcp_servers_command_lists_tools_and_errors(tmp_path: Path) -> None:
    missing, off = {"command": "no-such-program"}, {**stub("off"), "enabled": False}
    dies = {"command": "sh", "args": ["-c", "echo no licence: bought one? >&2; exit 3"]}
    configure(tmp_path, missing=missing, dies=dies, off=off, rivers=stub("rivers"))
    done = run(tmp_path, "servers")
    assert done.returncode == 1
    _, *table = done.stdout.splitlines()[:5]
    assert {line.split()[0]: line.split()[1:] for line in table} == {
        "missing": ["failed", "stdio"],
        "dies": ["failed", "stdio"],
        "off": ["disabled", "stdio"],
        "rivers": ["ready", "stdio", "2025-11-25", "lookup(query)"],
    }
    wrong = {
        "missing": "The command no-such-program could not be run: it was not found. Use its full path, or install it.",
        "dies": "The server's process ended with status 3. Its last output: no licence: bought one?",
    }
    empty, *reasons = done.stdout.splitlines()[5:]
    assert empty == ""
    assert reasons[:2] == [f"{name}: {why}" for name, why in wrong.items()]

    # While this one is waited for, the others are tried again.
    slow = {"command": "sh", "args": ["-c", 'sleep 0.8; exec "$0" "$@"', sys.executable, str(STUB), "rivers", "0"]}
    configure(tmp_path, missing=missing, dies=dies, off=off, rivers=slow)
    done = run(tmp_path, "servers", "--json")
    found = {one["name"]: one for one in json.loads(done.stdout)}
    assert {name: one["state"] for name, one in found.items()} == {
        "missing": "failed",
        "dies": "failed",
        "off": "disabled",
        "rivers": "ready",
    }
    assert {name: found[name]["error"] for name in wrong} == wrong
    assert (done.returncode, found["rivers"]["tool"]) == (1, "lookup")


def test_mcp_servers_command_names_the_address_that_cannot_be_reached(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"http://127.0.0.1:{probe.getsockname()[1]}"
    configure(tmp_path, gone={"url": f"{address}/mcp"})
    (found,) = json.loads(run(tmp_path, "servers", "--json").stdout)
    assert found["error"].startswith(f"The server at {address} could not be reached: ")


class Page(BaseHTTPRequestHandler):
    """A web page where an MCP server is expected."""

    def do_POST(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_mcp_servers_command_prints_no_lines_of_the_mcp_library(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as page:
        thread = threading.Thread(target=page.serve_forever)
        thread.start()
        configure(tmp_path, page={"url": f"http://127.0.0.1:{page.server_address[1]}/mcp"})
        done = run(tmp_path, "servers")
        page.shutdown()
        thread.join()
    assert (done.returncode, done.stderr) == (1, "")
    assert "page" in done.stdout


def test_mcp_servers_command_wraps_on_a_terminal(tmp_path: Path) -> None:
    name = "a-name-that-is-much-longer-than-the-terminal"
    configure(tmp_path, **{name: {"command": "no-such-program"}})
    done = run(tmp_path, "servers", COLUMNS="50", FORCE_COLOR="1")
    lines = [line.rstrip() for line in re.sub(r"\x1b\[[\d;]*m", "", done.stdout).splitlines()]
    table, reason = lines[1 : lines.index("")], lines[lines.index("") + 1 :]
    assert "".join(line.split(" ")[0] for line in table) == name
    assert reason == [
        f"{name}:",
        "  The command no-such-program could not be run: it",
        "  was not found. Use its full path, or install it.",
    ]


def test_mcp_servers_command_without_servers_explains_the_configuration(tmp_path: Path) -> None:
    done = run(tmp_path, "servers")
    assert (done.returncode, done.stdout) == (0, "")
    assert "mcpServers:" in done.stderr
    assert json.loads(run(tmp_path, "servers", "--json").stdout) == []


def test_documented_mcp_client_program_runs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "mcp.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    file = configure(tmp_path, memory=stub("memory"))
    with file.open("a", encoding="utf-8") as more:  # a busy machine starts the server slowly
        more.write("aggregator: {serverTimeoutSecs: 30, totalTimeoutSecs: 30}\n")
    environment = {**os.environ, "AGGREGATOR_DATA_DIR": str(tmp_path / "data")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    assert "(memory, 0." in done.stdout
    assert done.stdout.endswith("1 of 1 servers answered.\n")


async def test_mcp_calls_finish_during_shutdown(tmp_path: Path) -> None:
    file = configure(tmp_path, slow=stub("slow", 1.0))
    async with serving("--config", str(file), home=tmp_path) as program:
        async with Client(f"{program.url}/mcp", mode="legacy") as tools:
            await tools.list_tools()  # or the client would ask for it after the call
            call = asyncio.create_task(tools.call_tool("aggregate", {"query_text": "rivers"}))
            await program.logged("data_source_query_started")
            program.send(signal.SIGTERM)
            result = await call
        assert result.structured_content["metadata"]["servers_succeeded"] == 1
        assert await program.ended() == 0


async def test_disabled_aggregate_tool_is_not_listed(serve: Any) -> None:
    async with serve(aggregation=Aggregation(enabled=False)) as server, Client(f"{server.url}/mcp") as tools:
        listed = [tool.name for tool in (await tools.list_tools()).tools]
        called = await tools.call_tool("aggregate", {"query_text": "rivers"})
    assert listed == ["search", "ask"]
    assert called.is_error
    assert called.structured_content["error"] == "ConfigError"
    assert called.structured_content["field"] == "aggregator.enabled"


async def test_mcp_without_login_rejects_dns_rebinding(serve: Any) -> None:
    async with serve(auth="none") as server:
        evil = {"Origin": "http://evil.example.com", "Host": "evil.example.com", "Accept": "application/json"}
        status, said, _ = await server.post("/mcp", {"jsonrpc": "2.0", "id": 1, "method": "ping"}, headers=evil)
    assert (status, said["error"]) == (403, "forbidden")
