"""AGGREGATOR_VERIFIER_PATH, _URL, _MODEL and _API_KEY: another model checks the sentences of answers."""

import io
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from anabranch import Anabranch, Answer
from anabranch.app.replay import replay
from anabranch.app.startup import check
from anabranch.configuration.settings import secrets_of
from anabranch.domain.errors import ConfigurationError
from anabranch.telemetry.log import configured_log
from anabranch.testing import Document, Space, load_recording
from support.environment import loaded, opened
from support.model_servers import Said, served
from support.nli_models import THREE, nli_folder, predicting

pytestmark = pytest.mark.usefixtures("isolated_home")

DOCUMENT = "The university of Uppsala was founded in 1477. It is the oldest one in Sweden."
ANSWER = (
    "In 1477 the university of Uppsala was founded [1]. "
    "The university of Uppsala was not founded in 1477. "
    "Uppsala exports dried fish and bread to Norway."
)
CHECKED = ["supported", "contradicted", "unsupported"]


@pytest.fixture
async def uppsala() -> AsyncIterator[Space]:
    async with Space() as space:
        space.source("docs", documents=[Document(title="Uppsala", content=DOCUMENT)])
        space.model("writer", reply=ANSWER)
        yield space


async def ask(ab: Anabranch, space: Space, record: Path | None = None) -> Answer:
    return await ab.ask(
        "When was the university founded?", sources=[f"{space.url}/docs"], model=f"{space.url}/writer", record=record
    )


def verdicts(answer: Answer) -> list[str]:
    return [sentence.verdict for sentence in answer.sentences]


async def test_verifier_path_checks_the_sentences_of_answers(tmp_path: Path, uppsala: Space) -> None:
    async with opened(VERIFIER_PATH=str(nli_folder(tmp_path, THREE[::-1])), EVIDENCE="off") as ab:
        answer = await ask(ab, uppsala)
    assert verdicts(answer) == CHECKED
    assert answer.faithfulness == pytest.approx(1 / 3, abs=1e-3)
    [quote] = answer.sentences[0].quotes
    assert DOCUMENT[quote.start : quote.end] == "The university of Uppsala was founded in 1477."


async def test_verifier_url_checks_the_sentences_of_answers(uppsala: Space) -> None:
    async with served(predicting()) as server:
        verifier = {"VERIFIER_URL": server.url, "VERIFIER_MODEL": "judge", "VERIFIER_API_KEY": "sk-3"}
        async with opened(**verifier, EVIDENCE="off", VERIFY="on") as ab:
            answer = await ask(ab, uppsala)
    assert verdicts(answer) == CHECKED
    assert {asked["model"] for asked in server.asked} == {"judge"}
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer sk-3"}
    assert "sk-3" not in repr(server.asked)


@pytest.mark.parametrize("said", [500, 401, b"<html>", ConnectionResetError()], ids=repr)
async def test_an_answer_arrives_unchecked_if_the_verifier_fails(uppsala: Space, said: Said) -> None:
    async with served(said) as server, opened(VERIFIER_URL=server.url, EVIDENCE="off", RETRY_BUDGET="0") as ab:
        answer = await ask(ab, uppsala)
    assert answer.text == ANSWER
    assert [(one.verdict, one.reason) for one in answer.sentences] == [("unchecked", "unavailable")] * 3
    assert answer.faithfulness is None
    assert server.asked


async def test_verify_off_does_not_ask_the_verifier(uppsala: Space) -> None:
    async with served(predicting()) as server, opened(VERIFIER_URL=server.url, VERIFY="off") as ab:
        answer = await ask(ab, uppsala)
    assert answer.sentences == ()
    assert server.asked == []
    async with opened(VERIFIER_PATH="/nowhere", VERIFY="off"):
        pass


async def test_a_recording_has_what_the_verifier_said(tmp_path: Path, uppsala: Space) -> None:
    file = tmp_path / "run.json"
    async with served(predicting()) as server:
        verifier = {"VERIFIER_URL": server.url, "VERIFIER_API_KEY": "sk-hush-hush-1234"}
        async with opened(**verifier, EVIDENCE="off") as ab:
            answer = await ask(ab, uppsala, record=file)
    again = await replay(load_recording(file))
    assert again.same_as(load_recording(file))
    assert verdicts(answer) == CHECKED
    assert b"sk-hush" not in file.read_bytes()


def test_a_folder_without_a_verifier_stops_the_start(tmp_path: Path) -> None:
    log = configured_log(loaded(), io.StringIO())
    with pytest.raises(ConfigurationError, match="There is no verifier in"):
        check(loaded(VERIFIER_PATH=str(tmp_path / "none")), log)
    nli_folder(tmp_path, ("LABEL_0", "LABEL_1", "LABEL_2"))
    with pytest.raises(ConfigurationError, match="has the labels 'LABEL_0', 'LABEL_1', 'LABEL_2'"):
        check(loaded(VERIFIER_PATH=str(tmp_path)), log)
    check(loaded(VERIFIER_PATH=str(nli_folder(tmp_path))), log)


def test_verify_on_with_a_verifier_needs_no_embedding_model(tmp_path: Path) -> None:
    without = {"VERIFY": "on", "MODELS_DIR": str(tmp_path / "empty")}
    log = configured_log(loaded(), io.StringIO())
    with pytest.raises(ConfigurationError, match="AGGREGATOR_VERIFY=on needs the embedding model"):
        check(loaded(**without), log)
    check(loaded(**without, VERIFIER_URL="http://host"), log)
    check(loaded(**without, VERIFIER_PATH=str(nli_folder(tmp_path / "nli"))), log)


def test_the_api_key_of_the_verifier_is_a_secret() -> None:
    assert "sk-hush-hush-1234" in secrets_of(loaded(VERIFIER_URL="http://host", VERIFIER_API_KEY="sk-hush-hush-1234"))
