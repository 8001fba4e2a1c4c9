"""What a tool's name and hints say about it: whether it looks something up, and whether it changes things."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
from mcp_types import Tool

from anabranch.domain.errors import AnabranchError
from anabranch.domain.mcp import McpServer
from anabranch.sources.mcp.results.fields import line, plain, ranked

ASKING = ranked(
    "search query find ask retrieve lookup recall research discover explore match answer browse searches aggregate"
)
CHANGING = ranked(
    "create delete write update add remove send move edit insert append put patch drop commit checkout reset push merge"
    " rename replace upload publish cancel approve reject assign invite archive restore clear purge destroy kill stop"
    " enable disable toggle execute exec run eval install uninstall deploy save store remember forget ingest import"
    " register submit buy pay transfer upsert modify fork click fill navigate unlock grant revoke speak notify react"
)
# What is done, unless it is what is looked for: post, but not search_post.
PERHAPS_CHANGING = ranked("post set open close start order book comment reply star sign say type schedule lock call")
WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def changes_state(tool: Tool) -> bool:
    hints = tool.annotations
    if hints is not None and hints.destructive_hint:
        return True
    if is_read_only(tool):
        return False
    named = words(tool.name)
    is_said = hints is not None and hints.read_only_hint is False
    return bool(named & CHANGING.keys()) or (not looks_up(tool) and (is_said or bool(named & PERHAPS_CHANGING.keys())))


def is_read_only(tool: Tool) -> bool:
    return tool.annotations is not None and tool.annotations.read_only_hint is True


def needs_task(tool: Tool) -> bool:
    """It cannot simply be called: its answer would have to be fetched later."""
    return tool.execution is not None and tool.execution.task_support == "required"


def looks_up(tool: Tool) -> bool:
    return bool(words(tool.name) & ASKING.keys())


def words(text: str) -> set[str]:
    return {word.lower() for word in WORDS.findall(text)}


MAX_PROPERTIES = 200
MAX_PARTS = 12
DEPTH = 6

SPOKEN_RANGE = re.compile(r"\b([0-9]{1,6}) ?(?:-|\u2013|to) ?([0-9]{1,6})\b")
SPOKEN_MOST = re.compile(r"\b(?:max(?:imum)?|at most|up to)(?: is| of|[:=])? ?([0-9]{1,6})\b", re.IGNORECASE)


class Property:
    """One argument of a tool; `parts` are the schemas that it is put together from."""

    def __init__(self, given: object, root: Mapping[str, Any]) -> None:
        self.parts = tuple(islice(_parts(given, root), MAX_PARTS))

    @property
    def kinds(self) -> frozenset[str]:
        """The JSON types that it may have, as far as it says; none at all means any."""
        kinds: set[str] = set()
        for part in self.parts:
            named = part.get("type")
            kinds.update(kind for kind in (named if isinstance(named, list) else [named]) if isinstance(kind, str))
        return frozenset(kinds)

    @property
    def takes_words(self) -> bool:
        is_free = not any("enum" in part or "const" in part or "format" in part for part in self.parts)
        return is_free and ("string" in self.kinds or not self.kinds)

    @property
    def takes_count(self) -> bool:
        is_free = not any("enum" in part or "const" in part for part in self.parts)
        return is_free and bool(self.kinds & {"integer", "number"})

    @property
    def description(self) -> str:
        said = (part.get(name) for part in self.parts for name in ("title", "description"))
        return " ".join(text[:1_000] for text in said if isinstance(text, str))

    def fixed(self) -> tuple[Any, ...]:
        """What it is where nobody says: its default or its only value; empty where it has none."""
        for part in self.parts:
            for name in ("default", "const"):
                if name in part:
                    return (part[name],)
            if isinstance(only := part.get("enum"), list) and len(only) == 1:
                return (only[0],)
        return ()

    def bounds(self) -> tuple[int | None, int | None]:
        """The least and the most that a count may be, by the schema, else by what its description says."""
        least = [math.ceil(bound) for bound in self._bounds("minimum")]
        least += [math.floor(bound) + 1 for bound in self._bounds("exclusiveMinimum")]
        most = [math.floor(bound) for bound in self._bounds("maximum")]
        most += [math.ceil(bound) - 1 for bound in self._bounds("exclusiveMaximum")]
        if not most and (spoken := SPOKEN_RANGE.search(self.description)):
            most = [int(spoken[2])] if int(spoken[1]) < int(spoken[2]) else []
        if not most and (spoken := SPOKEN_MOST.search(self.description)):
            most = [int(spoken[1])]
        return max(least, default=None), min(most, default=None)

    def _bounds(self, name: str) -> Iterator[float]:
        for part in self.parts:
            bound = part.get(name)
            if isinstance(bound, int | float) and not isinstance(bound, bool) and abs(bound) < 10**15:
                yield bound


def properties(schema: Mapping[str, Any]) -> dict[str, Property]:
    found: dict[str, Property] = {}
    for part in islice(_parts(schema, schema), MAX_PARTS):
        named = part.get("properties")
        for name, given in islice(named.items(), MAX_PROPERTIES) if isinstance(named, dict) else ():
            if isinstance(name, str) and name not in found and len(found) < MAX_PROPERTIES:
                found[name] = Property(given, schema)
    return found


def required(schema: Mapping[str, Any]) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for part in islice(_parts(schema, schema, all_of_it=True), MAX_PARTS):
        names = part.get("required")
        found.update(
            dict.fromkeys(name for name in (names if isinstance(names, list) else ()) if isinstance(name, str))
        )
    return tuple(found)


def unwrapped(schema: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """Tools that take one object take their arguments inside it: its name, and its schema in place of theirs."""
    known = properties(schema)
    if len(known) == 1:
        ((name, only),) = known.items()
        inner = next((part for part in only.parts if isinstance(part.get("properties"), dict)), None)
        if inner is not None:
            return name, {key: schema[key] for key in ("$defs", "definitions") if key in schema} | inner
    return None, schema


def is_closed(schema: Mapping[str, Any]) -> bool:
    """No other arguments than those that it lists."""
    return schema.get("additionalProperties") is False


def _parts(
    given: object, root: Mapping[str, Any], *, all_of_it: bool = False, depth: int = 0
) -> Iterator[dict[str, Any]]:
    """A schema, what it refers to and what it is put together from; with `all_of_it` only what holds in every case."""
    if not isinstance(given, dict) or depth > DEPTH:
        return
    yield given
    if isinstance(reference := given.get("$ref"), str):
        yield from _parts(_referred(reference, root), root, all_of_it=all_of_it, depth=depth + 1)
    for name in ("allOf",) if all_of_it else ("allOf", "anyOf", "oneOf"):
        choices = given.get(name)
        for choice in choices[:MAX_PARTS] if isinstance(choices, list) else ():
            yield from _parts(choice, root, all_of_it=all_of_it, depth=depth + 1)


def _referred(reference: str, root: Mapping[str, Any]) -> object:
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
# A question fits here, but so does what is to be translated, sent or said back: the tool's name must ask.
PERHAPS = ranked("term terms phrase topic subject pattern prompt text input message instruction instructions")
LIMITS = ranked(
    "limit maxresults topk numresults resultlimit maxitems maxcount count numberofresults resultcount resultscount"
    " maxdocuments maxhits pagesize perpage num max size top take rows k n"
)
# Questions of these kinds are written by programmers.
LANGUAGES = re.compile(r"\b(?:sql|cypher|graphql|sparql|promql|logql|kql|jql|cql|gremlin|regex|xpath)\b", re.IGNORECASE)


class NoTool(AnabranchError):
    """It is for the operator to say what is asked, or how."""

    code = "no_tool"


class ToolChoice(NamedTuple):
    """`limit_least` and `limit_most` bound what `limit_argument` may be, where the server says; `defaults` are what the
    tool requires and nobody gave, by its own schema; `wrapper` is the one object in which it takes all its arguments,
    where it wants that."""

    tool: str
    query_argument: str
    limit_argument: str | None
    why: str
    limit_least: int | None = None
    limit_most: int | None = None
    defaults: Mapping[str, Any] = MappingProxyType({})
    wrapper: str | None = None


class _Shape:
    """What a tool takes, beside what the operator gives it."""

    def __init__(self, server: McpServer, tool: Tool) -> None:
        self.wrapper, self.schema = unwrapped(tool.input_schema)
        self.known = properties(self.schema)
        self.given = _given(server, self.wrapper)
        self.free = {name: found for name, found in self.known.items() if name not in self.given}
        self.required = [name for name in required(self.schema) if name not in self.given]
        self.is_closed = is_closed(self.schema)
        prefix = f"{self.wrapper}."
        argument = server.query_argument
        self.told = argument.removeprefix(prefix) if argument is not None and self.wrapper else argument

    @property
    def unlisted(self) -> list[str]:
        """What the operator gives it and it says nothing of."""
        says = self.known or self.is_closed
        return [name for name in self.given if name not in self.known] if says else []


class _Candidate:
    """A tool with the argument that its question would go into, and what else it needs."""

    def __init__(self, tool: Tool, shape: _Shape, argument: str) -> None:
        self.tool = tool
        self.argument = argument
        self.shape = shape
        free = {name: found for name, found in shape.free.items() if name != argument}
        self.limit = _named((name for name, found in free.items() if found.takes_count), LIMITS)
        needed = [name for name in shape.required if name not in (argument, self.limit)]
        self.defaults = {name: free[name].fixed()[0] for name in needed if name in free and free[name].fixed()}
        self.missing = [name for name in needed if name not in self.defaults]
        self.refused = shape.unlisted if shape.is_closed else []
        self.bounds = free[self.limit].bounds() if self.limit else (None, None)

    @property
    def worth(self) -> int:
        named = words(self.tool.name)
        said = words((self.tool.description or "")[:300])
        worth = 3 * is_read_only(self.tool) + 4 * bool(named & ASKING.keys()) + bool(said & ASKING.keys())
        worth += 3 * (plain(self.argument) in QUESTIONS) - 2 * bool(named & {"list", "get", "suggest", "autocomplete"})
        return worth - len(self.defaults) - len(self.missing) - len(self.shape.unlisted)

    def choice(self, how: str) -> ToolChoice:
        least, most = self.bounds
        wrapper, unlisted = self.shape.wrapper, self.shape.unlisted
        why = f"{_shown(self.tool.name)}: {how}takes {_shown(self.argument)}"
        why += f" and {_shown(self.limit)}" if self.limit else ""
        why += f" in {_shown(wrapper)}" if wrapper else ""
        why += f"; `arguments` gives {_list(unlisted)}, which it does not list" if unlisted else ""
        if self.argument in self.shape.given:
            why += f"; the question goes in place of the {_shown(self.argument)} in `arguments`"
        defaults = MappingProxyType(self.defaults)
        return ToolChoice(self.tool.name, self.argument, self.limit, why, least, most, defaults, wrapper)


def choose(server: McpServer, tools: Sequence[Tool]) -> ToolChoice:
    if not tools:
        raise NoTool("The server offers no tools.")
    if server.tool is not None:
        return _told(server, tools)
    found = _candidates(server, tools)
    ready = [candidate for candidate in found if not candidate.missing and not candidate.refused]
    best = _best(ready or found)
    if best is None:
        raise NoTool(_why_none(server, tools))
    if best.refused:
        raise NoTool(_why_refused(best))
    if best.missing:
        raise NoTool(
            f"The tool {_shown(best.tool.name)} takes a question, but also needs {_list(best.missing)}: give that under"
            f" `arguments`, or set `tool` to another of: {_offered(tools)}."
        )
    return best.choice("read-only, " if is_read_only(best.tool) else "")


def arguments(choice: ToolChoice, server: McpServer, text: str, limit: int) -> dict[str, Any]:
    """What the chosen tool is called with: the operator's own arguments win over our limit."""
    bounded = limit if choice.limit_most is None else min(limit, choice.limit_most)
    bounded = bounded if choice.limit_least is None else max(bounded, choice.limit_least)
    limited = {} if choice.limit_argument is None else {choice.limit_argument: bounded}
    built = {**choice.defaults, **limited, **_given(server, choice.wrapper), choice.query_argument: text}
    return built if choice.wrapper is None else {choice.wrapper: built}


