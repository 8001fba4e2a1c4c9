"""A SyftAI-Space model, answering at once or as a stream."""

from collections.abc import AsyncGenerator

from anabranch.domain.contracts import Outbound
from anabranch.domain.model import Context, Delta, Endpoint, Prompt
from anabranch.models.deltas import deltas
from anabranch.runtime import space


class SpaceModel:
    def __init__(self, endpoint: Endpoint, outbound: Outbound, *, streaming: bool) -> None:
        self._endpoint = endpoint
        self._outbound = outbound
        self._streaming = streaming

    def generate(self, prompt: Prompt, context: Context) -> AsyncGenerator[Delta, None]:
        payload = {
            "messages": prompt.messages,
            "max_tokens": prompt.max_tokens,
            "temperature": prompt.temperature,
            "stream": self._streaming,
            "stop_sequences": [],
        }
        return deltas(lambda: space.call(self._endpoint, payload, context, self._outbound))
