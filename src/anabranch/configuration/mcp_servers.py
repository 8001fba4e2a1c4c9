"""The blocks `mcpServers` and `aggregator` of the configuration file."""

import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from anabranch.configuration.config_file import (
    BlockFields,
    ConfigFile,
    Flag,
    Pattern,
    Share,
    Timeout,
    Weight,
    as_text,
    did_you_mean,
    quoted_name,
    require_list,
    require_mapping,
    type_name,
)
from anabranch.configuration.extras import require
from anabranch.domain.errors import ConfigurationError, UpstreamError
from anabranch.domain.mcp import QUERY, Aggregation, McpServer, ServerRule, placeholders
from anabranch.domain.ranking import NEUTRAL, Weights
from anabranch.network.addresses import parse

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.()-]{0,99}")
HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
NOT_IN_HEADERS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f\ud800-\udfff]")
OF_COMMANDS, OF_URLS = ("command", "args", "env", "cwd"), ("url", "headers")
TEXTS = {"tool": "tool", "queryArgument": "query_argument", "resultPath": "result_path"}
KINDS = ("type", "transport")
# Fields of other clients that concern only their user interfaces.
IGNORED = (
    *("alwaysAllow", "autoApprove", "autoStart", "chatMenu", "dev", "displayName", "gallery", "icon", "iconPath"),
    *("iconUrl", "startup", "tags", "title", "trust", "version"),
)
FIELDS = (
    *(*OF_COMMANDS, *OF_URLS, *TEXTS, *KINDS, "arguments", "reputation", "enabled", "disabled", "description"),
    *IGNORED,
)
ONE_TOOL = "only one tool is called, and `tool` names it"
VARIABLES = "write env: {NAME: ${NAME}}"
# Fields of other clients that must not be ignored, and what to use instead.
UNSUPPORTED = {
    "timeout": "set aggregator.serverTimeoutSecs, in seconds",
    "initTimeout": "a command has 30 seconds to be ready, a url 10",
    "envFile": VARIABLES,
    "env_file": VARIABLES,
    "disabledTools": ONE_TOOL,
    "excludeTools": ONE_TOOL,
    "enabledTools": ONE_TOOL,
    "includeTools": ONE_TOOL,
}
# Names with a special meaning in `sources` and `model`.
RESERVED = ("collections", "extractive")
# Words in the place of a name that are no secret.
ONLY_WORDS = re.compile(r"(?!Bearer|Basic|Token)[A-Z][A-Za-z]{0,19}( [A-Z][A-Za-z]{0,19}){1,3}")
TYPES = {"stdio": "command", "http": "url", "streamable-http": "url", "streamableHttp": "url"}
MAX_ARGUMENTS, MAX_DEPTH = 10_000, 20


def servers(read: ConfigFile, environment: Mapping[str, str]) -> dict[str, McpServer]:
    """The servers by name, in the order of the file."""
    where = f"{read.path}: mcpServers"
    texts, typed = require_mapping(read.server_texts, where), require_mapping(read.file.mcpServers, where)
    if len(texts) != len(typed):
        raise ConfigurationError(
            f"{where}: YAML reads two names as the same value, such as 1 and 01, or yes and true; quote them."
        )
    if typed:
        require("mcp", where)
    found: dict[str, McpServer] = {}
    for (name, entry), values in zip(texts.items(), typed.values(), strict=True):
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ConfigurationError(f"{where}: a name is 1 to 64 letters, digits, _ . or -, not {quoted_name(name)}.")
        if name in read.file.sources:
            raise ConfigurationError(f"{where}.{name}: sources has this name, too; rename one of them.")
        if name in RESERVED:
            raise ConfigurationError(f"{where}.{name}: this name is reserved; use another.")
        found[name] = _server(name, entry, values, environment, f"{where}.{name}")
    return found


