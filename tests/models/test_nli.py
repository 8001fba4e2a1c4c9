"""External NLI models, local and remote, as claim checkers."""

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from itertools import permutations
from pathlib import Path

import msgspec
import pytest

from anabranch.domain.contracts import Clock
from anabranch.domain.errors import ConfigurationError, UpstreamError
from anabranch.domain.evidence import ClaimChecker, Verdict
from anabranch.domain.signals import EvidenceUnavailable
from anabranch.models.cross_encoder import CrossEncoder
from anabranch.models.factory import ExternalClaims
from anabranch.models.nli import PAUSE_S, NliEndpoint, OnnxNli, predict_url, premise
from anabranch.models.remote import ModelServer
from anabranch.testing import ManualClock, Recorder
from anabranch.testing.contracts.evidence import FAR, NEAR, ClaimCheckerContract, page
from support.model_servers import Served, served
from support.nli_models import THREE, TWO, nli_folder, predicting

TRUE, OPPOSITE, OTHER = "The university was founded.", "The university was not founded.", "Bread is wet."


def endpoint(
    server: Served, model: str = "", timeout_s: float = 5.0, clock: Clock | None = None, api_key: str = "key"
) -> NliEndpoint:
    client = ModelServer(
        predict_url(server.url), server.outbound, api_key=api_key, timeout_s=timeout_s, sleep=server.sleep
    )
    return NliEndpoint(client, model, clock)


class TestLocal(ClaimCheckerContract):
    @pytest.fixture
    async def checker(self, tmp_path: Path) -> AsyncIterator[ClaimChecker]:
        model = OnnxNli(nli_folder(tmp_path), threads=2)
        yield model
        await model.close()


class TestRemote(ClaimCheckerContract):
    @pytest.fixture
    async def checker(self) -> AsyncIterator[ClaimChecker]:
        async with served(predicting()) as server:
            yield endpoint(server)


async def verdicts(checker: ClaimChecker) -> list[str]:
    """The most probable of each claim's three."""
    found = []
    for claim in (TRUE, OPPOSITE, OTHER):
        [verdict] = await checker.check(claim, [(NEAR,)])
        assert verdict is not None
        found.append(max(("supported", "unknown", "contradicted"), key=lambda name: float(getattr(verdict, name))))
    return found


# --- a local model


@pytest.mark.parametrize("labels", list(permutations(THREE)))
async def test_the_labels_of_a_local_model_may_be_in_any_order(tmp_path: Path, labels: tuple[str, ...]) -> None:
    model = OnnxNli(nli_folder(tmp_path, labels))
    assert await verdicts(model) == ["supported", "contradicted", "unknown"]
    await model.close()


@pytest.mark.parametrize("labels", [TWO, TWO[::-1]])
async def test_a_local_model_with_two_labels_contradicts_nothing(tmp_path: Path, labels: tuple[str, ...]) -> None:
    model = OnnxNli(nli_folder(tmp_path, labels))
    assert await verdicts(model) == ["supported", "unknown", "unknown"]
    [verdict] = await model.check(OPPOSITE, [(NEAR,)])
    assert verdict is not None
    assert verdict.contradicted == 0.0
    await model.close()


@pytest.mark.parametrize(
    "names", [("CONTRADICTION", "Neutral", "ENTAILMENT"), ("refutes", "Not Enough Info", "SUPPORTS")]
)
async def test_labels_may_be_written_in_other_ways(tmp_path: Path, names: tuple[str, ...]) -> None:
    model = OnnxNli(nli_folder(tmp_path, names, outputs=("contradiction", "neutral", "entailment")))
    assert await verdicts(model) == ["supported", "contradicted", "unknown"]
    await model.close()


async def test_a_model_of_an_export_with_an_onnx_folder_is_found(tmp_path: Path) -> None:
    nli_folder(tmp_path)
    (tmp_path / "onnx").mkdir()
    (tmp_path / "model.onnx").rename(tmp_path / "onnx" / "model.onnx")
    for path in (tmp_path, tmp_path / "onnx" / "model.onnx"):
        model = OnnxNli(path)
        assert (await verdicts(model))[0] == "supported"
        await model.close()


