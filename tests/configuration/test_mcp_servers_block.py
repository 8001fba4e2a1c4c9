"""The block `mcpServers:` of the configuration file: its values and its errors."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from anabranch.configuration.settings import load
from anabranch.domain.errors import ConfigurationError
from anabranch.domain.mcp import McpServer

Load = Callable[..., dict[str, McpServer]]
NOT_SET = (
    "mcpServers.a.{} is taken from KEY, which is not set. Set it, write ${{KEY:-default}}, or disable the server with "
    "enabled: false."
)


@pytest.fixture
def servers(tmp_path: Path) -> Load:
    """What a text becomes, with these variables in the environment."""

    def read(text: str, **environment: str) -> dict[str, McpServer]:
        path = tmp_path / "anabranch.yaml"
        path.write_text(text, encoding="utf-8")
        return load(environment, path).mcp_servers

    return read


def said(servers: Load, text: str, **environment: str) -> str:
    """What is wrong with a text: one sentence, after the file's name."""
    with pytest.raises(ConfigurationError) as caught:
        servers(text, **environment)
    path, _, sentence = str(caught.value).partition("anabranch.yaml: ")
    assert path
    assert "\n" not in sentence
    assert sentence.endswith(".")
    return sentence


def test_mcp_servers_are_read_as_other_clients_write_them(servers: Load) -> None:
    found = servers(
        """
        mcpServers:
          memory:
            type: stdio
            command: npx
            args: [-y, "@modelcontextprotocol/server-memory"]
            env: {MEMORY_FILE_PATH: /var/memory.json}
            cwd: /srv
            disabled: false
            autoApprove: [search_nodes]
            alwaysAllow: []
            description: What I know.
          docs:
            type: streamable-http
            url: https://docs.example/mcp?team=a
            headers: {Authorization: "Bearer ${DOCS_TOKEN}"}
            tool: search
            queryArgument: q
            arguments: {limit: 20, deep: yes, since: 2026-01-01, kinds: [a, 1.5, null]}
            resultPath: data.items
            reputation: 0.9
            enabled: no
        """,
        DOCS_TOKEN="hush",
    )
    assert found == {
        "memory": McpServer(
            name="memory",
            command="npx",
            args=("-y", "@modelcontextprotocol/server-memory"),
            env={"MEMORY_FILE_PATH": "/var/memory.json"},
            cwd="/srv",
            description="What I know.",
        ),
        "docs": McpServer(
            name="docs",
            url="https://docs.example/mcp?team=a",
            headers={"Authorization": "Bearer ${DOCS_TOKEN}"},
            tool="search",
            query_argument="q",
            arguments={"limit": 20, "deep": True, "since": "2026-01-01", "kinds": ["a", 1.5, None]},
            result_path="data.items",
            reputation=0.9,
            enabled=False,
        ),
    }
    assert list(found) == ["memory", "docs"]


@pytest.mark.parametrize("text", ["", "mcpServers:", "mcpServers: {}", "aggregator:"])
def test_a_file_without_mcp_servers_has_none(servers: Load, text: str) -> None:
    assert servers(text) == {}


def test_mcp_server_texts_are_not_converted_by_yaml(servers: Load) -> None:
    """YAML takes these for numbers, times of day, truth values and dates."""
    spelt = [
        "8080",
        "22:22",
        "0755",
        "3.10",
        "1_000",
        "0x1F",
        "yes",
        "True",
        "off",
        "2026-01-01",
        ".5",
        "1e3",
        "-y",
    ]
    found = servers(f"mcpServers: {{a: {{command: x, args: [{', '.join(spelt)}], env: {{NO: on, PORT: 8080}}}}}}")
    assert found["a"].args == tuple(spelt)
    assert found["a"].env == {"NO": "on", "PORT": "8080"}


def test_tagged_yaml_numbers_are_texts_in_mcp_servers(servers: Load) -> None:
    assert servers("mcpServers: {a: {command: x, args: [!!int 8, !!bool yes]}}")["a"].args == ("8", "true")


def test_yaml_merge_keys_work_in_mcp_servers(servers: Load) -> None:
    found = servers("mcpServers: {a: &a {command: x, env: {V: 07}}, b: {<<: *a, tool: t}}")
    assert (found["b"].command, found["b"].env, found["b"].tool) == ("x", {"V": "07"}, "t")


# --- variables


def test_variables_are_expanded_in_mcp_servers(servers: Load) -> None:
    command = servers(
        "mcpServers: {a: {command: '${BIN}/x', cwd: '${BIN}', args: ['--key=${KEY}', '${env:KEY}', '${OTHER:-none}',"
        " '$${KEY}', '$KEY', '${EMPTY:-}'], env: {K: '${KEY}${KEY}'}}}",
        BIN="/bin",
        KEY="k$1",
        EMPTY="",
    )["a"]
    assert (command.command, command.cwd) == ("/bin/x", "/bin")
    assert command.args == ("--key=k$1", "k$1", "none", "${KEY}", "$KEY", "")
    assert command.env == {"K": "k$1k$1"}
    url = servers("mcpServers: {a: {url: 'https://${H}/mcp', headers: {X-Key: '${KEY}'}}}", H="h.example", KEY="k")["a"]
    assert (url.url, url.headers) == ("https://h.example/mcp", {"X-Key": "k"})


