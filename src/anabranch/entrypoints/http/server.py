"""Serving: uvicorn, the sockets, the workers, and an orderly end."""

import asyncio
import signal
import socket
import sys
from contextlib import suppress
from typing import cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.supervisors import Multiprocess

from anabranch.domain.errors import ConfigurationError
from anabranch.runtime.lines import Log
from anabranch.runtime.settings import Settings


class HeadCapped(HttpToolsProtocol):
    """uvicorn's protocol, with bounds on a request's head: the parser has none, and a head may never end."""

    max_head_bytes = 64 * 1024
    head_s = 30.0
    _head_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast("asyncio.Transport", transport))
        self._head_begins()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_over()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._head_begins()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_is_over()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_timer is not None:
            self._head_bytes += len(data)
            if self._head_bytes > self.max_head_bytes:
                self.transport.abort()

    def _head_begins(self) -> None:
        self._head_is_over()
        self._head_timer = self.loop.call_later(self.head_s, self.transport.abort)

    def _head_is_over(self) -> None:
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def serve(settings: Settings, workers: int, log: Log) -> None:
    """Serve until told to stop. The settings must stand in the environment: workers read them there."""
    _raise_open_files()
    config = uvicorn.Config(
        "anabranch.entrypoints.http.app:create",
        factory=True,
        host=settings.host,
        port=settings.port,
        workers=workers,
        loop="auto",
        http=HeadCapped,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=int(settings.drain_timeout) + 10,
    )
    bound = _bind(settings)
    host, port = bound.getsockname()[:2]
    log.info("server_started", host=host, port=port, workers=workers)
    # The server raises a signal again once it has stopped; by then it has done its work, and the exit is a clean one.
    signal.signal(signal.SIGTERM, lambda *_: None)
    with suppress(KeyboardInterrupt):
        if workers > 1:
            Multiprocess(config, sockets=[bound]).run()
        else:
            uvicorn.Server(config).run(sockets=[bound])
    log.info("server_stopped")


def _bind(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    bound = socket.socket(family)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((settings.host, settings.port))
    except OSError as error:
        bound.close()
        reason = error.strerror or str(error)
        raise ConfigurationError(
            f"Cannot listen on {settings.host}:{settings.port} ({reason}); choose another with --host and --port."
        ) from None
    bound.listen(2048)  # from here on a connection waits in the queue, so `server_started` is true
    bound.set_inheritable(True)
    return bound


def _raise_open_files() -> None:
    """Every stream holds two connections, and the usual soft limit is 1,024 files."""
    if sys.platform == "win32":
        return
    import resource  # noqa: PLC0415

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or soft < hard:
        wanted = 65_536 if hard == resource.RLIM_INFINITY else hard
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
