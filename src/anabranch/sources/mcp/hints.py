"""What a tool's name and hints say about it: whether it looks something up, and whether it changes things."""

import re

from mcp_types import Tool

from anabranch.sources.mcp.fields import ranked

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


def changes(tool: Tool) -> bool:
    hints = tool.annotations
    if hints is not None and hints.destructive_hint:
        return True
    if is_read_only(tool):
        return False
    named = words(tool.name)
    is_said = hints is not None and hints.read_only_hint is False
    return bool(named & CHANGING.keys()) or (not asks(tool) and (is_said or bool(named & PERHAPS_CHANGING.keys())))


def is_read_only(tool: Tool) -> bool:
    return tool.annotations is not None and tool.annotations.read_only_hint is True


def needs_task(tool: Tool) -> bool:
    """It cannot simply be called: its answer would have to be fetched later."""
    return tool.execution is not None and tool.execution.task_support == "required"


def asks(tool: Tool) -> bool:
    return bool(words(tool.name) & ASKING.keys())


def words(text: str) -> set[str]:
    return {word.lower() for word in WORDS.findall(text)}
