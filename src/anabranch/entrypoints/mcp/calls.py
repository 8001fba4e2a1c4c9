"""Who calls a tool, and how it is told how far the call has come."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from anabranch.domain.model import Context, SourceReply, Status
from anabranch.knowledge.model import Caller

# How much of a call is done, of how much, and what that was.
Progress = Callable[[float, float | None, str | None], Awaitable[None]]


class Asker(NamedTuple):
    """Who calls. Who is not `vouched` for may not use what the operator has configured and pays for."""

    context: Context
    caller: Caller
    vouched: bool


def told(name: str, reply: SourceReply) -> str:
    """A line of progress."""
    if reply.status is not Status.SUCCESS:
        return f"{name}: {reply.status} after {reply.latency_ms} ms"
    count = len(reply.passages)
    return f"{name}: {count} result{'' if count == 1 else 's'} in {reply.latency_ms} ms"
