"""Breadcrumbs reach their sink whole and in order; a slow, full or missing sink delays nothing."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord

from anabranch.domain.signals import BreadcrumbsDropped
from anabranch.domain.steps import Breadcrumb
from anabranch.network.addresses import AddressGuard
from anabranch.network.outbound import AiohttpOutbound
from anabranch.telemetry.breadcrumbs import (
    MAX_QUEUED,
    MAX_WRITE_BYTES,
    BreadcrumbFanout,
    BreadcrumbFile,
    BreadcrumbTiming,
)
from anabranch.telemetry.otlp import OtlpBreadcrumbs, OtlpTiming
from anabranch.testing import Recorder
from support.otlp_collector import Collector

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def crumb(sequence: int = 1, **given: Any) -> Breadcrumb:
    return Breadcrumb(
        **{
            "session_id": "s",
            "plan_step_id": "p",
            "type": "subagent_result",
            "timestamp": "2026-11-15T02:15:30.441Z",
            "sequence": sequence,
            "subagent": "voice",
            "status": "success",
            "trace_id": TRACE,
            **given,
        }
    )


def lost(telemetry: Recorder) -> int:
    return sum(signal.count for signal in telemetry.signals if isinstance(signal, BreadcrumbsDropped))


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110  a file announces nothing
            await asyncio.sleep(0.005)


@asynccontextmanager
async def writing(
    path: Path, write: Callable[[int, bytes], int] = os.write, timing: BreadcrumbTiming = BreadcrumbTiming()
) -> AsyncIterator[tuple[BreadcrumbFile, Recorder]]:
    telemetry = Recorder()
    sink = BreadcrumbFile(path, telemetry, timing, write)
    sink.start()
    try:
        yield sink, telemetry
    finally:
        await sink.close()


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


# --- a file


async def test_breadcrumbs_are_lines_of_the_file_in_order_and_close_writes_the_queue(tmp_path: Path) -> None:
    path = tmp_path / "crumbs.jsonl"
    async with writing(path) as (sink, telemetry):
        sink.drop(crumb(1, ignored="late", retry_count=2))
        await until(lambda: read(path))
        for sequence in range(2, 3_000):
            sink.drop(crumb(sequence, session_id="ß\u2028\n"))
    lines = path.read_bytes().split(b"\n")
    assert [json.loads(line)["sequence"] for line in lines[:-1]] == list(range(1, 3_000))
    first = json.loads(lines[0])
    assert (first["ignored"], first["retry_count"], first["trace_id"]) == ("late", 2, TRACE)
    assert telemetry.signals == []


async def test_a_long_breadcrumb_is_cut_and_one_that_cannot_be_encoded_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "crumbs.jsonl"
    async with writing(path) as (sink, telemetry):
        sink.drop(crumb(1, status="\x01" * 5_000, session_id="\x01" * 900))
        sink.drop(crumb(2, status="\ud800"))
        sink.drop(crumb(3))
    assert [line["sequence"] for line in read(path)] == [1, 3]
    assert len(path.read_bytes().splitlines()[0]) < MAX_WRITE_BYTES
    assert lost(telemetry) == 1


WRITER = """
import asyncio, sys
from pathlib import Path
from anabranch.domain.steps import Breadcrumb
from anabranch.telemetry.breadcrumbs import BreadcrumbFanout, BreadcrumbFile

async def main(name, *paths):
    sinks = [BreadcrumbFile(Path(path), None) for path in paths]  # nothing is lost, so nobody is told
    for sink in sinks:
        sink.start()
    for n in range(2000):
        crumb = Breadcrumb(session_id=name * 150, plan_step_id="p", type="t", timestamp="", sequence=n)
        BreadcrumbFanout(*sinks).drop(crumb)
    await asyncio.to_thread(sys.stdin.readline)
    for sink in sinks:
        await sink.close()

