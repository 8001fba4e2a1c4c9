"""The few endpoints of OpenSearch that the index uses, over the outbound client."""

import asyncio
import threading
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import CancelledError
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec

from anabranch.domain.contracts import Exchange, Outbound
from anabranch.domain.errors import IndexFailed, UpstreamError
from anabranch.domain.model import Value

NAME = "anabranch"
# A node that does not answer in this time is passed over, if there are others.
PATIENCE_S = 3.0
BUSY = (429, 502, 503, 504)
# The error of an index that a full disk or an operator has made read-only.
BLOCKED = "cluster_block_exception"
MAX_REASON = 200
LOGIN = (
    "OpenSearch refuses the login (HTTP {}). Check AGGREGATOR_INDEX_URL and AGGREGATOR_INDEX_API_KEY, and the rights "
    "of the user."
)
JSON, NDJSON = "application/json", "application/x-ndjson"


class IndexUnreachable(IndexFailed):
    """OpenSearch cannot be reached, or does not answer in time."""


class IndexRefused(IndexFailed):
    """OpenSearch does not do what it is asked to do: the message has its reason."""


class VersionConflict(IndexRefused):
    """A newer version is there already."""


class IndexMissing(IndexFailed):
    """There is no index of this name."""


class IndexAddress(Value):
    """Where the index is: the nodes in the order in which they are asked, the name that the names of its indices begin
    with, and what authenticates a request."""

    nodes: tuple[str, ...]
    name: str
    authorization: str = ""

    @classmethod
    def of(cls, url: str, api_key: str | None = None) -> "IndexAddress":
        """Of `https://user:password@host:9200,other:9200/name`."""
        scheme, _, rest = url.partition("://")
        authority, _, name = rest.partition("/")
        login, _, hosts = authority.rpartition("@")
        user, _, password = login.partition(":")
        basic = b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
        return cls(
            nodes=tuple(f"{scheme}://{host}" for host in hosts.split(",")),
            name=name.strip("/") or NAME,
            authorization=f"ApiKey {api_key}" if api_key else f"Basic {basic}" if login else "",
        )


class OpenSearchReply(NamedTuple):
    """The body is None if it was no JSON object."""

    status: int
    body: Mapping[str, Any] | None


class OpenSearchClient:
    """Asks the node that answered last, and the others if it cannot be reached: every request may be made twice."""

    def __init__(self, outbound: Outbound, address: IndexAddress, timeout_s: float) -> None:
        self._outbound = outbound
        self._nodes = list(address.nodes)
        self._headers = {"Authorization": address.authorization} if address.authorization else {}
        self._timeout_s = timeout_s
        self.name = address.name

    async def call(
        self, method: str, path: str, body: bytes | None = None, *, timeout_s: float | None = None, kind: str = JSON
    ) -> Any:
        """The decoded reply; None if there is no such document. IndexMissing if there is no such index."""
        left_s = self._timeout_s if timeout_s is None else timeout_s
        failure: IndexUnreachable | None = None
        for node in tuple(self._nodes):
            is_last = node == self._nodes[-1] if failure is None else node is self._nodes[-1]
            within_s = left_s if is_last or timeout_s is not None else min(left_s, PATIENCE_S)
            try:
                async with asyncio.timeout(within_s):
                    reply = await self._asked(node, method, path, body, kind)
            except TimeoutError:
                failure = _unreachable(f"does not answer within {within_s:g} s")
            except UpstreamError as error:
                failure = _unreachable(f"cannot be reached ({error.message.removesuffix('.')})")
            else:
                if reply.status not in BUSY or _kind(reply) == BLOCKED:
                    self._prefer(node)
                    return _result(reply)
                failure = _unreachable(f"is busy (HTTP {reply.status})")
        assert failure is not None, "there is a node"
        raise failure

    async def _asked(self, node: str, method: str, path: str, body: bytes | None, kind: str) -> OpenSearchReply:
        headers = {**self._headers, **({"Content-Type": kind} if body is not None else {})}
        asking: AbstractAsyncContextManager[Exchange] = self._outbound.request(
            method, f"{node}/{path}", headers=headers, body=body, operator=True
        )
        async with asking as reply:
            content = await reply.read()
        try:
            return OpenSearchReply(reply.status, msgspec.json.decode(content, type=dict[str, Any]))
        except msgspec.MsgspecError:
            return OpenSearchReply(reply.status, None)

    def _prefer(self, node: str) -> None:
        if self._nodes[0] != node:
            self._nodes.remove(node)
            self._nodes.insert(0, node)


