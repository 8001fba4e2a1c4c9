"""Long runs: many streams at once, and clients that leave whenever they like."""

import asyncio
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from anabranch.testing import Space
from conftest import ref

ROOT = Path(__file__).parent.parent.parent
pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


def test_a_thousand_streams_on_one_worker() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.streams"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    per_stream = re.search(r"([\d.]+) KB per stream", done.stdout)
    assert per_stream is not None, done.stdout
    assert float(per_stream[1]) < 100
    assert "FAIL" not in done.stdout, done.stdout


@pytest.mark.parametrize("seed", range(5))
async def test_clients_that_leave_at_any_moment_leave_nothing_behind(serve: Any, seed: int) -> None:
    chance = random.Random(seed)
    async with Space(everything=True, record=False) as space, serve(model_streaming_enabled=True) as server:
        space.model("talker", reply="word " * 200, chunk_delay_s=0.002)
        host, port = server.url.removeprefix("http://").split(":")

        async def visit() -> None:
            slugs = chance.sample(["docs", "hang", "trickle", "status-500", "html", "reset", "cut"], 3)
            sources = [ref(space, slug, "alice") for slug in slugs]
            model = ref(space, chance.choice(["talker", "hang", "stream-break"]))
            body = json.dumps({"prompt": "?", "model": model, "data_sources": sources}).encode()
            path = chance.choice(["/api/v1/chat", "/api/v1/chat/stream"])
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            try:
                async with asyncio.timeout(chance.random() * 0.5):
                    while await reader.read(4096):
                        pass
            except TimeoutError:
                pass
            writer.close()

        for _ in range(20):
            await asyncio.gather(*(visit() for _ in range(50)))
        await space.wait_for(lambda: len(asyncio.all_tasks()) < 20, 10)
