"""The evidence model: what it reads, its limits, and what is said when it is not there."""

import asyncio
import hashlib
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper

from anabranch.domain.contracts import Clock, SystemClock
from anabranch.domain.errors import ConfigurationError
from anabranch.domain.evidence import ClaimChecker, Evidence, EvidencePage, ReadableUnit, Reading, Verdict
from anabranch.domain.signals import CacheLookup, EvidenceJudged, EvidenceUnavailable
from anabranch.models.evidence import (
    CLAIMS_FILE,
    CLAIMS_SHA256,
    FILE,
    MAX_ANSWER_TOKENS,
    SHA256,
    EvidenceMissing,
    OnnxClaims,
    OnnxEvidence,
    WordTable,
    best_span,
)
from anabranch.models.evidence_input import JOINT, SINGLE, UnitPlace
from anabranch.models.factory import LocalClaims, LocalEvidence
from anabranch.models.minilm import ModelMissing, read
from anabranch.policies.cache import CachedClaims, CachedEvidence
from anabranch.testing import FakeEvidence, ManualClock, Recorder
from anabranch.testing.contracts.evidence import FAR, NEAR, QUESTION, ClaimCheckerContract, EvidenceContract, page
from support.evidence_model import ModelFile, word_overlap_model

WHAT_TO_RUN = "Run: anabranch models install"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    return word_overlap_model(tmp_path_factory.mktemp("evidence"))


@pytest.fixture(scope="module")
def onnx_evidence(models_dir: Path, tiny: ModelFile) -> OnnxEvidence:
    return OnnxEvidence(models_dir, threads=2, file=tiny.file, sha256=tiny.sha256)


@pytest.fixture(scope="module")
def shipped(models_dir: Path) -> OnnxEvidence:
    return OnnxEvidence(models_dir, threads=2)


@pytest.fixture(scope="module")
def shipped_claims(models_dir: Path) -> OnnxClaims:
    return OnnxClaims(models_dir, threads=2)


class TestFakeEvidence(EvidenceContract):
    @pytest.fixture
    def evidence(self) -> Evidence:
        return FakeEvidence()


class TestFakeClaims(ClaimCheckerContract):
    @pytest.fixture
    def checker(self) -> ClaimChecker:
        return FakeEvidence()


class TestShippedClaims(ClaimCheckerContract):
    @pytest.fixture
    def checker(self, shipped_claims: OnnxClaims) -> ClaimChecker:
        return shipped_claims


class TestCachedClaims(ClaimCheckerContract):
    @pytest.fixture
    def checker(self) -> ClaimChecker:
        return CachedClaims(FakeEvidence(), SystemClock(), Recorder())


class TestOnnxEvidence(EvidenceContract):
    @pytest.fixture
    def evidence(self, onnx_evidence: OnnxEvidence) -> Evidence:
        return onnx_evidence


class TestCachedEvidence(EvidenceContract):
    @pytest.fixture
    def evidence(self, onnx_evidence: OnnxEvidence) -> Evidence:
        return CachedEvidence(onnx_evidence, SystemClock(), Recorder())


class TestShippedEvidence(EvidenceContract):
    @pytest.fixture
    def evidence(self, shipped: OnnxEvidence) -> Evidence:
        return shipped


# --- what it reads


async def answer(evidence: Evidence, question: str, *pages: EvidencePage) -> str:
    [reading] = await evidence.read(question, [pages])
    assert reading is not None
    assert reading.answer is not None
    found = reading.answer
    return pages[found.page].units[found.unit].text[found.start : found.end]


async def test_the_shipped_model_finds_an_answer_and_knows_when_there_is_none(shipped: OnnxEvidence) -> None:
    oslo = page("Oslo", "Oslo is the capital of Norway.", "It was founded in 1040 by Harald Hardrada.")
    assert "1040" in await answer(shipped, "When was Oslo founded?", oslo)
    assert "Harald" in await answer(shipped, "who founded oslo", oslo)
    there, missing = await shipped.read("Who founded Oslo?", [(oslo,), (FAR,)])
    assert there is not None
    assert missing is not None
    assert there.answerable > 0 > missing.answerable
    assert there.units[0][1] > there.units[0][0]


