"""Serving: uvicorn, the sockets, the workers, and the graceful shutdown."""

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sized
from contextlib import suppress
from typing import TYPE_CHECKING, cast

import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.supervisors import Multiprocess

from anabranch.app.startup import announce
from anabranch.configuration.settings import Settings
from anabranch.domain.errors import AnabranchError, ConfigurationError
from anabranch.entrypoints.http.errors import refused_connection
from anabranch.entrypoints.http.stop_signals import STOP_NOW
from anabranch.entrypoints.reload_signal import Terminal, hold_hangups, hung_up
from anabranch.policies.connections import CONNECTIONS, MOST_FILES, OpenConnections
from anabranch.telemetry.log import SOCKETS, Log

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent


class CountedConnection:
    """A connection as its address is charged for it, whatever protocol it speaks."""

    def __init__(self, transport: asyncio.Transport, connections: OpenConnections) -> None:
        peer = transport.get_extra_info("peername")
        self._address = str(peer[0]) if isinstance(peer, tuple) else ""
        self._transport = transport
        self._connections = connections

    def take(self) -> None:
        self._connections.add(self._address, self)

    def leave(self) -> None:
        self._connections.remove(self._address, self)

    def is_idle(self) -> bool:
        protocol = self._transport.get_protocol()
        return isinstance(protocol, HeadCapped) and protocol.is_idle()

    def drop(self) -> None:
        self._transport.abort()


