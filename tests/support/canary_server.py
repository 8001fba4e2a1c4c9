"""A listener that must receive nothing, and a record of every outbound connection."""

import asyncio
import socket
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import pytest
from aiohttp.abc import AbstractResolver, ResolveResult

JSON_REPLY = b'{"references":{"documents":[{"content":"Words.","metadata":{"title":"T"},"similarity_score":0.9}]}}'


def reply(status: int = 200, body: bytes = JSON_REPLY, **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


class Canary:
    """A listener that counts the connections it accepts, keeps the bytes, and answers every request the same."""

    def __init__(self, says: bytes = b"", *, host: str = "127.0.0.1") -> None:
        self.accepted = 0
        self.received: list[bytes] = []
        self._says = says or reply()
        self._host = host
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, self._host, 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for writer in tuple(self._writers):
            writer.close()
        await self._server.wait_closed()

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self._writers.add(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (
                        int(line.split(b":")[1])
                        for line in head.split(b"\r\n")
                        if line.lower().startswith(b"content-le")
                    ),
                    0,
                )
                self.received.append(head + await reader.readexactly(length))
                writer.write(self._says)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    def headers(self) -> list[dict[str, str]]:
        """The header lines of each request as they came; a name that came twice fails."""
        found = []
        for request in self.received:
            lines = request.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")[1:]
            pairs = [line.partition(": ")[::2] for line in lines]
            assert len({name.lower() for name, _ in pairs}) == len(pairs), pairs
            found.append({name.lower(): value for name, value in pairs})
        return found


class Watch:
    """Every address that the process has tried to connect to. What is not on this machine is refused there and then."""

    def __init__(self) -> None:
        self.dialled: list[tuple[str, int]] = []

    def connect(self, sock: socket.socket, address: Any) -> None:
        host, port = address[:2]
        self.dialled.append((host, port))
        if not host.startswith("127."):
            raise OSError(101, "the tests have no network")
        _connect(sock, address)

    def ports(self) -> set[int]:
        return {port for _, port in self.dialled}


_connect = socket.socket.connect


def watching(monkeypatch: pytest.MonkeyPatch) -> Watch:
    watch = Watch()

    def connect(sock: socket.socket, address: Any) -> None:
        watch.connect(sock, address)

    monkeypatch.setattr(socket.socket, "connect", connect)
    return watch


class Names(AbstractResolver):
    """A resolver from a table; a name with several answers gives the next one at each lookup. Like the system's own, it
    takes every sloppy way of writing an IPv4 address for that address."""

    def __init__(self, table: Mapping[str, Sequence[Sequence[str]]]) -> None:
        self.lookups: list[str] = []
        self._table = {name: list(answers) for name, answers in table.items()}

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        self.lookups.append(host)
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in self._answer(host.rstrip("."))
        ]

    def _answer(self, name: str) -> Sequence[str]:
        answers = self._table.get(name)
        if answers is not None:
            return answers.pop(0) if len(answers) > 1 else answers[0]
        return [socket.inet_ntoa(socket.inet_aton(name))]

    async def close(self) -> None:
        pass
