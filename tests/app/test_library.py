"""Anabranch as a library."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch import (
    Anabranch,
    AnabranchError,
    Answered,
    Endpoint,
    FellBack,
    GenerationStarted,
    Message,
    SentenceChecked,
    Settings,
    Token,
    Until,
)
from anabranch.testing import Document, Failure, Hub, Space
from conftest import LOCAL


@pytest.fixture
async def ab() -> AsyncIterator[Anabranch]:
    async with Anabranch.open(settings=Settings(retrieval_timeout=1, model_retries=0)) as opened:
        yield opened


def urls(space: Space, *slugs: str) -> list[str]:
    return [f"{space.url}/{slug}" for slug in slugs]


async def test_ask_returns_a_cited_answer(ab: Anabranch, space: Space) -> None:
    answer = await ab.ask("Why?", sources=urls(space, "docs", "html"), model=f"{space.url}/scribe")
    assert answer.text
    assert [reply.status for reply in answer.replies] == ["success", "error"]
    citation = answer.citations[0]
    words = answer.passages[citation.passage].text[citation.passage_start : citation.passage_end]
    assert words.rstrip(".") in answer.text


async def test_ask_explains_how_each_passage_came_to_its_place(ab: Anabranch, space: Space) -> None:
    asked: dict[str, Any] = {"sources": urls(space, "docs"), "model": f"{space.url}/scribe"}
    answer = await ab.ask("Why?", **asked, explain=True)
    assert answer.explanation is not None
    places = [(one.title, one.citation_index) for one in answer.explanation.passages]
    assert places == [(one.title, number) for number, one in enumerate(answer.passages, 1)]
    assert [step.stage for step in answer.explanation.passages[0].steps] == ["source", "merge", "evidence", "prompt"]
    assert (await ab.ask("Why?", **asked)).explanation is None


async def test_stream_yields_events_that_end_with_the_answer(ab: Anabranch, space: Space) -> None:
    async with ab.stream("Why?", sources=urls(space, "docs"), model=f"{space.url}/scribe") as events:
        heard = [event async for event in events]
    assert isinstance(heard[-1], Answered)
    assert "".join(event.text for event in heard if isinstance(event, Token)) == heard[-1].answer.text


async def test_leaving_a_stream_cancels_upstream_calls(ab: Anabranch, space: Space) -> None:
    async with ab.stream("Why?", sources=urls(space, "docs"), model=f"{space.url}/hang") as events:
        async for event in events:
            if isinstance(event, GenerationStarted):
                await space.wait_for(lambda: any(request.slug == "hang" for request in space.requests))
                break
    await space.wait_for(lambda: any(r.slug == "hang" and r.disconnected for r in space.requests), 1.0)


async def test_leaving_a_stream_at_once_leaves_nothing_to_wait_for(space: Space) -> None:
    async with (
        asyncio.timeout(5),
        Anabranch.open(settings=Settings()) as ab,
        ab.stream("Why?", sources=urls(space, "docs"), model=f"{space.url}/scribe"),
    ):
        pass
    assert space.requests == []


async def test_retrieval_only_and_history(ab: Anabranch, space: Space) -> None:
    answer = await ab.ask("Why?", sources=urls(space, "docs"), until=Until.MERGE)
    assert len(answer.passages) == 3
    await ab.ask(
        "And?",
        sources=urls(space, "docs"),
        model=f"{space.url}/scribe",
        history=[Message(role="user", content="Before.")],
    )
    assert space.requests[-1].body["messages"][1] == {"role": "user", "content": "Before."}


async def test_two_sources_with_one_slug_are_disambiguated_by_host(ab: Anabranch, space: Space) -> None:
    async with Space(everything=True) as other:
        sources = [f"{space.url}/docs", f"{other.url}/docs"]
        answer = await ab.ask("Why?", sources=sources, until=Until.MERGE)
    hosts = [url.removeprefix("http://") for url in (space.url, other.url)]
    assert [reply.path for reply in answer.replies] == [f"{host}/docs" for host in hosts]


async def test_nothing_found_is_an_answer_that_says_so(ab: Anabranch, space: Space) -> None:
    space.source("nothing", documents=[])
    answer = await ab.ask("Why?", sources=urls(space, "nothing"), model=f"{space.url}/scribe")
    assert answer.refused
    assert "Nothing that answers this was found" in answer.text
    assert not any(request.slug == "scribe" for request in space.requests)


@pytest.mark.usefixtures("isolated_home")
async def test_names_come_from_the_configuration(space: Space, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    space.source("secret", documents=[Document(title="S", content="Inside.")], token="t-1")
    monkeypatch.setenv("SECRET_TOKEN", "t-1")
    config = tmp_path / "anabranch.yaml"
    config.write_text(f"""
