"""JSON calls to a configured model server, with retries."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from anabranch.domain.contracts import Outbound
from anabranch.domain.errors import Trouble, UpstreamError, UpstreamTimedOut
from anabranch.network import syft_wire
from anabranch.policies import resilience
from anabranch.policies.resilience import GuardedCalls

RETRIES = 3
FIRST_WAIT_S = 0.5
MAX_BACKOFF_S = 10.0
# A longer Retry-After than this fails the call.
MAX_RETRY_AFTER_S = 30.0

Sleep = Callable[[float], Awaitable[None]]


class ModelServer:
    """A client of one model server. Time-outs, broken connections, 429 and 5xx are retried; every failure is an
    UpstreamError."""

    def __init__(
        self,
        url: str,
        outbound: Outbound,
        *,
        api_key: str = "",
        timeout_s: float = 30.0,
        sleep: Sleep = asyncio.sleep,
        attempts: GuardedCalls | None = None,
    ) -> None:
        self._url = url
        self._outbound = outbound
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s
        self._sleep = sleep
        self._attempts = attempts

    async def post(self, payload: Mapping[str, object]) -> bytes:
        body = msgspec.json.encode(payload)
        for attempt in range(RETRIES):
            try:
                return await self._attempted(body, first=attempt == 0)
            except UpstreamError as error:
                wait_s = _wait_s(error, attempt)
                if wait_s is None or not (self._attempts is None or self._attempts.again()):
                    raise
                await self._sleep(wait_s)
        return await self._attempted(body, first=False)

    async def _attempted(self, body: bytes, *, first: bool) -> bytes:
        if self._attempts is None:
            return await self._post(body)
        return await self._attempts.made(lambda: self._post(body), first=first)

    async def _post(self, body: bytes) -> bytes:
        call = self._outbound.request("POST", self._url, headers=self._headers, body=body, operator=True)
        try:
            async with asyncio.timeout(self._timeout_s), call as exchange:
                if 200 <= exchange.status < 300:
                    return await exchange.read()
                _, sentence = await syft_wire.refusal(exchange)
                trouble, wait_s = (
                    syft_wire.trouble(exchange.status),
                    resilience.retry_after_s(exchange.header("Retry-After")),
                )
                raise UpstreamError(sentence, trouble, wait_s, upstream_status=exchange.status)
        except TimeoutError as error:
            raise UpstreamTimedOut(f"It did not answer within {self._timeout_s:g} s.", Trouble.DOWN) from error


def api_url(base: str, operation: str, versions: tuple[str, ...] = ("/v1",)) -> str:
    """The URL of an operation; `base` is the host, the host with its version, or the whole URL."""
    base = syft_wire.base(base)
    if base.endswith(operation):
        return base
    return f"{base}{operation}" if base.endswith(versions) else f"{base}/v1{operation}"


def _wait_s(error: UpstreamError, attempt: int) -> float | None:
    """The server's Retry-After, else exponential backoff; None if a retry cannot help, or not soon enough."""
    if not error.trouble.may_pass:
        return None
    if error.wait_s is not None:
        return error.wait_s if error.wait_s <= MAX_RETRY_AFTER_S else None
    return min(MAX_BACKOFF_S, resilience.backoff_s(FIRST_WAIT_S, attempt))
