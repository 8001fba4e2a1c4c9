"""AGGREGATOR_EVIDENCE and AGGREGATOR_EVIDENCE_PASSAGES."""

import asyncio
import io
import threading
from collections.abc import Set
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from anabranch import Anabranch, Until
from anabranch.app.questions import Options, SearchScope
from anabranch.app.startup import check
from anabranch.configuration.settings import Settings, load
from anabranch.domain.errors import ConfigurationError
from anabranch.domain.evidence import Evidence
from anabranch.models.factory import evidence_for
from anabranch.telemetry.log import configured_log
from anabranch.testing import ManualClock, Recorder
from anabranch.testing.contracts.evidence import NEAR, QUESTION
from support.embedding_server import model_server
from support.environment import loaded, opened
from support.settings_collections import embedding, ready, text

pytestmark = pytest.mark.usefixtures("isolated_home")

MODEL = {"MODEL_URL": "http://127.0.0.1:9"}
EMBEDDINGS = {"EMBEDDING_URL": "http://127.0.0.1:9", "EMBEDDING_MODEL": "remote"}


def configured(settings: Settings) -> AbstractAsyncContextManager[Evidence | None]:
    return evidence_for(settings, ManualClock(), Recorder())


@pytest.mark.parametrize(
    ("variables", "ranked"),
    [
        ({}, {"ask", "query", "rag"}),
        (MODEL, set()),
        ({"EVIDENCE": "on", **MODEL}, {"ask", "query", "rag"}),
        ({"EVIDENCE": "off"}, set()),
    ],
    ids=["answers are quoted", "a language model writes", "on", "off"],
)
async def test_evidence_decides_where_passages_are_ordered_by_evidence(
    variables: dict[str, str], ranked: set[str]
) -> None:
    async with opened(**variables) as anabranch:
        questions, scope, none = anabranch.questions, SearchScope(), Options()
        asked = {
            "ask": await questions.library("x", [], None, (), None, None, Until.GENERATE),
            "query": questions.query("x", scope, (), none),
            "rag": questions.rag("x", scope, (), none),
            "chat": questions.chat("x", (), anabranch.model, (), none),
        }
        assert {name for name, question in asked.items() if question.evidence == "rank"} == ranked
        for wanted in ("rank", "off"):
            assert questions.query("x", scope, (), Options(evidence=wanted)).evidence == wanted
            assert questions.chat("x", (), anabranch.model, (), Options(evidence=wanted)).evidence == wanted


def test_a_language_model_in_the_file_orders_passages_by_score(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("models: {writer: {url: 'http://127.0.0.1:9', slug: writer, kind: openai}}\n")

    async def order() -> str:
        async with Anabranch.open(settings=load({}, file)) as anabranch:
            return anabranch.questions.query("x", SearchScope(), (), Options()).evidence

    assert asyncio.run(order()) == "off"


@pytest.mark.parametrize("given", ["auto", "on", "off"])
async def test_only_off_has_no_evidence_model(given: str) -> None:
    """It also judges quoted answers beside a language model."""
    async with configured(loaded(EVIDENCE=given, **MODEL)) as evidence:
        assert (evidence is None) == (given == "off")


@pytest.mark.parametrize(("written", "meant"), [("on", "on"), ("off", "off"), ("'on'", "on"), ("auto", "auto")])
def test_on_and_off_need_no_quotes_in_the_file(tmp_path: Path, written: str, meant: str) -> None:
    file = tmp_path / "evidence.yaml"
    file.write_text(f"settings: {{evidence: {written}}}\n")
    assert load({}, file).evidence == meant


def test_evidence_passages_is_from_1_to_25() -> None:
    assert [loaded(EVIDENCE_PASSAGES=given).evidence_passages for given in ("1", "25")] == [1, 25]
    with pytest.raises(ConfigurationError, match="takes a whole number from 1 to 25, not '26'"):
        loaded(EVIDENCE_PASSAGES="26")


@pytest.mark.parametrize("given", [2, 4])
async def test_evidence_passages_is_how_many_are_judged(models_dir: Path, given: int) -> None:
    """Nothing answers the question, so none of them ends the reading."""
    shelf = [text(f"The number {number} is on a sign at the river.") for number in range(9)]
    async with model_server() as server:
        settings = loaded(EVIDENCE_PASSAGES=str(given), MODELS_DIR=str(models_dir), **embedding(server))
        async with ready(settings, *shelf) as (anabranch, _):
            answer = await anabranch.ask("Who painted the sign at the river?", sources=["notes"], top_k=9)
    judged = [passage.evidence is not None for passage in answer.passages]
    assert judged == [True] * given + [False] * (9 - given)


@pytest.mark.parametrize("given", [1, 2])
async def test_computing_threads_compute_for_a_caller(models_dir: Path, given: int) -> None:
    """This process has a share of four: it may also use the thread that others leave free."""
    before = set(threading.enumerate())
    async with model_server() as server:
        settings = loaded(COMPUTING_THREADS=str(given), MODELS_DIR=str(models_dir), **embedding(server))
        async with ready(settings, text("The sign at the river was painted by Ada.")) as (anabranch, _):
            await asyncio.gather(*(anabranch.ask(f"Who painted sign {n}?", sources=["notes"]) for n in range(6)))
            assert len(_computing_threads(before)) == given + 1


async def test_the_threads_of_the_evidence_model_end_when_the_anabranch_is_closed(models_dir: Path) -> None:
    before = set(threading.enumerate())
    async with model_server() as server:
        settings = loaded(MODELS_DIR=str(models_dir), **embedding(server))
        async with ready(settings, text("The sign at the river was painted by Ada.")) as (anabranch, _):
            assert (await anabranch.ask("Who painted the sign?", sources=["notes"])).passages[0].evidence
            assert _computing_threads(before)
        assert not _computing_threads(before)


def _computing_threads(before: Set[threading.Thread]) -> list[str]:
    """Those that did not run before; other tests keep a model."""
    return [one.name for one in threading.enumerate() if one not in before and one.name.startswith("computations")]


@pytest.mark.parametrize("embeddings", [{}, EMBEDDINGS], ids=["local embeddings", "remote embeddings"])
async def test_where_the_word_vectors_are_not_installed_auto_reads_nothing_and_on_says_what_to_run(
    embeddings: dict[str, str],
) -> None:
    async with (
        configured(loaded(EVIDENCE="auto", **embeddings)) as auto,
        configured(loaded(EVIDENCE="on", **embeddings)) as on,
    ):
        assert auto is not None
        assert on is not None
        assert await auto.read(QUESTION, [(NEAR,)]) == [None]
        with pytest.raises(ConfigurationError, match="Run: "):
            await on.read(QUESTION, [(NEAR,)])


def test_a_server_with_evidence_on_does_not_start_without_the_word_vectors() -> None:
    for given in ("auto", "off"):
        settings = loaded(EVIDENCE=given, LOG_LEVEL="ERROR")
        check(settings, configured_log(settings, io.StringIO()))
    settings = loaded(EVIDENCE="on")
    with pytest.raises(ConfigurationError, match=r"^AGGREGATOR_EVIDENCE=on needs .* Run: anabranch models install$"):
        check(settings, configured_log(settings, io.StringIO()))
