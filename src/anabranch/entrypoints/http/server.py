"""Serving: uvicorn, the sockets, the workers, and an orderly end."""

import asyncio
import logging
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.supervisors import Multiprocess

from anabranch.app.starting import announce
from anabranch.domain.errors import ConfigurationError
from anabranch.entrypoints.hangup import Terminal, hold_hangups, hung_up
from anabranch.runtime.lines import Log
from anabranch.runtime.settings import Settings
from anabranch.runtime.telemetry import SOCKETS

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent


class Stall:
    """Ends a connection whose client takes nothing: to close it would be to wait until all is sent, which is never. It
    is a little quicker than the bound on what surfaces send, so that they find the client gone."""

    within_s = 25.0

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def begins(self, transport: asyncio.Transport) -> None:
        self.is_over()
        self._timer = asyncio.get_running_loop().call_later(self.within_s, transport.abort)

    def is_over(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class HeadCapped(HttpToolsProtocol):
    """uvicorn's protocol, with bounds on a request's head: the parser has none, and a head may never end."""

    max_head_bytes = 64 * 1024
    head_s = 30.0
    _head_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast("asyncio.Transport", transport))
        self._stall = Stall()
        self._head_begins()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_over()
        self._stall.is_over()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        self._stall.begins(self.transport)
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stall.is_over()
        super().resume_writing()

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


class Socket(WebSocketsSansIOProtocol):
    """uvicorn's protocol for WebSockets: `send` waits while the client takes nothing, but not for ever."""

    max_message_bytes = 64 * 1024
    max_heard_bytes = 128 * 1024
    heard_s = 60.0
    _heard_bytes = 0
    _heard_until = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._stall = Stall()
        self.logger = self.conn.logger = logging.getLogger(SOCKETS)
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stall.is_over()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        self._stall.begins(self.transport)
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stall.is_over()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """The whole head comes first, at once. If nothing came of it, the refusal is written, but nobody would send
        it."""
        if self._is_too_much(len(data)):
            self.transport.abort()
            return
        super().data_received(data)
        if not self.handshake_initiated:
            self.close_sent = self.handshake_complete = True
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.transport.close()

    def _is_too_much(self, count: int) -> bool:
        """Clients have nothing to say here but that they live. Others wait while frames are taken apart, and each ping
        is answered in memory, whether or not anybody reads that."""
        now = self.loop.time()
        if now >= self._heard_until:
            self._heard_bytes, self._heard_until = 0, now + self.heard_s
        self._heard_bytes += count
        return self._heard_bytes > self.max_heard_bytes

    async def send(self, message: "ASGISendEvent") -> None:
        """A handshake that was refused is over as well; uvicorn forgets to note it, and calls each an error."""
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and self.close_sent:
            self.handshake_complete = True

    def shutdown(self) -> None:
        """One that is open is closed by the surface: it knows whether the stream can be followed to its end."""
        if self.close_sent or not self.handshake_complete:
            super().shutdown()


class Workers(Multiprocess):
    """uvicorn's parent of several workers. It lets go of the port when they do: whoever comes while they drain is
    refused at once, and does not wait for a server that takes nobody any more. SIGHUP is for the workers, who read the
    configuration again; uvicorn would restart them. It is held here, so it is for those, too, who are just starting."""

    def __init__(self, config: uvicorn.Config, sockets: list[socket.socket]) -> None:
        super().__init__(config, sockets)
        self._terminal = Terminal()

    def handle_signals(self) -> None:
        if hung_up():
            self.handle_hup()
        super().handle_signals()

    def handle_hup(self) -> None:
        if self._terminal.closed:
            self.should_exit.set()
            return
        for worker in self.processes:
            if worker.pid is not None and worker.exitcode is None:
                os.kill(worker.pid, signal.SIGHUP)

    def terminate_all(self) -> None:
        super().terminate_all()
        for bound in self.sockets:
            bound.close()


def serve(settings: Settings, log: Log) -> None:
    """Serve until told to stop. The settings must stand in the environment: workers read them there."""
    _raise_open_files()
    hold_hangups()
    config = uvicorn.Config(
        "anabranch.entrypoints.http.app:create",
        factory=True,
        host=settings.host,
        port=settings.port,
        workers=settings.workers,
        loop="auto",
        http=HeadCapped,
        ws=Socket,
        ws_max_size=Socket.max_message_bytes,
        ws_per_message_deflate=False,  # it takes about 300 KB a client
        ws_ping_interval=20.0,
        ws_ping_timeout=20.0,
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=int(settings.drain_timeout) + 10,
    )
    bound = _bind(settings)
    host, port = bound.getsockname()[:2]
    log.info("server_started", host=host, port=port, workers=settings.workers)
    announce(settings, log)
    # The server raises a signal again once it has stopped; by then it has done its work, and the exit is a clean one.
    signal.signal(signal.SIGTERM, lambda *_: None)
    with suppress(KeyboardInterrupt):
        if settings.workers > 1:
            Workers(config, sockets=[bound]).run()
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
