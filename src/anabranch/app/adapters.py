"""The Directory: which adapter reaches which kind of endpoint."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, assert_never

from anabranch.domain.contracts import Generator, Outbound, Source
from anabranch.domain.model import Endpoint
from anabranch.models.openai import OpenAIModel
from anabranch.models.space import SpaceModel
from anabranch.sources.collection import CollectionSource
from anabranch.sources.space import SpaceSource

if TYPE_CHECKING:
    from anabranch.knowledge.room import Knowledge


class Adapters:
    def __init__(
        self, outbound: Outbound, knowledge: "Callable[[], Awaitable[Knowledge]]", *, model_streaming: bool
    ) -> None:
        self._outbound = outbound
        self._knowledge = knowledge
        self._streaming = model_streaming

    def source(self, endpoint: Endpoint) -> Source:
        if endpoint.kind == "collection":
            return CollectionSource(endpoint, self._knowledge)
        return SpaceSource(endpoint, self._outbound)

    def generator(self, endpoint: Endpoint) -> Generator:
        match endpoint.kind:
            case "space":
                return SpaceModel(endpoint, self._outbound, streaming=self._streaming)
            case "openai":
                return OpenAIModel(endpoint, self._outbound)
            case "extractive" | "collection":
                from anabranch.models.extractive import Extractive  # noqa: PLC0415

                return Extractive()
            case _:
                assert_never(endpoint.kind)
