"""Passes new records of the audit log on, as log lines and to a collector, and deletes those that are too old. One
process of a data folder does it, so each record is passed on once, whichever process has made it, also before this one
began; after a crash, a few may be passed on twice."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import NamedTuple

from anabranch.app.background import background
from anabranch.app.records import node_of, open_records
from anabranch.app.startup import COLLECTOR_REPLY_BYTES, outbound_for
from anabranch.configuration.settings import Settings
from anabranch.domain.audit import AuditRecord
from anabranch.domain.contracts import Outbound
from anabranch.domain.errors import AnabranchError
from anabranch.domain.model import Value
from anabranch.knowledge.records import audit, nodes
from anabranch.knowledge.records.database import Database, Session
from anabranch.telemetry.log import Log, audit_fields

BATCH = 500

# Why the records were not accepted; empty if they were.
Send = Callable[[Sequence[AuditRecord]], Awaitable[str]]


class AuditTiming(Value):
    """Seconds between two looks, and after a failed one; between two deletions; and for one attempt to send."""

    every_s: float = 1.0
    retry_s: float = 10.0
    delete_every_s: float = 3_600.0
    attempt_s: float = 5.0


USUAL = AuditTiming()


class Receiver(NamedTuple):
    """Where records are passed on to. How far that is done is kept under its name."""

    name: str
    send: Send


class AuditReader:
    def __init__(self, database: Database, log: Log, days: int, timing: AuditTiming = USUAL, node: str = "") -> None:
        self._database = database
        self._log = log
        self._days = days
        self._timing = timing
        self._node = node

    async def pass_on(self, receiver: Receiver) -> None:
        """Pass on what is new, for ever. Nothing is lost while a receiver refuses: it is sent again later."""
        failing = ""
        while True:
            reason = await self._attempt(receiver)
            if reason and reason != failing:
                self._log.warning("audit_not_sent", to=receiver.name, reason=reason)
            elif failing and not reason:
                self._log.info("audit_sent_again", to=receiver.name)
            failing = reason
            await asyncio.sleep(self._timing.retry_s if failing else self._timing.every_s)

    async def _attempt(self, receiver: Receiver) -> str:
        """Why not everything was passed on; empty if it was."""
        reason = ""
        try:
            if not await self._leads():
                return reason
            while not reason and (found := await self._database.read(partial(_unread, reader=receiver.name))):
                reason = await receiver.send(found)
                if not reason:
                    mark = partial(audit.set_passed_on, reader=receiver.name, seq=found[-1].seq)
                    await self._database.write(mark)
        except AnabranchError as error:
            return error.message
        return reason

    async def delete_expired(self) -> None:
        while True:
            try:
                expire = partial(audit.expire, days=self._days)
                while await self._leads():
                    if not await self._database.write(expire):
                        break
            except AnabranchError as error:
                self._log.warning("audit_not_deleted", reason=error.message)
            await asyncio.sleep(self._timing.delete_every_s)

    async def _leads(self) -> bool:
        """Whether this node is the one that does it for all."""
        return await self._database.read(lambda db: nodes.leads(db, self._node))

    async def log_lines(self, records: Sequence[AuditRecord]) -> str:
        for one in records:
            self._log.info("audit", **audit_fields(one))
        return ""


def _unread(db: Session, reader: str) -> list[AuditRecord]:
    seq = audit.passed_on(db, reader)
    return audit.after(db, seq, BATCH) if seq != audit.head(db).seq else []


@asynccontextmanager
async def reading_audit_log(settings: Settings, log: Log, timing: AuditTiming = USUAL) -> AsyncIterator[None]:
    """Read the audit log of the data folder meanwhile."""
    async with AsyncExitStack() as leaving:
        database = open_records(settings)
        leaving.callback(database.close)
        reader = AuditReader(database, log, settings.audit_days, timing, node_of(settings))
        receivers = [Receiver("log", reader.log_lines)]
        if settings.audit_otlp and settings.otlp_endpoint is not None:
            outbound = await leaving.enter_async_context(outbound_for(settings, COLLECTOR_REPLY_BYTES))
            receivers.append(Receiver("otlp", _collector(settings, outbound, timing)))
        async with background(reader.delete_expired(), *map(reader.pass_on, receivers)):
            yield


def _collector(settings: Settings, outbound: Outbound, timing: AuditTiming) -> Send:
    from anabranch.telemetry import otlp  # noqa: PLC0415  most have no collector

    headers = otlp.headers(settings.otlp_headers) if settings.otlp_headers else {}
    client = otlp.OtlpClient(outbound, settings.otlp_endpoint or "", otlp.LOGS, headers, timing.attempt_s)

    async def send(records: Sequence[AuditRecord]) -> str:
        return await client.send(lambda: otlp.encode_audit(records).SerializeToString())

    return send
