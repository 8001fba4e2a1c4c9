"""A small, real SyftAI-Space: data sources and models that answer, delay, reject or fail as a test configures."""

import asyncio
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from anabranch.domain.model import EndpointKind
from anabranch.testing.failures import MIB, DroppedConnectionError, Failing, Failure
from anabranch.testing.http_server import HttpServer, bearer, json
from anabranch.testing.model import Form, Model, Reply, scribe
from anabranch.testing.source import RIVERS, DataSource, Document


@dataclass(slots=True, kw_only=True)
class Recorded:
    """A received request; `headers` ignore case. `disconnected`: the client disconnected before the reply's end."""

    slug: str
    path: str
    headers: Mapping[str, str]
    raw: bytes
    finished: bool = False
    disconnected: bool = False

    @property
    def body(self) -> Any:
        return msgspec.json.decode(self.raw)


class Space(HttpServer):
    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        everything: bool = False,
        record: bool = True,
    ) -> None:
        super().__init__(self._respond, host=host, port=port, tls=tls)
        self.requests: list[Recorded] = []
        self._record = record
        self._endpoints: dict[str, DataSource | Model | Failing] = {}
        if everything:
            self.source("docs", documents=RIVERS)
            self.model("scribe")
            for failure in Failure:
                self.fails(failure.value, failure)

    def source(
        self,
        slug: str,
        *,
        documents: Sequence[Document] = (),
        delay_s: float = 0,
        token: str | None = None,
        summary: str | None = None,
    ) -> None:
        """Adds a data source; with a `summary` it also answers with text, as hybrid sources do."""
        self._endpoints[slug] = DataSource(slug, documents=documents, delay_s=delay_s, token=token, summary=summary)

    def model(
        self,
        slug: str,
        *,
        reply: str | Reply | None = None,
        delay_s: float = 0,
        form: Form = "summary",
        chunk_delay_s: float = 0,
        done_mark: bool = True,
        token: str | None = None,
        usage: bool = True,
    ) -> None:
        """Adds a model; without a `reply` it is the `scribe`, which cites the documents in the prompt."""
        self._endpoints[slug] = Model(
            slug=slug,
            reply=scribe if reply is None else reply,
            delay_s=delay_s,
            form=form,
            chunk_delay_s=chunk_delay_s,
            done_mark=done_mark,
            token=token,
            usage=usage,
        )

    def fails(
        self,
        slug: str,
        failure: Failure,
        *,
        form: Form = "summary",
        size_bytes: int = 32 * MIB,
        location: str = "/api/v1/endpoints/docs/query",
        retry_after_s: int = 1,
        body: bytes | None = None,
    ) -> None:
        """Adds an endpoint that fails: `form` is that of a STREAM_* failure, HUGE exceeds `size_bytes`, REDIRECT points
        to `location`, and `body` replaces the body of a failure that is a plain reply."""
        self._endpoints[slug] = Failing(
            failure=failure, form=form, size_bytes=size_bytes, location=location, retry_after_s=retry_after_s, body=body
        )

    async def wait_for(self, condition: Callable[[], object], timeout_s: float = 5) -> None:
        """Returns as soon as the condition holds; raises TimeoutError if it does not in time."""
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110 (a condition may depend on anything, so there is no event to wait for)
                await asyncio.sleep(0.002)

    async def _respond(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method != "POST":
            return self._get(request)
        raw = await request.content.read()
        slug, dialect = _address(request.path, raw)
        if not self._record:
            return await self._answer(request, slug, raw, dialect)
        recorded = Recorded(slug=slug, path=request.path, headers=request.headers, raw=raw)
        self.requests.append(recorded)
        try:
            response = await self._answer(request, slug, raw, dialect)
            await response.prepare(request)
            await response.write_eof()
        except (asyncio.CancelledError, ConnectionError) as error:
            recorded.disconnected = not (self._is_closing or isinstance(error, DroppedConnectionError))
            raise
        recorded.finished = True
        return response

    async def _answer(
        self, request: web.BaseRequest, slug: str, raw: bytes, dialect: EndpointKind
    ) -> web.StreamResponse:
        endpoint = self._endpoints.get(slug)
        if endpoint is None:
            return _refuse(404, "Endpoint not found", dialect)
        if endpoint.token is not None and bearer(request) != endpoint.token:
            return _refuse(401, "Invalid or missing token", dialect)
        try:
            return await endpoint.answer(request, raw, dialect)
        except msgspec.DecodeError as error:
            return _refuse(422, str(error), dialect)

    def _get(self, request: web.BaseRequest) -> web.Response:
        if request.path == "/health":
            return json(b'{"status":"ok"}')
        if request.path == "/v1/models":
            models = [
                {"id": slug, "object": "model", "created": 0, "owned_by": "space"}
                for slug, endpoint in self._endpoints.items()
                if isinstance(endpoint, Model)
            ]
            return json({"object": "list", "data": models})
        return _refuse(404, "Not found", "space")


class _Named(msgspec.Struct):
    model: str = ""


def _address(path: str, raw: bytes) -> tuple[str, EndpointKind]:
    """The slug that a request is for, and the dialect of the request."""
    if path == "/v1/chat/completions":
        try:
            return msgspec.json.decode(raw, type=_Named).model, "openai"
        except msgspec.DecodeError:
            return "", "openai"
    found = re.fullmatch(r"/api/v1/endpoints/([^/]+)/query", path)
    return (found[1] if found else ""), "space"


def _refuse(status: int, message: str, dialect: EndpointKind) -> web.Response:
    error = {"error": {"message": message, "type": "invalid_request_error"}}
    return json(error if dialect == "openai" else {"detail": message}, status)