@pytest.mark.parametrize("field", ["command: '${KEY}'", "cwd: '${KEY}', command: x"])
def test_an_unset_variable_in_mcp_servers_is_named(servers: Load, field: str) -> None:
    name = field.partition(":")[0]
    assert said(servers, f"mcpServers: {{a: {{{field}}}}}") == NOT_SET.format(name)


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ("command: x, args: [a, '${KEY}']", "args[1]"),
        ("command: x, env: {TOKEN: '${KEY}'}", "env.TOKEN"),
        ("url: 'https://h/${KEY}'", "url"),
        ("url: 'https://h', headers: {Authorization: 'Bearer ${KEY}'}", "headers.Authorization"),
    ],
)
def test_an_empty_variable_in_mcp_servers_counts_as_unset(servers: Load, fields: str, where: str) -> None:
    assert said(servers, f"mcpServers: {{a: {{{fields}}}}}", KEY="") == NOT_SET.format(where)
    assert not servers(f"mcpServers: {{a: {{{fields}, enabled: false}}}}")["a"].enabled


# --- mistakes

WRONG = {
    "[a]": "mcpServers takes fields (name: value), not a list.",
    "{a: x}": "mcpServers.a takes fields (name: value), not a text.",
    "{a: }": "mcpServers.a needs command or url.",
    "{a: {command: x, url: 'http://h'}}": "mcpServers.a has both command and url; leave one of them out.",
    "{a: {comand: x}}": "mcpServers.a has no field 'comand' (did you mean command?).",
    '{a: {command: x, arguments: {b: [1, "{quer}"]}}}': (
        "mcpServers.a.arguments.b[1] has the unknown placeholder {quer}; {query} is the question, and {{quer}} is a "
        "literal {quer}."
    ),
    "{a: {command: x, arguments: {b: {query}}}}": (
        'mcpServers.a.arguments.b: write "{query}" in quotes, for the question.'
    ),
    '{a: {command: x, queryArgument: b, arguments: {c: "{query}"}}}': (
        "mcpServers.a says twice where the question goes, in queryArgument and with {query} in arguments; leave one of "
        "them out."
    ),
    "{a: {command: x, query_argument: q}}": "mcpServers.a has no field 'query_argument' (did you mean queryArgument?).",
    "{a: {httpUrl: x}}": "mcpServers.a has no field 'httpUrl' (did you mean url?).",
    "{a: {command: x, 5: 6}}": "mcpServers.a has no field '5'.",
    "{a: {command: x, enabled: true, disabled: true}}": "mcpServers.a has both enabled and disabled; leave one of them "
    "out.",
    "{a: {command: x, enabled: perhaps}}": "mcpServers.a.enabled takes true or false, not 'perhaps'.",
    "{a: {command: ''}}": "mcpServers.a.command is empty.",
    "{a: {command: '${NOT_SET:-}'}}": "mcpServers.a.command is empty.",
    '{a: {url: "http://h", headers: {A: "b\\nc"}}}': "mcpServers.a.headers.A contains a line break "
    "or another control character.",
    "{a: {command: [x]}}": "mcpServers.a.command takes a text, not a list.",
    "{a: {command: x, args: y}}": "mcpServers.a.args takes a list of texts, not a text.",
    "{a: {command: x, args: [y, [z]]}}": "mcpServers.a.args[1] takes a text, not a list.",
    "{a: {command: x, args: [y, null]}}": "mcpServers.a.args[1] takes a text, not nothing.",
    '{a: {command: x, args: ["\\0"]}}': "mcpServers.a.args[0] contains an invalid character.",
    '{a: {command: x, args: ["\\ud800"]}}': "mcpServers.a.args[0] contains an invalid character.",
    "{a: {command: x, args: ['${input:key}']}}": "mcpServers.a.args[0] has ${ without a variable's name; write $${ "
    "for a literal ${.",
    "{a: {command: x, env: [y]}}": "mcpServers.a.env takes fields (name: value), not a list.",
    "{a: {command: x, env: {A: 1, B: [y]}}}": "mcpServers.a.env.B takes a text, not a list.",
    "{a: {command: x, headers: {A: b}}}": "mcpServers.a.headers goes with url, and this server has command.",
    "{a: {url: 'http://h', env: {A: b}}}": "mcpServers.a.env goes with command, and this server has url.",
    "{collections: {command: x}}": "mcpServers.collections: this name is reserved; use another.",
    "{extractive: {command: x}}": "mcpServers.extractive: this name is reserved; use another.",
    "{" + "n" * 65 + ": {command: x}}": f"mcpServers: a name is 1 to 64 letters, digits, _ . or -, not '{'n' * 59}…'.",
    "{a: {url: 'http://h', type: stdio}}": "mcpServers.a.type is stdio, which goes with command, not with url.",
    "{a: {url: 'http://h', type: soap}}": "mcpServers.a.type takes stdio or http, not 'soap'.",
    "{a: {url: 'http://h', headers: {'Bad Header': c}}}": "mcpServers.a.headers: entry 1 has no usable name ('Bad "
    "Header'); it takes NAME: value.",
    "{a: {url: 'http://h', headers: {'Bad Header': }}}": "mcpServers.a.headers: entry 1 has no usable name; it takes "
    "NAME: value.",
    "{a: {command: x, reputation: 1.5}}": "mcpServers.a.reputation takes a number from 0 to 1, not 1.5.",
    "{a: {command: x, reputation: .nan}}": "mcpServers.a.reputation takes a number from 0 to 1, not nan.",
    "{a: {command: x, tool: {}}}": "mcpServers.a.tool takes a text, not fields.",
    "{a: {command: x, arguments: [y]}}": "mcpServers.a.arguments takes fields (name: value), not a list.",
    "{a: {command: x, arguments: {y: [1, .inf]}}}": "mcpServers.a.arguments.y[1] takes a JSON value, not a number.",
    "{a: {command: x, cwd: ~no-such-user/x}}": "mcpServers.a.cwd begins with the home folder of an unknown user.",
    "{my server: {command: x}}": "mcpServers: a name is 1 to 64 letters, digits, _ . or -, not 'my server'.",
    "{yes: {command: x}, true: {command: y}}": "mcpServers: YAML reads two names as the same value, such as 1 and "
    "01, or yes and true; quote them.",
}


