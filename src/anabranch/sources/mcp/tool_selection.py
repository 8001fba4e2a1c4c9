"""Chooses the tool of an MCP server that answers questions, and builds its arguments."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
from mcp_types import Tool, ToolAnnotations

from anabranch.domain.errors import AnabranchError
from anabranch.domain.mcp import QUERY, McpServer, filled, placeholders
from anabranch.sources.mcp.text import normalized, one_line, ranked

SEARCH_VERBS = ranked(
    "search query find ask retrieve lookup recall research discover explore match answer browse searches aggregate"
)
CHANGE_VERBS = ranked(
    "create delete write update add remove send move edit insert append put patch drop commit checkout reset push merge"
    " rename replace upload publish cancel approve reject assign invite archive restore clear purge destroy kill stop"
    " enable disable toggle execute exec run eval install uninstall deploy save store remember forget ingest import"
    " register submit buy pay transfer upsert modify fork click fill navigate unlock grant revoke speak notify react"
)
# A verb, unless the tool searches for it: post, but not search_post.
AMBIGUOUS_VERBS = ranked("post set open close start order book comment reply star sign say type schedule lock call")
LIST_VERBS = ranked("list get suggest autocomplete")
WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def changes_state(tool: Tool) -> bool:
    hints, named = tool.annotations or ToolAnnotations(), words(tool.name)
    if hints.destructive_hint or hints.read_only_hint:
        return bool(hints.destructive_hint)
    is_ambiguous = hints.read_only_hint is False or not named.isdisjoint(AMBIGUOUS_VERBS)
    return not named.isdisjoint(CHANGE_VERBS) or (is_ambiguous and not is_search(tool))


def is_read_only(tool: Tool) -> bool:
    return tool.annotations is not None and tool.annotations.read_only_hint is True


def needs_task(tool: Tool) -> bool:
    """Its answer must be fetched later, as a task, which is not supported."""
    return tool.execution is not None and tool.execution.task_support == "required"


def is_search(tool: Tool) -> bool:
    return not words(tool.name).isdisjoint(SEARCH_VERBS)


def words(text: str) -> set[str]:
    return {word.lower() for word in WORDS.findall(text)}


MAX_PROPERTIES = 200
MAX_PARTS = 12
DEPTH = 6

RANGE_TEXT = re.compile(r"\b([0-9]{1,6}) ?(?:-|\u2013|to) ?([0-9]{1,6})\b")
MAXIMUM_TEXT = re.compile(r"\b(?:max(?:imum)?|at most|up to)(?: is| of|[:=])? ?([0-9]{1,6})\b", re.IGNORECASE)


class Property:
    """One argument of a tool; `parts` are the schemas that it combines. A schema that names no type accepts any."""

    def __init__(self, schema: object, root: Mapping[str, Any]) -> None:
        self.parts = tuple(islice(_parts(schema, root), MAX_PARTS))
        types = [part.get("type") for part in self.parts]
        kinds = {kind for one in types for kind in (one if isinstance(one, list) else [one]) if isinstance(kind, str)}
        keywords = {keyword for part in self.parts for keyword in part}
        is_free = keywords.isdisjoint(("enum", "const"))
        self.accepts_text = is_free and "format" not in keywords and ("string" in kinds or not kinds)
        self.accepts_count = is_free and not kinds.isdisjoint(("integer", "number"))
        texts = [part.get(name) for part in self.parts for name in ("title", "description")]
        self.description = " ".join(text[:1_000] for text in texts if isinstance(text, str))

    def default(self) -> tuple[Any, ...]:
        """Its default or only value, as a tuple of one; empty if it has none."""
        for part in self.parts:
            for name in ("default", "const"):
                if name in part:
                    return (part[name],)
            if isinstance(only := part.get("enum"), list) and len(only) == 1:
                return (only[0],)
        return ()

    def bounds(self) -> tuple[int | None, int | None]:
        """The minimum and the maximum of a count, by the schema, else by the description."""
        least = [math.ceil(bound) for bound in self._bounds("minimum")]
        least += [math.floor(bound) + 1 for bound in self._bounds("exclusiveMinimum")]
        most = [math.floor(bound) for bound in self._bounds("maximum")]
        most += [math.ceil(bound) - 1 for bound in self._bounds("exclusiveMaximum")]
        if not most and (found := RANGE_TEXT.search(self.description)) and int(found[1]) < int(found[2]):
            most = [int(found[2])]
        if not most and (found := MAXIMUM_TEXT.search(self.description)):
            most = [int(found[1])]
        return max(least, default=None), min(most, default=None)

    def _bounds(self, name: str) -> list[float]:
        bounds = (part.get(name) for part in self.parts if not isinstance(part.get(name), bool))
        return [bound for bound in bounds if isinstance(bound, int | float) and abs(bound) < 10**15]


def properties(schema: Mapping[str, Any]) -> dict[str, Property]:
    found: dict[str, Property] = {}
    for part in islice(_parts(schema, schema), MAX_PARTS):
        named = part.get("properties")
        for name, property_schema in islice(named.items(), MAX_PROPERTIES) if isinstance(named, dict) else ():
            if isinstance(name, str) and name not in found and len(found) < MAX_PROPERTIES:
                found[name] = Property(property_schema, schema)
    return found


def required(schema: Mapping[str, Any]) -> list[str]:
    lists = (part.get("required") for part in islice(_parts(schema, schema, required_only=True), MAX_PARTS))
    names = (name for one in lists if isinstance(one, list) for name in one)
    return list(dict.fromkeys(name for name in names if isinstance(name, str)))


def unwrapped(schema: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """If a tool takes all arguments inside one object: the object's name, and its schema."""
    known = properties(schema)
    if len(known) == 1:
        ((name, only),) = known.items()
        inner = next((part for part in only.parts if isinstance(part.get("properties"), dict)), None)
        if inner is not None:
            return name, {key: schema[key] for key in ("$defs", "definitions") if key in schema} | inner
    return None, schema


