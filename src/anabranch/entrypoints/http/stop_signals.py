"""The stop signals of one server process: SIGTERM ends the readiness at once, and closes the listener after a delay."""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import parent_process
from types import FrameType
from typing import Any

# From the parent of several workers: skip the delay. It is not SIGINT: a terminal sends that to every process, and a
# second one ends the running answers, too. Windows has no such signal, and there is no delay for its workers.
STOP_NOW: signal.Signals | None = getattr(signal, "SIGUSR1", None)


class StopSignals:
    """`received` is true from the first signal on. During the delay a load balancer sees at `/ready` that it should
    send no more questions; those that still come are answered. SIGINT, or a second signal, skips the delay. A worker's
    second SIGTERM does not: service managers send one to every process, and then the parent sends its own."""

    def __init__(self, delay_s: float) -> None:
        self.received = False
        self._is_worker = parent_process() is not None
        self._delay_s = 0.0 if self._is_worker and STOP_NOW is None else delay_s
        self._stopping = False
        self._timer: asyncio.TimerHandle | None = None
        self._server_handlers: dict[int, Any] = {}
        self._drain: Callable[[], None] = lambda: None

    @contextmanager
    def handled(self, drain: Callable[[], None]) -> Iterator[None]:
        """Calls `drain` and the server's own handler, which closes the listener, once the delay is over. (The server
        notifies the application only after its last connection.)"""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        self._drain = drain
        self._server_handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

        def handle(number: int, _stack: FrameType | None) -> None:
            loop.call_soon_threadsafe(self._receive, number)

        for number in self._server_handlers:
            signal.signal(number, handle)
        if self._is_worker and STOP_NOW is not None:
            signal.signal(STOP_NOW, handle)
        try:
            yield
        finally:
            for number, handler in self._server_handlers.items():
                signal.signal(number, handler)
            if self._is_worker and STOP_NOW is not None:
                signal.signal(STOP_NOW, signal.SIG_IGN)  # one that comes now would kill the process

    def _receive(self, number: int) -> None:
        waiting, self.received = self._timer is not None, True
        if self._stopping or number != signal.SIGTERM or (waiting and not self._is_worker):
            self._stop(number)
        elif not waiting:
            self._timer = asyncio.get_running_loop().call_later(self._delay_s, self._stop, number)

    def _stop(self, number: int) -> None:
        if not self._stopping:
            self._stopping = True
            self._drain()
        known = number if number in self._server_handlers else signal.SIGTERM
        if callable(handler := self._server_handlers[known]):
            handler(known, None)
