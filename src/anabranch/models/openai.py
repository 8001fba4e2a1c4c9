"""Models behind OpenAI's /v1/chat/completions."""

from collections.abc import AsyncGenerator

import msgspec

from anabranch.domain.contracts import Outbound
from anabranch.domain.model import Context, Delta, Endpoint, Prompt
from anabranch.models.model_server import api_url
from anabranch.models.replies import deltas
from anabranch.network import syft_wire


class OpenAIModel:
    """The endpoint's slug is the model's name; its token is the API key."""

    def __init__(self, endpoint: Endpoint, outbound: Outbound) -> None:
        self._endpoint = endpoint
        self._outbound = outbound

    def generate(self, prompt: Prompt, context: Context) -> AsyncGenerator[Delta, None]:
        payload = {
            "model": self._endpoint.slug,
            "messages": prompt.messages,
            "max_tokens": prompt.max_tokens,
            "temperature": prompt.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return deltas(
            lambda: self._outbound.request(
                "POST",
                api_url(self._endpoint.url, "/chat/completions"),
                headers=syft_wire.headers(self._endpoint, context),
                body=msgspec.json.encode(payload),
                operator=self._endpoint.operator,
                public_only=self._endpoint.public_only,
            )
        )
