"""The Directory: which adapter reaches which kind of endpoint, and with which patience."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, assert_never

from anabranch.domain.contracts import Generator, Outbound, Source
from anabranch.domain.model import Endpoint
from anabranch.models.openai import OpenAIModel
from anabranch.models.space import SpaceModel
from anabranch.runtime.resilience import Resilience
from anabranch.sources.collection import CollectionSource
from anabranch.sources.space import SpaceSource

if TYPE_CHECKING:
    from anabranch.knowledge.room import Knowledge


class Adapters:
    def __init__(
        self,
        outbound: Outbound,
        knowledge: "Callable[[], Awaitable[Knowledge]]",
        resilience: Resilience,
        servers: Callable[[Endpoint], Source],
        *,
        model_streaming: bool,
    ) -> None:
        self._servers = servers
        self._outbound = outbound
        self._knowledge = knowledge
        self._resilience = resilience
        self._streaming = model_streaming

    def source(self, endpoint: Endpoint) -> Source:
        if endpoint.kind == "collection":
            return CollectionSource(endpoint, self._knowledge)
        return self._resilience.source(endpoint, self._servers if endpoint.kind == "mcp" else self._space)

    def _space(self, endpoint: Endpoint) -> Source:
        return SpaceSource(endpoint, self._outbound)

    def generator(self, endpoint: Endpoint, *, retried: bool = True) -> Generator:
        match endpoint.kind:
            case "space":
                model: Generator = SpaceModel(endpoint, self._outbound, streaming=self._streaming)
                return self._resilience.generator(endpoint, model, retried=retried)
            case "openai":
                return self._resilience.generator(endpoint, OpenAIModel(endpoint, self._outbound), retried=retried)
            case "extractive" | "collection" | "mcp":
                from anabranch.models.extractive import Extractive  # noqa: PLC0415

                return Extractive()
            case _:
                assert_never(endpoint.kind)