@pytest.mark.parametrize("block", WRONG)
def test_an_mcp_servers_error_is_one_sentence_that_names_the_field(servers: Load, block: str) -> None:
    assert said(servers, f"mcpServers: {block}") == WRONG[block]


def test_an_mcp_server_cannot_have_the_name_of_a_source(servers: Load) -> None:
    text = "mcpServers: {shelf: {command: x}}\nsources: {shelf: {url: 'http://h', slug: s}}"
    assert said(servers, text) == "mcpServers.shelf: sources has this name, too; rename one of them."


def test_braces_that_are_no_placeholders_are_kept_in_arguments(servers: Load) -> None:
    texts = ['{"a": 1}', "{3}", "{}", "${NAME}", "{ user }", "{{user}}", "{query}", "a}b{c"]
    (found,) = servers(
        msgspec.json.encode({"mcpServers": {"a": {"command": "x", "arguments": {"t": texts}}}}).decode()
    ).values()
    assert found.arguments == {"t": texts}


@pytest.mark.parametrize("arguments", ["&a {b: *a}", "&a [*a]", "{a: " + "[" * 30 + "]" * 30 + "}"])
def test_recursive_yaml_arguments_are_refused(servers: Load, arguments: str) -> None:
    said(servers, f"mcpServers: {{a: {{command: x, arguments: {arguments}}}}}")


def test_exponential_yaml_arguments_are_refused(servers: Load) -> None:
    lines = "\n".join(f"      a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 18))
    text = f"mcpServers:\n  a:\n    command: x\n    arguments:\n      a0: &a0 [1, 2]\n{lines}"
    assert "too large or too deeply nested" in said(servers, text)


@pytest.mark.parametrize("text", ["2026-99-99", "!!bool perhaps", "!!int ''", "!!timestamp x", "[" * 2_000])
def test_invalid_yaml_values_are_configuration_errors(servers: Load, text: str) -> None:
    assert "this is not YAML" in said(servers, f"mcpServers: {{a: {text}}}")


# --- secrets


@pytest.mark.parametrize(
    "fields",
    [
        "command: x, env: {sk-hush-hush}",
        "command: x, env: {hush_hush}",
        "command: x, env: {'sk hush-hush': 1}",
        "command: x, env: {KEY: [hush-hush]}",
        "command: x, env: hush-hush",
        "command: x, args: --key=hush-hush",
        "command: x, args: [--key, [hush-hush]]",
        "command: x, args: ['${hush-hush}']",
        "url: 'https://user:hush-hush@host/mcp'",
        "url: 'hush-hush'",
        "url: 'ftp://host?key=hush-hush'",
        "url: 'https://host?key=hush-hush', args: [a]",
        'url: https://host, headers: {Authorization: "hush-hush\\n"}',
        "url: https://host, headers: {Bearer hush-hush}",
        "url: https://host, headers: [hush-hush]",
        "command: x, env: {KEY: hush-hush",
    ],
)
def test_mcp_server_secrets_are_not_in_errors(servers: Load, fields: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        servers(f"mcpServers: {{a: {{{fields}}}}}")
    assert "hush" not in str(caught.value)


def test_mcp_server_secrets_are_not_in_the_repr(servers: Load) -> None:
    found = servers("mcpServers: {a: {url: 'https://h?key=hush', headers: {A: hush}}, b: {command: x, env: {K: hush}}}")
    assert "hush" not in repr(found) + str(found)
    assert b"hush" in msgspec.json.encode(found)