def lines(parts: Iterable[Any]) -> bytes:
    """A body of several JSON values, one in each line."""
    return b"".join(msgspec.json.encode(part) + b"\n" for part in parts)


def check(found: Any) -> None:
    """Raise what one result among several says that went wrong."""
    if isinstance(found, dict) and found.get("error") is not None:
        _result(OpenSearchReply(int(found.get("status", 500)), found))


def _unreachable(what: str) -> IndexUnreachable:
    return IndexUnreachable(
        f"OpenSearch {what}; the collections cannot be searched until it answers.", reason="index_unreachable"
    )


def _result(reply: OpenSearchReply) -> Any:
    body, kind = reply.body, _kind(reply)
    if body is None:
        raise IndexRefused(
            f"What AGGREGATOR_INDEX_URL names does not answer as OpenSearch does (HTTP {reply.status}, no JSON object)."
            if reply.status not in (401, 403)
            else LOGIN.format(reply.status)
        )
    if reply.status < 300:
        return body
    if kind == "index_not_found_exception":
        raise IndexMissing(f"OpenSearch has no index {body['error'].get('index', '')}.")
    if reply.status == 404 and body.get("found") is False:
        return None
    if kind == "version_conflict_engine_exception":
        raise VersionConflict("OpenSearch has a newer version already.")
    if reply.status == 401 or (reply.status == 403 and kind != BLOCKED):
        raise IndexRefused(LOGIN.format(reply.status))
    error = body.get("error")
    reason = str(error.get("reason", "")) if isinstance(error, dict) else ""
    said = f"{kind}: {reason}"[:MAX_REASON] if kind else "no reason"
    raise IndexRefused(f"OpenSearch refuses a request (HTTP {reply.status}, {said}).")


def _kind(reply: OpenSearchReply) -> str:
    """The type of the error that a reply says."""
    error = None if reply.body is None else reply.body.get("error")
    return str(error.get("type", "")) if isinstance(error, dict) else str(error or "")


def check_whole(reply: Mapping[str, Any]) -> None:
    """Raise IndexRefused if a part of the index has not done what all of it should do."""
    shards = reply.get("_shards", {})
    if shards.get("failed") or reply.get("failures") or reply.get("timed_out"):
        raise IndexRefused("A part of OpenSearch did not answer; it is asked again.")


class BlockingClient:
    """The same for threads: its requests are made in an event loop of its own."""

    def __init__(self, connected: Callable[[], tuple[OpenSearchClient, Callable[[], Awaitable[None]]]]) -> None:
        """`connected` is called in the event loop, and returns a client and what closes its connections."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="opensearch", daemon=True)
        self._thread.start()
        self._scheduling = threading.Lock()
        self._is_closed = False

        async def connect() -> tuple[OpenSearchClient, Callable[[], Awaitable[None]]]:
            return connected()

        self._client, self._disconnect = asyncio.run_coroutine_threadsafe(connect(), self._loop).result()

    @property
    def name(self) -> str:
        return self._client.name

    def call(
        self, method: str, path: str, body: bytes | None = None, *, timeout_s: float | None = None, kind: str = JSON
    ) -> Any:
        with self._scheduling:
            if self._is_closed:
                raise _unreachable("is not asked any more: the process stops")
            asking = self._client.call(method, path, body, timeout_s=timeout_s, kind=kind)
            asked = asyncio.run_coroutine_threadsafe(asking, self._loop)
        try:
            return asked.result()
        except CancelledError:
            raise _unreachable("is not asked any more: the process stops") from None

    def close(self) -> None:
        """End the requests that are being made, and close the connections."""
        with self._scheduling:
            self._is_closed = True
        asyncio.run_coroutine_threadsafe(self._closed(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _closed(self) -> None:
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._disconnect()
        await asyncio.sleep(0)  # the transports close in the next turn of the loop