def _server(name: str, entry: object, typed: object, environment: Mapping[str, str], where: str) -> McpServer:
    """`entry` has all values as strings, `typed` as YAML reads them."""
    for field, instead in UNSUPPORTED.items():
        if field in require_mapping(entry, where):
            raise ConfigurationError(f"{where}.{field} is not supported: {instead}. Remove it.")
    texts, values = BlockFields(entry, where, FIELDS), BlockFields(typed, where, FIELDS)
    enabled = _enabled(values)
    _check_transport(texts)
    # The variables of a disabled server need not be set.
    expanded = BlockFields(entry, where, FIELDS, environment if enabled else None)
    arguments = require_mapping(values["arguments"], values.at("arguments"))
    server = McpServer(
        name=name,
        command=expanded.text("command"),
        args=_args(expanded),
        env=_named_texts(expanded, "env", VARIABLE),
        cwd=_folder(expanded.text("cwd"), texts.at("cwd")),
        url=_url(expanded, enabled=enabled),
        headers=_headers(expanded),
        arguments=_json(arguments, values.at("arguments"), iter(range(MAX_ARGUMENTS)), MAX_DEPTH),
        reputation=values.value("reputation", Share, NEUTRAL),
        enabled=enabled,
        description=_description(texts),
        **{attribute: texts.text(field) for field, attribute in TEXTS.items()},
    )
    if server.query_argument is not None and QUERY in placeholders(server.arguments):
        raise ConfigurationError(
            f"{where} says twice where the question goes, in queryArgument and with {{query}} in arguments; leave one "
            "of them out."
        )
    if enabled:
        _check_program(server, environment, texts.at("command"))
    return server


def _description(fields: BlockFields) -> str | None:
    """None if empty, as in some clients' files."""
    found = as_text(fields["description"], fields.at("description")) if "description" in fields else ""
    return found.strip() or None


def _check_program(server: McpServer, environment: Mapping[str, str], where: str) -> None:
    """Refuse a command line in `command`: it is not split at spaces."""
    command = server.command or ""
    program, *rest = command.split() or [""]
    folders = server.env.get("PATH") or environment.get("PATH", "")
    is_there = Path(server.cwd or "", command).is_file() or shutil.which(command, path=folders)
    if rest and not is_there and shutil.which(program, path=folders):
        raise ConfigurationError(
            f"{where} takes only the program, not a command line; put what follows "
            f"{quoted_name(program)} into args, a list."
        )


def _enabled(fields: BlockFields) -> bool:
    enabled, disabled = fields.value("enabled", Flag), fields.value("disabled", Flag)
    if enabled is not None and disabled is not None:
        raise ConfigurationError(f"{fields.where} has both enabled and disabled; leave one of them out.")
    return enabled is not False and not disabled


def _check_transport(fields: BlockFields) -> None:
    """Exactly one of command and url, with the fields that belong to it."""
    has = [field for field in ("command", "url") if field in fields]
    if len(has) == 2:
        raise ConfigurationError(f"{fields.where} has both command and url; leave one of them out.")
    if not has:
        raise ConfigurationError(f"{fields.where} needs command or url.")
    for field in OF_URLS if has == ["command"] else OF_COMMANDS:
        if field in fields and fields[field] not in ([], {}):
            other = "url" if field == "headers" else "command"
            raise ConfigurationError(f"{fields.at(field)} goes with {other}, and this server has {has[0]}.")
    for name in KINDS:
        if name in fields:
            _check_kind(as_text(fields[name], fields.at(name)), has[0], fields.at(name))


def _check_kind(kind: str, has: str, where: str) -> None:
    if kind == "sse":
        raise ConfigurationError(
            f"{where}: the old SSE transport is not supported. Many servers also have an address for "
            "streamable HTTP, often the same with /mcp in place of /sse: give that as url, with type: http."
        )
    if kind not in TYPES:
        raise ConfigurationError(f"{where} takes stdio or http, not {quoted_name(kind)}.")
    if TYPES[kind] != has:
        raise ConfigurationError(f"{where} is {kind}, which goes with {TYPES[kind]}, not with {has}.")


