"""One JSON call to a model server that the operator named, made again where that can help."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from anabranch.domain.contracts import Exchange, Outbound
from anabranch.domain.errors import UpstreamError
from anabranch.runtime import space

RETRIES = 3
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 10.0
# A server that asks for more patience than this is not waited for.
LONGEST_ASKED_S = 30.0

Sleep = Callable[[float], Awaitable[None]]


class TryAgain(UpstreamError):
    """A failure that may pass. `wait_s` is how long the server asks to be left alone, if it does."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class ModelServer:
    """Where a model is served. Time-outs, broken connections, 429 and 5xx are tried again; all failures are an
    UpstreamError."""

    def __init__(
        self, url: str, outbound: Outbound, *, api_key: str = "", timeout_s: float = 30.0, sleep: Sleep = asyncio.sleep
    ) -> None:
        self._url = url
        self._outbound = outbound
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s
        self._sleep = sleep

    async def post(self, payload: Mapping[str, object]) -> bytes:
        body = msgspec.json.encode(payload)
        for attempt in range(RETRIES):
            try:
                return await self._post(body)
            except TryAgain as error:
                await self._sleep(_wait_s(error, attempt))
        return await self._post(body)

    async def _post(self, body: bytes) -> bytes:
        call = self._outbound.request("POST", self._url, headers=self._headers, body=body, operator=True)
        try:
            async with asyncio.timeout(self._timeout_s), call as exchange:
                if 200 <= exchange.status < 300:
                    return await exchange.read()
                _, sentence = await space.refusal(exchange)
                if exchange.status == 429 or exchange.status >= 500:
                    raise TryAgain(sentence, _asked_s(exchange))
                raise UpstreamError(sentence, upstream_status=exchange.status)
        except TimeoutError as error:
            raise TryAgain(f"It did not answer within {self._timeout_s:g} s.") from error
        except UpstreamError as error:
            if isinstance(error, TryAgain) or error.details:
                raise
            raise TryAgain(error.message) from error


def _wait_s(error: TryAgain, attempt: int) -> float:
    """Twice as long each time, and never at the same moment as everybody else; or as long as the server asks."""
    if error.wait_s is not None:
        if error.wait_s > LONGEST_ASKED_S:
            raise error
        return error.wait_s
    wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0**attempt)
    return wait_s * random.uniform(0.5, 1.0)  # noqa: S311  no secret


def _asked_s(exchange: Exchange) -> float | None:
    asked = exchange.retry_after
    return float(asked) if asked.isascii() and asked.isdecimal() else None