class AbortsStalled(asyncio.Protocol):
    """Aborts a connection whose client does not read: closing it would wait until everything is sent. The limit is
    shorter than the one of the surfaces, so that they see a disconnect."""

    stall_s = 25.0
    transport: asyncio.Transport
    place: CountedConnection | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_stall()
        if self.place is not None:
            self.place.leave()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        self._end_stall()
        self._stall_timer = asyncio.get_running_loop().call_later(self.stall_s, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        self._end_stall()
        super().resume_writing()

    def _end_stall(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()


class QueueingFlow(FlowControl):
    """Reads no further requests of a connection while earlier ones of it wait."""

    def __init__(self, transport: asyncio.Transport, waiting: Sized) -> None:
        super().__init__(transport)
        self._waiting = waiting

    def resume_reading(self) -> None:
        if self.read_paused and not self._waiting:
            super().resume_reading()


class TooManyRequests(Exception):
    """Raised inside the parser, so that it reads no further requests."""


class TinyChunks(Exception):
    """Raised inside the parser, so that it reads no further chunks: each takes as long as a hundred times its bytes."""


class HeadCapped(AbortsStalled, HttpToolsProtocol):
    """uvicorn's HTTP protocol with limits on the size and time of a request's head and trailers, on the headers in
    them, on tiny chunks, and on the requests that arrive together; the parser has none. What is over the limits on
    connections is refused before its request."""

    max_head_bytes = 64 * 1024
    max_headers = 256
    max_waiting = 32
    # Of a body, further chunks must be of this many bytes on average.
    max_chunks = 4096
    chunk_bytes = 64
    head_s = 30.0
    refusal_s = 1.0
    max_refused = 64
    # Without a request in progress, the connection is aborted then. One timer for all requests looks at it.
    _due = 0.0
    _timer: asyncio.TimerHandle | None = None
    # Of a head or trailers, without the read in which they began.
    _head_bytes = 0
    _is_in_head = True
    _chunks = 0
    _body_bytes = 0
    _is_refused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast("asyncio.Transport", transport))
        self.flow = QueueingFlow(self.transport, self.pipeline)
        self._due = self.loop.time() + self.head_s
        self._timer = self.loop.call_at(self._due, self._abort_when_due)
        connections = self.app_state.get(CONNECTIONS)
        if connections is not None:
            place = CountedConnection(self.transport, connections)
            try:
                place.take()
                self.place = place
            except AnabranchError as error:
                self._refuse(error, connections)

    def is_idle(self) -> bool:
        """Whether no request is in progress. A head that has not arrived is none."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is None or cycle.response_complete

    def _refuse(self, error: AnabranchError, connections: OpenConnections) -> None:
        """Sends the error, and gives the client a moment to read it. In a flood there are too few files for that."""
        self._is_refused = True
        if connections.refused >= self.max_refused:
            self.transport.abort()
            return
        connections.refused += 1
        self.transport.write(refused_connection(error))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(self.refusal_s, self._end_refusal, connections)

    def _end_refusal(self, connections: OpenConnections) -> None:
        connections.refused -= 1
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._due = self.loop.time() + self.head_s
        self._is_in_head = True
        self._head_bytes = 0
        self._chunks = self._body_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()
        if len(self.pipeline) > self.max_waiting:
            self.transport.abort()
            raise TooManyRequests

    def on_chunk_header(self) -> None:
        """After the last chunk, which has no body, trailers follow."""
        self._is_in_head = True
        self._head_bytes = 0
        self._chunks += 1
        if self._body_bytes < (self._chunks - self.max_chunks) * self.chunk_bytes:
            self.transport.abort()
            raise TinyChunks

    def on_body(self, body: bytes) -> None:
        self._is_in_head = False
        self._body_bytes += len(body)
        super().on_body(body)

    def on_chunk_complete(self) -> None:
        self._is_in_head = False

    def on_response_complete(self) -> None:
        self._due = self.loop.time() + self.head_s
        super().on_response_complete()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._head_bytes += len(data)
        super().data_received(data)
        # A short header takes many times its bytes.
        if self._is_in_head and (self._head_bytes > self.max_head_bytes or len(self.headers or ()) > self.max_headers):
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():
            super().send_400_response(msg)

    def handle_websocket_upgrade(self) -> None:
        self._end_timer()
        super().handle_websocket_upgrade()

    def _abort_when_due(self) -> None:
        now = self.loop.time()
        if self.is_idle() and now >= self._due:
            self.transport.abort()
        else:
            due = self._due if self._due > now else now + self.head_s
            self._timer = self.loop.call_at(due, self._abort_when_due)

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Socket(AbortsStalled, WebSocketsSansIOProtocol):
    """uvicorn's WebSocket protocol with limits: on what a client sends, and on the time that it does not read."""

    max_message_bytes = 64 * 1024
    max_received_bytes = 128 * 1024
    window_s = 60.0
    _received_bytes = 0
    _window_ends = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.logger = self.conn.logger = logging.getLogger(SOCKETS)
        super().connection_made(transport)
        before = self.transport.get_protocol()
        self.place = before.place if isinstance(before, HeadCapped) else None

    def data_received(self, data: bytes) -> None:
        """The whole head comes first. If the handshake fails, the refusal is queued, and must be written here."""
        if self._is_too_much(len(data)):
            self.transport.abort()
            return
        super().data_received(data)
        if not self.handshake_initiated:
            self.close_sent = self.handshake_complete = True
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.transport.close()

    def _is_too_much(self, count: int) -> bool:
        """Whether a client sends more than pings. Parsing frames delays other clients, and every ping is answered in
        memory, even if the client does not read."""
        now = self.loop.time()
        if now >= self._window_ends:
            self._received_bytes, self._window_ends = 0, now + self.window_s
        self._received_bytes += count
        return self._received_bytes > self.max_received_bytes

    async def send(self, message: "ASGISendEvent") -> None:
        """Returns when the client has read enough for the next message, so that none is rendered before. Marks a
        refused handshake as complete; uvicorn does not, and logs each as an error."""
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and self.close_sent:
            self.handshake_complete = True
        elif message["type"] == "websocket.send":
            await self.writable.wait()

    def shutdown(self) -> None:
        """An open socket is closed by the surface, which knows whether the stream can be followed to its end."""
        if self.close_sent or not self.handshake_complete:
            super().shutdown()


class Workers(Multiprocess):
    """uvicorn's parent of several workers. It closes the port with them: a client that connects during the drain is
    refused at once. SIGHUP is forwarded to the workers, which reload the configuration; uvicorn would restart them. It
    is kept here for workers that are just starting. At SIGINT, and at a second stop signal, the workers do not wait
    before they close the port."""

    joined_every_s = 0.1

    def __init__(self, config: uvicorn.Config, sockets: list[socket.socket], log: Log) -> None:
        super().__init__(config, sockets)
        self._log = log
        self._terminal = Terminal()
        self._stop_now = False

    def keep_subprocess_alive(self) -> None:
        """uvicorn replaces workers that have ended, and kills and replaces those that do not answer."""
        before = [(worker, worker.exitcode) for worker in self.processes]
        began = time.monotonic()
        super().keep_subprocess_alive()
        # One that ends while it is asked has no status before. uvicorn kills only those that let the time pass.
        waited = time.monotonic() - began >= self.config.timeout_worker_healthcheck
        for worker, status in before:
            if worker not in self.processes:
                last = worker.exitcode if status is None and not waited else status
                self._log.warning("worker_died", pid=worker.pid, **_cause_of_death(last))

    def handle_signals(self) -> None:
        if hung_up():
            self.handle_hup()
        super().handle_signals()

    def handle_hup(self) -> None:
        if self._terminal.closed:
            self.should_exit.set()
            return
        self._send_all(signal.SIGHUP)

    def handle_int(self) -> None:
        self._stop_now = True
        super().handle_int()

    def terminate_all(self) -> None:
        super().terminate_all()
        if self._stop_now:
            self._send_all(STOP_NOW)
        for bound in self.sockets:
            bound.close()

    def join_all(self) -> None:
        """uvicorn's own waits for the workers without a look at further signals."""
        while running := [worker for worker in self.processes if worker.exitcode is None]:
            running[0].process.join(self.joined_every_s)
            if {signal.SIGINT, signal.SIGTERM}.intersection(self.signal_queue):
                self.signal_queue.clear()
                self._send_all(STOP_NOW)

    def _send_all(self, number: signal.Signals | None) -> None:
        for worker in self.processes:
            if worker.pid is not None and worker.exitcode is None and number is not None:
                os.kill(worker.pid, number)


def _cause_of_death(status: int | None) -> dict[str, str | int]:
    """Fields of the log, from the exit status that a worker had before it was replaced; None: it was still running."""
    if status is None:
        return {"reason": "it did not answer, and was killed"}
    if status >= 0:
        return {"status": status}
    with suppress(ValueError):
        return {"signal": signal.Signals(-status).name}
    return {"signal": -status}


def serve(settings: Settings, log: Log) -> None:
    """Serve until a stop signal. The settings must be in the environment: workers read them there."""
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
        ws_per_message_deflate=False,  # it takes about 300 KB per client
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
    # uvicorn raises the signal again once it has stopped; the exit is a clean one.
    signal.signal(signal.SIGTERM, lambda *_: None)
    with suppress(KeyboardInterrupt):
        if settings.workers > 1:
            Workers(config, [bound], log).run()
        else:
            uvicorn.Server(config).run(sockets=[bound])
    log.info("server_stopped")


def _bind(settings: Settings) -> socket.socket:
    bound = socket.socket(socket.AF_INET6 if ":" in settings.host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((settings.host, settings.port))
    except OSError as error:
        bound.close()
        raise ConfigurationError(
            f"Cannot listen on {settings.host}:{settings.port} ({error.strerror or error}); "
            "choose another with --host and --port."
        ) from None
    bound.listen(2048)  # from here on a connection waits in the queue, so `server_started` is true
    return bound


def _raise_open_files() -> None:
    """Every stream holds two connections, and the usual soft limit is 1,024 files."""
    if sys.platform == "win32":
        return
    import resource  # noqa: PLC0415

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else hard
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
