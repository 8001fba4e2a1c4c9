"""The models of OpenAI's API: what a caller may ask, by id, and what a question to one of them searches."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from anabranch.app.anabranch import Anabranch
from anabranch.domain.errors import NotFound
from anabranch.domain.model import COLLECTION_ADDRESS, Endpoint
from anabranch.entrypoints.http.access import Access
from anabranch.entrypoints.http.openai_wire import ModelNotFound, OpenAIModelView
from anabranch.entrypoints.http.operations import Call
from anabranch.entrypoints.http.query_wire import CollectionQuestion
from anabranch.knowledge.collection_names import unambiguous

EVERY = "all"
COLLECTION, SOURCE, MODEL, MCP = COLLECTION_ADDRESS.removesuffix(":"), "source", "model", "mcp"
KINDS = (COLLECTION, SOURCE, MODEL, MCP)


class AskedModel(NamedTuple):
    """What a model id stands for: what is searched, as in /v1/query, and the model that writes, if it names one."""

    question: CollectionQuestion
    writer: Endpoint | None = None


@dataclass(frozen=True)
class ModelCatalog:
    """`all`, collections, configured sources, MCP servers and models. What a caller may not use does not exist for
    it."""

    anabranch: Anabranch
    access: Access

    async def listed(self, call: Call[Any]) -> list[OpenAIModelView]:
        return [
            OpenAIModelView(id=EVERY),
            *await self._collections(call),
            *(OpenAIModelView(id=name) for name in self._configured(call)),
            OpenAIModelView(id=self.anabranch.knowledge.embedder.name),
        ]

    async def find(self, call: Call[Any], name: str) -> OpenAIModelView:
        """The model with this id."""
        if name != self.anabranch.knowledge.embedder.name:
            await self.asked(call, name, "")
        listed = {one.id: one for one in await self.listed(call)}
        return listed.get(name) or listed.get(f"{COLLECTION}:{name}") or OpenAIModelView(id=name)

    async def asked(self, call: Call[Any], name: str, query: str) -> AskedModel:
        kind, _, rest = name.partition(":")
        if name == EVERY:
            return AskedModel(CollectionQuestion(query=query, sources="all"))
        if name == self.anabranch.knowledge.embedder.name:
            raise ModelNotFound(name, f"{name!r} only embeds: POST /v1/embeddings takes it")
        if name != MCP and kind not in KINDS:
            kind, rest = COLLECTION, name
        if kind == COLLECTION:
            await self._readable(call, name)
            return AskedModel(CollectionQuestion(query=query, collections=[name]))
        if kind == MODEL:
            writer = self._models(call).get(rest)
            if writer is None:
                raise ModelNotFound(name)
            return AskedModel(CollectionQuestion(query=query, sources="all"), writer)
        known = self._sources(call)
        wanted = SOURCE if kind == SOURCE else MCP
        names = [one for one, of in known.items() if of == wanted and (one == rest or name == MCP)]
        if not names:
            raise ModelNotFound(name)
        return AskedModel(CollectionQuestion(query=query, sources=names))

    async def _readable(self, call: Call[Any], name: str) -> None:
        knowledge = await self.anabranch.knowledge.existing()
        if knowledge is None:
            raise ModelNotFound(name)
        try:
            await knowledge.chosen(call.caller, (name,))
        except NotFound:
            raise ModelNotFound(name) from None

    async def _collections(self, call: Call[Any]) -> list[OpenAIModelView]:
        """A collection of another owner with the same name is listed by its address."""
        knowledge = await self.anabranch.knowledge.existing()
        if knowledge is None:
            return []
        visible = await knowledge.chosen(call.caller, None)
        return [
            OpenAIModelView(id=unambiguous(one, visible, call.caller, COLLECTION_ADDRESS), created=int(one.created_at))
            for one in visible
        ]

    def _configured(self, call: Call[Any]) -> Iterator[str]:
        sources = self._sources(call)
        yield from (f"{SOURCE}:{name}" for name, kind in sources.items() if kind == SOURCE)
        servers = [name for name, kind in sources.items() if kind == MCP]
        yield from (MCP, *(f"{MCP}:{name}" for name in servers)) if servers else ()
        yield from (f"{MODEL}:{name}" for name in self._models(call))

    def _sources(self, call: Call[Any]) -> Mapping[str, str]:
        """The sources and MCP servers that the caller may name, and which of the two each is."""
        known = self.anabranch.questions.known_sources(self.access.grants(call.scope, call.caller))
        return {name: MCP if one.kind == "mcp" else SOURCE for name, one in known.items() if one.kind != "collection"}

    def _models(self, call: Call[Any]) -> Mapping[str, Endpoint]:
        return self.anabranch.questions.known_models(self.access.grants(call.scope, call.caller))
