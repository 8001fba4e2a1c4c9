"""What the settings of the audit log do, and how its records leave the data folder: as log lines and over OTLP."""

import asyncio
import io
import json
import logging
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

from anabranch.app.audit_reader import AuditTiming, reading_audit_log
from anabranch.domain.audit import Actor, AuditEntry, AuditFilter
from anabranch.domain.errors import ConfigurationError
from anabranch.knowledge.records import audit
from anabranch.knowledge.records.database import Session
from anabranch.knowledge.records.sqlite import SqliteDatabase
from anabranch.telemetry.log import Log, json_line
from support.environment import LOCAL, loaded
from support.otlp_collector import Collector

pytestmark = pytest.mark.usefixtures("isolated_home")

SOON = AuditTiming(every_s=0.01, retry_s=0.01, delete_every_s=0.01)
DAVID = Actor(name="user:david\n\x1b[31m", address="192.0.2.7", surface="api", key="k1")
PATIENCE_S = 20


@pytest.fixture
def database(tmp_path: Path) -> Iterator[SqliteDatabase]:
    with closing(SqliteDatabase.open(tmp_path)) as opened:
        yield opened


def add(database: SqliteDatabase, *objects: str) -> None:
    def work(db: Session) -> None:
        for one in objects:
            audit.append(db, AuditEntry(action="document.deleted", object=one, name="Her diary"), DAVID)

    database.writing(work)


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110  the reader tells nobody
            await asyncio.sleep(0.01)


def lines(written: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in written.getvalue().splitlines()]


def logged(written: io.StringIO) -> Log:
    return Log(written, logging.INFO, json_line)


async def test_records_older_than_audit_days_are_deleted(tmp_path: Path, database: SqliteDatabase) -> None:
    add(database, "document:old", "document:new")
    with closing(sqlite3.connect(database.path)) as db:
        db.execute("DROP TRIGGER audit_is_not_changed")
        db.execute("UPDATE audit SET at_us = at_us - 86400000000 * 8 WHERE seq = 1")
        db.commit()
    settings = loaded(DATA_DIR=str(tmp_path), AUDIT_DAYS="7")
    async with reading_audit_log(settings, logged(io.StringIO()), SOON):
        await until(lambda: "document:old" not in objects(database))
    assert objects(database) == ["", "document:new"]


def objects(database: SqliteDatabase) -> list[str]:
    return [one.object for one in database.reading(lambda db: audit.listed(db, AuditFilter(), None, 10))]


async def test_each_record_is_one_log_line_also_after_a_restart(tmp_path: Path, database: SqliteDatabase) -> None:
    settings, written = loaded(DATA_DIR=str(tmp_path)), io.StringIO()
    add(database, "document:1")
    async with reading_audit_log(settings, logged(written), SOON):
        await until(lambda: lines(written))
        add(database, "document:2")
        await until(lambda: len(lines(written)) == 2)
        await until(lambda: database.reading(lambda db: audit.passed_on(db, "log")) == 2)
    add(database, "document:3")
    async with reading_audit_log(settings, logged(written), SOON):
        await until(lambda: len(lines(written)) == 3)
    found = lines(written)
    assert [(one["event"], one["seq"], one["object"]) for one in found] == [
        ("audit", 1, "document:1"),
        ("audit", 2, "document:2"),
        ("audit", 3, "document:3"),
    ]
    assert (found[0]["actor"], found[0]["address"], found[0]["action"]) == (
        "user:david??[31m",
        "192.0.2.7",
        "document.deleted",
    )
    assert len(found[0]["hash"]) == 64
    assert "diary" not in written.getvalue(), "what has left cannot be forgotten"


async def test_audit_otlp_sends_records_to_the_collector(tmp_path: Path, database: SqliteDatabase) -> None:
    add(database, "document:1", "document:2")
    written = io.StringIO()
    async with Collector() as collector:
        collector.refuse = 4
        settings = loaded(
            DATA_DIR=str(tmp_path), OTLP_ENDPOINT=collector.url, AUDIT_OTLP="true", ENDPOINT_ALLOWLIST=LOCAL
        )
        async with reading_audit_log(settings, logged(written), SOON):
            await until(lambda: database.reading(lambda db: audit.passed_on(db, "otlp")) == 2)
            await until(lambda: "audit_sent_again" in written.getvalue())
        path, _, body = collector.requests[-1]
    assert path == "/v1/logs"
    (scope,) = ExportLogsServiceRequest.FromString(body).resource_logs[0].scope_logs
    sent = [{pair.key: pair.value for pair in one.attributes} for one in scope.log_records]
    assert [one["anabranch.audit.object"].string_value for one in sent] == ["document:1", "document:2"]
    assert [one["anabranch.audit.seq"].int_value for one in sent] == [1, 2]
    assert {one.event_name for one in scope.log_records} == {"anabranch.audit"}
    assert b"diary" not in body
    assert [one["event"] for one in lines(written) if one["event"] != "audit"] == ["audit_not_sent", "audit_sent_again"]
    with pytest.raises(ConfigurationError, match="AGGREGATOR_AUDIT_OTLP needs AGGREGATOR_OTLP_ENDPOINT"):
        loaded(AUDIT_OTLP="true")
