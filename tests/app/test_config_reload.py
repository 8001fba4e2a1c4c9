"""The file is read again: what is handed on, what stays as it was, and what the log says."""

import io
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from anabranch.app.config_reload import ConfigReload
from anabranch.configuration.settings import load
from anabranch.domain.audit import AuditEntry
from anabranch.domain.mcp import Aggregation, McpServer
from anabranch.telemetry.log import Log

BEFORE = """
mcpServers:
  memory: {command: memory, env: {KEY: hush}}
  docs: {url: "https://docs.example/mcp", headers: {Authorization: hush}}
  old: {command: old}
sources:
  shelf: {url: "https://space.example", slug: shelf}
"""


class RecordedLog(Log):
    """A log whose lines can be compared."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []
        super().__init__(io.StringIO(), logging.INFO, self._record)

    def _record(self, fields: dict[str, Any]) -> str:
        event, *_ = (fields.pop(name) for name in ("event", "level", "timestamp"))
        self.lines.append((event, fields))
        return str(event)


class Node:
    """What a running service is to Reloading."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.write(BEFORE)
        self.log = RecordedLog()
        self.taken: list[tuple[Mapping[str, McpServer], Aggregation]] = []
        self.broken: Exception | None = None
        self.audited: list[AuditEntry] = []
        self.reloading = ConfigReload(load({}, path), self._take, self.log, lambda: load({}, path), self._record)

    def write(self, text: str) -> None:
        self.path.write_text(text, encoding="utf-8")

    async def _record(self, entry: AuditEntry) -> None:
        self.audited.append(entry)

    async def _take(self, servers: Mapping[str, McpServer], aggregation: Aggregation) -> None:
        if self.broken is not None:
            raise self.broken
        self.taken.append((servers, aggregation))

    async def again(self, text: str) -> tuple[str, dict[str, Any]]:
        """What is said about a text that stands in the file now."""
        self.write(text)
        self.log.lines.clear()
        await self.reloading.again()
        [line] = self.log.lines
        assert "hush" not in str(line)
        return line


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "anabranch.yaml")


def reloaded(**differences: Any) -> tuple[str, dict[str, Any]]:
    nothing = {"added": [], "removed": [], "changed": [], "aggregator_changed": False, "restart_needed": []}
    return "configuration_reloaded", {**nothing, **differences}


async def test_a_reload_applies_and_logs_the_changes(node: Node) -> None:
    line = await node.again(
        BEFORE.replace("KEY: hush", "KEY: hush-hush").replace("old: {command: old}", "new: {command: new}")
        + "aggregator: {defaultMaxResults: 50}"
    )
    assert line == reloaded(added=["new"], removed=["old"], changed=["memory"], aggregator_changed=True)
    [(servers, aggregation)] = node.taken
    assert list(servers) == ["memory", "docs", "new"]
    assert servers["memory"].env == {"KEY": "hush-hush"}
    assert aggregation.default_max_results == 50
    [entry] = node.audited
    assert (entry.action, entry.outcome) == ("configuration.reloaded", "done")
    assert entry.details == line[1]


async def test_each_reload_is_compared_with_the_previous_one(node: Node) -> None:
    assert await node.again(BEFORE) == reloaded()
    changed = BEFORE.replace("command: old", "command: older")
    assert await node.again(changed) == reloaded(changed=["old"])
    assert await node.again(changed) == reloaded()
    assert await node.again(BEFORE) == reloaded(changed=["old"])


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda text: text.replace("command: old", "comand: old"), "mcpServers.old has no field 'comand'"),
        (lambda text: text + "aggregator: {dedupThreshold: 80}", "aggregator.dedupThreshold takes"),
        (lambda text: text + "settings: {port: x}", "settings.port takes"),
        (lambda text: text.replace("KEY: hush", "KEY: '${NOT_SET}'"), "NOT_SET"),
        (lambda text: text + "]", "this is not YAML"),
        (lambda text: text.replace("  shelf:", "  sheaf:").replace("old:", "shelf:"), "mcpServers.shelf: a source"),
    ],
)
async def test_an_invalid_configuration_file_changes_nothing(
    node: Node, spoil: Callable[[str], str], said: str
) -> None:
    event, reason = await node.again(spoil(BEFORE))
    assert event == "configuration_refused"
    assert said in reason["reason"]
    assert node.taken == []
    assert [(entry.outcome, entry.details) for entry in node.audited] == [("failed", {})]
    assert await node.again(BEFORE) == reloaded()


async def test_a_missing_configuration_file_changes_nothing(node: Node) -> None:
    node.path.unlink()
    await node.reloading.again()
    assert node.log.lines[0][0] == "configuration_refused"
    assert "cannot be read" in node.log.lines[0][1]["reason"]
    assert node.taken == []


async def test_reload_logs_blocks_that_need_a_restart(node: Node) -> None:
    port = BEFORE + "settings: {port: 4711}"
    assert await node.again(port) == reloaded(restart_needed=["settings"])
    assert await node.again(port) == reloaded(restart_needed=["settings"])
    assert await node.again(BEFORE) == reloaded()
    more = BEFORE.replace("slug: shelf", "slug: rack") + "models: {m: {url: 'http://h', slug: s, publish: a/m}}"
    assert await node.again(more) == reloaded(restart_needed=["sources", "models"])


async def test_an_unexpected_error_in_a_reload_is_logged(node: Node) -> None:
    node.broken = RuntimeError("No.")
    event, said = await node.again(BEFORE)
    assert event == "configuration_refused"
    assert said["exception"].endswith("RuntimeError: No.")
    node.broken = None
    assert await node.again(BEFORE) == reloaded()