def _given(server: McpServer, wrapper: str | None) -> Mapping[str, Any]:
    """The operator's arguments, which may, but need not, name the object that they go into."""
    inside = server.arguments.get(wrapper) if wrapper else None
    return inside if isinstance(inside, Mapping) else server.arguments


def _told(server: McpServer, tools: Sequence[Tool]) -> ToolChoice:
    tool = next((tool for tool in tools if tool.name == server.tool), None)
    if tool is None:
        raise NoTool(f"The server has no tool {_shown(server.tool or '')!r}. Set `tool` to one of: {_offered(tools)}.")
    shape = _Shape(server, tool)
    argument = shape.told or _question(shape.free) or _only(shape)
    if argument is None and (taken := _question(shape.known)) is not None:
        raise NoTool(_why_taken(tool, taken))
    if argument is None:
        raise NoTool(
            f"It is not clear which argument of {_shown(tool.name)} takes the question. Set `queryArgument` to one of:"
            f" {_list(shape.known) or 'what it takes, if anything'}."
        )
    candidate = _Candidate(tool, shape, argument)
    if shape.known and argument not in shape.known and (candidate.missing or shape.is_closed):
        raise NoTool(
            f"The tool {_shown(tool.name)} has no argument {_shown(argument)!r}. Set `queryArgument` to one of:"
            f" {_list(shape.known)}."
        )
    if candidate.refused:
        raise NoTool(_why_refused(candidate))
    if candidate.missing:
        raise NoTool(
            f"The tool {_shown(tool.name)} also needs {_list(candidate.missing)}: give that under `arguments`."
        )
    return candidate.choice(
        "as configured; this tool may change things; " if changes_state(tool) else "as configured, "
    )


