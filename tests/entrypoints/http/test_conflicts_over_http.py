"""Sources that contradict each other, over HTTP: the answer says so, cites both, and names the conflict."""

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from anabranch.domain.model import Message
from anabranch.testing import Document, Space
from conftest import ref
from support.collection_server import Library, library, text
from support.mcp_tool_client import client

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("conflicts-over-http")]

ASKED = "How many days of parental leave do employees get?"
CLAIM = "Employees get 30 days of parental leave."
AGAINST = "Employees get 45 days of parental leave."
DOCUMENTS = {
    "Leave policy": f"# Leave policy\n\nThis page is about time off. {CLAIM} Ask the desk for a form.",
    "Handbook": f"# Handbook\n\n{AGAINST} The canteen opens at noon.",
}


def obedient(messages: Sequence[Message]) -> str:
    """Says that the sources disagree if the prompt says so."""
    prompt = messages[-1].content
    first, second = (CLAIM, AGAINST) if prompt.find(CLAIM) < prompt.find(AGAINST) else (AGAINST, CLAIM)
    return f"The sources disagree. {first} [1] {second} [2]" if 'conflicts-with="2"' in prompt else f"{first} [1]"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def space() -> AsyncIterator[Space]:
    async with Space() as opened:
        opened.model("writer", reply=obedient)
        for title, content in DOCUMENTS.items():
            opened.source(title.split()[0].lower(), documents=[Document(title=title, content=content)])
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def quoting(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> AsyncIterator[Library]:
    async with library(tmp_path_factory.mktemp("data"), models_dir, rate_limit=0) as opened:
        await _filled(opened)
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def writing(tmp_path_factory: pytest.TempPathFactory, models_dir: Path, space: Space) -> AsyncIterator[Library]:
    writer = {"model_url": space.url, "model_name": "writer", "rate_limit": 0}
    async with library(tmp_path_factory.mktemp("data"), models_dir, **writer) as opened:
        await _filled(opened)
        yield opened


async def _filled(opened: Library) -> None:
    await opened.collection("hr")
    await opened.ingest("hr", *(text(content, title=title) for title, content in DOCUMENTS.items()))


def checked(conflicts: Any, kind: str = "number") -> None:
    """One conflict, whose words stand in the documents where it says."""
    (found,) = conflicts
    assert found["kind"] == kind
    assert 0.8 <= found["probability"] <= 1
    sides = found["claim"], found["against"]
    assert {side["quoted_text"] for side in sides} == {CLAIM, AGAINST}
    assert {side["citation_index"] for side in sides} == {1, 2}
    for side in sides:
        content = next(content for content in DOCUMENTS.values() if side["quoted_text"] in content)
        assert content[side["start_char"] : side["end_char"]] == side["quoted_text"]


async def test_an_answer_that_quotes_says_that_the_sources_disagree_and_quotes_both(quoting: Library) -> None:
    answer = await quoting.ask(ASKED)
    lines = answer["answer"].split("\n")
    assert lines[0] == "The sources disagree:"
    assert {line.partition(" [")[0] for line in lines[1:3]} == {f"- Leave policy: {CLAIM}", f"- Handbook: {AGAINST}"}
    assert {one["quoted_text"] for one in answer["citations"]} >= {CLAIM, AGAINST}
    assert answer["faithfulness_score"] == 1
    checked(answer["conflicts"])


async def test_a_model_is_told_that_the_sources_disagree(writing: Library) -> None:
    answer = await writing.ask(ASKED)
    assert answer["answer"].startswith("The sources disagree.")
    assert {one["citation_index"] for one in answer["citations"]} == {1, 2}
    checked(answer["conflicts"])


async def test_streams_name_conflicts_in_their_last_event(writing: Library) -> None:
    events = await writing.stream(ASKED)
    assert events[-1].name == "done"
    checked(events[-1].data["conflicts"])


async def test_rag_names_conflicts_in_its_last_event_also_of_a_cached_answer(writing: Library) -> None:
    found = []
    for _ in range(2):
        reply = await writing.call("POST", "/rag/stream", {"query": f"Please tell me: {ASKED}"})
        found.append(json.loads(reply.body.split("data: ")[-1])["data"])
    first, again = found
    assert (first["cached"], again["cached"]) == (False, True)
    checked(first["conflicts"])
    assert first["conflicts"] == again["conflicts"]


async def test_an_answer_that_is_not_verified_or_has_no_conflict_has_no_such_field(writing: Library) -> None:
    assert "conflicts" not in await writing.ask(ASKED, verify=False)
    assert "conflicts" not in await writing.ask("When does the canteen open?")


async def test_chat_names_conflicts_between_two_sources_if_the_request_asks(writing: Library, space: Space) -> None:
    asked = {
        "prompt": ASKED,
        "model": ref(space, "writer"),
        "data_sources": [ref(space, name) for name in ("leave", "handbook")],
    }
    plain = await writing.good("POST", "/api/v1/chat", asked)
    assert "conflicts" not in plain
    verified = await writing.good("POST", "/api/v1/chat", {**asked, "verify": True})
    (found,) = verified["conflicts"]
    assert {found[side]["quoted_text"] for side in ("claim", "against")} == {CLAIM, AGAINST}
    assert found["claim"]["source"] != found["against"]["source"]


async def test_the_ask_tool_of_mcp_has_the_conflicts_and_says_once_that_the_sources_disagree(quoting: Library) -> None:
    async with client(quoting) as tools:
        await tools.list_tools()  # so that what comes back is held against its schema
        result = await tools.call_tool("ask", {"question": ASKED})
    checked(result.structured_content["conflicts"])
    (block,) = result.content
    assert block.type == "text"
    assert block.text.count("The sources disagree:") == 1
