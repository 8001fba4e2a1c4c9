"""The file's `aggregator:`: which servers a query goes to, how long they have, and how results are ranked."""

from collections.abc import Collection

from anabranch.configuration.config_file import ConfigFile
from anabranch.configuration.fields import BlockFields, listed, meant, shown, text
from anabranch.configuration.routing_rules import mistake
from anabranch.configuration.setting_types import Flag, HalfLife, Pattern, Results, Share, Timeout, Weight
from anabranch.domain.errors import ConfigurationError
from anabranch.domain.mcp import Aggregation, ServerRule
from anabranch.domain.ranking import Weights

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
