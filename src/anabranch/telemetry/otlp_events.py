"""Breadcrumbs as OTLP logs, sent to a collector that may be slow or gone without anybody noticing."""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from importlib.metadata import version

import msgspec
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ResourceLogs, ScopeLogs, SeverityNumber
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from anabranch.domain.contracts import Outbound, Telemetry
from anabranch.domain.errors import UpstreamError
from anabranch.domain.steps import Breadcrumb
from anabranch.telemetry.breadcrumbs import MAX_WAITING, LostBreadcrumbs

BATCH = 512
EVERY_S = 1.0
EXPORT_S = 5.0
CLOSE_S = 2.0
TRIES = 2
PATH = "/v1/logs"
TRACES_PATH = "/v1/traces"
MAX_TEXT = 256


class OtlpBreadcrumbs:
    """Sends them in batches, by a task of its own. A batch that the collector refuses is sent once more and then lost;
    beyond a bound, so is what waits."""

    def __init__(self, outbound: Outbound, endpoint: str, headers: Mapping[str, str], telemetry: Telemetry) -> None:
        self._outbound = outbound
        self._url = endpoint.rstrip("/").removesuffix(TRACES_PATH).removesuffix(PATH) + PATH
        self._headers = {**headers, "Content-Type": "application/x-protobuf"}
        self._losses = LostBreadcrumbs(telemetry)
        self._waiting: deque[Breadcrumb] = deque()
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._send_on())

    def drop(self, crumb: Breadcrumb) -> None:
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append(crumb)
        else:
            self._losses.add(1)

    async def close(self) -> None:
        """Send what waits, as far as a moment allows."""
        self._closing.set()
        if self._task is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._task
            self._task = None
        if self._waiting:
            self._losses.add(len(self._waiting))
            self._waiting.clear()
        self._losses.close()

    async def _send_on(self) -> None:
        closing = False
        while not closing:
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S):
                    closing = await self._closing.wait()
            while self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
                sent = False
                try:
                    sent = await self._sent(batch)
                finally:
                    if not sent:
                        self._losses.add(len(batch))

    async def _sent(self, batch: Sequence[Breadcrumb]) -> bool:
        try:
            # Encoding takes milliseconds, in which nobody's stream should have to wait.
            body = await asyncio.to_thread(lambda: encoded(batch).SerializeToString())
            for _ in range(TRIES):
                if await self._posted(body):
                    return True
        except Exception:  # noqa: BLE001  the task's boundary: one batch that cannot be sent is not the end
            return False
        return False

    async def _posted(self, body: bytes) -> bool:
        call = self._outbound.request("POST", self._url, headers=self._headers, body=body, operator=True)
        try:
            async with asyncio.timeout(EXPORT_S), call as exchange:
                await exchange.read()
                return exchange.status < 300
        except (UpstreamError, TimeoutError):
            return False


def encoded(batch: Sequence[Breadcrumb]) -> ExportLogsServiceRequest:
    scope = InstrumentationScope(name="anabranch", version=version("anabranch"))
    logs = ScopeLogs(scope=scope, log_records=[_record(crumb) for crumb in batch])
    about = {"service.name": "anabranch", "service.version": version("anabranch")}
    resource = Resource(attributes=[_pair(name, value) for name, value in about.items()])
    return ExportLogsServiceRequest(resource_logs=[ResourceLogs(resource=resource, scope_logs=[logs])])


def _record(crumb: Breadcrumb) -> LogRecord:
    said = {name: value for name, value in msgspec.structs.asdict(crumb).items() if value not in (None, "")}
    return LogRecord(
        time_unix_nano=_nanoseconds(said.pop("timestamp", "")),
        severity_number=SeverityNumber.SEVERITY_NUMBER_INFO,
        severity_text="INFO",
        event_name=f"anabranch.{crumb.type}",
        body=AnyValue(string_value=crumb.type),
        attributes=[_pair(f"anabranch.{name}", value) for name, value in said.items()],
        trace_id=_trace_id(said.pop("trace_id", "")),
    )


def _pair(name: str, value: str | int) -> KeyValue:
    held = AnyValue(string_value=value[:MAX_TEXT]) if isinstance(value, str) else AnyValue(int_value=value)
    return KeyValue(key=name, value=held)


def _nanoseconds(timestamp: str) -> int:
    try:
        return round(datetime.fromisoformat(timestamp).timestamp() * 1000) * 1_000_000
    except (ValueError, OverflowError):
        return 0


def _trace_id(given: str) -> bytes:
    try:
        found = bytes.fromhex(given)
    except ValueError:
        return b""
    return found if len(found) == 16 else b""
