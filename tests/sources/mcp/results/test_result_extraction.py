"""Tool replies become passages with title, text, URL and date."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from mcp_types import (
    Annotations,
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from anabranch.domain.mcp import McpServer
from anabranch.domain.model import Passage
from anabranch.sources.mcp.results.extraction import Unreadable, passages

MAY_5 = datetime(2024, 5, 5, tzinfo=UTC).timestamp()
DAY = "2024-05-05T00:00:00Z"


def read(*texts: object, structured: Any = None, path: str | None = None) -> tuple[Passage, ...]:
    content = [TextContent(text=text if isinstance(text, str) else json.dumps(text)) for text in texts]
    result = CallToolResult(content=[*content], structured_content=structured)
    return passages(result, McpServer(name="one", result_path=path))


def said(found: tuple[Passage, ...]) -> list[tuple[str, str]]:
    return [(passage.title, passage.text) for passage in found]


def test_memory_server_graph_becomes_passages() -> None:
    ada = {"name": "Ada", "entityType": "person", "observations": ["likes tea", "lives in London"]}
    bob: dict[str, Any] = {"name": "Bob", "entityType": "person", "observations": []}
    knows = {"from": "Ada", "to": "Bob", "relationType": "works_with"}
    wrote = {"from": "Bob", "to": "Refund policy", "relationType": "wrote"}
    reply = {"entities": [ada, bob], "relations": [knows, wrote, wrote, {"from": 1, "to": None}]}
    passage = Passage(
        source="one", title="Ada", text="Type: person\nlikes tea\nlives in London\nAda works with Bob", score=0.0
    )
    assert read(reply, structured=reply)[0] == passage
    assert said(read(reply))[1] == ("Bob", "Type: person\nAda works with Bob\nBob wrote Refund policy")
    assert said(read({"entities": [ada], "relations": []})) == [("Ada", "Type: person\nlikes tea\nlives in London")]
    assert said(read({"entities": [ada]})) == [("Ada", "Type: person\nlikes tea\nlives in London")]
    assert said(read({"entities": [], "relations": [knows]})) == [("Ada works with Bob", "Ada works with Bob")]
    other = {"source": "Ada", "target": "Eve", "relationType": "knows"}
    assert said(read({"entities": [{"name": "Eve", "observations": "x"}], "relations": [other]})) == [
        ("Eve", "x\nAda knows Eve")
    ]
    nothing: dict[str, Any] = {"entities": [], "relations": []}
    assert read(nothing, structured=nothing) == ()


def test_structured_content_takes_precedence_over_text() -> None:
    assert said(read("a\nb", structured={"result": "a\nb"})) == [("a", "a\nb")]
    assert said(read({"title": "A", "text": "x"}, structured={"result": [{"title": "A", "text": "x"}]})) == [("A", "x")]
    assert read("Nothing was there.", structured={"results": []}) == ()
    assert said(read("The text itself", structured={"count": 1})) == [("The text itself", "The text itself")]
    assert said(read("The text itself", structured={})) == [("The text itself", "The text itself")]


@pytest.mark.parametrize(
    "reply",
    [
        [{"title": "T", "text": "x"}],
        {"results": [{"title": "T", "content": "x"}]},
        {"data": {"search": {"edges": [{"cursor": "c", "node": {"title": "T", "bodyText": "x"}}]}}},
        {"result": json.dumps([{"title": "T", "snippet": "x"}])},
        {"took": 3, "hits": {"total": {"value": 1}, "hits": [{"_source": {"title": "T", "body": "x"}}]}},
        {"query": "q", "answer": "a", "images": [], "results": [{"title": "T", "content": "x", "raw_content": None}]},
        {"summary": "Found 1", "issues": [{"key": "K-1", "title": "T", "description": "x"}]},
        {"batchcomplete": "", "query": {"searchinfo": {"totalhits": 1}, "search": [{"title": "T", "snippet": "x"}]}},
        {"facets": {"tags": ["a", "b"]}, "web": {"results": [{"title": "T", "description": "x"}]}},
        {"unheard_of": [{"title": "T", "text": "x"}], "tags": []},
        {"title": "T", "text": "x", "tags": ["a", "b", "c"]},
        {"title": "T", "description": "x", "files": [{"name": "a"}]},
        {"response": {"title": "T", "body": "x"}},
        [{"title": {"rendered": "T"}, "content": {"rendered": "x"}}],
        [{"page_content": "x", "metadata": {"title": "T"}}],
        [{"id": 1, "payload": {"pageTitle": "T", "chunk-text": "x"}}],
        [{"properties": {"Name": {"type": "title", "title": [{"plain_text": "T"}]}}, "content": [{"text": "x"}]}],
        [{"name": "T", "highlight": {"body": ["x"]}}],
        [[{"name": "T", "value": "x"}]],
        ['{"name": "T", "value": "x"}'],
    ],
    ids=range(20),
)
def test_result_lists_are_located_in_any_structure(reply: object) -> None:
    assert said(read(reply)) == [("T", "x")]
    if isinstance(reply, dict):
        assert said(read(structured=reply)) == [("T", "x")]


def test_lists_of_strings_are_results() -> None:
    assert [passage.text for passage in read(["one", "", "two"])] == ["one", "two"]
    assert [passage.text for passage in read({"documents": [["one", "two"]], "ids": [["1", "2"]]})] == ["one", "two"]
    assert [passage.text for passage in read({"suggestions": ["one", "two"]})] == ["one", "two"]


def test_results_carry_url_date_id_and_score() -> None:
    (found,) = read(
        {
            "total_count": 1,
            "items": [
                {
                    "id": 17,
                    "name": "branch",
                    "url": "https://api.example.org/branch",
                    "html_url": "https://example.org/branch",
                    "description": "A stream that rejoins its river.",
                    "created_at": "2020-01-01",
                    "updated_at": DAY,
                    "score": 0.75,
                    "owner": {"id": 4, "name": "somebody"},
                }
            ],
        }
    )
    assert found == Passage(
        source="one",
        title="branch",
        text="A stream that rejoins its river.",
        score=0.75,
        document_id="17",
        url="https://example.org/branch",
        date=MAY_5,
    )


@pytest.mark.parametrize("score", [1.5, -0.1, "0.9", True, None, 10**400, float("nan"), float("inf")])
def test_scores_outside_0_to_1_are_ignored(score: object) -> None:
    (found,) = read(structured=[{"text": "x", "score": score}])
    assert found.score == 0.0


@pytest.mark.parametrize(
    "url", ["javascript:alert(1)", "JavaScript://%0aalert(1)", "data:text/html,x", "/docs", "C:\\x", "a b", 5]
)
def test_invalid_and_script_urls_are_ignored(url: object) -> None:
    (found,) = read([{"text": "x", "url": url}])
    assert found.url is None


def test_an_object_without_text_becomes_field_lines() -> None:
    (found,) = read(
        [{"name": "b", "stars": 5, "private": False, "topics": ["a", "b"], "gone": None, "node": {"size": 2}}]
    )
    assert (found.title, found.text) == ("b", "name: b\nstars: 5\nprivate: no\ntopics: a, b\nsize: 2")
    assert said(read([{"title": "only"}])) == [("only", "only")]


def test_json_in_text_blocks_is_parsed() -> None:
    assert said(read('{"title": "a", "text": "x"}\n{"title": "b", "text": "y"}\n')) == [("a", "x"), ("b", "y")]
    assert said(read('Here you are:\n```json\n[{"title": "a", "text": "x"}]\n```\n')) == [("a", "x")]
    assert said(read({"title": "a", "text": "x"}, {"title": "b", "text": "y"})) == [("a", "x"), ("b", "y")]
    assert read("[]") == read("{}") == read("  \n ") == ()
    assert said(read("[see] the note")) == [("[see] the note", "[see] the note")]
    assert said(read("42")) == [("42", "42")]
    page = "How to set it up.\n" + "Long prose. " * 20 + '\n```json\n{"results": []}\n```\n'
    assert [passage.text for passage in read(page)] == [page.strip()]


def test_each_plain_text_block_is_one_passage() -> None:
    long = "A first line that goes on and on, " * 5
    assert said(read("# Heading\n\nBody", "Second")) == [("Heading", "# Heading\n\nBody"), ("Second", "Second")]
    (found,) = read(long)
    assert len(found.title) <= 80
    (found,) = read("word " * 10_000)
    assert len(found.text) <= 20_000
    assert found.text.endswith("word")
    assert said(read("half \ud800 and \x00NUL <b>kept</b>")) == [("half ? and NUL <b>kept</b>",) * 2]
    assert said(read("###")) == [("one", "###")]


def test_labelled_text_is_split_into_results() -> None:
    found = read(
        "Detailed Results:\n\nTitle: A\nURL: https://a.example\nPublished: 2024-05-05\nContent: first\nNote: more\n\n"
        "---\n\n- Title: B\n- URL: https://b.example\n- Description: second\n"
    )
    assert said(found) == [("A", "first\nNote: more"), ("B", "second")]
    assert [(passage.url, passage.date) for passage in found] == [
        ("https://a.example", MAY_5),
        ("https://b.example", None),
    ]
    letter = "Title: only that\nand a text\nthat goes on"
    assert said(read(letter)) == [("Title: only that", letter)]


@pytest.mark.parametrize(
    "nothing", ["No matches found", "No results found for 'tea'.", "0 results", "no matching documents"]
)
def test_no_results_messages_are_not_results(nothing: str) -> None:
    assert read(nothing) == read(nothing, structured={"content": nothing}) == ()
    assert read("No documents may leave the house.") != ()


def test_resources_are_results_and_images_are_not() -> None:
    link = ResourceLink(
        name="y.md", title="Why", uri="file:///x/y.md", description="About", annotations=Annotations(last_modified=DAY)
    )
    bare = ResourceLink(name="z.md", uri="demo://z")
    inside = EmbeddedResource(resource=TextResourceContents(uri="demo://notes/a%20b.txt", text="words"))
    blob = EmbeddedResource(resource=BlobResourceContents(uri="demo://c", blob="AA=="))
    picture = ImageContent(data="AA==", mime_type="image/png")
    sound = AudioContent(data="AA==", mime_type="audio/wav")
    noted = TextContent(text="noted", annotations=Annotations(last_modified=DAY))
    result = CallToolResult(content=[link, bare, blob, picture, inside, sound, noted])
    assert [(p.title, p.text, p.url, p.date) for p in passages(result, McpServer(name="one"))] == [
        ("Why", "About", "file:///x/y.md", MAY_5),
        ("z.md", "z.md", "demo://z", None),
        ("a b.txt", "words", "demo://notes/a%20b.txt", None),
        ("noted", "noted", None, MAY_5),
    ]
    both = CallToolResult(content=[noted, link], structured_content={"results": [{"text": "x"}]})
    assert [p.text for p in passages(both, McpServer(name="one"))] == ["x", "About"]


@pytest.mark.parametrize(
    ("path", "reply"),
    [
        ("data.found", {"data": {"found": [{"text": "x"}], "results": [{"text": "y"}]}}),
        ("$.data", {"data": [{"text": "x"}]}),
        ("groups[1].hits", {"groups": [{}, {"hits": [{"text": "x"}]}]}),
        ("[-1]", [{"text": "y"}, {"text": "x"}]),
        ("edges[*].thing", {"edges": [{"thing": {"text": "x"}}, {"other": 1}]}),
        ("a['b.c']", {"a": {"b.c": "x"}}),
        ("result.found", {"result": json.dumps({"found": ["x"]})}),
        ("text", {"text": "x", "results": ["y"]}),
    ],
)
def test_result_path_locates_the_results(path: str, reply: object) -> None:
    assert [passage.text for passage in read(reply, path=path)] == ["x"]
    assert [passage.text for passage in read(structured=reply, path=path)] == ["x"]


def test_result_path_applies_to_json_text() -> None:
    reply = {"found": [{"text": "x"}]}
    assert [passage.text for passage in read(reply, structured={"result": json.dumps(reply)}, path="found")] == ["x"]
    assert read({"found": []}, path="found") == ()


@pytest.mark.parametrize(
    "path", ["wrong", "data.wrong", "data[0]", "data.found[7]", "data..found", "[", "data.found.text.x"]
)
def test_wrong_result_path_is_an_error(path: str) -> None:
    with pytest.raises(Unreadable, match="resultPath"):
        read({"data": {"found": [{"text": "x"}]}}, path=path)
    with pytest.raises(Unreadable, match="resultPath"):
        read("no JSON at all", path=path)
