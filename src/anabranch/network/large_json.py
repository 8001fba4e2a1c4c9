"""Decoding of large JSON, which would otherwise hold the event loop."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from anabranch.domain.errors import FailureKind, UpstreamError

T = TypeVar("T")

LARGE_BYTES = 256 * 1024
# A decoder does not let other threads run. Each object and list takes it as long as a hundred bytes of text.
MAX_CONTAINERS = 250_000


def has_too_many_containers(body: bytes) -> bool:
    return len(body) > LARGE_BYTES and body.count(b"{") + body.count(b"[") > MAX_CONTAINERS


async def decoded(body: bytes, decode: Callable[[bytes], T]) -> T:
    """The decoded reply; a large one is decoded in a thread. UpstreamError if it has far too many objects and lists."""
    if len(body) <= LARGE_BYTES:
        return decode(body)
    if has_too_many_containers(body):
        raise UpstreamError(f"The reply has more than {MAX_CONTAINERS:,} objects and lists.", FailureKind.UNUSABLE)
    return await asyncio.to_thread(decode, body)
