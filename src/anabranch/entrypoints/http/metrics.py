"""What Prometheus reads: GET /metrics."""

import asyncio
import gzip

from prometheus_client.exposition import gzip_accepted
from starlette.types import Receive, Scope, Send

from anabranch.app import Anabranch
from anabranch.domain.errors import AnabranchError, Forbidden
from anabranch.entrypoints.http.access import Access
from anabranch.entrypoints.http.errors import send_error
from anabranch.entrypoints.http.exchange import header, send_body
from anabranch.runtime.metrics import Metrics

NOT_YOURS = "Only the operator may read the metrics; make a key with: anabranch keys create --user NAME --operator"


class MetricsSurface:
    """The metrics, for the operator: they name everybody's endpoints. For everybody, if the settings say so."""

    def __init__(self, anabranch: Anabranch, metrics: Metrics) -> None:
        self._public = anabranch.settings.metrics_public
        self._access = Access(anabranch)
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        if not self._public:
            try:
                if not (await self._access.caller(scope)).operator:
                    raise Forbidden(NOT_YOURS)
            except AnabranchError as error:
                await send_error(send, error)
                return
        compressed = gzip_accepted(header(scope, b"accept-encoding") or "")
        # Thousands of lines take tens of milliseconds, in which nobody's answer should have to wait.
        body, media_type = await asyncio.to_thread(self._read, header(scope, b"accept") or "", compressed=compressed)
        headers = [
            (b"content-type", media_type.encode()),
            (b"content-length", str(len(body)).encode()),
            (b"cache-control", b"no-store"),
            (b"vary", b"accept, accept-encoding"),
            *([(b"content-encoding", b"gzip")] if compressed else []),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send_body(send, body, more=False)

    def _read(self, accept: str, *, compressed: bool) -> tuple[bytes, str]:
        body, media_type = self._metrics.exposition(accept)
        return (gzip.compress(body, 1) if compressed else body), media_type
