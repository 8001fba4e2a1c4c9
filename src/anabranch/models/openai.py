"""Any server that speaks OpenAI's /v1/chat/completions."""

from collections.abc import AsyncGenerator

import msgspec

from anabranch.domain.contracts import Outbound
from anabranch.domain.model import Context, Delta, Endpoint, Prompt
from anabranch.models.deltas import deltas
from anabranch.runtime import space


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
                headers=space.headers(self._endpoint, context),
                body=msgspec.json.encode(payload),
                operator=self._endpoint.operator,
                public_only=self._endpoint.public_only,
            )
        )


def completions_url(base: str) -> str:
    """People configure the host, the host with /v1, or the whole address; all three work."""
    base = space.base(base)
    if base.endswith("/chat/completions"):
        return base
    return f"{base}/chat/completions" if base.endswith("/v1") else f"{base}/v1/chat/completions"
