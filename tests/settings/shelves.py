"""An Anabranch with a few documents, embedded by a server of the tests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from modelserver import ModelServer

from anabranch import Anabranch, Settings
from anabranch.app.indexer import indexer
from anabranch.knowledge.model import Caller, Item, NewDocument
from anabranch.knowledge.text import Chunking

OPERATOR = Caller(operator=True)
TEXTS = ("The river carries sand to the delta.", "Bread is baked in the oven.", "The delta of a river is wet.")


def embedding(server: ModelServer) -> dict[str, str]:
    return {"EMBEDDING_URL": server.url, "EMBEDDING_MODEL": "fake-128"}


def text(content: str) -> NewDocument:
    return NewDocument(source="text", data=content.encode(), title=content[:20])


@asynccontextmanager
async def ready(settings: Settings, *documents: NewDocument) -> AsyncIterator[tuple[Anabranch, tuple[Item, ...]]]:
    """An Anabranch with a collection, and what became of its documents."""
    async with Anabranch.open(settings=settings) as anabranch:
        room = await anabranch.knowledge()
        await room.create_collection(OPERATOR, "notes", chunking=Chunking(strategy="sentence"))
        job = await room.ingest(OPERATOR, "notes", documents)
        async with indexer(settings) as taking_in:
            await taking_in.drain()
        yield anabranch, (await room.job(OPERATOR, job)).items