async def test_a_claim_longer_than_the_model_reads_says_so(shipped_claims: OnnxClaims) -> None:
    page = EvidencePage(title="Ferry", units=(ReadableUnit(text="The ferry leaves at 7."),))
    for claim, whole in (("The ferry leaves at 7.", True), ("The ferry leaves at 7" + ", and it is blue" * 40, False)):
        (verdict,) = await shipped_claims.check(claim, [(page,)])
        assert verdict is not None
        assert verdict.whole is whole


async def test_the_shipped_model_checks_claims(shipped_claims: OnnxClaims) -> None:
    oslo = page("Oslo", "Oslo is the capital of Norway.", "It was founded in 1040 by Harald Hardrada.")
    claim = "Oslo was founded by Harald Hardrada in 1040."
    [right] = await shipped_claims.check(claim, [(oslo,)])
    [wrong] = await shipped_claims.check(claim.replace("1040", "1140"), [(oslo,)])
    [unknown] = await shipped_claims.check("Oslo has two airports.", [(oslo,)])
    assert right is not None
    assert wrong is not None
    assert unknown is not None
    assert right.supported > 0.5 > max(wrong.supported, unknown.supported)
    assert wrong.contradicted > unknown.contradicted
    assert right.units[1] > right.units[0]
    doubted = max(wrong.words, key=lambda word: word[2])
    assert claim[doubted[0] : doubted[1]] == "1040"


def test_word_vectors_are_those_of_the_embedding_model(models_dir: Path) -> None:
    file = read(models_dir).model
    weights = {each.name: each for each in onnx.load(file).graph.initializer}
    words = numpy_helper.to_array(weights["words"]).astype(np.float32) * numpy_helper.to_array(weights["words.scales"])
    table = WordTable(file)
    ids = np.array([0, 1, 2, 101, 102, 2003, len(words) - 1], np.int32)
    assert np.array_equal(table[ids], words[ids])
    assert table[ids].dtype == np.float32


async def test_several_pages_have_more_room_than_one(onnx_evidence: OnnxEvidence) -> None:
    """A unit of one token takes two: its marker, too."""
    units = ["Fish"] * 300
    single, joint = await onnx_evidence.read("?", [(page("", *units),), (page("", *units), page("", "Cod"))])
    assert single is not None
    assert joint is not None
    assert 2 * len(single.units[0]) in range(SINGLE - 10, SINGLE)
    assert 2 * len(joint.units[0]) in range(JOINT - 10, JOINT)
    assert joint.units[1:] == ((),), "there was no room for the second page"


async def test_text_before_a_unit_is_read_and_not_chosen(onnx_evidence: OnnxEvidence) -> None:
    with_heading = page("", "It is dried.", before="Stockfish")
    assert await answer(onnx_evidence, "stockfish", with_heading) in with_heading.units[0].text
    plain, headed = await onnx_evidence.read("stockfish", [(page("", "It is dried."),), (with_heading,)])
    assert plain is not None
    assert headed is not None
    assert headed.relevance > plain.relevance


async def test_an_answer_is_whole_words_of_one_unit(onnx_evidence: OnnxEvidence) -> None:
    """The tokens that the question shares are only parts of the text's words: ##bra ##nch, ##rem ##ark."""
    text = "Unremarkable, said Dr. Anabranchington."
    for question in ("zbranch", "qremark"):
        [reading] = await onnx_evidence.read(question, [(page("", text),)])
        assert reading is not None
        assert reading.answer is not None
        words = [found.span() for found in re.finditer(r"\w+|[,.]", text)]
        assert reading.answer.start in {start for start, _ in words}
        assert reading.answer.end in {end for _, end in words}


@given(
    st.lists(st.floats(-9, 9), min_size=40, max_size=40),
    st.lists(st.floats(-9, 9), min_size=40, max_size=40),
    st.lists(st.integers(0, 39), min_size=0, max_size=5, unique=True),
)
def test_the_best_span_is_found(start: list[float], end: list[float], markers: list[int]) -> None:
    markers.sort()
    places = [
        UnitPlace(0, number, marker, stop)
        for number, (marker, stop) in enumerate(zip(markers, [*markers[1:], 40], strict=False))
    ]
    every = [
        (start[first] + end[last], first, last)
        for place in places
        for first in range(place.marker + 1, place.end)
        for last in range(first, min(place.end, first + MAX_ANSWER_TOKENS))
    ]
    found = best_span(np.array(start), np.array(end), places)
    assert (found is None) == (not every)
    if found is not None:
        assert start[found[1]] + end[found[2]] == max(score for score, _, _ in every)
        assert (found[1], found[2]) in {(first, last) for _, first, last in every}
        assert found[0].marker < found[1] <= found[2] < found[0].end