def config(**fields: object) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(json.dumps(fields))


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda folder: (folder / "model.onnx").unlink(), "There is no verifier in .* needs model.onnx"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json beside"),
        (lambda folder: (folder / "config.json").unlink(), "it needs config.json beside"),
        (lambda folder: (folder / "config.json").write_bytes(b"\xff{"), r"config\.json cannot be read"),
        (lambda folder: (folder / "config.json").write_bytes(b"[" * 100_000), r"config\.json cannot be read"),
        (config(), r"config\.json cannot be read"),
        (config(id2label={}), r"config\.json cannot be read"),
        (config(id2label={"0": "entailment"}), r"config\.json cannot be read"),
        (config(id2label={str(number): "neutral" for number in range(99)}), r"config\.json cannot be read"),
        (
            config(id2label={"0": "LABEL_0", "1": "LABEL_1"}),
            r"has the labels 'LABEL_0', 'LABEL_1'\. It must have entailment, neutral",
        ),
        (config(id2label={"0": "neutral", "1": "contradiction"}), "has the labels 'neutral', 'contradiction'"),
        (config(id2label={"1": "neutral", "2": "entailment"}), "It must have entailment, neutral and"),
        (config(id2label={"0": "entailment", "1": "not_entailment"}), "3 numbers, but config.json has 2 labels"),
        (lambda folder: (folder / "model.onnx").write_bytes(b"nonsense"), "cannot be loaded"),
    ],
)
def test_a_folder_that_has_no_usable_verifier_is_refused(
    tmp_path: Path, spoil: Callable[[Path], object], complaint: str
) -> None:
    spoil(nli_folder(tmp_path))
    with pytest.raises(ConfigurationError, match=complaint):
        OnnxNli(tmp_path)


async def test_a_long_text_is_truncated_and_the_claim_is_not(tmp_path: Path) -> None:
    model = OnnxNli(nli_folder(tmp_path, max_position_embeddings=40))
    [verdict] = await model.check("The river is wet.", [(page("", "The river is wet. " + "sand " * 5_000),)])
    assert verdict is not None
    assert verdict.supported > 0.5
    await model.close()


def test_special_tokens_in_a_document_are_text(tmp_path: Path) -> None:
    model = CrossEncoder(nli_folder(tmp_path), "verifier")
    attacked = model.encode("Bread. [SEP] The river is wet. [CLS]", "The river is wet.")
    assert attacked.tokens.count("[SEP]") == 2
    assert attacked.tokens.count("[CLS]") == 1


def test_the_premise_is_the_title_the_headings_and_the_units() -> None:
    pages = (page("Uppsala > History", "It was founded\nin 1477.", before="Founding"), page("", "", "Salt."))
    assert premise(pages) == "Uppsala > History\nFounding\nIt was founded in 1477.\nSalt."


# --- a server


async def test_a_server_is_asked_with_pairs_of_text_and_claim() -> None:
    async with served(predicting(TWO)) as server:
        await endpoint(server, "judge").check(TRUE, [(NEAR,), (FAR,)])
        await endpoint(server, api_key="").check(TRUE, [(FAR,)])
    assert server.asked[0] == {
        "inputs": [[premise((NEAR,)), TRUE], [premise((FAR,)), TRUE]],
        "truncate": True,
        "model": "judge",
    }
    assert "model" not in server.asked[1]
    assert server.paths[0] == "/predict"
    assert server.headers[0]["Authorization"] == "Bearer key"
    assert "Authorization" not in server.headers[1]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [(THREE, "contradicted"), (THREE[::-1], "contradicted"), (TWO, "unknown"), (TWO[::-1], "unknown")],
)
async def test_a_server_may_have_two_or_three_labels(labels: tuple[str, ...], expected: str) -> None:
    async with served(predicting(labels)) as server:
        assert await verdicts(endpoint(server)) == ["supported", expected, "unknown"]


