"""The block `aggregator:` of the configuration file: the examples, every error, and arbitrary YAML."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from anabranch.configuration.mcp_servers import FIELDS, NUMBERS, WEIGHTS
from anabranch.configuration.settings import Settings, load
from anabranch.domain.errors import ConfigurationError
from anabranch.domain.mcp import Aggregation, McpServer, ServerRule
from anabranch.domain.ranking import Weights

Load = Callable[[str], Settings]
ROOT = Path(__file__).parents[2]

# Word for word from the specification.
EXAMPLE = """
aggregator:
  enabled: true
  defaultMaxResults: 30
  serverTimeoutSecs: 3
  totalTimeoutSecs: 5
  dedupThreshold: 0.8

  serverRules:
    - pattern: "documentation|library|package|module"
      servers: ["context7"]
    - pattern: "code|class|function|method|variable"
      servers: ["serena"]
    - pattern: ".*"
      servers: ["context7", "serena", "memory"]

  rankingWeights:
    keywordMatch: 0.4
    freshness: 0.3
    serverReputation: 0.2
    lengthPenalty: 0.1
"""
SERVERS = """
mcpServers:
  context7: {url: "https://mcp.context7.com/mcp"}
  serena: {command: uvx, args: [serena]}
  memory: {command: npx, args: [-y, "@modelcontextprotocol/server-memory"]}