def _args(fields: BlockFields) -> tuple[str, ...]:
    where = fields.at("args")
    given = require_list(fields["args"], where, "texts") if "args" in fields else []
    return tuple(fields.expand(arg, f"{where}[{at}]") for at, arg in enumerate(given))


def _named_texts(fields: BlockFields, name: str, names: re.Pattern[str]) -> dict[str, str]:
    """Texts by name. A misplaced secret may be in the place of a name: errors show only clear names."""
    where, found = fields.at(name), {}
    for at, (key, value) in enumerate(require_mapping(fields[name], where).items(), 1):
        if not isinstance(key, str) or not names.fullmatch(key):
            is_clear = isinstance(key, str) and value is not None and ONLY_WORDS.fullmatch(key)
            named = f" ({key!r})" if is_clear else ""
            raise ConfigurationError(f"{where}: entry {at} has no usable name{named}; it takes NAME: value.")
        if value is None:
            raise ConfigurationError(f'{where}: entry {at} has no value; an empty one is written "".')
        found[key] = fields.expand(value, f"{where}.{key}")
    return found


def _headers(fields: BlockFields) -> dict[str, str]:
    found = _named_texts(fields, "headers", HEADER)
    for name, value in found.items():
        if NOT_IN_HEADERS.search(value):
            where = f"{fields.at('headers')}.{name}"
            raise ConfigurationError(f"{where} contains a line break or another control character.")
    return found


def _url(fields: BlockFields, *, enabled: bool) -> str | None:
    url = fields.text("url")
    if url is not None and (enabled or "${" not in url):
        try:
            parse(url)
        except UpstreamError:
            raise ConfigurationError(
                f"{fields.at('url')} takes a URL that begins with http:// or https:// and has no password in it; a "
                "token goes into headers."
            ) from None
    return url


def _folder(given: str | None, where: str) -> str | None:
    try:
        return None if given is None else str(Path(given).expanduser())
    except RuntimeError:
        raise ConfigurationError(f"{where} begins with the home folder of an unknown user.") from None


def _json(value: object, where: str, remaining: Iterator[int], depth: int) -> Any:
    """The value as JSON, bounded in size: YAML references let a short file expand without limit."""
    if next(remaining, None) is None or not depth:
        raise ConfigurationError(f"{where}: the arguments are too large or too deeply nested.")
    match value:
        case {"query": None, **others} if not others:  # {query} without quotes, as YAML reads it
            raise ConfigurationError(f'{where}: write "{{query}}" in quotes, for the question.')
        case dict():
            return {
                as_text(key, f"{where}: a name"): _json(one, f"{where}.{key}", remaining, depth - 1)
                for key, one in value.items()
            }
        case list():
            return [_json(one, f"{where}[{at}]", remaining, depth - 1) for at, one in enumerate(value)]
        case None | bool():
            return value
        case str():
            return _template(as_text(value, where), where)
        case int() if abs(value) < 2**63:
            return value
        case float() if abs(value) < float("inf"):
            return value
        case _ if hasattr(value, "isoformat"):
            return value.isoformat()
        case _:
            raise ConfigurationError(f"{where} takes a JSON value, not {type_name(value)}.")


def _template(text: str, where: str) -> str:
    for name in placeholders(text):
        if name != QUERY:
            raise ConfigurationError(
                f"{where} has the unknown placeholder {{{name}}}; {{query}} is the question, and {{{{{name}}}}} is a "
                f"literal {{{name}}}."
            )
    return text