async def test_what_a_server_leaves_out_is_unknown() -> None:
    async with served(b'[[{"label": "CONTRADICTION", "score": 0.75}]]') as server:
        [verdict] = await endpoint(server).check(TRUE, [(NEAR,)])
    assert verdict == Verdict(supported=0.0, unknown=0.25, contradicted=0.75)


async def test_many_pairs_are_sent_in_batches_within_the_limits_of_a_call() -> None:
    async with served(predicting()) as server:
        found = await endpoint(server).check(TRUE, [(page(str(number), "Salt."),) for number in range(200)])
    assert [len(asked["inputs"]) for asked in server.asked] == [32, 32]
    assert [verdict is not None for verdict in found] == [True] * 64 + [False] * 136


async def test_blank_texts_and_claims_are_not_sent() -> None:
    async with served(predicting()) as server:
        found = [
            *await endpoint(server).check(" \n", [(NEAR,)]),
            *await endpoint(server).check(TRUE, [(), (page("", " "),)]),
        ]
    assert found == [Verdict(supported=0.0, unknown=1.0, contradicted=0.0)] * 3
    assert server.asked == []


@pytest.mark.parametrize(
    ("given", "called"),
    [
        ("http://h", "http://h/predict"),
        ("http://h/", "http://h/predict"),
        ("http://h/nli/predict", "http://h/nli/predict"),
    ],
)
def test_a_verifier_url_may_be_host_or_full_path(given: str, called: str) -> None:
    assert predict_url(given) == called


def result(*pairs: tuple[object, object]) -> bytes:
    return msgspec.json.encode([[{"label": label, "score": score} for label, score in pairs]])


HOSTILE = [
    ("is not a list of labels", b"<html>"),
    ("is not a list of labels", b"[" * 100_000),
    ("is not a list of labels", b'{"error": "no"}'),
    ("is not a list of labels", b'[{"label": "entailment", "score": 1}]'),
    ("is not a list of labels", b'[[{"label": "entailment", "score": NaN}]]'),
    ("is not a list of labels", result(("entailment", "0.9"))),
    ("is not a list of labels", result(("entailment", -0.1))),
    ("is not a list of labels", result(("entailment", 7.3), ("neutral", -2.0))),
    ("is not a list of labels", result((None, 0.9))),
    ("has results for 0 pairs, not for the 1", b"[]"),
    ("has results for 2 pairs, not for the 1", b"[[],[]]"),
    ("must be entailment, neutral and contradiction", b"[[]]"),
    ("has the labels 'LABEL_0', 'LABEL_1'", result(("LABEL_0", 0.9), ("LABEL_1", 0.1))),
    ("has the labels 'positive', 'entailment'", result(("positive", 0.9), ("entailment", 0.1))),
    ("must be entailment, neutral and contradiction", result(("entailment", 0.4), ("entailment", 0.4))),
    ("not the probabilities of one choice", result(("entailment", 0.9), ("neutral", 0.9))),
    ("larger than", b" " * 5_000_000),
]


@pytest.mark.parametrize(("complaint", "reply"), HOSTILE)
async def test_hostile_replies_of_a_server_fail_clearly(complaint: str, reply: bytes) -> None:
    async with served(reply) as server:
        with pytest.raises(UpstreamError, match=complaint) as failed:
            await endpoint(server).check(TRUE, [(NEAR,)])
    assert "(AGGREGATOR_VERIFIER_URL)" in failed.value.message
    assert len(failed.value.message) < 500


async def test_a_busy_server_is_retried_and_a_refusal_is_not() -> None:
    async with served(ConnectionResetError(), 503, predicting()) as server:
        assert (await endpoint(server).check(TRUE, [(NEAR,)]))[0] is not None
        assert len(server.slept) == 2
    async with served(401) as server:
        with pytest.raises(UpstreamError, match=r"The verifier \(AGGREGATOR_VERIFIER_URL\) .*No luck today"):
            await endpoint(server).check(TRUE, [(NEAR,)])
        assert server.slept == []


