"""Real MCP servers from npm and PyPI side by side, with one killed and one hanging."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from anabranch import AggregatedResponse, Anabranch, Settings
from anabranch.domain.mcp import Aggregation, McpServer

pytestmark = [pytest.mark.timeout(120), pytest.mark.xdist_group("mcp_real")]

BIN = Path(sys.executable).parent
NODE = BIN.parent / "node" / "node_modules" / ".bin"
PATH = {"PATH": f"{BIN}:{os.environ['PATH']}"}
SERVERS = ("memory", "filesystem", "everything", "git", "time")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A graph to remember, a folder of files, and a repository with a commit."""
    entities = [
        {"type": "entity", "name": "Refunds", "entityType": "policy", "observations": ["Refunds take 30 days."]},
        {"type": "entity", "name": "Lunch", "entityType": "habit", "observations": ["Lunch is at noon."]},
    ]
    (tmp_path / "memory.json").write_text("\n".join(map(json.dumps, entities)))
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "refunds").write_text("Refunds are paid by bank transfer.")
    git = ["git", "-c", "user.name=Ada", "-c", "user.email=ada@example.com", "-c", "commit.gpgsign=false"]
    subprocess.run([*git, "init", "-q", "-b", "refunds", tmp_path / "files"], check=True)
    subprocess.run([*git, "add", "."], cwd=tmp_path / "files", check=True)
    subprocess.run([*git, "commit", "-q", "-m", "Refunds are written down"], cwd=tmp_path / "files", check=True)
    return tmp_path


@pytest.fixture
async def ab(home: Path) -> AsyncIterator[Anabranch]:
    files = str(home / "files")
    servers = (
        McpServer(name="memory", command=str(NODE / "mcp-server-memory"), env=PATH | _memory(home), reputation=0.9),
        McpServer(
            name="filesystem",
            command=str(NODE / "mcp-server-filesystem"),
            args=(files,),
            env=PATH,
            tool="search_files",
            query_argument="pattern",
            arguments={"path": files},
        ),
        McpServer(name="everything", command=str(NODE / "mcp-server-everything"), env=PATH, tool="echo"),
        McpServer(
            name="git",
            command=str(BIN / "mcp-server-git"),
            args=("--repository", files),
            env=PATH,
            tool="git_show",
            query_argument="revision",
            arguments={"repo_path": files},
        ),
        McpServer(name="time", command=str(BIN / "mcp-server-time"), env=PATH, tool="get_current_time"),
    )
    settings = Settings(
        mcp_servers={server.name: server for server in servers},
        aggregation=Aggregation(server_timeout_s=2.0),
        data_dir=str(home / "data"),
    )
    async with Anabranch.open(settings=settings) as opened:
        await opened.warm()
        async with asyncio.timeout(60):
            await opened.servers_settled()
        yield opened
    assert children() == []


def _memory(home: Path) -> dict[str, str]:
    return {"MEMORY_FILE_PATH": str(home / "memory.json")}


def children(of: str = "mcp-server") -> list[psutil.Process]:
    """The servers that run on our behalf, each behind what has started it (and not what only holds it on a leash)."""
    found = psutil.Process().children(recursive=True)
    lines = [(child, _line(child)) for child in found]
    return [child for child, line in lines if of in line and "leash.py" not in line]


def _line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


async def aggregated(ab: Anabranch, text: str) -> AggregatedResponse:
    async with asyncio.timeout(10):
        return await ab.aggregate(text, servers=())


def statuses(response: AggregatedResponse) -> dict[str, str]:
    return {one.server_name: one.status.value for one in response.metadata.servers}


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110  processes tell nobody
            await asyncio.sleep(0.01)


async def test_real_servers_are_searched_in_both_protocols(ab: Anabranch) -> None:
    health = {one.name: one for one in ab.servers()}
    assert {name: one.state for name, one in health.items()} == dict.fromkeys(SERVERS, "ready")
    assert (health["memory"].tool, health["memory"].query_argument) == ("search_nodes", "query")
    assert (health["time"].tool, health["time"].query_argument) == ("get_current_time", "timezone")
    assert {health[name].protocol for name in ("memory", "time")} == {"2025-11-25", "2026-07-28"}

    response = await aggregated(ab, "refunds")
    assert statuses(response) == {
        "memory": "success",
        "filesystem": "success",
        "everything": "success",
        "git": "success",
        "time": "error",  # there is no such time zone
    }
    found = {one.server_result.server_name: one.server_result.content for one in response.results}
    assert found["memory"].title == "Refunds"
    assert "Refunds take 30 days." in found["memory"].text
    assert found["filesystem"].text.endswith("files/refunds")
    assert "Refunds are written down" in found["git"].text
    assert response.results[0].score_breakdown.keyword_match > 0
    told = response.metadata
    assert (told.servers_queried, told.servers_succeeded) == (5, 4)
    assert told.server_diversity == len(found) / 4

    # They are sources of ordinary questions, too.
    answer = await ab.ask("refunds take", sources=["memory"], model="extractive")
    assert "Refunds take 30 days." in answer.text
    assert answer.passages[answer.citations[0].passage].source == "memory"


async def test_killed_and_hanging_real_servers_do_not_affect_others(ab: Anabranch) -> None:
    memory, everything = children("mcp-server-memory")[-1], children("mcp-server-everything")[-1]
    memory.suspend()  # so that its call is certainly in flight
    everything.suspend()
    asking = asyncio.create_task(aggregated(ab, "refunds"))
    await until(lambda: {one.name: one.calls for one in ab.servers()}["memory"] == 1)
    memory.kill()
    response = await asking
    assert statuses(response)["memory"] == "error"
    assert statuses(response)["everything"] == "timeout"
    assert {statuses(response)[name] for name in ("filesystem", "git")} == {"success"}
    report = {one.server_name: one for one in response.metadata.servers}
    assert (report["memory"].error or "").startswith("The server's process ended")
    assert report["everything"].response_time_ms < 2_500
    await until(lambda: {one.name: one.state for one in ab.servers()}["memory"] == "ready")
    everything.send_signal(signal.SIGCONT)
    again = await aggregated(ab, "refunds")
    assert {statuses(again)[name] for name in SERVERS if name != "time"} == {"success"}


async def test_git_log_of_the_real_git_server_is_called_with_fixed_arguments(home: Path) -> None:
    files = str(home / "files")
    server = McpServer(
        name="git",
        command=str(BIN / "mcp-server-git"),
        env=PATH,
        tool="git_log",
        arguments={"repo_path": files, "max_count": 5},
    )
    slow = Aggregation(server_timeout_s=30.0, total_timeout_s=30.0)
    settings = Settings(mcp_servers={"git": server}, aggregation=slow, data_dir=str(home / "data"))
    async with Anabranch.open(settings=settings) as opened:
        response = await opened.aggregate("refunds", servers=())
        (health,) = opened.servers()
    assert statuses(response) == {"git": "success"}
    assert "Refunds are written down" in response.results[0].server_result.content.text
    assert (health.tool, health.query_argument) == ("git_log", None)
    assert "does not get the question" in (health.chosen or "")
