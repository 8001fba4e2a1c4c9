"""The tools of well-known MCP servers, as they list them: names, arguments and hints in full, long descriptions cut."""

from typing import Any

from mcp_types import Tool, ToolAnnotations, ToolExecution

WORDS = {"type": "string"}
WHOLE = {"type": "integer"}
NUMBER = {"type": "number"}
LIST = {"type": "array", "items": {"type": "string"}}
OPTIONAL_WORDS = {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}


def tool(
    name: str,
    /,
    *needed: str,
    says: str = "",
    reads: bool | None = None,
    destroys: bool | None = None,
    task: Any = None,
    schema: dict[str, Any] | None = None,
    **takes: dict[str, Any],
) -> Tool:
    hinted = reads is not None or destroys is not None
    return Tool(
        name=name,
        description=says or None,
        input_schema={"type": "object", "properties": takes, "required": list(needed), **(schema or {})},
        annotations=ToolAnnotations(read_only_hint=reads, destructive_hint=destroys) if hinted else None,
        execution=ToolExecution(task_support=task) if task else None,
    )


MEMORY = [
    tool("create_entities", "entities", reads=False, destroys=False, entities={"type": "array"}),
    tool("create_relations", "relations", reads=False, destroys=False, relations={"type": "array"}),
    tool("add_observations", "observations", reads=False, destroys=False, observations={"type": "array"}),
    tool("delete_entities", "entityNames", reads=False, destroys=True, entityNames=LIST),
    tool("delete_observations", "deletions", reads=False, destroys=True, deletions={"type": "array"}),
    tool("delete_relations", "relations", reads=False, destroys=True, relations={"type": "array"}),
    tool("read_graph", reads=True, destroys=False, says="Read the entire knowledge graph"),
    tool(
        "search_nodes",
        "query",
        reads=True,
        destroys=False,
        says="Search for nodes in the knowledge graph based on a query",
        query={
            "type": "string",
            "description": "The search query to match against entity names, types, and observations",
        },
    ),
    tool("open_nodes", "names", reads=True, destroys=False, names=LIST),
]

FILESYSTEM = [
    tool("read_file", "path", reads=True, path=WORDS, tail=NUMBER, head=NUMBER),
    tool("read_text_file", "path", reads=True, path=WORDS, tail=NUMBER, head=NUMBER),
    tool("read_media_file", "path", reads=True, path=WORDS),
    tool("read_multiple_files", "paths", reads=True, paths=LIST),
    tool("write_file", "path", "content", reads=False, destroys=True, path=WORDS, content=WORDS),
    tool("edit_file", "path", "edits", reads=False, destroys=True, path=WORDS, edits={"type": "array"}),
    tool("create_directory", "path", reads=False, destroys=False, path=WORDS),
    tool("list_directory", "path", reads=True, path=WORDS),
    tool("list_directory_with_sizes", "path", reads=True, path=WORDS, sortBy={"type": "string", "default": "name"}),
    tool("directory_tree", "path", reads=True, path=WORDS, excludePatterns={**LIST, "default": []}),
    tool("move_file", "source", "destination", reads=False, destroys=True, source=WORDS, destination=WORDS),
    tool(
        "search_files",
        "path",
        "pattern",
        reads=True,
        path=WORDS,
        pattern=WORDS,
        excludePatterns={**LIST, "default": []},
    ),
    tool("get_file_info", "path", reads=True, path=WORDS),
    tool("list_allowed_directories", reads=True),
]

EVERYTHING = [
    tool("echo", "message", reads=True, destroys=False, says="Echoes back the input string", message=WORDS),
    tool(
        "get-annotated-message", "messageType", reads=True, messageType={"type": "string", "enum": ["error", "debug"]}
    ),
    tool("get-env", reads=True),
    tool("get-resource-links", reads=True, count={"type": "number", "default": 3, "minimum": 1, "maximum": 10}),
    tool(
        "get-structured-content", "location", reads=True, location={"type": "string", "enum": ["New York", "Chicago"]}
    ),
    tool("get-sum", "a", "b", reads=True, a=NUMBER, b=NUMBER),
    tool("gzip-file-as-resource", reads=False, destroys=False, name=WORDS, data={"type": "string", "format": "uri"}),
    tool("toggle-simulated-logging", reads=False, destroys=False),
    tool("trigger-long-running-operation", reads=True, duration={"type": "number", "default": 10}),
    tool("simulate-research-query", "topic", reads=False, destroys=False, task="required", topic=WORDS),
]

TIME = [
    tool("get_current_time", "timezone", reads=True, destroys=False, timezone=WORDS),
    tool(
        "convert_time",
        "source_timezone",
        "time",
        "target_timezone",
        reads=True,
        destroys=False,
        source_timezone=WORDS,
        time=WORDS,
        target_timezone=WORDS,
    ),
]

