"""`anabranch eval answers`: a small collection, questions with reference answers and gold sentences, real models."""

import asyncio
import json
import re
import signal
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from anabranch.app.answer_comparison import Estimate
from anabranch.domain.model import Message
from anabranch.entrypoints.cli.answer_results import show
from anabranch.testing import Space
from support.cli_runner import Run, environment, here

pytestmark = pytest.mark.xdist_group("answer-evaluation")

PAID = "Refunds for printed books are paid within 30 days of the return."
LABEL = "The shop pays for the return label."
BUILT = "It was built by Marta Olsen in 1994."
DOCUMENTS = {
    "shop/returns.md": f"# Returns\n\n{PAID} {LABEL}\n",
    "kiln.md": f"# The kiln\n\nThe kiln in the workshop reaches 1280 degrees. {BUILT}\n",
    "boats.md": "# Boats\n\nThe ferry to Skagen leaves at nine. Tickets are sold on board.\n",
}
QUESTIONS: list[dict[str, Any]] = [
    {
        "question": "How long do refunds for printed books take?",
        "answers": ["30 days"],
        "evidence": [{"document": "shop/returns.md", "text": PAID}],
    },
    {
        "question": "Who pays for the return label?",
        "answers": ["the shop"],
        "evidence": [{"document": "shop/returns.md", "text": LABEL}],
    },
    {
        "question": "Who built the kiln in the workshop?",
        "answers": ["Olsen", "Marta Olsen"],
        "evidence": [{"document": "kiln.md", "text": BUILT}],
    },
    {"question": "What salary does the lighthouse keeper earn?", "answerable": False},
]
PATIENCE_S = 40
STREAMING = {"AGGREGATOR_MODEL_STREAMING_ENABLED": "true"}


@pytest.fixture
def dataset(tmp_path: Path, models_dir: Path) -> Path:
    folder = tmp_path / "shop"
    for name, text in DOCUMENTS.items():
        (folder / "documents" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "documents" / name).write_text(text)
    write_questions(folder, QUESTIONS)
    return folder


def write_questions(folder: Path, rows: Sequence[object]) -> None:
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    yield from here(tmp_path / "data", monkeypatch, capsys)


def table(text: str) -> dict[str, list[str]]:
    """The cells of each measure."""
    rows = re.findall(r"^(\S.*?)  +(-|[-+]?\d.*?) *$", text, re.MULTILINE)
    return {name: re.split(r"  +", cells) for name, cells in rows}


def marked_with_the_wrong_passage(messages: Sequence[Message]) -> str:
    """A right sentence whose mark names a passage that there is and that says something else."""
    said = {"refunds": PAID, "label": LABEL, "kiln": BUILT}
    asked = messages[-1].content.lower().rpartition("question")[2] or messages[-1].content.lower()
    right = next((text for word, text in said.items() if word in asked), None)
    return f"{right[:-1]} [3]." if right else "The documents do not mention a salary."


def test_an_extractive_answer_is_measured_without_a_model(run: Run, dataset: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ran = run("eval", "answers", "--dataset", str(dataset), "--output", str(out))
    assert ran.code == 0, ran.err
    measures = table(ran.out)
    for name in ("citation recall", "faithfulness", "containment", "gold sentences cited", "refused, unanswerable"):
        assert measures[name][0] == "1.000", ran.out
    assert measures["refused, answerable"] == ["0.000", "0.000 to 0.000", "3"]
    assert measures["latency p95, ms"][2] == "4"
    assert re.search(r"^configured: extractive: \d sentences, \d citations$", ran.out, re.MULTILINE)
    assert "shop: 3 documents, 4 questions" in ran.out
    assert max(map(len, ran.out.splitlines())) <= 80
    results = json.loads((out / "results.json").read_text())
    assert results["configurations"]["configured"]["measures"]["containment"] == {
        "value": 1.0,
        "low": 1.0,
        "high": 1.0,
        "questions": 3,
    }
    chart = ET.fromstring((out / "results.svg").read_text())
    assert "refused, unanswerable" in [element.text for element in chart.iter()]
    rows = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()[1:]]
    assert [row["number"] for row in rows] == [0, 1, 2, 3]
    assert rows[0]["answer"].startswith(PAID)
    assert list((tmp_path / "data").glob("*")) == []


async def test_two_configurations_show_what_verification_does_for_wrong_marks(
    run: Run, dataset: Path, space: Space
) -> None:
    space.model("writer", reply=marked_with_the_wrong_passage, form="openai")
    arguments = ("--dataset", str(dataset), "--model", f"{space.url}/writer", "--with", "verify=off")
    ran = await asyncio.to_thread(run, "eval", "answers", *arguments)
    assert ran.code == 0, ran.err
    measures = table(ran.out)
    assert measures["citation recall"] == ["1.000", "0.000", "-1.000", "-1.000 to -1.000"], ran.out
    assert measures["citation precision"][:2] == ["1.000", "0.000"]
    assert measures["gold sentences cited"][:2] == ["1.000", "0.000"]
    assert measures["containment"][:3] == ["1.000", "1.000", "+0.000"]
    assert measures["refused, unanswerable"][:2] == ["1.000", "1.000"]
    assert "changed: " in ran.out
    assert "verify=off" in ran.out
    assert max(map(len, ran.out.splitlines())) <= 80