sources:
  handbook: {{url: "{space.url}", slug: docs, owner: alice}}
  vault: {{url: "{space.url}", slug: secret, owner: bob, token: "${{SECRET_TOKEN}}"}}
models:
  writer: {{url: "{space.url}", slug: scribe, kind: openai}}
""")
    async with Anabranch.open(config) as ab:
        answer = await ab.ask("Why?")
        assert [reply.path for reply in answer.replies] == ["alice/docs", "bob/secret"]
        assert answer.model == "scribe"
        one = await ab.ask("Why?", sources=["vault"], model="writer")
        assert "Inside [bob/secret]" in one.text


async def test_paths_are_looked_up_on_the_hub(space: Space) -> None:
    async with Hub() as hub:
        hub.publish(owner="alice", slug="docs", url=space.url, type="data_source")
        hub.publish(owner="mia", slug="scribe", url=space.url, type="model")
        async with Anabranch.open(settings=Settings(syfthub_url=hub.url, endpoint_allowlist=LOCAL)) as ab:
            answer = await ab.ask("Why?", sources=["alice/docs"], model="mia/scribe", tokens={"alice": "t"})
            assert "[alice/docs]" in answer.text
            with pytest.raises(AnabranchError, match="knows no endpoint 'alice/nothing'"):
                await ab.ask("Why?", sources=["alice/nothing"], model="mia/scribe")


async def test_without_a_token_the_hub_is_asked_for_a_guests(space: Space) -> None:
    space.source("members", documents=[Document(title="M", content="Hello.")], token="guest-alice")
    async with Hub() as hub:
        hub.publish(owner="alice", slug="members", url=space.url, type="data_source")
        async with Anabranch.open(settings=Settings(syfthub_url=hub.url, endpoint_allowlist=LOCAL)) as ab:
            as_guest = await ab.ask("Why?", sources=["alice/members"], until=Until.MERGE)
            as_self = await ab.ask("Why?", sources=["alice/members"], until=Until.MERGE, tokens={"alice": "mine"})
    assert as_guest.replies[0].status == "success"
    assert as_self.replies[0].status == "access_denied"


async def test_the_readmes_example_runs(space: Space, capsys: pytest.CaptureFixture[str]) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    code = readme.split("```python\n")[1].split("```")[0].replace("asyncio.run(main())", "")
    space.source("policies", documents=[Document(title="Refunds", content="Refunds take 30 days.")])
    space.model("writer")
    code = code.replace("https://space.example", space.url).replace("https://models.example", space.url)
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    await names["main"]()
    assert capsys.readouterr().out == "Refunds take 30 days [policies].\n policies Refunds take 30 days.\n"


async def test_what_the_hub_names_is_guarded_like_any_other_address(space: Space) -> None:
    async with Hub() as hub:
        hub.publish(owner="eve", slug="docs", url=space.url, type="data_source")
        async with Anabranch.open(settings=Settings(syfthub_url=hub.url)) as ab:
            answer = await ab.ask("Why?", sources=["eve/docs"], until=Until.MERGE)
    assert answer.replies[0].status == "error"
    assert space.requests == []


@pytest.mark.parametrize(
    ("question", "sources", "says"),
    [
        (" ", [], "prompt is empty"),
        ("Why?", ["nonsense"], "neither a configured name"),
        ("Why?", ["http://host"], "names no endpoint"),
        ("Why?", ["alice/docs"], "hub at"),
    ],
)
async def test_invalid_arguments_of_ask_raise_one_sentence(
    ab: Anabranch, question: str, sources: list[str], says: str
) -> None:
    with pytest.raises(AnabranchError, match=says):
        await ab.ask(question, sources=sources, model=Endpoint(slug="m", url="http://x"))


async def test_top_k_of_zero_is_refused(ab: Anabranch, space: Space) -> None:
    with pytest.raises(AnabranchError, match="top_k is 0"):
        await ab.ask("Why?", sources=urls(space, "docs"), until=Until.MERGE, top_k=0)


async def test_without_a_model_the_documents_own_sentences_answer(ab: Anabranch, space: Space) -> None:
    space.source("policies", documents=[Document(title="Refunds", content="Refunds take 30 days. Shoes are sold.")])
    answer = await ab.ask("How long do refunds take?", sources=urls(space, "policies"))
    assert answer.model == "extractive"
    assert answer.text == "Refunds take 30 days. [1]"
    citation = answer.citations[0]
    quoted = answer.passages[citation.passage].text[citation.passage_start : citation.passage_end]
    assert quoted.rstrip(".") == "Refunds take 30 days"


async def test_a_failed_model_raises_without_a_fallback(ab: Anabranch, space: Space) -> None:
    space.fails("broken", Failure.STATUS_500)
    with pytest.raises(AnabranchError, match="500") as caught:
        await ab.ask("Why?", sources=urls(space, "docs"), model=f"{space.url}/broken", fallback=False)
    assert caught.value.code == "generation_failed"


def _asked(space: Space) -> dict[str, Any]:
    return {"sources": urls(space, "policies"), "model": f"{space.url}/broken"}


async def test_a_failed_model_is_replaced_by_quotes_that_say_so(ab: Anabranch, space: Space) -> None:
    space.fails("broken", Failure.STATUS_500)
    space.source("policies", documents=[Document(title="Refunds", content="Refunds take 30 days.")])
    question, asked = "How long do refunds take?", _asked(space)
    answer = await ab.ask(question, **asked)
    assert (answer.text, answer.model) == ("Refunds take 30 days. [1]", "extractive")
    assert answer.fallback is not None
    assert (answer.fallback.failed, answer.fallback.reason) == ("broken", "unavailable")
    assert "500" in answer.fallback.message
    async with ab.stream(question, **asked) as events:
        (fell_back,) = [event async for event in events if isinstance(event, FellBack)]
    assert fell_back.model == "extractive"


def test_the_public_names() -> None:
    assert sorted(anabranch.__all__) == anabranch.__all__
    for name in anabranch.__all__:
        assert getattr(anabranch, name) is not None


WRITTEN = "Refunds take 30 days [policies]. Labels are free. Penguins swim well [policies]."


async def test_each_sentence_of_an_answer_has_the_words_that_support_it(ab: Anabranch, space: Space) -> None:
    said = "Refunds take 30 days. Labels are free."
    space.source("policies", documents=[Document(title="Refunds", content=said)])
    space.model("writer", reply=WRITTEN)
    asked: dict[str, Any] = {"sources": [f"{space.url}/policies"], "model": f"{space.url}/writer"}
    answer = await ab.ask("What about refunds?", **asked)
    assert [sentence.verdict for sentence in answer.sentences] == ["supported", "supported", "unsupported"]
    quotes = [said[one.start : one.end] for sentence in answer.sentences for one in sentence.quotes]
    assert quotes == ["Refunds take 30 days.", "Labels are free."]
    assert answer.faithfulness == pytest.approx(2 / 3, abs=1e-4)
    assert (answer.sentences[1].added, answer.sentences[2].removed) == (1, 1)
    async with ab.stream("What about refunds?", **asked) as events:
        checked = [event.sentence async for event in events if isinstance(event, SentenceChecked)]
    assert tuple(checked) == answer.sentences


async def test_a_strict_answer_leaves_out_what_no_source_supports(ab: Anabranch, space: Space) -> None:
    space.source("policies", documents=[Document(title="Refunds", content="Refunds take 30 days. Labels are free.")])
    space.model("writer", reply=WRITTEN)
    answer = await ab.ask(
        "What about refunds?",
        sources=[f"{space.url}/policies"],
        model=f"{space.url}/writer",
        answer_policy="strict",
    )
    assert "Penguins" not in answer.text
    assert answer.text.startswith("Refunds take 30 days [policies]. Labels are free.")
    assert (answer.left_out, answer.faithfulness) == (1, 1.0)


async def test_without_verification_an_answer_has_no_sentences(ab: Anabranch, space: Space) -> None:
    answer = await ab.ask(
        "What is an anabranch?", sources=[f"{space.url}/docs"], model=f"{space.url}/scribe", verify=False
    )
    assert (answer.sentences, answer.faithfulness) == ((), None)
    assert answer.citations
