"""Constructs the outbound HTTP client."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from anabranch.configuration.settings import Settings, secrets_of
from anabranch.network import redaction
from anabranch.network.addresses import AddressGuard
from anabranch.network.outbound import AiohttpOutbound

COLLECTOR_REPLY_BYTES = 64 * 1024


@asynccontextmanager
async def outbound_for(settings: Settings, max_reply_bytes: int | None = None) -> AsyncIterator[AiohttpOutbound]:
    """A client that reaches public addresses, and what the settings allow besides. While it is open, the secrets of the
    settings are removed from texts of upstreams."""
    opened = AiohttpOutbound(
        guard=AddressGuard(settings.allowed_networks),
        allowed_origins=settings.allowed_origins,
        max_reply_bytes=settings.max_reply_bytes if max_reply_bytes is None else max_reply_bytes,
    )
    redaction.learn(opened, secrets_of(settings))
    try:
        yield opened
    finally:
        redaction.forget(opened)
        await opened.close()