def _parts(
    schema: object, root: Mapping[str, Any], *, required_only: bool = False, depth: int = 0
) -> Iterator[dict[str, Any]]:
    """A schema and the schemas that it references and combines; with `required_only`, without alternatives."""
    if not isinstance(schema, dict) or depth > DEPTH:
        return
    yield schema
    if isinstance(reference := schema.get("$ref"), str):
        yield from _parts(_resolve(reference, root), root, required_only=required_only, depth=depth + 1)
    for name in ("allOf",) if required_only else ("allOf", "anyOf", "oneOf"):
        choices = schema.get(name)
        for choice in choices[:MAX_PARTS] if isinstance(choices, list) else ():
            yield from _parts(choice, root, required_only=required_only, depth=depth + 1)


def _resolve(reference: str, root: Mapping[str, Any]) -> object:
    value: object = root
    for name in reference.removeprefix("#").split("/")[:10]:
        if name:
            value = value.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(value, dict) else None
    return value


MAX_NAMES = 20
MAX_NAME = 64

QUESTIONS = ranked(
    "query q question searchquery querytext userquery naturallanguagequery searchterm searchterms searchtext"
    " searchstring search keywords keyword objective"
)
# Could be a question, but also text to translate or to send: the tool's name must contain a search verb.
AMBIGUOUS_QUESTIONS = ranked(
    "term terms phrase topic subject pattern prompt text input message instruction instructions"
)
LIMITS = ranked(
    "limit maxresults topk numresults resultlimit maxitems maxcount count numberofresults resultcount resultscount"
    " maxdocuments maxhits pagesize perpage num max size top take rows k n"
)
# Arguments that take a query language, not a question.
QUERY_LANGUAGES = re.compile(
    r"\b(?:sql|cypher|graphql|sparql|promql|logql|kql|jql|cql|gremlin|regex|xpath)\b", re.IGNORECASE
)