MAX_PATTERN = 1_000
# Automaton steps for each character of a question: `(a{1,1000}){1,100}` would be 100,000 of them.
MAX_EXPANDED = 1_000
TOKEN = re.compile(
    r"(?P<atom>\\[pPxuU]\{[^}]*\}|\\.|\[(?:\\.|[^\]\\])*\])|(?P<open>\()|(?P<close>\))|\{(?P<least>\d+)(?:,(?P<most>\d*))?\}|.",
    re.DOTALL,
)
NUMBERS = {
    "enabled": ("enabled", Flag),
    "defaultMaxResults": (
        "default_max_results",
        Annotated[int, Meta(ge=10, le=100, description="a whole number from 10 to 100")],
    ),
    "serverTimeoutSecs": ("server_timeout_s", Timeout),
    "totalTimeoutSecs": ("total_timeout_s", Timeout),
    "dedupThreshold": ("dedup_threshold", Share),
    "freshnessHalfLifeDays": (
        "freshness_half_life_days",
        Annotated[float, Meta(gt=0, le=36_500, description="a number of days above 0, at most 36,500")],
    ),
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
    given = BlockFields(fields["rankingWeights"], fields.at("rankingWeights"), tuple(WEIGHTS))
    weights = Weights(**{to: given.value(name, Weight) for name, to in WEIGHTS.items() if name in given})
    if not any((weights.keyword_match, weights.freshness, weights.server_reputation, weights.length_penalty)):
        raise ConfigurationError(f"{given.where} are all 0; set at least one of them above 0.")
    return weights


def _rules(fields: BlockFields, known: Collection[str]) -> tuple[ServerRule, ...]:
    if "serverRules" not in fields:
        return ()
    where = fields.at("serverRules")
    rules = require_list(fields["serverRules"], where, "rules (pattern, servers)")
    return tuple(_rule(rule, known, f"{where}[{at}]") for at, rule in enumerate(rules))


def _rule(given: object, known: Collection[str], where: str) -> ServerRule:
    rule = BlockFields(given, where, ("pattern", "servers"))
    for field in ("pattern", "servers"):
        if field not in rule:
            raise ConfigurationError(f"{where} needs {field}.")
    pattern = rule.value("pattern", Pattern)
    if (problem := pattern_problem(pattern)) is not None:
        raise ConfigurationError(f"{rule.at('pattern')} is not a regular expression that can be used ({problem}).")
    named = [as_text(name, rule.at("servers")) for name in require_list(rule["servers"], rule.at("servers"), "names")]
    if not named:
        raise ConfigurationError(f"{rule.at('servers')} names no server; name one, or remove the rule.")
    for name in named:
        if name not in known:
            raise ConfigurationError(
                f"{rule.at('servers')} names {quoted_name(name)}, which is not in mcpServers"
                f"{did_you_mean(name, known)}; add it there, or remove it from the rule."
            )
    return ServerRule(pattern=pattern, servers=tuple(dict.fromkeys(named)))


def matching(rules: Iterable[ServerRule], query: str) -> ServerRule | None:
    """The first rule whose pattern is found in the question, ignoring case."""
    return next((rule for rule in rules if _finder(rule.pattern)(query)), None)


def pattern_problem(pattern: str) -> str | None:
    """What is wrong with a pattern, if anything is."""
    if len(pattern) > MAX_PATTERN:
        return f"it is longer than {MAX_PATTERN:,} characters"
    if _expanded(pattern) > MAX_EXPANDED:
        return f"its repetitions expand to more than {MAX_EXPANDED:,} characters"
    try:
        _finder(pattern)
    except ValueError as error:
        return str(error)
    return None


@lru_cache(maxsize=1_024)
def _finder(pattern: str) -> Callable[[str], bool]:
    """Python's engine backtracks: `(a+)+$` would block the event loop for hours. Rust's does not, and the MCP SDK
    depends on it."""
    from pydantic_core import SchemaError, SchemaValidator, core_schema  # noqa: PLC0415  35 ms, for those with rules

    try:
        schema = core_schema.str_schema(pattern=f"(?i){pattern}", regex_engine="rust-regex")
        return SchemaValidator(schema).isinstance_python
    except SchemaError as error:
        # The last line, without the drawing above it.
        reason = str(error).strip().splitlines()[-1].strip()
        raise ValueError(reason.removeprefix("error: ").removeprefix("SchemaError: ").rstrip(".")) from None


def _expanded(pattern: str) -> int:
    """The length of a pattern with every counted repetition written out, at most."""
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