asyncio.run(main(*sys.argv[1:]))
"""


def test_two_processes_share_a_file_or_a_pipe_without_tearing_lines(tmp_path: Path) -> None:
    path, pipe = tmp_path / "crumbs.jsonl", tmp_path / "pipe"
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDWR)  # so that it does not end while nobody has it open for writing
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, name, str(path), str(pipe)], stdin=subprocess.PIPE)
        for name in ("a", "b")
    ]
    try:
        # By then both wait for room in the pipe, and race for it when somebody reads.
        asyncio.run(until(lambda: path.exists() and path.read_bytes().count(b"\n") == 4_000))
        came = bytearray()
        while came.count(b"\n") < 4_000:
            came += os.read(end, 5_000)
    finally:
        for writer in writers:
            writer.communicate(b"\n", timeout=20)
        os.close(end)
    for lines in (read(path), [json.loads(line) for line in came.splitlines()]):
        assert len(lines) == 4_000
        for name in ("a", "b"):
            assert [line["sequence"] for line in lines if line["session_id"] == name * 150] == list(range(2_000))


async def test_a_rotated_breadcrumb_file_is_created_again(tmp_path: Path) -> None:
    path = tmp_path / "crumbs.jsonl"
    async with writing(path) as (sink, _):
        sink.drop(crumb(1))
        await until(lambda: read(path))
        path.rename(tmp_path / "crumbs.1")
        sink.drop(crumb(2))
        await until(lambda: read(path))
    assert [line["sequence"] for line in read(path)] == [2]


async def test_breadcrumbs_are_written_once_a_missing_folder_exists(tmp_path: Path) -> None:
    path = tmp_path / "away" / "crumbs.jsonl"
    async with writing(path, timing=BreadcrumbTiming(retry_s=0.01)) as (sink, telemetry):
        sink.drop(crumb(1))
        await until(lambda: sink._unwritten)
        sink.drop(crumb(2))
        path.parent.mkdir()
        await until(lambda: len(read(path)) == 2)
    assert telemetry.signals == []


async def test_a_full_disk_loses_breadcrumbs_and_counts_them(tmp_path: Path) -> None:
    full = tmp_path / "crumbs.jsonl"
    full.symlink_to("/dev/full")
    async with writing(full) as (sink, telemetry):
        for sequence in range(MAX_QUEUED + 1_500):
            sink.drop(crumb(sequence))
        assert lost(telemetry) <= 1_500
    assert lost(telemetry) == MAX_QUEUED + 1_500, "what could not be written is counted"


async def test_a_line_cut_by_a_full_disk_is_written_again_whole(tmp_path: Path) -> None:
    path = tmp_path / "crumbs.jsonl"
    room = [30, 10_000_000]

    def write(file: int, data: bytes) -> int:
        return os.write(file, data[: room.pop(0) if len(room) > 1 else room[0]])

    async with writing(path, write) as (sink, _):
        sink.drop(crumb(1))
        sink.drop(crumb(2))
    cut, *lines = path.read_bytes().splitlines()
    assert len(cut) == 30
    assert [json.loads(line)["sequence"] for line in lines] == [1, 2]


async def test_a_blocking_breadcrumb_file_delays_nothing_and_losses_are_reported_once_a_second(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)  # opening it waits for a reader, and there is none
    telemetry = Recorder()
    sink = BreadcrumbFile(path, telemetry, BreadcrumbTiming(close_s=0.1))
    sink.start()
    sink.drop(crumb(1))
    await until(lambda: sink._unwritten)
    began = time.process_time()
    for sequence in range(2 * MAX_QUEUED):
        sink.drop(crumb(sequence))
    assert time.process_time() - began < 2
    assert [type(signal) for signal in telemetry.signals] == [BreadcrumbsDropped], "of ten thousand, one line"
    async with asyncio.timeout(10):
        await sink.close()
    assert lost(telemetry) == 2 * MAX_QUEUED + 1
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # lets the thread go
    os.close(reader)


# --- a collector


class Logs(Collector):
    """A collector of logs."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[LogRecord] = []

    def collect(self, body: bytes) -> None:
        for of_resource in ExportLogsServiceRequest.FromString(body).resource_logs:
            self.of(of_resource.resource)
            self.records += [record for scope in of_resource.scope_logs for record in scope.log_records]


@pytest.fixture
async def logs() -> AsyncIterator[Logs]:
    async with Logs() as started:
        yield started


