"""SIGHUP: the operator's word that the configuration file has changed."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from types import FrameType


def hold_hangups() -> None:
    """Let the signal wait until somebody listens: by itself it would end this process and those that it starts."""
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        signal.signal(signal.SIGHUP, _to_the_main_thread)


def hung_up() -> bool:
    """Whether the signal has come while it is held; it is taken."""
    if sys.platform == "win32" or signal.SIGHUP not in signal.sigpending():
        return False
    signal.sigwait({signal.SIGHUP})
    return True


class Terminal:
    """The terminal that this process was started in, if any. When it is closed, that too is a SIGHUP."""

    def __init__(self) -> None:
        self._seen = _terminals()

    @property
    def closed(self) -> bool:
        return bool(self._seen) and not _terminals()


@asynccontextmanager
async def on_hangup(callback: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Call back at each signal, for those that come meanwhile once more. One that was held comes now, and those that
    come after the end are held. Nothing on Windows, nor outside the main thread."""
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        yield
        return
    loop, heard, terminal = asyncio.get_running_loop(), asyncio.Event(), Terminal()

    def hear(_number: int, _stack: FrameType | None) -> None:
        if terminal.closed:
            signal.raise_signal(signal.SIGTERM)
        else:
            loop.call_soon_threadsafe(heard.set)

    async def answer() -> None:
        while True:
            await heard.wait()
            heard.clear()
            await callback()

    # Not the loop's own handlers: it could not give back the one that was there.
    before = signal.signal(signal.SIGHUP, hear)
    held = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    answering = asyncio.create_task(answer())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        signal.signal(signal.SIGHUP, before if before is not None else signal.SIG_DFL)
        answering.cancel()
        with suppress(asyncio.CancelledError):
            await answering


def _to_the_main_thread(number: int, _stack: FrameType | None) -> None:
    """Threads that were there before do not hold it, and may be who gets it."""
    signal.pthread_kill(threading.main_thread().ident or 0, number)


def _terminals() -> list[int]:
    return [number for number in (0, 1, 2) if os.isatty(number)]
