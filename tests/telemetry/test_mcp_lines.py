"""What the log says of MCP servers: our whole sentence, and what the server's process said last."""

import io
import json
from typing import Any

from anabranch.configuration.settings import Settings
from anabranch.domain.signals import McpServerStateChanged
from anabranch.telemetry.log import LoggedEvents, configured_log, flush


def told(*signals: McpServerStateChanged) -> list[dict[str, Any]]:
    stream = io.StringIO()
    log = configured_log(Settings(), stream)
    telemetry = LoggedEvents(log)
    for signal in signals:
        telemetry.noted(signal)
    flush(log)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    return [{name: value for name, value in line.items() if name != "timestamp"} for line in lines]


def test_each_turn_is_a_line_with_the_whole_reason() -> None:
    missing = "The command no-such-program could not be run: it was not found. Use its full path, or install it."
    ended = "The server's process ended with status 3."
    lines = told(
        McpServerStateChanged(server="docs", state="connecting"),
        McpServerStateChanged(server="docs", state="failed", reason=missing),
        McpServerStateChanged(
            server="docs", state="failed", reason=ended, last_words="Cannot find module 'x': no such file."
        ),
        McpServerStateChanged(server="docs", state="ready"),
        McpServerStateChanged(server="docs", state="connecting", reason=ended),
        McpServerStateChanged(server="docs", state="idle"),
    )
    of_docs = {"server": "docs", "level": "warning"}
    words = "Cannot find module 'x': no such file."
    assert lines == [
        {"event": "mcp_server_failed", **of_docs, "reason": missing},
        {"event": "mcp_server_failed", **of_docs, "reason": ended, "last_words": words},
        {"event": "mcp_server_ready", "server": "docs", "level": "info"},
        {"event": "mcp_server_lost", **of_docs, "reason": ended},
    ]


def test_what_is_quoted_is_bounded_and_obeyed_by_no_terminal() -> None:
    (line,) = told(
        McpServerStateChanged(server="docs", state="failed", reason="A: \x1b[2J\n" + "b" * 5_000, last_words="\u202ec")
    )
    assert (line["reason"][:9], line["reason"][-1], len(line["reason"])) == ("A: ?[2J?b", "…", 1_000)
    assert line["last_words"] == "?c"