@asynccontextmanager
async def sending(url: str, close_s: float = 20.0) -> AsyncIterator[tuple[OtlpBreadcrumbs, Recorder]]:
    outbound = AiohttpOutbound(guard=AddressGuard(()), max_reply_bytes=65_536)
    telemetry = Recorder()
    sink = OtlpBreadcrumbs(outbound, url, {"x-key": "k"}, telemetry, OtlpTiming(interval_s=0.01, close_s=close_s))
    sink.start()
    try:
        yield sink, telemetry
    finally:
        await sink.close()
        await outbound.close()


async def test_breadcrumbs_reach_an_otlp_collector_as_log_records(logs: Logs) -> None:
    async with sending(logs.url) as (sink, telemetry):
        sink.drop(crumb(1, ignored="duplicate"))
        await logs.until(lambda: logs.records)
        for sequence in range(2, 2_000):
            sink.drop(crumb(sequence, trace_id="none"))
    first, second, *_ = logs.records
    said = {pair.key: pair.value.string_value or pair.value.int_value for pair in first.attributes}
    assert said == {
        "anabranch.session_id": "s",
        "anabranch.plan_step_id": "p",
        "anabranch.type": "subagent_result",
        "anabranch.sequence": 1,
        "anabranch.subagent": "voice",
        "anabranch.status": "success",
        "anabranch.revision": 0,
        "anabranch.retry_count": 0,
        "anabranch.trace_id": TRACE,
        "anabranch.ignored": "duplicate",
    }
    assert (first.trace_id.hex(), second.trace_id) == (TRACE, b"")
    assert first.time_unix_nano == 1_794_708_930_441_000_000
    assert (first.body.string_value, first.event_name) == ("subagent_result", "anabranch.subagent_result")
    sequences = [
        pair.value.int_value for one in logs.records for pair in one.attributes if pair.key.endswith("equence")
    ]
    assert sequences == list(range(1, 2_000))
    assert logs.resource["service.name"] == "anabranch"
    assert {(path, headers["x-key"]) for path, headers, _ in logs.requests} == {("/v1/logs", "k")}
    assert telemetry.signals == []


@pytest.mark.parametrize("path", ["", "/", "/v1/traces", "/v1/logs", "/v1/logs/"])
async def test_the_otlp_endpoint_may_name_the_path_of_traces_or_logs(logs: Logs, path: str) -> None:
    async with sending(logs.url + path) as (sink, _):
        sink.drop(crumb())
    assert [path for path, _, _ in logs.requests] == ["/v1/logs"]


async def test_a_batch_that_the_collector_refuses_twice_is_lost(logs: Logs) -> None:
    logs.refuse = 3
    async with sending(logs.url) as (sink, telemetry):
        sink.drop(crumb(1))
        await until(lambda: lost(telemetry))
        sink.drop(crumb(2))
        await logs.until(lambda: logs.records)
    assert (len(logs.requests), len(logs.records), lost(telemetry)) == (4, 1, 1)


async def test_a_hanging_or_unreachable_collector_delays_nothing(logs: Logs) -> None:
    logs.hang = True
    async with sending(logs.url, close_s=0.1) as (sink, telemetry):
        sink.drop(crumb(1))
        await logs.until(lambda: logs.requests)
        for sequence in range(MAX_QUEUED + 10):
            sink.drop(crumb(sequence))
        assert lost(telemetry) == 1
        async with asyncio.timeout(10):
            await sink.close()
    assert lost(telemetry) == MAX_QUEUED + 11
    async with sending("http://127.0.0.1:1") as (sink, telemetry):
        sink.drop(crumb(1))
        await until(lambda: lost(telemetry))


async def test_every_breadcrumb_sink_gets_every_breadcrumb(tmp_path: Path) -> None:
    async with (
        writing(tmp_path / "a") as (first, _),
        writing(tmp_path / "b") as (second, _),
    ):
        BreadcrumbFanout(first, BreadcrumbFanout(), second).drop(crumb(7))
    assert [line["sequence"] for name in "ab" for line in read(tmp_path / name)] == [7, 7]
