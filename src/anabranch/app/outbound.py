"""The one way out for a process with these settings."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from anabranch.configuration.settings import Settings, secrets_of
from anabranch.network import redaction
from anabranch.network.addresses import AddressGuard
from anabranch.network.outbound import AiohttpOutbound


@asynccontextmanager
async def outbound(settings: Settings, *, max_reply_bytes: int | None = None) -> AsyncIterator[AiohttpOutbound]:
    """While it is open, the settings' secrets are removed from what upstreams say."""
    opened = AiohttpOutbound(
        guard=AddressGuard(settings.allowed_networks),
        allowed_origins=settings.allowed_origins,
        max_reply_bytes=max_reply_bytes or settings.max_reply_bytes,
    )
    redaction.learn(opened, secrets_of(settings))
    try:
        yield opened
    finally:
        redaction.forget(opened)
        await opened.close()
