"""No tool reply can crash the extraction of results or exceed its limits."""

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mcp_types import (
    Annotations,
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from anabranch.domain.mcp import McpServer
from anabranch.domain.model import Passage
from anabranch.sources.mcp.results.extraction import Unreadable, passages
from support.examples import examples

KEYS = [
    *("results", "items", "data", "content", "text", "title", "name", "url", "date", "id", "score", "node", "_source"),
    *(
        "metadata",
        "observations",
        "hits",
        "edges",
        "result",
        "highlight",
        "rendered",
        "timestamp",
        "properties",
        "value",
    ),
    *("entities", "relations", "from", "to", "relationType", "entityType"),
]
keys = st.sampled_from(KEYS) | st.text(max_size=5)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -(10**4000), 1e308])
    | st.floats()
    | st.text(max_size=20)
    | st.text(st.characters(categories=["Cs", "Cc"]), max_size=5)
    | st.sampled_from(["https://a.b/c", "2024-05-05", '{"results": [{"text": "x"}]}', "```json\n[1]\n```", "[" * 5_000])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(keys, inner, max_size=5),
    max_leaves=25,
)
texts = (
    st.text(max_size=60)
    | values.map(json.dumps)
    | st.lists(values, max_size=3).map(lambda v: "\n".join(map(json.dumps, v)))
)
labels = st.lists(
    st.sampled_from(["Title: x", "URL: https://a.b", "Text: y", "Name:", "- Title: z", "", "more"]), max_size=9
)
notes = st.none() | st.builds(
    Annotations, last_modified=st.none() | st.text(max_size=20), priority=st.none(), audience=st.none()
)


@st.composite
def blocks(draw: st.DrawFn) -> ContentBlock:
    words, note = draw(texts | labels.map("\n".join)), draw(notes)
    match draw(st.integers(0, 4)):
        case 0 | 1:
            return TextContent(text=words, annotations=note)
        case 2:
            return ResourceLink(name=words, title=draw(st.none() | texts), uri=draw(st.text()), annotations=note)
        case 3:
            return EmbeddedResource(resource=TextResourceContents(uri=draw(st.text()), text=words), annotations=note)
        case _:
            return EmbeddedResource(resource=BlobResourceContents(uri="a:b", blob=words))


def check(found: tuple[Passage, ...]) -> None:
    assert len(found) <= 1_000
    for passage in found:
        assert passage.source == "one"
        assert 0 < len(passage.title) <= 300
        assert passage.title == " ".join(passage.title.split())
        assert passage.text.strip()
        assert len(passage.text) <= 20_000
        assert 0.0 <= passage.score <= 1.0
        assert passage.url is None or (len(passage.url) <= 2_000 and not passage.url.lower().startswith("javascript:"))
        assert passage.document_id is None or len(passage.document_id) <= 300
        for written in (passage.title, passage.text, passage.url or "", passage.document_id or ""):
            written.encode()
            assert "\x00" not in written


@settings(deadline=None, max_examples=examples(120))
@given(
    values,
    st.lists(blocks(), max_size=4),
    st.sampled_from([None, None, "results", "data.items[0]", "$", "a..b", "[*].x"]),
)
def test_any_reply_is_read_or_rejected_as_unreadable(
    structured: Any, content: list[ContentBlock], path: str | None
) -> None:
    result = CallToolResult(content=content, structured_content=structured)
    try:
        found = passages(result, McpServer(name="one", result_path=path))
    except Unreadable:
        assert path is not None
    else:
        check(found)


def deep(levels: int, kind: str) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = [value] if kind == "list" else {"data": value}
    return value


@pytest.mark.parametrize(
    "structured",
    [
        deep(10_000, "list"),
        deep(10_000, "object"),
        {"results": [deep(5_000, "object"), deep(5_000, "list")]},
        {"results": ["x"] * 100_000},
        {"results": [["x"] * 10] * 10_000},
        {"results": [{"text": "x " * 1_000_000}]},
        {"results": [{"text": ["y" * 100] * 100_000}]},
        {"results": [{f"k{n}": n for n in range(100_000)}]},
        {f"k{n}": {"a": n} for n in range(100_000)},
        {"k" * 1_000_000: "x", "title": "y" * 1_000_000, "id": "z" * 1_000_000, "url": "http://" + "u" * 1_000_000},
        {"results": [{"observations": [["x"] * 100] * 100}] * 200},
        {
            "entities": [{"name": str(n % 3), "observations": ["x"]} for n in range(20_000)],
            "relations": [{"from": "1", "to": "2", "relationType": f"r{n}" * 1_000} for n in range(20_000)],
        },
    ],
    ids=["lists", "objects", "inside", "many", "nested", "long", "parts", "keys", "holders", "names", "wide", "graph"],
)
def test_huge_structured_replies_are_read_quickly(structured: Any) -> None:
    began = time.process_time()
    check(passages(CallToolResult.model_construct(content=[], structured_content=structured), McpServer(name="one")))
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    "text",
    [
        "[" * 1_000_000,
        '{"a":' * 1_000_000,
        "```json\n" * 200_000,
        "Title: x\n" * 200_000,
        "Title: x\nURL: y\n" * 100_000,
        "Title: x\nText: y\n" + "z\n" * 1_000_000,
        '{"a": 1}\n' * 200_000,
        "[" + "9" * 1_000_000 + "]",
        "no " * 300_000,
        " \x00\n" * 300_000,
        "- " * 500_000 + ":",
        json.dumps(json.dumps(json.dumps({"results": [{"text": "x"}]}))),
    ],
    ids=[
        "lists",
        "objects",
        "fences",
        "titles",
        "records",
        "lines",
        "rows",
        "digits",
        "nothing",
        "blank",
        "label",
        "quoted",
    ],
)
def test_huge_text_replies_are_read_quickly(text: str) -> None:
    began = time.process_time()
    check(passages(CallToolResult(content=[TextContent(text=text)]), McpServer(name="one")))
    assert time.process_time() - began < 2


def test_the_number_of_content_blocks_is_limited() -> None:
    content: list[ContentBlock] = [TextContent(text=f"text {number}") for number in range(3_000)]
    content.insert(0, ImageContent(data="AA==", mime_type="image/png"))
    found = passages(CallToolResult(content=content), McpServer(name="one"))
    assert len(found) == 1_000
    check(found)
