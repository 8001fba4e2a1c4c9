"""The outermost layer: a correlation id for every request, and an answer in our own form to whatever goes wrong."""

from contextlib import suppress

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from anabranch.entrypoints.http import errors
from anabranch.entrypoints.http.asgi import header, send_json
from anabranch.telemetry.correlation import correlation_id
from anabranch.telemetry.log import Log

MAX_LOGGED_PATH = 200
ROUTING = {
    404: ("not_found", "There is nothing at this address."),
    405: ("method_not_allowed", "This address does not take that method."),
}
BEGINNINGS = ("http.response.start", "websocket.accept")


class CorrelationMiddleware:
    """Takes X-Correlation-ID from the caller if it is a sensible one, makes one if not, and always sends it back."""

    def __init__(self, app: ASGIApp, log: Log) -> None:
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            send = _answering(send, scope)
        scope["correlation_id"] = said = correlation_id(header(scope, b"x-correlation-id"))
        echo = (b"x-correlation-id", said.encode())
        begun = False

        async def send_marked(message: Message) -> None:
            nonlocal begun
            if message["type"] in BEGINNINGS:
                begun = True
                message["headers"] = [*message["headers"], echo]
                if 400 <= message.get("status", 101) < 500:
                    path = scope["path"][:MAX_LOGGED_PATH]
                    peer = (scope.get("client") or ("",))[0]
                    status = message["status"]
                    self._log.info("request_refused", correlation_id=said, status=status, path=path, peer=peer)
            await send(message)

        try:
            await self._app(scope, receive, send_marked)
        except HTTPException as error:
            code, message = ROUTING.get(error.status_code, ("http_error", error.detail))
            headers = [(name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items()]
            await send_json(send_marked, error.status_code, errors.body(code, message), headers)
        except Exception as error:
            self._log.error("unexpected_error", correlation_id=said, exc_info=error)
            if begun:
                raise
            message = "Something went wrong on our side; the log has the details under this correlation id."
            body = errors.body("internal_error", message, correlation_id=said)
            await send_json(send_marked, 500, body)


def _answering(send: Send, scope: Scope) -> Send:
    """Refusals of a WebSocket are sent as those of any request: what comes before it is accepted is an HTTP answer, for
    servers that can send one."""
    can = "websocket.http.response" in (scope.get("extensions") or {})

    async def answer(message: Message) -> None:
        if not message["type"].startswith("http."):
            await send(message)
            return
        with suppress(OSError):  # the client has not waited for it
            if can:
                await send({**message, "type": f"websocket.{message['type']}"})
            elif message["type"] == "http.response.start":
                await send({"type": "websocket.close", "code": 1008, "reason": ""})

    return answer
