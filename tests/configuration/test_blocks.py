"""The configuration file as a whole: unknown blocks, duplicate keys, and the variables that it uses."""

from collections.abc import Callable
from pathlib import Path

import pytest

from anabranch.configuration.settings import load, variables_in_use
from anabranch.domain.errors import ConfigurationError

Write = Callable[[str], Path]


@pytest.fixture
def written(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        path = tmp_path / "anabranch.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def said(path: Path) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load({}, path)
    return str(caught.value).partition("anabranch.yaml: ")[2]


BLOCKS = "settings, sources, models, mcpServers, aggregator"
THERE_ARE = f"there are: {BLOCKS}. Settings such as port belong under settings."
WRONG = {
    "mcp_servers: {}": f"there is no block 'mcp_servers' (did you mean mcpServers?); {THERE_ARE}",
    "1: {}": f"there is no block a number; {THERE_ARE}",
    "- a": f"the file takes blocks ({BLOCKS}), not a list.",
    "sources: [a]": "sources takes fields (name: value), not a list.",
}


@pytest.mark.parametrize("text", WRONG)
def test_an_unknown_block_of_the_file_is_named_with_the_nearest_one(written: Write, text: str) -> None:
    assert said(written(text)) == WRONG[text]


@pytest.mark.parametrize("text", ["", "# nothing", "settings:\nsources:\nmodels:\nmcpServers:\naggregator:\n"])
def test_an_empty_block_counts_as_not_given(written: Write, text: str) -> None:
    assert load({}, written(text)) == load({}, written("{}"))


TWICE = {
    "mcpServers:\n  a: {command: x}\n  a: {command: y}": "mcpServers.a is there twice (lines 2 and 3).",
    "settings: {port: 1}\nmodels:\nsettings: {port: 2}": "settings is there twice (lines 1 and 3).",
    "settings: {port: 1, 'port': 2}": "settings.port is there twice (both times on line 1).",
    "mcpServers: {1: {command: x}, '1': {command: y}}": "mcpServers.1 is there twice (both times on line 1).",
    "aggregator:\n  serverRules:\n  - {pattern: a, servers: [a]}\n  - pattern: b\n    pattern: c": (
        "aggregator.serverRules[1].pattern is there twice (lines 4 and 5)."
    ),
    "mcpServers: {a: {command: x, arguments: {b: &b {c: 1, c: 2}, d: *b}}}": (
        "mcpServers.a.arguments.b.c is there twice (both times on line 1)."
    ),
    "mcpServers: {a: {command: x, env: {hush_hush, hush_hush}}}": (
        "mcpServers.a.env.… is there twice (both times on line 1)."
    ),
    "mcpServers: {a: {command: x, env: {hush hush: 1, hush hush: 2}}}": (
        "mcpServers.a.env.… is there twice (both times on line 1)."
    ),
}


@pytest.mark.parametrize("text", TWICE)
def test_duplicate_yaml_keys_are_rejected(written: Write, text: str) -> None:
    assert said(written(text)) == TWICE[text]


def test_a_merged_yaml_key_may_be_overridden(written: Write) -> None:
    text = "mcpServers: {a: &a {command: x, tool: t}, b: &b {<<: *a, tool: u}, c: {<<: *b}}"
    servers = load({}, written(text)).mcp_servers
    assert (servers["b"].tool, servers["c"].tool) == ("u", "u")


def test_the_environment_variables_that_the_settings_use(written: Write) -> None:
    path = written(
        """
        sources: {handbook: {url: "https://h", slug: s, token: "${ALICE}"}}
        mcpServers:
          a: {command: x, args: ["${env:KEY}", "${UNSET:-text}", "${SET:-text}", "$${ESCAPED}"]}
          b: {command: x, env: {A: "${OFF}"}, enabled: false}
        """
    )
    given = ("ALICE", "KEY", "SET", "ESCAPED", "OFF", "OTHER", "PATH", "AGGREGATOR_LOG_LEVEL", "AGGREGATOR_CONFIG")
    environment = {**dict.fromkeys(given, "INFO"), "AGGREGATOR_PORT": ""}
    assert variables_in_use(environment, path) == ["AGGREGATOR_LOG_LEVEL", "ALICE", "KEY", "SET"]