class NoTool(AnabranchError):
    """No tool can be chosen; the operator must configure one."""

    code = "no_tool"


class ToolChoice(NamedTuple):
    """`query_argument` is None if the question is not passed on. `limit_least` and `limit_most` are the bounds of
    `limit_argument`, if the server states them. `defaults` are values from the schema for required arguments that are
    not configured. `wrapper` is the object that contains all arguments, if the tool has one. `is_template`: the
    configured arguments say where the question goes."""

    tool: str
    query_argument: str | None
    limit_argument: str | None
    why: str
    limit_least: int | None = None
    limit_most: int | None = None
    defaults: Mapping[str, Any] = MappingProxyType({})
    wrapper: str | None = None
    is_template: bool = False


class _Inputs:
    """The arguments of a tool, and which of them the operator has configured. `is_closed`: it accepts only those that
    it lists. `unlisted` are configured arguments that it does not list. `template` is the configured argument with
    {query} in it."""

    def __init__(self, server: McpServer, tool: Tool) -> None:
        self.wrapper, schema = unwrapped(tool.input_schema)
        self.known = properties(schema)
        self.configured = _configured_arguments(server, self.wrapper)
        self.free = {name: found for name, found in self.known.items() if name not in self.configured}
        self.required = [name for name in required(schema) if name not in self.configured]
        self.is_closed = schema.get("additionalProperties") is False
        has_list = self.known or self.is_closed
        self.unlisted = [name for name in self.configured if name not in self.known] if has_list else []
        self.query_argument = server.query_argument
        if self.query_argument is not None and self.wrapper:
            self.query_argument = self.query_argument.removeprefix(f"{self.wrapper}.")
        self.template = next((name for name, value in self.configured.items() if QUERY in placeholders(value)), None)
        self.query_argument = self.query_argument or self.template


class _Candidate:
    """A tool with the argument for the question, if it gets the question, and what else it needs."""

    def __init__(self, tool: Tool, inputs: _Inputs, argument: str | None) -> None:
        self.tool = tool
        self.argument = argument
        self.inputs = inputs
        free = {name: found for name, found in inputs.free.items() if name != argument}
        self.limit = _named((name for name, found in free.items() if found.accepts_count), LIMITS)
        needed = [name for name in inputs.required if name not in (argument, self.limit)]
        self.defaults = {name: free[name].default()[0] for name in needed if name in free and free[name].default()}
        self.missing = [name for name in needed if name not in self.defaults]
        self.is_listed = argument is None or inputs.template is not None or not inputs.known or argument in inputs.known
        self.refused = inputs.unlisted if inputs.is_closed else []
        self.bounds = free[self.limit].bounds() if self.limit else (None, None)
        named, described = words(tool.name), words((tool.description or "")[:300])
        score = 3 * is_read_only(tool) + 4 * is_search(tool) + (not described.isdisjoint(SEARCH_VERBS))
        score += 3 * (normalized(argument or "") in QUESTIONS) - 2 * (not named.isdisjoint(LIST_VERBS))
        self.score = score - len(self.defaults) - len(self.missing) - len(inputs.unlisted)

    def choice(self, how: str) -> ToolChoice:
        wrapper, unlisted = self.inputs.wrapper, self.inputs.unlisted
        takes = " and ".join(_short(name) for name in (self.argument, self.limit) if name)
        why = f"{_short(self.tool.name)}: {how}{f'takes {takes}' if takes else 'takes only `arguments`'}"
        why += f" in {_short(wrapper)}" if wrapper else ""
        why += f"; `arguments` gives {_names(unlisted)}, which it does not list" if unlisted else ""
        if self.argument is not None and not self.is_listed:
            why += f"; `queryArgument` {_short(self.argument)!r} is not an argument of {_short(self.tool.name)}"
            why += f"; it takes: {_names(self.inputs.known)}"
        if self.argument is None:
            why += "; it does not get the question"
        elif self.inputs.template is not None:
            why += "; the question goes in place of {query} in `arguments`"
        elif self.argument in self.inputs.configured:
            why += f"; the question goes in place of the {_short(self.argument)} in `arguments`"
        return ToolChoice(
            *(self.tool.name, self.argument, self.limit, why, *self.bounds, self.defaults, wrapper),
            is_template=self.inputs.template is not None,
        )