def _candidates(server: McpServer, tools: Sequence[Tool]) -> list[_Candidate]:
    return [candidate for tool in tools if (candidate := _candidate(server, tool)) is not None]


def _best(candidates: Sequence[_Candidate]) -> _Candidate | None:
    return max(candidates, key=lambda candidate: candidate.worth, default=None)


def _candidate(server: McpServer, tool: Tool) -> _Candidate | None:
    """None where the tool takes no question, changes something, or can only be asked in ways that we do not have."""
    if needs_task(tool) or changes_state(tool):
        return None
    shape = _Shape(server, tool)
    if shape.told is not None:
        argument = shape.told if shape.told in shape.known else None
    elif "echo" in words(tool.name):
        argument = None
    else:
        argument = _question(shape.free)
        if argument is not None and plain(argument) in PERHAPS and not looks_up(tool):
            return None
    return None if argument is None else _Candidate(tool, shape, argument)


def _why_none(server: McpServer, tools: Sequence[Tool]) -> str:
    """If what the operator has written fits no tool, then that it does not."""
    named = server.query_argument
    bare = _best(_candidates(msgspec.structs.replace(server, query_argument=None, arguments={}), tools))
    risky = [tool.name for tool in tools if (shape := _Shape(server, tool)).told in shape.known and changes_state(tool)]
    if risky:
        return (
            f"Only {_list(risky)} takes {_shown(named or '')}, and may change things: set `tool` to it if it is to be"
            " asked all the same."
        )
    if named is not None and bare is not None:
        takes = f"{_shown(bare.tool.name)} takes: {_list(bare.shape.known)}"
        return f"No tool has an argument {_shown(named)!r}; {takes}. Set `queryArgument` to one of these."
    if bare is not None and bare.argument in _given(server, bare.shape.wrapper):
        return _why_taken(bare.tool, bare.argument)
    also = "" if named is None else f" or has an argument {_shown(named)!r}"
    return (
        f"None of its tools clearly takes a question{also}. Set `tool` to one of: {_offered(tools)}; and"
        " `queryArgument` to where the question goes, and `arguments` to what else it needs; or switch the server off"
        " with `enabled: false`."
    )


