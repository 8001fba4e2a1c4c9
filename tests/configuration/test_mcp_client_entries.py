"""Entries of `mcpServers:` as other MCP clients' files and instructions have them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from anabranch.configuration.settings import load
from anabranch.domain.errors import ConfigurationError
from anabranch.domain.mcp import McpServer

Load = Callable[..., McpServer]


@pytest.fixture
def entry(tmp_path: Path) -> Load:
    """What the fields of one entry become, with these variables in the environment."""

    def read(fields: str, **environment: str) -> McpServer:
        path = tmp_path / "anabranch.yaml"
        path.write_text(f"mcpServers: {{a: {{{fields}}}}}", encoding="utf-8")
        return load(environment, path).mcp_servers["a"]

    return read


def said(entry: Load, fields: str, **environment: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        entry(fields, **environment)
    return str(caught.value).partition("anabranch.yaml: mcpServers.a")[2]


def test_user_interface_fields_of_other_mcp_clients_are_ignored(entry: Load) -> None:
    windows = "icon: a.png, autoStart: true, trust: yes, gallery: {}, description: ''"
    assert entry(f"command: x, transport: stdio, {windows}") == McpServer(name="a", command="x")
    assert entry("url: 'http://h', type: http, transport: streamable-http").url == "http://h"


WRONG = {
    "url: 'http://h/sse', type: sse": ".type: the old SSE transport is not supported. Many servers also "
    "have an address for streamable HTTP, often the same with /mcp in place of /sse: give that as url, with "
    "type: http.",
    "url: 'http://h', transport: stdio": ".transport is stdio, which goes with command, not with url.",
    "command: x, timeout: 60": ".timeout is not supported: set aggregator.serverTimeoutSecs, in seconds. Remove it.",
    "command: x, env_file: .env": ".env_file is not supported: write env: {NAME: ${NAME}}. Remove it.",
    "command: x, disabledTools: [y]": ".disabledTools is not supported: only one tool is called, and `tool` names it. "
    "Remove it.",
}


@pytest.mark.parametrize("fields", WRONG)
def test_unsupported_fields_of_other_mcp_clients_are_errors(entry: Load, fields: str) -> None:
    assert said(entry, fields) == WRONG[fields]


def test_a_command_line_in_command_is_refused(entry: Load, tmp_path: Path) -> None:
    program = tmp_path / "npx"
    program.touch(mode=0o755)
    where = {"PATH": str(tmp_path)}
    line = "command: npx -y server --key=hush"
    sentence = ".command takes only the program, not a command line; put what follows 'npx' into args, a list."
    assert said(entry, line, **where) == sentence
    assert "not a command line" in said(entry, f"command: {program} -y")
    assert not entry(f"{line}, enabled: false", **where).enabled
    # Where it is not clear what was meant, starting it will tell.
    assert entry("command: another one", **where).command == "another one"
    program.with_name("npx -y").touch(mode=0o755)
    assert entry("command: npx -y", **where).command == "npx -y"
    assert entry(f"command: ./npx -y, cwd: '{tmp_path}'", **where).command == "./npx -y"
