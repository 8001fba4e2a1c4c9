"""Models behind OpenAI's /v1/chat/completions."""

from collections.abc import AsyncGenerator

import msgspec

from anabranch.domain.contracts import Outbound
from anabranch.domain.model import Context, Delta, Endpoint, Prompt
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
                completions_url(self._endpoint.url),
                headers=syft_wire.headers(self._endpoint, context),
                body=msgspec.json.encode(payload),
                operator=self._endpoint.operator,
            )
        )


def completions_url(base: str) -> str:
    """Accepts the host, the host with /v1, or the whole URL."""
    base = syft_wire.base(base)
    if base.endswith("/chat/completions"):
        return base
    return f"{base}/chat/completions" if base.endswith("/v1") else f"{base}/v1/chat/completions"
