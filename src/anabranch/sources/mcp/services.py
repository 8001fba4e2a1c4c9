"""Objects and time limits that all MCP servers of a pool share."""

import asyncio
import random
from collections.abc import Awaitable, Callable

from anabranch.domain.contracts import Clock, Outbound, Telemetry
from anabranch.domain.model import Value


class McpTiming(Value):
    """Time limits of connections to MCP servers, in seconds."""

    connect_s: float = 30.0
    disconnect_s: float = 15.0
    # A connection that lasted so long was stable: when it is lost, the next attempt is immediate.
    stable_s: float = 10.0
    # How long a server that left `silent_calls` calls in a row unanswered may take to answer a probe.
    probe_s: float = 2.0
    silent_calls: int = 3
    # The least time between two listings of the tools of a server that announces changes.
    relist_s: float = 1.0
    # How long a removed server still answers calls that had selected it.
    removal_s: float = 0.25
    # Two timers watch one deadline. This close to it, a cancelled call counts as timed out.
    deadline_tolerance_s: float = 0.05
    # HTTP: replies of which only the status matters.
    notification_s: float = 5.0
    session_delete_s: float = 1.0
    # HTTP: how long to wait for the last bytes of a stream, so that its connection can be reused.
    last_bytes_s: float = 0.02
    # HTTP: the least time between two GET streams.
    listen_gap_s: float = 0.25
    # stdio: how long a process may take to read a message.
    write_s: float = 5.0


class PoolServices(Value):
    """The clients, clock and limits that all servers of a pool share."""

    outbound: Outbound
    clock: Clock
    telemetry: Telemetry
    max_reply_bytes: int
    timing: McpTiming = McpTiming()
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    random: Callable[[], float] = random.random
