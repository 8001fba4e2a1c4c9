"""An Anabranch with a few documents, embedded by a server of the tests."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from anabranch import Anabranch, Settings
from anabranch.app.indexer import indexer
from anabranch.entrypoints.cli.resources import alone
from anabranch.knowledge.model import Caller, Chunking, JobItem, NewDocument
from support.embedding_server import ModelServer, model_server
from support.environment import loaded

OPERATOR = Caller(operator=True)
TEXTS = ("The river carries sand to the delta.", "Bread is baked in the oven.", "The delta of a river is wet.")


def embedding(server: ModelServer) -> dict[str, str]:
    return {"EMBEDDING_URL": server.url, "EMBEDDING_MODEL": "fake-128"}


def text(content: str) -> NewDocument:
    return NewDocument(source="text", data=content.encode(), title=content[:20])


@asynccontextmanager
async def ready(settings: Settings, *documents: NewDocument) -> AsyncIterator[tuple[Anabranch, tuple[JobItem, ...]]]:
    """An Anabranch with a collection, and what became of its documents."""
    async with Anabranch.open(settings=settings) as anabranch:
        room = await anabranch.knowledge()
        await room.create_collection(OPERATOR, "notes", chunking=Chunking(strategy="sentence"))
        job = await room.ingest(OPERATOR, "notes", documents)
        async with indexer(settings) as taking_in:
            await taking_in.drain()
        yield anabranch, (await room.job(OPERATOR, job)).items


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with the three texts, for all tests that only ask."""
    folder = tmp_path_factory.mktemp("kept") / "data"
    asyncio.run(_keep(folder))
    return folder


@pytest.fixture
def notes(kept: Path, isolated_home: None) -> Iterator[Path]:
    """A copy of it, where the settings look. Its lock is taken: nobody starts an indexer, which nobody needs."""
    folder = Path(loaded().data_dir).expanduser()
    shutil.copytree(kept, folder)
    with alone(folder):
        yield folder


async def _keep(folder: Path) -> None:
    async with (
        model_server() as server,
        ready(loaded(DATA_DIR=str(folder), **embedding(server)), *map(text, TEXTS)) as (_, items),
    ):
        assert [item.status for item in items] == ["completed"] * len(TEXTS)
