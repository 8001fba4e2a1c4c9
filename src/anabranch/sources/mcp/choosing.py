"""Which of a server's tools is asked, and how: as the operator says, else found from the tools' schemas."""

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
from mcp_types import Tool

from anabranch.domain.errors import AnabranchError
from anabranch.domain.servers import McpServer
from anabranch.sources.mcp.fields import line, plain, ranked
from anabranch.sources.mcp.hints import ASKING, asks, changes, is_read_only, needs_task, words
from anabranch.sources.mcp.schemas import Property, is_closed, properties, required, unwrapped

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


class Choice(NamedTuple):
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

    def choice(self, how: str) -> Choice:
        least, most = self.bounds
        wrapper, unlisted = self.shape.wrapper, self.shape.unlisted
        why = f"{_shown(self.tool.name)}: {how}takes {_shown(self.argument)}"
        why += f" and {_shown(self.limit)}" if self.limit else ""
        why += f" in {_shown(wrapper)}" if wrapper else ""
        why += f"; `arguments` gives {_list(unlisted)}, which it does not list" if unlisted else ""
        if self.argument in self.shape.given:
            why += f"; the question goes in place of the {_shown(self.argument)} in `arguments`"
        defaults = MappingProxyType(self.defaults)
        return Choice(self.tool.name, self.argument, self.limit, why, least, most, defaults, wrapper)


def choose(server: McpServer, tools: Sequence[Tool]) -> Choice:
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


def arguments(choice: Choice, server: McpServer, text: str, limit: int) -> dict[str, Any]:
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


def _told(server: McpServer, tools: Sequence[Tool]) -> Choice:
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
    return candidate.choice("as configured; this tool may change things; " if changes(tool) else "as configured, ")


def _candidates(server: McpServer, tools: Sequence[Tool]) -> list[_Candidate]:
    return [candidate for tool in tools if (candidate := _candidate(server, tool)) is not None]


def _best(candidates: Sequence[_Candidate]) -> _Candidate | None:
    return max(candidates, key=lambda candidate: candidate.worth, default=None)


def _candidate(server: McpServer, tool: Tool) -> _Candidate | None:
    """None where the tool takes no question, changes something, or can only be asked in ways that we do not have."""
    if needs_task(tool) or changes(tool):
        return None
    shape = _Shape(server, tool)
    if shape.told is not None:
        argument = shape.told if shape.told in shape.known else None
    elif "echo" in words(tool.name):
        argument = None
    else:
        argument = _question(shape.free)
        if argument is not None and plain(argument) in PERHAPS and not asks(tool):
            return None
    return None if argument is None else _Candidate(tool, shape, argument)


def _why_none(server: McpServer, tools: Sequence[Tool]) -> str:
    """If what the operator has written fits no tool, then that it does not."""
    named = server.query_argument
    bare = _best(_candidates(msgspec.structs.replace(server, query_argument=None, arguments={}), tools))
    risky = [tool.name for tool in tools if (shape := _Shape(server, tool)).told in shape.known and changes(tool)]
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
    return _list(tool.name for tool in [one for one in tools if not changes(one) and not needs_task(one)] or tools)
