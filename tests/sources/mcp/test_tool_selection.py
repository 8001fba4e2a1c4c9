"""The choice of a server's tool and its arguments."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mcp_types import Tool

from anabranch.domain.mcp import McpServer
from anabranch.sources.mcp.tool_selection import NoTool, ToolChoice, arguments, choose
from support import mcp_tool_lists
from support.examples import examples
from support.mcp_tool_lists import LIST, WHOLE, WORDS, tool


def server(**given: Any) -> McpServer:
    return McpServer(name="one", command="true", **given)


@pytest.mark.parametrize(
    ("tools", "chosen", "question", "limit"),
    [
        ("MEMORY", "search_nodes", "query", None),
        ("BRAVE", "brave_web_search", "query", "count"),
        ("GITHUB", "search_code", "query", "perPage"),
        ("NOTION", "API-post-search", "query", "page_size"),
        ("TAVILY", "tavily_search", "query", "max_results"),
        ("EXA", "web_search_exa", "query", "numResults"),
        ("MEM0", "search_memory", "query", None),
    ],
)
def test_tool_selection_finds_the_question_tool_of_known_servers(
    tools: str, chosen: str, question: str, limit: str | None
) -> None:
    choice = choose(server(), getattr(mcp_tool_lists, tools))
    assert choice[:3] == (chosen, question, limit)


@pytest.mark.parametrize("tools", ["EVERYTHING", "TIME", "GIT", "FETCH", "SLACK", "POSTGRES", "SQLITE"])
def test_tool_selection_fails_if_no_tool_takes_a_question(tools: str) -> None:
    listed: Sequence[Tool] = getattr(mcp_tool_lists, tools)
    with pytest.raises(NoTool) as raised:
        choose(server(), listed)
    for word in ("`tool`", "`queryArgument`", "`arguments`", "`enabled: false`", listed[0].name):
        assert word in raised.value.message


def test_tool_choice_explains_itself() -> None:
    assert choose(server(), mcp_tool_lists.MEMORY).why == "search_nodes: read-only, takes query"
    assert choose(server(), mcp_tool_lists.BRAVE).why == "brave_web_search: takes query and count"
    told = choose(server(tool="echo"), mcp_tool_lists.EVERYTHING)
    assert told.why == "echo: as configured, takes message"


@pytest.mark.parametrize("argument", ["message", "text", "input", "prompt", "pattern", "term"])
def test_ambiguous_argument_names_need_a_search_verb_in_the_tool_name(argument: str) -> None:
    takes: dict[str, Any] = {argument: WORDS}
    with pytest.raises(NoTool, match="None of its tools clearly takes a question"):
        choose(server(), [tool("process", argument, reads=True, **takes)])
    assert choose(server(), [tool("find_notes", argument, **takes)]).query_argument == argument
    with pytest.raises(NoTool):
        choose(server(), [tool("echo_query", "query", reads=True, query=WORDS)])
    assert choose(server(query_argument="message"), mcp_tool_lists.EVERYTHING).tool == "echo"


def test_error_lists_read_only_tools_if_there_are_any() -> None:
    with pytest.raises(NoTool) as raised:
        choose(server(), mcp_tool_lists.GIT)
    assert "to one of: git_status, git_diff, git_log, git_show; and" in raised.value.message
    with pytest.raises(NoTool, match=r"to another of: read_file, .*, search_files, get_file_info") as raised:
        choose(server(), mcp_tool_lists.FILESYSTEM)
    assert "write_file" not in raised.value.message
    with pytest.raises(NoTool, match="to one of: write_a, write_b; and"):
        choose(server(), [tool("write_a", text=WORDS), tool("write_b", text=WORDS)])


def test_a_configured_state_changing_tool_is_used_with_a_warning() -> None:
    told = choose(server(tool="git_commit", arguments={"repo_path": "."}), mcp_tool_lists.GIT)
    assert told.why == "git_commit: as configured; this tool may change state; takes message"


def test_unknown_query_argument_is_named_in_the_error() -> None:
    with pytest.raises(NoTool) as raised:
        choose(server(query_argument="nosuch"), mcp_tool_lists.MEMORY)
    expected = "No tool has an argument 'nosuch'; search_nodes takes: query. Set `queryArgument` to one of these."
    assert raised.value.message == expected
    with pytest.raises(NoTool, match="Only write_file takes content, and may change state: set `tool`"):
        choose(server(query_argument="content"), mcp_tool_lists.FILESYSTEM)
    with pytest.raises(NoTool, match="takes a question or has an argument 'nosuch'"):
        choose(server(query_argument="nosuch"), mcp_tool_lists.TIME)


def test_unknown_configured_arguments_are_named_in_the_error() -> None:
    given = {"lang": "en", "nosuch": 1}
    open_tool = tool("search", "query", query=WORDS, lang=WORDS)
    closed = tool("search", "query", schema={"additionalProperties": False}, query=WORDS, lang=WORDS)
    bare = tool("search", schema={"properties": {}})
    for named in (None, "search"):
        choice = choose(server(tool=named, arguments=given), [open_tool])
        assert choice.why.endswith("takes query; `arguments` gives nosuch, which it does not list")
        with pytest.raises(NoTool) as raised:
            choose(server(tool=named, arguments=given), [closed])
        expected = "`arguments` gives nosuch, which the tool search does not take; it takes: query, lang."
        assert raised.value.message == expected
    assert "nosuch" not in choose(server(tool="search", query_argument="q", arguments=given), [bare]).why
    # Of two, the one that knows what it is given is meant.
    other = tool("search_other", "query", schema={"additionalProperties": False}, query=WORDS, nosuch=WHOLE, lang=WORDS)
    assert choose(server(arguments=given), [open_tool, closed, other]).tool == "search_other"


def test_configured_argument_in_place_of_the_question_is_an_error() -> None:
    for named in (None, "search_nodes"):
        with pytest.raises(NoTool, match="`arguments` gives query, where the tool search_nodes takes the question"):
            choose(server(tool=named, arguments={"query": "x"}), mcp_tool_lists.MEMORY)
    both = server(query_argument="query", arguments={"query": "x"})
    choice = choose(both, mcp_tool_lists.MEMORY)
    assert choice.why.endswith("; the question goes in place of the query in `arguments`")
    assert arguments(choice, both, "tea", 5) == {"query": "tea"}


def test_required_arguments_can_be_configured() -> None:
    with pytest.raises(NoTool, match="search_files takes a question, but also needs path: set that under `arguments`"):
        choose(server(), mcp_tool_lists.FILESYSTEM)
    configured = server(arguments={"path": "/srv"})
    choice = choose(configured, mcp_tool_lists.FILESYSTEM)
    assert choice[:3] == ("search_files", "pattern", None)
    assert arguments(choice, configured, "*.md", 5) == {"path": "/srv", "pattern": "*.md"}
    assert choose(server(arguments={"libraryId": "/a/b"}), mcp_tool_lists.CONTEXT7).tool == "query-docs"


def test_state_changing_tools_are_never_chosen_automatically() -> None:
    with pytest.raises(NoTool):
        choose(server(arguments={"repo_path": "."}), mcp_tool_lists.GIT)
    with pytest.raises(NoTool):
        choose(server(arguments={"channel_id": "C1", "thread_ts": "1"}), mcp_tool_lists.SLACK)


@pytest.mark.parametrize(
    "risky",
    [
        tool("find_and_replace", "query", query=WORDS),
        tool("search", "query", destroys=True, query=WORDS),
        tool("research", "query", task="required", query=WORDS),
        tool("process", "query", reads=False, query=WORDS),
        tool("createQuery", "query", query=WORDS),
        tool("run_query", "query", query=WORDS),
        tool("translate", "text", says="Translate, then search for it", text=WORDS),
        tool("order", "q", q=WORDS),
    ],
    ids=lambda found: found.name,
)
def test_state_changing_tools_are_used_only_if_configured(risky: Tool) -> None:
    with pytest.raises(NoTool):
        choose(server(), [risky])
    assert choose(server(tool=risky.name), [risky]).tool == risky.name


def test_read_only_tools_are_preferred_then_search_verbs_then_order() -> None:
    asks, reads, plain = (
        tool("search_all", "query", query=WORDS),
        tool("search_some", "query", reads=True, query=WORDS),
        tool("things", "query", query=WORDS),
    )
    assert choose(server(), [plain, asks, reads]).tool == "search_some"
    assert choose(server(), [plain, asks]).tool == "search_all"
    assert choose(server(), [asks, tool("search_more", "query", query=WORDS)]).tool == "search_all"
    assert choose(server(query_argument="names"), [*mcp_tool_lists.MEMORY, asks]).query_argument == "names"


@pytest.mark.parametrize(
    ("takes", "question"),
    [
        ({"text": WORDS, "searchQuery": WORDS}, "searchQuery"),
        ({"q": {"type": ["string", "null"]}}, "q"),
        ({"query": {"$ref": "#/$defs/Words"}}, "query"),
        ({"keywords": {"anyOf": [{"type": "null"}, {"type": "string"}]}}, "keywords"),
        ({"query": {"enum": ["a", "b"]}, "question": WORDS}, "question"),
        ({"doc-query": {}}, "doc-query"),
        ({"query": LIST, "prompt": WORDS}, "prompt"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tool_selection_finds_the_question_argument(takes: dict[str, Any], question: str) -> None:
    listed = tool("find", schema={"$defs": {"Words": WORDS}, "properties": takes})
    assert choose(server(), [listed]).query_argument == question


def test_limit_is_clamped_to_the_tools_bounds() -> None:
    def limited(schema: dict[str, Any], limit: int) -> object:
        choice = choose(server(), [tool("search", "query", "limit", query=WORDS, limit=schema)])
        return arguments(choice, server(), "x", limit).get("limit")

    assert limited(WHOLE, 50) == 50
    assert limited({"type": "integer", "minimum": 10, "maximum": 20}, 50) == 20
    assert limited({"type": "integer", "minimum": 10, "maximum": 20}, 5) == 10
    assert limited({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 10}, 50) == 9
    assert limited({"anyOf": [{"type": "integer", "maximum": 7}, {"type": "null"}]}, 50) == 7
    assert limited({"type": "integer", "description": "How many, at most 15"}, 50) == 15
    brave = choose(server(), mcp_tool_lists.BRAVE)
    assert arguments(brave, server(), "tea", 100) == {"query": "tea", "count": 20}
    own = server(arguments={"count": 3})
    assert arguments(choose(own, mcp_tool_lists.BRAVE), own, "tea", 100) == {"query": "tea", "count": 3}


def test_required_arguments_get_their_schema_defaults() -> None:
    mode = {"type": "string", "enum": ["fast", "deep"], "default": "fast"}
    listed = tool("search", "query", "mode", "version", query=WORDS, mode=mode, version={"const": 2})
    choice = choose(server(), [listed])
    assert arguments(choice, server(), "x", 1) == {"query": "x", "mode": "fast", "version": 2}


def test_arguments_inside_a_wrapper_object() -> None:
    inner = {"type": "object", "properties": {"query": WORDS, "limit": WHOLE, "format": WORDS}, "required": ["query"]}
    schema = {"$defs": {"SearchInput": inner}, "properties": {"params": {"$ref": "#/$defs/SearchInput"}}}
    listed = [tool("wiki_search", "params", schema=schema)]
    choice = choose(server(), listed)
    assert choice.why == "wiki_search: takes query and limit in params"
    assert arguments(choice, server(), "tea", 5) == {"params": {"query": "tea", "limit": 5}}
    for extra in ({"format": "json"}, {"params": {"format": "json"}}):
        own = server(tool="wiki_search", query_argument="params.query", arguments=extra)
        assert arguments(choose(own, listed), own, "tea", 5) == {
            "params": {"query": "tea", "limit": 5, "format": "json"}
        }


def test_configured_tool_and_argument_must_exist() -> None:
    with pytest.raises(NoTool, match=r"no tool 'serch_nodes'\. Set `tool` to one of: read_graph, search_nodes, "):
        choose(server(tool="serch_nodes"), mcp_tool_lists.MEMORY)
    closed = tool("search", query=WORDS, schema={"additionalProperties": False})
    with pytest.raises(NoTool, match=r"no argument 'qury'\. Set `queryArgument` to one of: query"):
        choose(server(tool="search", query_argument="qury"), [closed])
    assert choose(server(tool="search", query_argument="any"), [tool("search")]).query_argument == "any"
    assert choose(server(tool="get_current_time"), mcp_tool_lists.TIME).query_argument == "timezone"
    with pytest.raises(NoTool, match="`queryArgument`"):
        choose(server(tool="git_diff"), mcp_tool_lists.GIT)
    with pytest.raises(NoTool, match="also needs path: set that under `arguments`"):
        choose(server(tool="search_files"), mcp_tool_lists.FILESYSTEM)
    with pytest.raises(NoTool, match="offers no tools"):
        choose(server(), [])


GIT_LOG = tool("git_log", "repo_path", repo_path=WORDS, max_count=WHOLE, start_timestamp=WORDS, end_timestamp=WORDS)


def test_a_tool_without_a_question_argument_is_called_with_fixed_arguments() -> None:
    git = server(tool="git_log", arguments={"repo_path": "/srv/repo"})
    choice = choose(git, [GIT_LOG])
    assert (choice.query_argument, choice.limit_argument) == (None, "max_count")
    assert choice.why == "git_log: as configured, takes max_count; it does not get the question"
    assert arguments(choice, git, "refunds", 7) == {"repo_path": "/srv/repo", "max_count": 7}
    status = server(tool="git_status", arguments={"repo_path": "/srv/repo"})
    choice = choose(status, [tool("git_status", "repo_path", repo_path=WORDS)])
    assert choice.why == "git_status: as configured, takes only `arguments`; it does not get the question"
    assert arguments(choice, status, "refunds", 7) == {"repo_path": "/srv/repo"}


def test_a_query_argument_that_the_tool_does_not_list_is_reported() -> None:
    git = server(tool="git_log", query_argument="message", arguments={"repo_path": "/srv/repo"})
    choice = choose(git, mcp_tool_lists.GIT)
    assert choice.query_argument == "message"
    assert choice.why.endswith(
        "; `queryArgument` 'message' is not an argument of git_log; it takes: repo_path, max_count, since"
    )


def test_fixed_arguments_are_for_named_tools_and_must_be_complete() -> None:
    with pytest.raises(NoTool, match="None of its tools clearly takes a question"):
        choose(server(arguments={"repo_path": "/srv/repo"}), [GIT_LOG])
    diff = tool("git_diff", "repo_path", "target", repo_path=WORDS, target=WORDS, context_lines=WHOLE)
    with pytest.raises(NoTool, match="also needs repo_path, target: set that under `arguments`"):
        choose(server(tool="git_diff", arguments={"context_lines": 3}), [diff])
    with pytest.raises(NoTool, match=r"It is not clear which argument of now takes the question.*set `arguments`"):
        choose(server(tool="now"), [tool("now")])


def test_the_question_goes_in_place_of_the_placeholder() -> None:
    given = {"repo_path": "/srv/repo", "grep": "fix: {query}", "more": [{"text": "{query} {{query}} ${query}"}, 3]}
    log = tool("git_log", "repo_path", repo_path=WORDS, grep=WORDS, more=LIST, since=WORDS)
    git = server(tool="git_log", arguments=given)
    choice = choose(git, [log])
    assert (choice.query_argument, choice.is_template) == ("grep", True)
    assert choice.why == "git_log: as configured, takes grep; the question goes in place of {query} in `arguments`"
    assert arguments(choice, git, "a {query} \\1", 7) == {
        "repo_path": "/srv/repo",
        "grep": "fix: a {query} \\1",
        "more": [{"text": "a {query} \\1 {query} ${query}"}, 3],
    }


def test_a_placeholder_decides_which_tool_is_chosen() -> None:
    tools = [tool("search_code", "query", query=WORDS, reads=True), tool("find_tickets", "filter", filter=WORDS)]
    tickets = server(arguments={"filter": "state:open {query}"})
    choice = choose(tickets, tools)
    assert (choice.tool, choice.query_argument) == ("find_tickets", "filter")
    assert arguments(choice, tickets, "refund", 5) == {"filter": "state:open refund"}


def test_a_placeholder_inside_a_wrapper_object() -> None:
    inner = {"type": "object", "properties": {"filter": WORDS, "size": WHOLE}, "required": ["filter"]}
    wrapped = server(tool="find", arguments={"request": {"filter": "a {query}"}})
    choice = choose(wrapped, [tool("find", "request", request=inner)])
    assert arguments(choice, wrapped, "b", 5) == {"request": {"filter": "a b", "size": 5}}


def test_long_tool_lists_are_cut_in_errors() -> None:
    with pytest.raises(NoTool) as raised:
        choose(server(), [tool(f"x{number}\n" + "y" * 1_000) for number in range(500)])
    assert len(raised.value.message) < 1_600
    assert "\n" not in raised.value.message
    assert "… (480 more)" in raised.value.message


NAMES = [
    *("type", "properties", "required", "anyOf", "allOf", "$ref", "#/properties/query", "query", "limit", "enum"),
    *("default", "minimum", "maximum", "exclusiveMaximum", "const", "description", "string", "integer", "number"),
]
names = st.sampled_from(NAMES) | st.text(max_size=4)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | names,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=5),
    max_leaves=12,
)
schemas = st.fixed_dictionaries(
    {"properties": st.dictionaries(names, values, max_size=4) | values},
    optional={"required": st.lists(names, max_size=3) | values, "allOf": values, "$ref": names},
)


@st.composite
def any_tools(draw: st.DrawFn) -> Tool:
    return Tool(name=draw(st.text(max_size=5)), description=draw(st.none() | st.text()), input_schema=draw(schemas))


@settings(deadline=None, max_examples=examples(80))
@given(st.lists(any_tools(), max_size=3), st.sampled_from([None, "query", ""]))
def test_tool_selection_survives_any_schema(tools: list[Tool], named: str | None) -> None:
    configured = server(query_argument=named, tool=tools[0].name if tools and named == "" else None)
    try:
        choice = choose(configured, tools)
    except NoTool as error:
        assert error.message  # noqa: PT017
    else:
        assert isinstance(choice, ToolChoice)
        assert choice.tool in {tool.name for tool in tools}
        built = arguments(choice, configured, "x", 10)
        assert choice.query_argument is not None
        assert (built[choice.wrapper] if choice.wrapper is not None else built)[choice.query_argument] == "x"


def test_tool_selection_survives_recursive_schemas() -> None:
    schema = {"$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}] * 50}}, "allOf": [{"$ref": "#"}] * 50}
    endless = tool("search", "query", schema=schema | {"properties": {"query": {"$ref": "#/$defs/A"}}})
    assert choose(server(), [endless] * 50).query_argument == "query"