async def test_after_a_failure_a_server_is_left_alone_for_a_while() -> None:
    clock = ManualClock()
    async with served(500, 500, 500, 500, predicting()) as server:
        checker = endpoint(server, clock=clock)
        with pytest.raises(UpstreamError, match="No luck today"):
            await checker.check(TRUE, [(NEAR,)])
        assert await checker.check(TRUE, [(NEAR,)]) == [None]
        assert len(server.asked) == 4
        clock.advance(PAUSE_S)
        assert (await checker.check(TRUE, [(NEAR,)]))[0] is not None


async def test_the_sentences_of_an_answer_do_not_wait_for_a_silent_server_one_after_the_other() -> None:
    clock = ManualClock()
    async with served(None) as server:
        client = ModelServer(predict_url(server.url), server.outbound, sleep=server.sleep)
        checker = NliEndpoint(client, clock=clock, limit_s=0.05)
        with pytest.raises(UpstreamError, match=r"cannot be asked: It took more than 0\.05 s"):
            await checker.check(TRUE, [(NEAR,)], until=clock.monotonic() + 60)
        for _ in range(5):
            assert await checker.check(TRUE, [(NEAR,)], until=clock.monotonic() + 60) == [None]
        assert len(server.asked) == 1


async def test_a_check_that_is_not_done_in_its_time_is_no_failure() -> None:
    clock = ManualClock()
    async with served(None, predicting()) as server:
        checker = endpoint(server, clock=clock)
        assert await checker.check(TRUE, [(NEAR,)], until=clock.monotonic() + 0.05) == [None]
        assert (await checker.check(TRUE, [(NEAR,)]))[0] is not None


# --- failures


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"<html>", "is not a list of labels"),
        (result(("LABEL_0", 0.9), ("LABEL_1", 0.1)), "LABEL_0"),
        (500, "No luck today"),
        (ConnectionResetError(), "cannot be asked"),
        (None, "did not answer within"),
    ],
    ids=["garbage", "wrong labels", "500", "broken connection", "silence"],
)
async def test_a_verifier_that_fails_checks_nothing_and_is_noted_once(
    said: int | bytes | BaseException | None, reason: str
) -> None:
    recorder, clock = Recorder(), ManualClock()
    async with served(said) as server:
        checker = ExternalClaims(lambda: endpoint(server, timeout_s=0.05, clock=clock), recorder)
        for _ in range(3):
            assert await checker.check(TRUE, [(NEAR,)]) == [None]
            clock.advance(PAUSE_S)
        await checker.close()
    [signal] = recorder.signals
    assert isinstance(signal, EvidenceUnavailable)
    assert reason in signal.reason


async def test_reasons_that_are_always_different_are_noted_a_few_times() -> None:
    recorder = Recorder()
    async with served(*(result((f"label {number}", 0.9)) for number in range(50))) as server:
        checker = ExternalClaims(lambda: endpoint(server), recorder)
        for _ in range(50):
            assert await checker.check(TRUE, [(NEAR,)]) == [None]
    assert len(recorder.signals) == 20


async def test_a_local_model_that_cannot_be_loaded_checks_nothing_and_is_noted_once(tmp_path: Path) -> None:
    recorder = Recorder()
    (nli_folder(tmp_path) / "model.onnx").write_bytes(b"nonsense")
    checker = ExternalClaims(lambda: OnnxNli(tmp_path), recorder)
    for _ in range(3):
        assert await checker.check(TRUE, [(NEAR,)]) == [None]
    await checker.close()
    [signal] = recorder.signals
    assert isinstance(signal, EvidenceUnavailable)
    assert "The verifier in" in signal.reason


def test_the_labels_of_a_folder_are_checked_without_a_model_library(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from anabranch.models.nli import read_folder\n"
        f"print(read_folder(Path({str(nli_folder(tmp_path))!r})).labels)\n"
        "print([name for name in ('numpy', 'onnx', 'onnxruntime', 'tokenizers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["('supported', 'unknown', 'contradicted')", "[]"]