# --- time, threads, cancellation


class Gate:
    """A clock that the model asks before each input. It lets only as many pass as the test has let in; the time is how
    many have passed."""

    def __init__(self, passes: int = 0) -> None:
        self._passes = threading.Semaphore(passes)
        self.passed = 0

    def monotonic(self) -> float:
        self._passes.acquire()
        self.passed += 1
        return self.passed

    def let_in(self, count: int) -> None:
        self._passes.release(count)


def gated(models_dir: Path, tiny: ModelFile, gate: Clock) -> OnnxEvidence:
    return OnnxEvidence(models_dir, file=tiny.file, sha256=tiny.sha256, clock=gate)


async def test_inputs_are_read_in_order_until_the_time_is_over(models_dir: Path, tiny: ModelFile) -> None:
    slow = gated(models_dir, tiny, Gate(passes=100))
    readings = await slow.read(QUESTION, [(NEAR,)] * 8, until=4.5)
    assert [reading is not None for reading in readings] == [True] * 4 + [False] * 4


async def test_a_call_with_many_inputs_does_not_hold_up_another(models_dir: Path, tiny: ModelFile) -> None:
    gate = Gate()
    slow = gated(models_dir, tiny, gate)
    long = asyncio.create_task(slow.read(QUESTION, [(NEAR,)] * 10, until=1000))
    await asyncio.sleep(0)
    short = asyncio.create_task(slow.read(QUESTION, [(FAR,)], until=1000))
    await asyncio.sleep(0)
    gate.let_in(2)
    assert [reading is not None for reading in await short] == [True]
    assert not long.done()
    gate.let_in(9)
    assert None not in await long
    assert gate.passed == 11


async def test_a_cancelled_call_ends_with_the_input_that_is_being_read(models_dir: Path, tiny: ModelFile) -> None:
    gate = Gate()
    slow = gated(models_dir, tiny, gate)
    cancelled = asyncio.create_task(slow.read(QUESTION, [(NEAR,)] * 10, until=1000))
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    gate.let_in(100)
    assert None not in await slow.read(QUESTION, [(NEAR,)], until=1000)
    assert gate.passed <= 2


# --- the cache


class Counted:
    """Counts the inputs that get to the evidence behind the cache."""

    def __init__(self, *, limit: int = 64) -> None:
        self.inner = FakeEvidence(limit=limit)
        self.inputs = 0

    async def read(
        self, question: str, inputs: Sequence[tuple[EvidencePage, ...]], *, until: float | None = None
    ) -> Sequence[Reading | None]:
        self.inputs += len(inputs)
        return await self.inner.read(question, inputs, until=until)

    async def check(
        self, claim: str, inputs: Sequence[tuple[EvidencePage, ...]], *, until: float | None = None
    ) -> Sequence[Verdict | None]:
        self.inputs += len(inputs)
        return await self.inner.check(claim, inputs, until=until)


async def test_passages_are_read_once_for_a_question() -> None:
    counted, recorder = Counted(), Recorder()
    cached = CachedEvidence(counted, ManualClock(), recorder)
    first = await cached.read(QUESTION, [(NEAR,), (FAR,)])
    again = await cached.read(QUESTION, [(FAR,), (NEAR,), (NEAR, FAR)])
    assert [*again][:2] == [*first][::-1]
    assert counted.inputs == 3
    lookups = [signal.hit for signal in recorder.signals if isinstance(signal, CacheLookup)]
    assert lookups == [False, False, True, True, False]
    judged = [signal for signal in recorder.signals if isinstance(signal, EvidenceJudged)]
    assert [(signal.task, signal.passages) for signal in judged] == [("read", 2), ("read", 2)]


