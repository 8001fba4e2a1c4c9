"""The examples of docs/clients.md run unchanged."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from anabranch.app.event_streams import Timing
from anabranch.client import PlannerClient
from anabranch.testing import Space
from conftest import Server, ref
from support.cutting_proxy import CuttingProxy
from support.node_process import PACKAGES, STREAM

PAGE = (Path(__file__).parent.parent.parent / "docs" / "clients.md").read_text(encoding="utf-8")


def example(language: str, place: int = 0) -> str:
    return str(re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)[place])


def defined(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, "clients.md", "exec"), names)
    return names


async def run_by_node(folder: Path, code: str) -> str:
    """What a module prints. npm's packages are looked for beside it."""
    (folder / "example.mjs").write_text(code, encoding="utf-8")
    (folder / "node_modules").symlink_to(PACKAGES / "node_modules")
    return await printed_by_node(folder)


async def printed_by_node(folder: Path, *arguments: str) -> str:
    """What example.mjs prints."""
    node = str(Path(sys.prefix) / "bin" / "node")
    command = (node, "--preserve-symlinks-main", "example.mjs", *arguments)
    process = await asyncio.create_subprocess_exec(*command, cwd=folder, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(30):
        printed, _ = await process.communicate()
    assert process.returncode == 0
    return printed.decode()


@pytest.fixture
async def soon_server(serve: Any) -> AsyncIterator[Server]:
    """An EventSource waits before it learns that the stream is over: here for milliseconds."""
    async with serve(timing=Timing(retry_ms=(10, 30)), retrieval_timeout=1.0, generation_timeout=2.0) as started:
        yield started


async def test_documented_python_and_javascript_clients_follow_the_same_step(
    soon_server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = soon_server
    view = await defined(example("python"))["main"](server.url)
    assert capsys.readouterr().out == "success Hello.\n"
    sequences = sorted(event.sequence for event in view.latest.values())

    page = re.sub(r"</?script.*?>\n?", "", example("html")).replace('"/web/stream.js"', f'"{STREAM.as_uri()}"')
    page = page.replace("sessionId:", 'baseUrl: "SERVER", sessionId:')
    page = "const document = { body: {} };\n" + page + "console.log(document.body.textContent);\n"
    stream = "SERVER/planner/sessions/s1/steps/p1/stream"
    source = (
        example("js")
        + f'''
const view = new Map();
const alive = setInterval(() => {{}}, 1000);
follow("{stream}", {{
  onEvent: (event) => view.set(event.type + event.content.result_key, event.sequence),
  onReset: () => view.clear(),
  onEnd: () => clearInterval(alive) ?? console.log(JSON.stringify([...view.values()])),
  onRefused: (code) => process.exit(code),
}});
'''
    )
    (tmp_path / "page").mkdir()
    (tmp_path / "source").mkdir()
    async with CuttingProxy(server.url) as proxy:
        shown, heard = await asyncio.gather(
            run_by_node(tmp_path / "page", page.replace("SERVER", proxy.url)),
            run_by_node(tmp_path / "source", source.replace("SERVER", proxy.url)),
        )
    assert shown.startswith('success: {"call":{')
    assert '"transcript":"Hello."' in shown
    assert sorted(map(int, heard.strip("[]\n").split(","))) == sequences


async def test_the_documented_node_client_runs_alone_in_an_empty_folder(soon_server: Server, tmp_path: Path) -> None:
    """One file, saved from the server, without package.json and without other modules."""
    await defined(example("python"))["main"](soon_server.url)
    async with soon_server.session.get(f"{soon_server.url}/web/stream.js") as response:
        (tmp_path / "stream.mjs").write_bytes(await response.read())
    (tmp_path / "example.mjs").write_text(example("mjs"), encoding="utf-8")
    async with CuttingProxy(soon_server.url) as proxy:
        assert await printed_by_node(tmp_path, proxy.url) == "success Hello.\n"


async def test_the_javascript_client_is_one_module() -> None:
    source = STREAM.read_text(encoding="utf-8")
    assert not re.search(r"^\s*(import\b|export\b.*\bfrom\b)|\bimport\s*\(|\brequire\s*\(", source, re.MULTILINE)


async def test_the_documented_conflict_is_caught(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    begin = defined(example("python", 1))["begin"]
    async with PlannerClient(server.url) as planner:
        for subagent, begun in (("voice", True), ("voice", True), ("action", False)):
            step = {"session_id": "s", "plan_step_id": "p", "expected_subagents": [{"key": subagent}]}
            assert await begin(planner, step) is begun
    assert "p" in capsys.readouterr().out


async def test_documented_answer_client_gets_the_whole_answer(server: Server, space: Space) -> None:
    question = {
        "prompt": "Why?",
        "user_id": "ada",
        "data_sources": [ref(space, "docs", "alice")],
        "model": ref(space, "scribe", "mia"),
    }
    words = await defined(example("python", 2))["main"](server.url, question)
    assert words == (await server.chat(**question))["response"]


def test_package_lock_names_no_registry() -> None:
    lock = (Path(__file__).parents[1] / "node" / "package-lock.json").read_text(encoding="utf-8")
    assert '"integrity"' in lock
    assert "resolved" not in lock
    assert "://" not in lock


async def test_the_server_serves_the_javascript_modules(serve: Any) -> None:
    async with serve() as server:
        for name in ("stream.js", "connection.js"):
            async with server.session.get(f"{server.url}/web/{name}") as response:
                assert response.status == 200
                assert response.content_type == "text/javascript"
                assert await response.read() == (STREAM.parent / name).read_bytes()
