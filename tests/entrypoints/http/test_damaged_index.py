"""A damaged index over HTTP: answers say that they are partial, and `/ready` why the server is not."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from anabranch.app import readiness
from anabranch.knowledge.index.manifest import Generations
from anabranch.knowledge.index.writer import IndexWriter
from anabranch.knowledge.model import PARTIAL
from anabranch.models.factory import LocalEmbedder
from support.collection_server import Library, library, text
from support.knowledge_fixtures import records_in

HERONS, OTTERS = "Herons sleep under the alder by the weir.", "Otters sleep in a holt by the weir."


async def ready(shelf: Library) -> tuple[int, Any]:
    reply = await shelf.call("GET", "/ready")
    return reply.status, reply.body


async def until_ready(shelf: Library, expected: tuple[int, Any]) -> None:
    """The state is checked once a second."""
    async with asyncio.timeout(10):
        while await ready(shelf) != expected:  # noqa: ASYNC110  another connection sees it
            await asyncio.sleep(0.05)


async def test_answers_are_partial_until_a_damaged_segment_is_rebuilt(tmp_path: Path, models_dir: Path) -> None:
    folder = tmp_path / "data"
    async with library(folder, models_dir) as shelf:
        collection = await shelf.collection("animals")
        database = records_in(folder)
        writer = IndexWriter(database, Generations(folder / "index"), LocalEmbedder.name)
        for content in (HERONS, OTTERS):
            await shelf.ingest(collection, text(content))
            writer.fold()
        assert "source_status" not in await shelf.ask("Who sleeps near the weir?")  # another question: this is cached
        assert await ready(shelf) == (200, {"status": "ready"})
        shutil.rmtree(folder / "index" / Generations(folder / "index").current().segments[0])
        writer.verify(lambda _: None)  # the process that indexes finds it
        partial = await shelf.ask("Who sleeps by the weir?")
        assert [(one["status"], one["error"]) for one in partial["source_status"]] == [("success", PARTIAL)]
        assert "alder" not in str(partial["sources"])
        await until_ready(shelf, (503, {"status": "not_ready", "reason": "index_damaged"}))
        writer.repair()
        whole = await shelf.ask("Who sleeps by the weir?")
        assert ("source_status" in whole, "alder" in str(whole["sources"])) == (False, True)
        await until_ready(shelf, (200, {"status": "ready"}))
        database.close()


async def test_ready_names_the_reason(tmp_path: Path, models_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with library(tmp_path / "data", models_dir) as shelf:
        monkeypatch.setattr(readiness, "is_nearly_full", lambda *_: True)
        assert await ready(shelf) == (503, {"status": "not_ready", "reason": "disk_full"})
        assert (await shelf.call("GET", "/health")).status == 200
