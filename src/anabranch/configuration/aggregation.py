"""The file's `aggregator:` block, and the server rules in it, which match in time linear in the question."""

import re
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache

from anabranch.configuration.config_file import ConfigFile
from anabranch.configuration.fields import (
    BlockFields,
    Flag,
    HalfLife,
    Pattern,
    Results,
    Share,
    Timeout,
    Weight,
    listed,
    meant,
    shown,
    text,
)
from anabranch.domain.errors import ConfigurationError
from anabranch.domain.mcp import Aggregation, ServerRule
from anabranch.domain.ranking import Weights

MAX_PATTERN = 1_000
# Automaton steps for each character of a question: `(a{1,1000}){1,100}` would be 100,000 of them.
MAX_EXPANDED = 1_000
TOKEN = re.compile(
    r"(?P<atom>\\[pPxuU]\{[^}]*\}|\\.|\[(?:\\.|[^\]\\])*\])|(?P<open>\()|(?P<close>\))|\{(?P<least>\d+)(?:,(?P<most>\d*))?\}|.",
    re.DOTALL,
)
NUMBERS = {
    "enabled": ("enabled", Flag),
    "defaultMaxResults": ("default_max_results", Results),
    "serverTimeoutSecs": ("server_timeout_s", Timeout),
    "totalTimeoutSecs": ("total_timeout_s", Timeout),
    "dedupThreshold": ("dedup_threshold", Share),
    "freshnessHalfLifeDays": ("freshness_half_life_days", HalfLife),
}
WEIGHTS = {
    "keywordMatch": "keyword_match",
    "freshness": "freshness",
    "serverReputation": "server_reputation",
    "lengthPenalty": "length_penalty",
}


def aggregation(read: ConfigFile, known: Collection[str]) -> Aggregation:
    """`known` are the servers that rules may name."""
    fields = BlockFields(read.file.aggregator, f"{read.path}: aggregator", (*NUMBERS, "serverRules", "rankingWeights"))
    return Aggregation(
        server_rules=_rules(fields, known),
        ranking_weights=_weights(fields),
        **{attribute: fields.value(name, kind) for name, (attribute, kind) in NUMBERS.items() if name in fields},
    )


def _weights(fields: BlockFields) -> Weights:
    if "rankingWeights" not in fields:
        return Weights()
    given = BlockFields(fields["rankingWeights"], fields.at("rankingWeights"), tuple(WEIGHTS))
    weights = Weights(**{to: given.value(name, Weight) for name, to in WEIGHTS.items() if name in given})
    if not any((weights.keyword_match, weights.freshness, weights.server_reputation, weights.length_penalty)):
        raise ConfigurationError(f"{given.where} are all 0, and then nothing is better than anything else.")
    return weights


def _rules(fields: BlockFields, known: Collection[str]) -> tuple[ServerRule, ...]:
    if "serverRules" not in fields:
        return ()
    where = fields.at("serverRules")
    rules = listed(fields["serverRules"], where, "rules (pattern, servers)")
    return tuple(_rule(rule, known, f"{where}[{at}]") for at, rule in enumerate(rules))


def _rule(given: object, known: Collection[str], where: str) -> ServerRule:
    rule = BlockFields(given, where, ("pattern", "servers"))
    for field in ("pattern", "servers"):
        if field not in rule:
            raise ConfigurationError(f"{where} needs {field}.")
    pattern = rule.value("pattern", Pattern)
    if (wrong := mistake(pattern)) is not None:
        raise ConfigurationError(f"{rule.at('pattern')} is not a regular expression that can be used ({wrong}).")
    named = [text(name, rule.at("servers")) for name in listed(rule["servers"], rule.at("servers"), "names")]
    if not named:
        raise ConfigurationError(f"{rule.at('servers')} names no server; leave the rule out, or name some.")
    for name in named:
        if name not in known:
            raise ConfigurationError(
                f"{rule.at('servers')} names {shown(name)}, which is not in mcpServers{meant(name, known)}; add it "
                "there, or take it out of the rule."
            )
    return ServerRule(pattern=pattern, servers=tuple(dict.fromkeys(named)))


def matching(rules: Iterable[ServerRule], query: str) -> ServerRule | None:
    """The first rule whose pattern is found in the question, ignoring case."""
    return next((rule for rule in rules if _finder(rule.pattern)(query)), None)


def mistake(pattern: str) -> str | None:
    """What is wrong with a pattern, if anything is."""
    if len(pattern) > MAX_PATTERN:
        return f"it is longer than {MAX_PATTERN:,} characters"
    if _expanded(pattern) > MAX_EXPANDED:
        return f"its repetitions come to more than {MAX_EXPANDED:,} characters"
    try:
        _finder(pattern)
    except ValueError as error:
        return str(error)
    return None


@lru_cache(maxsize=1_024)
def _finder(pattern: str) -> Callable[[str], bool]:
    """Python's own engine backtracks: `(a+)+$` would hold up everybody for hours. Rust's does not, and the MCP SDK
    brings it along."""
    from pydantic_core import SchemaError, SchemaValidator, core_schema  # noqa: PLC0415  35 ms, for those with rules

    try:
        schema = core_schema.str_schema(pattern=f"(?i){pattern}", regex_engine="rust-regex")
        return SchemaValidator(schema).isinstance_python
    except SchemaError as error:
        raise ValueError(_reason(str(error))) from None


def _reason(said: str) -> str:
    """The engine's own words: the last line, without what it has drawn above it."""
    last = said.strip().splitlines()[-1].strip()
    return last.removeprefix("error: ").removeprefix("SchemaError: ").rstrip(".")


def _expanded(pattern: str) -> int:
    """How many characters a pattern comes to when every counted repetition is written out, at the most."""
    sizes, last = [0], 0
    for token in TOKEN.finditer(pattern):
        if token["open"]:
            sizes.append(0)
        elif token["close"]:
            last = sizes.pop() if len(sizes) > 1 else 0
            sizes[-1] += last
        elif token["least"]:
            # Longer numbers are more than enough, and would take long to read.
            times = max(int(token["least"][:9]), int((token["most"] or "0")[:9]))
            sizes[-1] += last * max(times - 1, 0)
            last *= max(times, 1)
        else:
            sizes[-1] += 1
            last = 1
    return sum(sizes)
