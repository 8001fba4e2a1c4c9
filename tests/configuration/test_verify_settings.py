"""AGGREGATOR_VERIFY and AGGREGATOR_MIN_FAITHFULNESS."""

import io
from pathlib import Path
from typing import Any

import pytest

from anabranch import Answered, SentenceChecked, Token, Until
from anabranch.app.questions import Options, SearchScope
from anabranch.app.startup import check
from anabranch.configuration.settings import load
from anabranch.domain.errors import ConfigurationError
from anabranch.telemetry.log import configured_log
from anabranch.testing import Document, Space
from support.environment import loaded, opened

pytestmark = pytest.mark.usefixtures("isolated_home")

QUESTION = "How long do refunds take?"


@pytest.mark.parametrize(
    ("given", "checked"),
    [
        ("auto", {"ask", "query", "rag", "mcp", "planner"}),
        ("on", {"ask", "query", "rag", "mcp", "planner", "chat"}),
        ("off", set()),
    ],
)
async def test_verify_decides_where_sentences_are_checked(given: str, checked: set[str]) -> None:
    # As the variable does; whether the models are installed does not matter here.
    async with opened(VERIFY=given) as anabranch:
        questions, scope, none = anabranch.questions, SearchScope(), Options()
        asked = {
            "ask": await questions.library("x", [], None, (), None, None, Until.GENERATE),
            "query": questions.query("x", scope, (), none),
            "rag": questions.rag("x", scope, (), none),
            "mcp": questions.ask_tool("x", scope, none),
            "planner": questions.documentation(),
            "chat": questions.chat("x", (), anabranch.model, (), none),
        }
        assert {name for name, question in asked.items() if question.verify} == checked
        for wanted in (True, False):
            assert questions.query("x", scope, (), Options(verify=wanted)).verify == wanted
        assert questions.chat("x", (), anabranch.model, (), Options(answer_policy="strict")).verify


@pytest.mark.parametrize(("written", "meant"), [("on", "on"), ("off", "off"), ("auto", "auto")])
def test_verify_and_its_minimum_in_the_file(tmp_path: Path, written: str, meant: str) -> None:
    file = tmp_path / "verify.yaml"
    file.write_text(f"settings: {{verify: {written}, min_faithfulness: 0.8}}\n")
    settings = load({}, file)
    assert (settings.verify, settings.min_faithfulness) == (meant, 0.8)


def test_verify_on_needs_the_word_vectors(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="AGGREGATOR_VERIFY=on needs the embedding model"):
        check(loaded(VERIFY="on", MODELS_DIR=str(tmp_path)), configured_log(loaded(), io.StringIO()))


@pytest.mark.parametrize("given", ["-0.1", "1.1", "much"])
def test_the_minimum_of_faithfulness_is_from_0_to_1(given: str) -> None:
    with pytest.raises(ConfigurationError, match="AGGREGATOR_MIN_FAITHFULNESS"):
        loaded(MIN_FAITHFULNESS=given)
    assert [loaded(MIN_FAITHFULNESS=fine).min_faithfulness for fine in ("0", "1")] == [0.0, 1.0]


async def test_an_answer_below_the_minimum_is_withheld_and_a_streamed_one_is_flagged(space: Space) -> None:
    space.source("policies", documents=[Document(title="Refunds", content="Refunds take 30 days.")])
    space.model("writer", reply="Refunds take 30 days [1]. Penguins swim very well. Lions sleep under trees.")
    asked: dict[str, Any] = {"sources": [f"{space.url}/policies"], "model": f"{space.url}/writer"}
    async with opened(MIN_FAITHFULNESS="0.5") as anabranch:
        answer = await anabranch.ask(QUESTION, **asked)
        async with anabranch.stream(QUESTION, **asked) as stream:
            events = [event async for event in stream]
    assert (answer.refused, answer.unfaithful, answer.sentences, answer.citations) == (True, True, (), ())
    assert answer.text == "The answer was withheld: the sources support only 33% of its sentences."
    assert "Penguins" in "".join(event.text for event in events if isinstance(event, Token))
    assert sum(isinstance(event, SentenceChecked) for event in events) == 3
    (end,) = [event.answer for event in events if isinstance(event, Answered)]
    assert (end.refused, end.unfaithful, end.faithfulness) == (False, True, 0.3333)
    async with opened(MIN_FAITHFULNESS="0.3") as anabranch:
        assert not (await anabranch.ask(QUESTION, **asked)).unfaithful
