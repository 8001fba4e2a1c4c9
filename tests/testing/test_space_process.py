"""`python -m anabranch.testing`: the Space as a separate process."""

import asyncio
import json
import signal
import subprocess
import sys

import aiohttp

from anabranch.testing.source import documents


async def test_testing_space_process_prints_its_url_and_stops_on_signal() -> None:
    command = (sys.executable, "-m", "anabranch.testing", "--documents", "3", "--document-bytes", "100")
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    url = json.loads(await process.stdout.readline())["url"]
    try:
        async with aiohttp.ClientSession(url) as http:
            for slug in ("docs", "source-1", "source-10"):
                async with http.post(f"/api/v1/endpoints/{slug}/query", json={"messages": "?"}) as response:
                    found = (await response.json())["references"]["documents"]
                    assert [len(document["content"]) for document in found] == [100, 100, 100]
            async with http.post("/api/v1/endpoints/status-401/query", json={}) as response:
                assert response.status == 401
    finally:
        process.send_signal(signal.SIGTERM)
    assert await process.wait() == 0


def test_sample_documents_are_reproducible_and_distinct() -> None:
    shelf = documents("source-1", count=20, size_bytes=2048)
    assert shelf == documents("source-1", count=20, size_bytes=2048)
    other = documents("source-2", count=20, size_bytes=2048)
    assert len({document.title for document in shelf + other}) == 40
    assert len({document.content for document in shelf + other}) == 40
    scores = [document.score for document in shelf]
    assert scores[0] == 0.95
    assert scores == sorted(scores, reverse=True)
    assert scores[-1] > 0.5
