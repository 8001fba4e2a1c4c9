"""A flood of refused requests does not fill the log, and one address does not hide the refusals of another."""

import io

import msgspec

from anabranch.configuration.settings import Settings
from anabranch.telemetry.log import configured_log
from anabranch.telemetry.refused_requests import ALL, EACH, RefusedRequests


def test_a_flood_is_counted_and_other_addresses_are_logged() -> None:
    stream = io.StringIO()
    log = configured_log(Settings(log_format="json"), stream)
    seconds = [10.0]
    refused = RefusedRequests(log, now=lambda: seconds[0])

    def add(peer: str) -> None:
        refused.add(peer, correlation_id="c", status=404, path="/nothing")

    for _ in range(1_000):
        add("203.0.113.1")
    add("203.0.113.2")
    for number in range(1_000):
        add(f"2001:db8::{number:x}")
    seconds[0] = 11.0
    add("203.0.113.1")
    add("203.0.113.1")
    log.flush()
    lines = [msgspec.json.decode(line) for line in stream.getvalue().splitlines()]
    assert {line["event"] for line in lines} == {"request_refused"}
    assert [line["peer"] for line in lines[: EACH + 1]] == ["203.0.113.1"] * EACH + ["203.0.113.2"]
    assert len(lines) == ALL + 2
    assert sum(line.get("left_out", 0) for line in lines) + len(lines) == 1_000 + 1 + 1_000 + 2
    assert "left_out" not in lines[-1]