def _why_refused(candidate: _Candidate) -> str:
    return (
        f"`arguments` gives {_list(candidate.refused)}, which the tool {_shown(candidate.tool.name)} does not take; it"
        f" takes: {_list(candidate.shape.known) or 'nothing'}."
    )


def _why_taken(tool: Tool, argument: str) -> str:
    return (
        f"`arguments` gives {_shown(argument)}, where the tool {_shown(tool.name)} takes the question: leave it out, or"
        " set `queryArgument` to another."
    )


def _question(free: Mapping[str, Property]) -> str | None:
    fit = {name: found for name, found in free.items() if found.takes_words and not LANGUAGES.search(found.description)}
    return (
        _named(fit, QUESTIONS)
        or next((name for name in fit if plain(name).endswith("query")), None)
        or _named(fit, PERHAPS)
    )


def _only(shape: _Shape) -> str | None:
    """The one argument that takes words, or the one of those that is required."""
    words = [name for name, found in shape.free.items() if found.takes_words]
    needed = [name for name in words if name in shape.required]
    return next((names[0] for names in (needed, words) if len(names) == 1), None)


def _named(known: Iterable[str], ranks: Mapping[str, int]) -> str | None:
    return min((name for name in known if plain(name) in ranks), key=lambda name: ranks[plain(name)], default=None)


def _shown(name: str) -> str:
    return line(name, MAX_NAME)


def _list(names: Iterable[str]) -> str:
    shown = [_shown(name) for name in names]
    more = [] if len(shown) <= MAX_NAMES else [f"… ({len(shown) - MAX_NAMES} more)"]
    return ", ".join(shown[:MAX_NAMES] + more)


def _offered(tools: Sequence[Tool]) -> str:
    """What the operator may choose from: where there are tools that change nothing, only these."""
    return _list(
        tool.name for tool in [one for one in tools if not changes_state(one) and not needs_task(one)] or tools
    )