"""


@pytest.fixture
def settings(tmp_path: Path) -> Load:
    def read(text: str) -> Settings:
        path = tmp_path / "anabranch.yaml"
        path.write_text(text, encoding="utf-8")
        return load({}, path)

    return read


def said(settings: Load, text: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        settings(text)
    path, _, sentence = str(caught.value).partition("anabranch.yaml: ")
    assert path
    assert "\n" not in sentence
    assert sentence.endswith(".")
    return sentence


def test_the_aggregator_example_of_the_specification_is_read(settings: Load) -> None:
    found = settings(EXAMPLE + SERVERS)
    assert found.aggregation == Aggregation(
        enabled=True,
        default_max_results=30,
        server_timeout_s=3.0,
        total_timeout_s=5.0,
        dedup_threshold=0.8,
        server_rules=(
            ServerRule(pattern="documentation|library|package|module", servers=("context7",)),
            ServerRule(pattern="code|class|function|method|variable", servers=("serena",)),
            ServerRule(pattern=".*", servers=("context7", "serena", "memory")),
        ),
        ranking_weights=Weights(keyword_match=0.4, freshness=0.3, server_reputation=0.2, length_penalty=0.1),
    )
    assert list(found.mcp_servers) == ["context7", "serena", "memory"]


def test_a_server_rule_that_names_an_unknown_server_is_an_error(settings: Load) -> None:
    sentence = (
        "aggregator.serverRules[0].servers names 'context7', which is not in mcpServers; add it there, or remove it "
        "from the rule."
    )
    assert said(settings, EXAMPLE) == sentence


@pytest.mark.parametrize("page", ["docs/mcp.md", "docs/settings.md", "README.md"])
def test_the_aggregator_examples_of_the_documentation_are_read(tmp_path: Path, page: str) -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    path = tmp_path / "anabranch.yaml"
    path.write_text("\n".join(block for block in blocks if "mcpServers:" in block or "aggregator:" in block), "utf-8")
    assert "memory" in load({"ALICE_TOKEN": "a", "DOCS_TOKEN": "d"}, path).mcp_servers


def test_a_client_configuration_in_json_is_read(settings: Load) -> None:
    entry = {"command": "npx", "args": ["-y", "x"], "env": {"A": "1"}, "disabled": False, "autoApprove": []}
    found = settings(json.dumps({"mcpServers": {"memory": entry}}, indent=2)).mcp_servers
    assert found == {"memory": McpServer(name="memory", command="npx", args=("-y", "x"), env={"A": "1"})}


def test_missing_aggregator_fields_have_defaults(settings: Load) -> None:
    assert settings("aggregator:").aggregation == settings("").aggregation == Aggregation()
    default = Aggregation()
    assert (default.total_timeout_s, default.server_timeout_s, default.dedup_threshold) == (5.0, 3.0, 0.8)
    weights = default.ranking_weights
    assert (weights.keyword_match, weights.freshness, weights.server_reputation, weights.length_penalty) == (
        *(0.4, 0.3, 0.2, 0.1),
    )
    found = settings(
        "aggregator: {enabled: no, freshnessHalfLifeDays: 7, rankingWeights: {freshness: 2}, serverRules: }"
    )
    assert found.aggregation == Aggregation(
        enabled=False, freshness_half_life_days=7.0, ranking_weights=Weights(freshness=2.0)
    )


@pytest.mark.parametrize(
    ("fields", "field", "value"),
    [
        ("defaultMaxResults: 10", "default_max_results", 10),
        ("defaultMaxResults: 100", "default_max_results", 100),
        ("serverTimeoutSecs: 0.05", "server_timeout_s", 0.05),
        ("serverTimeoutSecs: 60", "server_timeout_s", 60.0),  # longer than the whole: the whole then ends it
        ("totalTimeoutSecs: 3600", "total_timeout_s", 3600.0),
        ("dedupThreshold: 0", "dedup_threshold", 0.0),
        ("dedupThreshold: 1", "dedup_threshold", 1.0),
        ("dedupThreshold: 8e-1", "dedup_threshold", 0.8),  # a text to YAML
        ("freshnessHalfLifeDays: 0.5", "freshness_half_life_days", 0.5),
    ],
)
def test_aggregator_values_at_their_limits(settings: Load, fields: str, field: str, value: float) -> None:
    assert getattr(settings(f"aggregator: {{{fields}}}").aggregation, field) == value


SECONDS = "a number of seconds above 0, at most 3,600"
WRONG = {
    "5": "aggregator takes fields (name: value), not a number.",
    "{defaultMaxResults: 9}": "aggregator.defaultMaxResults takes a whole number from 10 to 100, not 9.",
    "{defaultMaxResults: 101}": "aggregator.defaultMaxResults takes a whole number from 10 to 100, not 101.",
    "{defaultMaxResults: 30.5}": "aggregator.defaultMaxResults takes a whole number from 10 to 100, not 30.5.",
    "{defaultMaxResults: yes}": "aggregator.defaultMaxResults takes a whole number from 10 to 100, not true.",
    "{defaultMaxResults: 0x" + "f" * 6000 + "}": "aggregator.defaultMaxResults takes a whole number from 10 to 100, "
    "not a number of that size.",
    "{serverTimeoutSecs: 0}": f"aggregator.serverTimeoutSecs takes {SECONDS}, not 0.",
    "{totalTimeoutSecs: -1}": f"aggregator.totalTimeoutSecs takes {SECONDS}, not -1.",
    "{totalTimeoutSecs: .inf}": f"aggregator.totalTimeoutSecs takes {SECONDS}, not inf.",
    "{totalTimeoutSecs: soon}": f"aggregator.totalTimeoutSecs takes {SECONDS}, not 'soon'.",
    "{dedupThreshold: 80}": "aggregator.dedupThreshold takes a number from 0 to 1, not 80.",
    "{dedupThreshold: [1]}": "aggregator.dedupThreshold takes a number from 0 to 1, not a list.",
    "{dedupThreshold: 2026-01-01}": "aggregator.dedupThreshold takes a number from 0 to 1, not a date.",
    "{freshnessHalfLifeDays: 0}": "aggregator.freshnessHalfLifeDays takes a number of days above 0, at most 36,500, "
    "not 0.",
    "{enabled: perhaps}": "aggregator.enabled takes true or false, not 'perhaps'.",
    "{default_max_results: 30}": "aggregator has no field 'default_max_results' (did you mean defaultMaxResults?).",
    "{rules: []}": "aggregator has no field 'rules' (did you mean serverRules?).",
    "{rankingWeights: [1]}": "aggregator.rankingWeights takes fields (name: value), not a list.",
    "{rankingWeights: {keywordMatch: -1}}": "aggregator.rankingWeights.keywordMatch takes a number from 0 to 1,000, "
    "not -1.",
    "{rankingWeights: {freshness: .nan}}": "aggregator.rankingWeights.freshness takes a number from 0 to 1,000, not "
    "nan.",
    "{rankingWeights: {reputation: 1}}": "aggregator.rankingWeights has no field 'reputation' (did you mean "
    "serverReputation?).",
    "{rankingWeights: {keywordMatch: 0, freshness: 0, serverReputation: 0, lengthPenalty: 0}}": "aggregator."
    "rankingWeights are all 0; set at least one of them above 0.",
    "{serverRules: {}}": "aggregator.serverRules takes a list of rules (pattern, servers), not fields.",
    "{serverRules: [x]}": "aggregator.serverRules[0] takes fields (name: value), not a text.",
    "{serverRules: [{servers: [memory]}]}": "aggregator.serverRules[0] needs pattern.",
    "{serverRules: [{pattern: a}]}": "aggregator.serverRules[0] needs servers.",
    "{serverRules: [{pattern: '', servers: [memory]}]}": "aggregator.serverRules[0].pattern takes a regular expression "
    "in quotes, not ''.",
    "{serverRules: [{pattern: a, servers: []}]}": "aggregator.serverRules[0].servers names no server; name one, "
    "or remove the rule.",
    "{serverRules: [{pattern: a, servers: memory}]}": "aggregator.serverRules[0].servers takes a list of names, not a "
    "text.",
    "{serverRules: [{pattern: a, servers: [memory]}, {pattern: '[', servers: [memory]}]}": "aggregator.serverRules[1]."
    "pattern is not a regular expression that can be used (unclosed character class).",
    "{serverRules: [{pattern: a, servers: [memry]}]}": "aggregator.serverRules[0].servers names 'memry', which is not "
    "in mcpServers (did you mean memory?); add it there, or remove it from the rule.",
}


@pytest.mark.parametrize("block", WRONG, ids=range(len(WRONG)))
def test_an_aggregator_error_is_one_sentence_that_names_the_field(settings: Load, block: str) -> None:
    assert said(settings, f"aggregator: {block}\n{SERVERS}") == WRONG[block]


# --- whatever YAML can hold

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.dates()
    | st.binary(max_size=5)
    | st.sampled_from(["memory", "x", "${HOME}", "${", "http://h", "stdio", "[", "(a+)+$", "2026-99-99"])
)
NAMES = st.text(max_size=5) | st.sampled_from(["memory", "a", *FIELDS, *NUMBERS, *WEIGHTS, "pattern", "servers"])
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | SCALARS, inner, max_size=4),
    max_leaves=12,
)


# Two fields at the most beside what it needs, or none would get past the first of them.
FEW = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=2)
ENTRIES = FEW.map(lambda few: {"command": "x", **few}) | FEW.map(lambda few: {"url": "http://h", **few}) | VALUES
RULES = st.lists(st.fixed_dictionaries({"pattern": SCALARS, "servers": st.lists(SCALARS, max_size=2)}), max_size=3)
BLOCKS = (
    st.dictionaries(st.sampled_from(list(NUMBERS)), SCALARS, max_size=2)
    | st.fixed_dictionaries({"serverRules": RULES | VALUES})
    | st.fixed_dictionaries({"rankingWeights": st.dictionaries(st.sampled_from(list(WEIGHTS)), SCALARS) | VALUES})
    | VALUES
)


@given(servers=st.dictionaries(NAMES, ENTRIES, max_size=2) | VALUES, aggregator=BLOCKS)
def test_any_aggregator_block_is_read_or_a_configuration_error(servers: Any, aggregator: Any) -> None:
    text = yaml.safe_dump({"mcpServers": servers, "aggregator": aggregator}, allow_unicode=True)
    with TemporaryDirectory() as folder:
        path = Path(folder, "anabranch.yaml")
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        try:
            found = load({"HOME": "/"}, path)
        except ConfigurationError as error:
            said = str(error)
        else:
            said = "anabranch.yaml: "
            assert all(isinstance(server, McpServer) for server in found.mcp_servers.values())
            assert isinstance(found.aggregation, Aggregation)
    assert "anabranch.yaml: " in said
    assert "\n" not in said