GIT = [
    tool("git_status", "repo_path", reads=True, repo_path=WORDS),
    tool("git_diff", "repo_path", "target", reads=True, repo_path=WORDS, target=WORDS, context_lines=WHOLE),
    tool("git_commit", "repo_path", "message", reads=False, destroys=False, repo_path=WORDS, message=WORDS),
    tool("git_add", "repo_path", "files", reads=False, destroys=False, repo_path=WORDS, files=LIST),
    tool("git_reset", "repo_path", reads=False, destroys=True, repo_path=WORDS),
    tool("git_log", "repo_path", reads=True, repo_path=WORDS, max_count={**WHOLE, "default": 10}, since=OPTIONAL_WORDS),
    tool(
        "git_create_branch", "repo_path", "branch_name", reads=False, destroys=False, repo_path=WORDS, branch_name=WORDS
    ),
    tool("git_checkout", "repo_path", "branch_name", reads=False, destroys=False, repo_path=WORDS, branch_name=WORDS),
    tool("git_show", "repo_path", "revision", reads=True, repo_path=WORDS, revision=WORDS),
]

BRAVE = [
    tool(
        "brave_web_search",
        "query",
        says="Performs a web search using the Brave Search API, ideal for general queries, news, articles.",
        query={"type": "string", "description": "Search query (max 400 chars, 50 words)"},
        count={"type": "number", "description": "Number of results (1-20, default 10)", "default": 10},
        offset={"type": "number", "description": "Pagination offset (max 9, default 0)", "default": 0},
    ),
    tool("brave_local_search", "query", says="Searches for local businesses.", query=WORDS, count=NUMBER),
]

GITHUB = [
    tool("add_issue_comment", "owner", "repo", "body", reads=False, owner=WORDS, repo=WORDS, body=WORDS),
    tool("create_repository", "name", reads=False, name=WORDS, description=WORDS),
    tool("get_file_contents", "owner", "repo", reads=True, owner=WORDS, repo=WORDS, path=WORDS),
    tool("list_issues", "owner", "repo", reads=True, owner=WORDS, repo=WORDS, perPage=NUMBER),
    tool(
        "search_code",
        "query",
        reads=True,
        query={"type": "string", "description": "Search query using GitHub's powerful code search syntax."},
        perPage={"type": "number", "description": "Results per page (min 1, max 100)", "minimum": 1, "maximum": 100},
        page={"type": "number", "minimum": 1},
    ),
    tool("search_issues", "query", reads=True, query=WORDS, owner=WORDS, perPage=NUMBER),
    tool("search_repositories", "query", reads=True, query=WORDS, perPage=NUMBER),
]

CONTEXT7 = [
    tool("resolve-library-id", "query", "libraryName", reads=True, query=WORDS, libraryName=WORDS),
    tool("query-docs", "libraryId", "query", reads=True, libraryId=WORDS, query=WORDS),
]

FETCH = [
    tool(
        "fetch",
        "url",
        says="Fetches a URL from the internet and optionally extracts its contents as markdown.",
        url={"type": "string", "format": "uri", "minLength": 1},
        max_length={"type": "integer", "default": 5000, "exclusiveMinimum": 0, "exclusiveMaximum": 1000000},
        raw={"type": "boolean", "default": False},
    )
]

SLACK = [
    tool("slack_list_channels", limit=NUMBER, cursor=WORDS),
    tool("slack_post_message", "channel_id", "text", channel_id=WORDS, text=WORDS),
    tool("slack_reply_to_thread", "channel_id", "thread_ts", "text", channel_id=WORDS, thread_ts=WORDS, text=WORDS),
    tool("slack_add_reaction", "channel_id", "reaction", channel_id=WORDS, reaction=WORDS),
    tool("slack_get_channel_history", "channel_id", channel_id=WORDS, limit=NUMBER),
]

POSTGRES = [tool("query", says="Run a read-only SQL query", sql=WORDS)]

SQLITE = [
    tool("read_query", "query", query={"type": "string", "description": "SELECT SQL query to execute"}),
    tool("write_query", "query", query={"type": "string", "description": "SQL query to execute"}),
    tool("append_insight", "insight", insight=WORDS),
]

NOTION = [
    tool("API-post-page", "parent", "properties", parent={"type": "object"}, properties={"type": "object"}),
    tool("API-create-a-comment", "rich_text", rich_text={"type": "array"}),
    tool(
        "API-post-search",
        says="Search by title",
        query=WORDS,
        filter={"type": "object"},
        page_size={**WHOLE, "default": 100},
    ),
    tool("API-delete-a-block", "block_id", block_id=WORDS),
]

TAVILY = [
    tool(
        "tavily_search",
        "query",
        says="Search the web for current information on any topic.",
        query=WORDS,
        search_depth={"type": "string", "enum": ["basic", "advanced"], "default": "basic"},
        topic={"type": "string", "enum": ["general"], "default": "general"},
        max_results={"type": "integer", "default": 5, "minimum": 5, "maximum": 20},
    ),
    tool("tavily_extract", "urls", urls=LIST),
    tool("tavily_crawl", "url", url=WORDS, instructions=WORDS, limit=WHOLE),
    tool("tavily_research", "input", says="Perform comprehensive research on a topic.", input=WORDS),
]

EXA = [
    tool("web_search_exa", "query", reads=True, query=WORDS, numResults=NUMBER),
    tool("get_code_context_exa", "query", reads=True, query=WORDS, tokensNum={**NUMBER, "minimum": 1000}),
    tool("company_research_exa", "companyName", reads=True, companyName=WORDS, numResults=NUMBER),
]

MEM0 = [
    tool("add_memories", "text", says="Add a new memory, after which it can be searched.", text=WORDS),
    tool("search_memory", "query", says="Search through stored memories.", query=WORDS),
    tool("delete_all_memories"),
]