def choose(server: McpServer, tools: Sequence[Tool]) -> ToolChoice:
    if not tools:
        raise NoTool("The server offers no tools.")
    if server.tool is not None:
        return _configured_choice(server, tools)
    best = _best(server, tools)
    if best is None:
        raise NoTool(_no_candidate_message(server, tools))
    if best.refused:
        raise NoTool(_unknown_arguments_message(best))
    if best.missing:
        raise NoTool(
            f"The tool {_short(best.tool.name)} takes a question, but also needs {_names(best.missing)}: set that under"
            f" `arguments`, or set `tool` to another of: {_available(tools)}."
        )
    return best.choice("read-only, " if is_read_only(best.tool) else "")


def arguments(choice: ToolChoice, server: McpServer, text: str, limit: int) -> dict[str, Any]:
    """The arguments of a call. Configured arguments take precedence over the limit."""
    bounded = limit if choice.limit_most is None else min(limit, choice.limit_most)
    bounded = bounded if choice.limit_least is None else max(bounded, choice.limit_least)
    limited = {} if choice.limit_argument is None else {choice.limit_argument: bounded}
    asked = {} if choice.query_argument is None or choice.is_template else {choice.query_argument: text}
    built = {**choice.defaults, **limited, **filled(_configured_arguments(server, choice.wrapper), text), **asked}
    return built if choice.wrapper is None else {choice.wrapper: built}


def _configured_arguments(server: McpServer, wrapper: str | None) -> Mapping[str, Any]:
    """The configured arguments, with or without the wrapper object around them."""
    inside = server.arguments.get(wrapper) if wrapper else None
    return inside if isinstance(inside, Mapping) else server.arguments


def _configured_choice(server: McpServer, tools: Sequence[Tool]) -> ToolChoice:
    tool = next((tool for tool in tools if tool.name == server.tool), None)
    if tool is None:
        raise NoTool(
            f"The server has no tool {_short(server.tool or '')!r}. Set `tool` to one of: {_available(tools)}."
        )
    inputs = _Inputs(server, tool)
    argument = inputs.query_argument or _question_argument(inputs.free) or _only_text_argument(inputs)
    if argument is None and (occupied := _question_argument(inputs.known)) is not None:
        raise NoTool(_occupied_message(tool, occupied))
    if argument is None and not inputs.configured:
        raise NoTool(
            f"It is not clear which argument of {_short(tool.name)} takes the question. Set `queryArgument` to one of:"
            f" {_names(inputs.known) or 'what it takes, if anything'}; or, if it takes no question, set `arguments`."
        )
    candidate = _Candidate(tool, inputs, argument)
    if not candidate.is_listed and (candidate.missing or inputs.is_closed):
        raise NoTool(
            f"The tool {_short(tool.name)} has no argument {_short(argument or '')!r}. Set `queryArgument` to one of:"
            f" {_names(inputs.known)}."
        )
    if candidate.refused:
        raise NoTool(_unknown_arguments_message(candidate))
    if candidate.missing:
        raise NoTool(
            f"The tool {_short(tool.name)} also needs {_names(candidate.missing)}: set that under `arguments`."
        )
    return candidate.choice("as configured; this tool may change state; " if changes_state(tool) else "as configured, ")


def _best(server: McpServer, tools: Sequence[Tool]) -> _Candidate | None:
    found = [candidate for tool in tools if (candidate := _candidate(server, tool)) is not None]
    ready = [candidate for candidate in found if not candidate.missing and not candidate.refused]
    return max(ready or found, key=lambda candidate: candidate.score, default=None)


