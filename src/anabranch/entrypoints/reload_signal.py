"""SIGHUP: the operator asks the process to reload the configuration file."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from types import FrameType


def hold_hangups() -> None:
    """Block SIGHUP until there is a handler: its default action would end this process and its children."""
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        signal.signal(signal.SIGHUP, _send_to_main_thread)


def hung_up() -> bool:
    """Whether SIGHUP arrived while it was blocked; it is consumed."""
    if sys.platform == "win32" or signal.SIGHUP not in signal.sigpending():
        return False
    signal.sigwait({signal.SIGHUP})
    return True


class Terminal:
    """The terminal that this process was started in, if any. Closing it sends SIGHUP, too."""

    def __init__(self) -> None:
        self._seen = _terminals()

    @property
    def closed(self) -> bool:
        return bool(self._seen) and not _terminals()


@asynccontextmanager
async def on_hangup(callback: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Call back at each SIGHUP; those that arrive during a call cause one more. A blocked one is delivered now; after
    the end they are blocked as before. Does nothing on Windows, or outside the main thread."""
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        yield
        return
    loop, received, terminal = asyncio.get_running_loop(), asyncio.Event(), Terminal()

    def receive(_number: int, _stack: FrameType | None) -> None:
        if terminal.closed:
            signal.raise_signal(signal.SIGTERM)
        else:
            loop.call_soon_threadsafe(received.set)

    async def call_back() -> None:
        while True:
            await received.wait()
            received.clear()
            await callback()

    # Not the loop's add_signal_handler: the previous handler could not be restored.
    before = signal.signal(signal.SIGHUP, receive)
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    calling = asyncio.create_task(call_back())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGHUP, before if before is not None else signal.SIG_DFL)
        calling.cancel()
        with suppress(asyncio.CancelledError):
            await calling


def _send_to_main_thread(number: int, _stack: FrameType | None) -> None:
    """Threads that were started before do not block the signal, so it may be delivered to one of them."""
    signal.pthread_kill(threading.main_thread().ident or 0, number)


def _terminals() -> list[int]:
    return [number for number in (0, 1, 2) if os.isatty(number)]