def test_configurations_may_have_other_embedders_and_options(run: Run, dataset: Path) -> None:
    arguments = ("--dataset", str(dataset), "--limit", "1", "--with", "top_k=1", "--with", "embedding_threads=2")
    results = json.loads(run("eval", "answers", *arguments, "--json").out)
    assert results["questions"] == 1
    assert results["configurations"]["changed"]["changes"] == {"top_k": "1", "embedding_threads": "2"}
    assert results["differences"]["citation_recall"]["value"] == 0.0


async def interrupted(arguments: Sequence[str], folder: Path, space: Space, requests: int) -> tuple[str, str]:
    """What the command prints on both streams if it is interrupted when the model has got so many requests."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "anabranch", *arguments),
        env=environment(folder / "data", **STREAMING),
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        await space.wait_for(lambda: len(space.requests) == requests, PATIENCE_S)
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(PATIENCE_S):
            printed, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
    assert process.returncode == 130, said
    return printed.decode(), said.decode()


async def test_an_evaluation_that_is_interrupted_before_the_first_pair_says_what_was_answered(
    dataset: Path, tmp_path: Path, space: Space
) -> None:
    def reply(_: Sequence[Message]) -> str:
        return PAID if len(space.requests) < 3 else "word " * 10_000

    space.model("writer", reply=reply, form="openai", chunk_delay_s=0.01)
    arguments = ("--dataset", str(dataset), "--model", f"{space.url}/writer", "--with", "verify=off")
    printed, said = await interrupted(("eval", "answers", *arguments), tmp_path, space, 3)
    assert printed == ""
    assert "Interrupted, nothing measured. Answered of 4 questions: 1 (configured), 0 (changed)." in said


async def test_an_interrupted_evaluation_prints_what_it_has_and_is_continued(
    run: Run, dataset: Path, tmp_path: Path, space: Space
) -> None:
    stuck = True

    def reply(messages: Sequence[Message]) -> str:
        return "word " * 10_000 if stuck and "Who built the kiln" in messages[-1].content else PAID

    space.model("writer", reply=reply, form="openai", chunk_delay_s=0.01)
    out = tmp_path / "out"
    arguments = ("eval", "answers", "--dataset", str(dataset), "--model", f"{space.url}/writer", "--output", str(out))
    # The first question is asked twice: once to load the models.
    printed, said = await interrupted(arguments, tmp_path, space, 4)
    assert table(printed)["containment"][0] == "0.500"
    assert "Interrupted: 2 of 4 questions measured." in said
    assert json.loads((out / "results.json").read_text())["questions"] == 2
    with (out / "answers.jsonl").open("a") as file:
        file.write('{"configuration": "conf')  # as a process that was killed leaves it
    stuck = False
    asked = len(space.requests)
    again = await asyncio.to_thread(run, *arguments, **STREAMING)
    assert again.code == 0, again.err
    assert "Continuing after 2 questions in" in again.err
    assert "shop: 3 documents, 4 questions" in again.out
    assert len(space.requests) == asked + 3
    other = await asyncio.to_thread(run, *arguments, "--top-k", "1", **STREAMING)
    assert (other.code, other.out) == (2, "")
    assert "has the answers of another dataset or configuration. Choose another folder" in other.err


async def test_a_model_that_fails_stops_the_evaluation(run: Run, dataset: Path, tmp_path: Path, space: Space) -> None:
    """No other model answers in its place."""
    missing = f"{space.url}/nowhere"
    ran = await asyncio.to_thread(run, "eval", "answers", "--dataset", str(dataset), "--model", missing)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith("anabranch: The first 3 questions failed (configured): ")


def write_hotpot(folder: Path, *facts: list[list[object]]) -> None:
    """A question for each list of supporting facts."""
    row = {"question": QUESTIONS[0]["question"], "answer": "30 days", "context": [["Returns", [PAID, f" {LABEL}"]]]}
    (folder / "questions.json").write_text(json.dumps([{**row, "_id": "1", "supporting_facts": one} for one in facts]))


def test_the_layouts_of_beir_and_hotpotqa_are_read(run: Run, tmp_path: Path, models_dir: Path) -> None:
    beir = tmp_path / "beir"
    beir.mkdir()
    corpus = [{"_id": "r", "title": "Returns", "text": f"{PAID} {LABEL}"}, {"_id": "e", "title": "", "text": ""}]
    (beir / "corpus.jsonl").write_text("".join(json.dumps(one) + "\n" for one in corpus))
    write_questions(beir, [{**QUESTIONS[0], "evidence": [{"document": "r", "text": PAID}]}])
    hotpot = tmp_path / "hotpot"
    hotpot.mkdir()
    write_hotpot(hotpot, [["Returns", 0]], [])
    (hotpot / "corpus.json").write_text(json.dumps({"Boats": ["The ferry leaves at nine."]}))
    for folder, documents in ((beir, 2), (hotpot, 2)):
        results = json.loads(run("eval", "answers", "--dataset", str(folder), "--json").out)
        assert results["documents"] == documents
        measures = results["configurations"]["configured"]["measures"]
        assert (measures["gold_recall"]["value"], measures["containment"]["value"]) == (1.0, 1.0)


def test_two_documents_with_one_id_are_refused(run: Run, tmp_path: Path) -> None:
    corpus = [{"_id": "r", "text": PAID}, {"_id": "s", "text": LABEL}, {"_id": "r", "text": BUILT}]
    (tmp_path / "corpus.jsonl").write_text("\n".join(json.dumps(one) + "\n" for one in corpus))
    write_questions(tmp_path, [{"question": "Why?"}])
    ran = run("eval", "answers", "--dataset", str(tmp_path))
    assert (ran.code, ran.out) == (2, "")
    assert "corpus.jsonl, line 5: the _id 'r' is already used in line 1." in ran.err


def test_supporting_facts_that_are_no_sentences_are_left_out_and_counted(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "hotpot"
    folder.mkdir()
    write_hotpot(folder, [["Returns", 0], ["Returns", 2], ["Returns", -1], ["Elsewhere", 0], ["Boats", 0]])
    (folder / "corpus.json").write_text(json.dumps({"Boats": ["The ferry leaves at nine."]}))
    ran = run("eval", "answers", "--dataset", str(folder), "--json")
    assert ran.code == 0
    assert "Ignored 3 supporting facts of the questions: they name no sentence of a document." in ran.err
    measures = json.loads(ran.out)["configurations"]["configured"]["measures"]
    assert measures["gold_recall"]["value"] == 0.5


def test_a_zero_has_no_minus(capsys: pytest.CaptureFixture[str]) -> None:
    near = Estimate(value=-0.0004, low=-0.4, high=0.0, questions=4)
    measures = {"citation_recall": near, "latency_p50_ms": near}
    one = {"measures": measures, "changes": {}, "model": "a", "sentences": 1, "citations": 1, "unchecked_sentences": 0}
    ran = {"configured": one, "changed": one}
    show({"configurations": ran, "differences": measures, "documents": 1, "questions": 4, "dataset": "shop"})
    shown = table(capsys.readouterr().out)
    assert shown["citation recall"] == ["0.000", "0.000", "+0.000", "-0.400 to +0.000"]
    assert shown["latency p50, ms"] == ["0", "0", "+0", "+0 to +0"]


def test_a_document_that_cannot_be_read_is_not_searched_for_its_gold_sentence(run: Run, dataset: Path) -> None:
    (dataset / "documents" / "broken.pdf").write_bytes(b"%PDF-1.4 broken")
    broken = {"document": "broken.pdf", "text": "x"}
    write_questions(dataset, [{**QUESTIONS[0], "evidence": [broken]}])
    ran = run("eval", "answers", "--dataset", str(dataset))
    assert ran.code == 0, ran.err
    assert "1 document failed" in ran.err


def test_usage_errors_say_what_is_wrong(run: Run, dataset: Path, tmp_path: Path) -> None:
    def refused(*arguments: str, folder: Path = dataset) -> str:
        ran = run("eval", "answers", "--dataset", str(folder), *arguments)
        assert (ran.code, ran.out) == (2, ""), ran
        return ran.err

    assert "There is no questions.jsonl in" in refused(folder=tmp_path)
    assert "--with magic: magic is not a setting." in refused("--with", "magic=1")
    assert "--with data_dir: data_dir is set by this command." in refused("--with", "data_dir=/tmp")
    assert "--with top_k=many is not valid" in refused("--with", "top_k=many")
    assert "answer_policy=some is not valid: it takes all or strict." in refused("--with", "answer_policy=some")
    assert "--with AGGREGATOR_VERIFY" in refused("--with", "AGGREGATOR_VERIFY=perhaps")
    assert "no-such-model" in refused("--model", "no-such-model", "--limit", "1")
    file = tmp_path / "file"
    file.write_text("")
    assert "--output" in refused("--output", str(file))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "answers.jsonl").write_text("no JSON\n")
    assert "is not a file of this command" in refused("--output", str(tmp_path / "other"))
    write_questions(dataset, [QUESTIONS[0], {"question": 7}])
    assert "questions.jsonl, line 2: Expected `str`, got `int` - at `$.question`" in refused()
    write_questions(dataset, [{"question": "Why?", "evidence": [{"document": "lost.md", "text": "x"}]}])
    assert "Question 1 of shop has evidence in 'lost.md', which is not one of its documents." in refused()
    other = {"document": "kiln.md", "text": "It was built by Marta Olsen in 1995."}
    folded = {"document": "kiln.md", "text": BUILT.replace(" ", "\n  ")}
    write_questions(dataset, [QUESTIONS[0], {"question": "Who?", "evidence": [folded, other]}])
    assert f"Question 2 of shop has evidence that is not in 'kiln.md': {other['text']!r}." in refused()
    write_questions(dataset, [{"question": " "}])
    assert "Question 1 of shop is empty." in refused()
    write_questions(dataset, [])
    assert "There is no question in" in refused()
