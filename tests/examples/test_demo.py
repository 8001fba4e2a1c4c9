"""`make demo`, with fewer documents."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import aiohttp
import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import os
from examples import demo
os.environ["AGGREGATOR_PORT"] = str(demo.free_port("127.0.0.1"))
demo.LIBRARY = {"writers/guide": ["docs/chat.md"], "makers/workshop": ["docs/limits.md"]}
demo.main()
"""
QUESTION = {"query": "Which error does a caller get that is over its limit?", "sources": "all"}


@pytest.mark.timeout(120)
async def test_the_demo_asks_the_sources_of_several_owners(tmp_path: Path, models_dir: Path) -> None:
    environment = {
        **os.environ,
        "HOME": str(tmp_path),
        "AGGREGATOR_MODELS_DIR": str(models_dir),
        "PYTHONUNBUFFERED": "1",
    }
    demo = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM),
        cwd=ROOT,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert demo.stdout is not None
    try:
        printed = (await demo.stdout.readuntil(b"Ctrl-C stops it.")).decode()
        assert "[1]" in printed
        url = printed.partition("Open the page: ")[2].partition("/#/")[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(url) as response:
                assert response.status == 200
            async with session.post(f"{url}/v1/query", data=json.dumps(QUESTION)) as response:
                answer = await response.json()
        assert "429" in answer["answer"]
        assert answer["citations"]
        demo.send_signal(signal.SIGINT)
        assert await demo.wait() == 0
    finally:
        if demo.returncode is None:
            demo.terminate()
            await demo.wait()
