"""AGGREGATOR_EVIDENCE and AGGREGATOR_EVIDENCE_PASSAGES."""

import asyncio
import io
from pathlib import Path

import pytest

from anabranch.app.startup import check
from anabranch.configuration.settings import Settings, load
from anabranch.domain.errors import ConfigurationError
from anabranch.domain.evidence import Evidence
from anabranch.models.factory import evidence_for
from anabranch.telemetry.log import configured_log
from anabranch.testing import ManualClock, Recorder
from anabranch.testing.contracts.evidence import NEAR, QUESTION
from support.environment import loaded

pytestmark = pytest.mark.usefixtures("isolated_home")

MODEL = {"MODEL_URL": "http://127.0.0.1:9"}
EMBEDDINGS = {"EMBEDDING_URL": "http://127.0.0.1:9", "EMBEDDING_MODEL": "remote"}


def configured(settings: Settings) -> Evidence | None:
    return evidence_for(settings, ManualClock(), Recorder())


@pytest.mark.parametrize(
    ("variables", "used"),
    [
        ({}, True),
        (MODEL, False),
        ({"EVIDENCE": "auto", **MODEL}, False),
        ({"EVIDENCE": "on", **MODEL}, True),
        ({"EVIDENCE": "off"}, False),
        ({"EVIDENCE": "off", **MODEL}, False),
    ],
)
def test_evidence_decides_whether_the_evidence_model_is_used(variables: dict[str, str], used: bool) -> None:
    assert (configured(loaded(**variables)) is not None) == used


def test_a_model_in_the_file_counts_as_a_language_model(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("models: {writer: {url: 'http://127.0.0.1:9', slug: writer, kind: openai}}\n")
    assert configured(load({}, file)) is None


@pytest.mark.parametrize(("written", "meant"), [("on", "on"), ("off", "off"), ("'on'", "on"), ("auto", "auto")])
def test_on_and_off_need_no_quotes_in_the_file(tmp_path: Path, written: str, meant: str) -> None:
    file = tmp_path / "evidence.yaml"
    file.write_text(f"settings: {{evidence: {written}}}\n")
    assert load({}, file).evidence == meant


def test_evidence_passages_is_from_1_to_25() -> None:
    assert [loaded(EVIDENCE_PASSAGES=given).evidence_passages for given in ("1", "25")] == [1, 25]
    with pytest.raises(ConfigurationError, match="takes a whole number from 1 to 25, not '26'"):
        loaded(EVIDENCE_PASSAGES="26")


@pytest.mark.parametrize("embeddings", [{}, EMBEDDINGS], ids=["local embeddings", "remote embeddings"])
def test_where_the_word_vectors_are_not_installed_auto_reads_nothing_and_on_says_what_to_run(
    embeddings: dict[str, str],
) -> None:
    auto, on = (configured(loaded(EVIDENCE=given, **embeddings)) for given in ("auto", "on"))
    assert auto is not None
    assert on is not None
    assert asyncio.run(auto.read(QUESTION, [(NEAR,)])) == [None]
    with pytest.raises(ConfigurationError, match="Run: "):
        asyncio.run(on.read(QUESTION, [(NEAR,)]))


def test_a_server_with_evidence_on_does_not_start_without_the_word_vectors() -> None:
    for given in ("auto", "off"):
        settings = loaded(EVIDENCE=given, LOG_LEVEL="ERROR")
        check(settings, configured_log(settings, io.StringIO()))
    settings = loaded(EVIDENCE="on")
    with pytest.raises(ConfigurationError, match=r"^AGGREGATOR_EVIDENCE=on needs .* Run: anabranch models install$"):
        check(settings, configured_log(settings, io.StringIO()))
