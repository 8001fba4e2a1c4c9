"""Models of a SyftAI-Space, with or without streaming."""

from collections.abc import AsyncGenerator

from anabranch.domain.contracts import Outbound
from anabranch.domain.model import Context, Delta, Endpoint, Prompt
from anabranch.models.replies import deltas
from anabranch.network import syft_wire


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
        return deltas(lambda: syft_wire.call(self._endpoint, payload, context, self._outbound))