async def test_every_part_of_an_input_counts_in_the_cache() -> None:
    counted = Counted()
    cached = CachedEvidence(counted, ManualClock(), Recorder())
    inputs = [
        (page("a", "b"),),
        (page("b", "a"),),
        (page("a", "b", before="c"),),
        (page("a", "c", before="b"),),
        (page("a", "b", "c"),),
        (page("a", "bc"),),
        (page("ab", ""),),
        (page("a", "b"), page("c")),
        (page("a", "b", "c"), page("")),
        (page("a"), page("b")),
        (page("a", "\ud83d"),),
        (),
    ]
    for _ in range(2):
        await cached.read("q", inputs)
        await cached.read("q2", inputs)
    assert counted.inputs == 2 * len(inputs)


async def test_what_was_not_read_is_tried_again() -> None:
    counted = Counted(limit=1)
    cached = CachedEvidence(counted, ManualClock(), Recorder())
    inputs = [(NEAR,), (FAR,)]
    assert [reading is None for reading in await cached.read(QUESTION, inputs)] == [False, True]
    assert None not in await cached.read(QUESTION, inputs)
    assert counted.inputs == 3


async def test_the_cache_is_bounded() -> None:
    counted = Counted()
    cached = CachedEvidence(counted, ManualClock(), Recorder(), max_bytes=20_000)
    inputs = [(page(str(number), "Fish."),) for number in range(60)]
    await cached.read(QUESTION, inputs)
    await cached.read(QUESTION, inputs[-1:])
    assert counted.inputs == 60
    await cached.read(QUESTION, inputs[:1])
    assert counted.inputs == 61


# --- loading


def test_another_file_is_not_loaded(models_dir: Path, tiny: ModelFile, tmp_path: Path) -> None:
    with pytest.raises(EvidenceMissing, match=r"is not in this installation.*pip install"):
        OnnxEvidence(models_dir, file=tmp_path / "none.onnx", sha256=tiny.sha256)
    damaged = tmp_path / "damaged.onnx"
    damaged.write_bytes(tiny.file.read_bytes() + b"\0")
    with pytest.raises(EvidenceMissing, match=r"is damaged.*pip install"):
        OnnxEvidence(models_dir, file=damaged, sha256=tiny.sha256)


def test_the_hash_in_the_code_is_that_of_the_file() -> None:
    for file, expected in ((FILE, SHA256), (CLAIMS_FILE, CLAIMS_SHA256)):
        assert (hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else "") == expected


def test_without_the_embedding_model_the_error_says_what_to_run(tiny: ModelFile, tmp_path: Path) -> None:
    with pytest.raises(ModelMissing, match="Run: anabranch models install"):
        OnnxEvidence(tmp_path, file=tiny.file, sha256=tiny.sha256)


async def test_where_it_cannot_be_loaded_nothing_is_read_unless_it_is_required(tmp_path: Path) -> None:
    recorder = Recorder()
    optional, required = (LocalEvidence(tmp_path, 1, recorder, required=required) for required in (False, True))
    assert await optional.read(QUESTION, [(NEAR,), (FAR,)]) == [None, None]
    [signal] = recorder.signals
    assert isinstance(signal, EvidenceUnavailable)
    assert WHAT_TO_RUN in signal.reason
    with pytest.raises(ConfigurationError, match=WHAT_TO_RUN):
        await required.read(QUESTION, [(NEAR,)])
    claims, needed = (LocalClaims(tmp_path, 1, Recorder(), required=required) for required in (False, True))
    assert await claims.check(QUESTION, [(NEAR,)]) == [None]
    with pytest.raises(ConfigurationError, match=WHAT_TO_RUN):
        await needed.check(QUESTION, [(NEAR,)])


def test_nothing_is_loaded_before_the_first_question() -> None:
    code = (
        "import asyncio, sys\n"
        "from anabranch.configuration.settings import Settings\n"
        "from anabranch.models.factory import evidence_for\n"
        "from anabranch.testing import ManualClock, Recorder\n"
        "async def use():\n"
        "    async with evidence_for(Settings(evidence='on'), ManualClock(), Recorder()) as evidence:\n"
        "        assert evidence\n"
        "asyncio.run(use())\n"
        "print([name for name in ('numpy', 'onnx', 'onnxruntime', 'tokenizers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