def _candidate(server: McpServer, tool: Tool) -> _Candidate | None:
    """None if the tool takes no question, changes state, or cannot be called directly."""
    if needs_task(tool) or changes_state(tool):
        return None
    inputs = _Inputs(server, tool)
    argument = inputs.query_argument or _question_argument(inputs.free)
    if inputs.query_argument is not None:
        is_question = argument in inputs.known
    else:
        is_question = "echo" not in words(tool.name) and (
            normalized(argument) not in AMBIGUOUS_QUESTIONS or is_search(tool)
        )
    return _Candidate(tool, inputs, argument) if argument is not None and is_question else None


def _no_candidate_message(server: McpServer, tools: Sequence[Tool]) -> str:
    """Why no tool was chosen; first, whether the configuration fits no tool."""
    named = server.query_argument
    unconfigured = _best(msgspec.structs.replace(server, query_argument=None, arguments={}), tools)
    state_changing = [
        tool.name
        for tool in tools
        if (inputs := _Inputs(server, tool)).query_argument in inputs.known and changes_state(tool)
    ]
    if state_changing:
        return (
            f"Only {_names(state_changing)} takes {_short(named or '')}, and may change state: set `tool` to it to"
            " use it nevertheless."
        )
    if named is not None and unconfigured is not None:
        takes = f"{_short(unconfigured.tool.name)} takes: {_names(unconfigured.inputs.known)}"
        return f"No tool has an argument {_short(named)!r}; {takes}. Set `queryArgument` to one of these."
    argument = None if unconfigured is None else unconfigured.argument
    if unconfigured is not None and argument in _configured_arguments(server, unconfigured.inputs.wrapper):
        return _occupied_message(unconfigured.tool, argument or "")
    also = "" if named is None else f" or has an argument {_short(named)!r}"
    return (
        f"None of its tools clearly takes a question{also}. Set `tool` to one of: {_available(tools)}; and"
        " `queryArgument` to where the question goes, and `arguments` to what else it needs; or disable the server"
        " with `enabled: false`."
    )


def _unknown_arguments_message(candidate: _Candidate) -> str:
    return (
        f"`arguments` gives {_names(candidate.refused)}, which the tool {_short(candidate.tool.name)} does not take; it"
        f" takes: {_names(candidate.inputs.known) or 'nothing'}."
    )


def _occupied_message(tool: Tool, argument: str) -> str:
    return (
        f"`arguments` gives {_short(argument)}, where the tool {_short(tool.name)} takes the question: leave it out,"
        " write {query} in it, or set `queryArgument` to another."
    )


def _question_argument(free: Mapping[str, Property]) -> str | None:
    fit = {
        name: found
        for name, found in free.items()
        if found.accepts_text and not QUERY_LANGUAGES.search(found.description)
    }
    return (
        _named(fit, QUESTIONS)
        or next((name for name in fit if normalized(name).endswith("query")), None)
        or _named(fit, AMBIGUOUS_QUESTIONS)
    )


def _only_text_argument(inputs: _Inputs) -> str | None:
    """The only text argument, or the only required one."""
    texts = [name for name, found in inputs.free.items() if found.accepts_text]
    needed = [name for name in texts if name in inputs.required]
    return next((names[0] for names in (needed, texts) if len(names) == 1), None)


def _named(known: Iterable[str], ranks: Mapping[str, int]) -> str | None:
    return min(
        (name for name in known if normalized(name) in ranks), key=lambda name: ranks[normalized(name)], default=None
    )


def _short(name: str) -> str:
    return one_line(name, MAX_NAME)


def _names(names: Iterable[str]) -> str:
    listed = [_short(name) for name in names]
    more = [] if len(listed) <= MAX_NAMES else [f"… ({len(listed) - MAX_NAMES} more)"]
    return ", ".join(listed[:MAX_NAMES] + more)


def _available(tools: Sequence[Tool]) -> str:
    """The tools that the operator can configure: only read-only ones, if there are any."""
    return _names(
        tool.name for tool in [one for one in tools if not changes_state(one) and not needs_task(one)] or tools
    )
