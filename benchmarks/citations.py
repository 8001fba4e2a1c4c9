"""Citations before and after verification: of quoted answers, and of a scripted model that writes right sentences
without marks, or with a third of its marks wrong."""

import argparse
import asyncio
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from html import unescape
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.progress import track
from rich.table import Table

from anabranch import Anabranch
from anabranch.app.answer_comparison import Estimate, summary
from anabranch.app.answer_evaluation import (
    AnswerEvaluation,
    AnswerOptions,
    EvaluatedQuestion,
    GoldSentence,
    MeasuredAnswer,
    answer_to,
    same_words,
)
from anabranch.configuration.settings import Settings, load
from anabranch.domain.contracts import SystemClock
from anabranch.domain.errors import AnabranchError
from anabranch.domain.model import Answer, Message
from anabranch.entrypoints.cli.answer_dataset import AnswerDataset, read_dataset
from anabranch.entrypoints.cli.evaluation_documents import ingested
from anabranch.knowledge.model import Chunking
from anabranch.models.factory import claims_for
from anabranch.telemetry.log import SilentTelemetry
from anabranch.testing import Space
from anabranch.text.answer_match import token_f1, tokens

DOCUMENT = re.compile(r"<document\b[^>]*>.*?<content>(?P<content>.*?)</content>", re.DOTALL)
QUESTION = re.compile(r"QUESTION:\n(?P<text>.*?)\n---\s*\Z", re.DOTALL)
PARENTHESES = re.compile(r"\s*\([^()]*\)")
PRONOUN = re.compile(r"(?:He|She|It|They|The film|The band|The album|The series)\b(?!')")
NOTHING = "The documents do not mention it."
MEASURES = ("citation_recall", "citation_precision", "gold_precision")
# One mark of so many is wrong.
WRONG = 3


class Corrections(NamedTuple):
    """The marks of a verified run: written, corrected, and corrected to the words that the sentence is made of; added,
    and added right."""

    written: int = 0
    corrected: int = 0
    corrected_right: int = 0
    added: int = 0
    added_right: int = 0

    def plus(self, other: "Corrections") -> "Corrections":
        return Corrections(*(one + more for one, more in zip(self, other, strict=True)))


class Writer:
    """Writes the gold sentences of a question that are in the prompt, copied or edited; `marks` are none or a third
    wrong. `wrong` and `changed` count the marks and the sentences that it wrote."""

    def __init__(self, questions: Sequence[EvaluatedQuestion], *, edits: bool, marks: str) -> None:
        self.wrong = self.changed = self.written = 0
        self._gold = {" ".join(one.question.split()): one.evidence for one in questions}
        self._edits = edits
        self._marks = marks

    def __call__(self, messages: Sequence[Message]) -> str:
        prompt = messages[-1].content
        asked = QUESTION.search(prompt)
        gold = self._gold.get(" ".join(unescape(asked["text"]).split()), ()) if asked else ()
        contents = [" ".join(unescape(found["content"]).split()) for found in DOCUMENT.finditer(prompt)]
        written = []
        for number, one in enumerate(gold):
            wanted = " ".join(one.text.split())
            at = next((place for place, content in enumerate(contents) if wanted in content), None)
            if at is not None:
                said = edited(one) if self._edits else wanted
                self.written += 1
                self.changed += tokens(said) != tokens(wanted)
                written.append(said.rstrip(".") + self._mark(at, len(contents), number + len(one.text)) + ".")
        return " ".join(written) or NOTHING

    def _mark(self, at: int, count: int, chance: int) -> str:
        if self._marks == "none":
            return ""
        wrong = self._marks == "third wrong" and count > 1 and chance % WRONG == 0
        self.wrong += wrong
        return f" [{(at + 1) % count + 1 if wrong else at + 1}]"


def edited(gold: GoldSentence) -> str:
    """The same with small changes, by rules: without what is in parentheses, the subject named, a few words replaced.
    It is no paraphrase."""
    text = PRONOUN.sub(gold.document.partition(" (")[0], PARENTHESES.sub("", " ".join(gold.text.split())), count=1)
    for old, new in (
        (" was born ", " came into the world "),
        (" is a ", " is known as a "),
        (" was a ", " was known as a "),
    ):
        text = text.replace(old, new, 1)
    return text


def corrections(asked: EvaluatedQuestion, answer: Answer, ids: Mapping[str, str]) -> Corrections:
    total = Corrections()
    for one in answer.sentences:
        text = answer.text[one.start : one.end]
        meant = max(asked.evidence, key=lambda gold: token_f1(text, [gold.text]), default=None)
        if meant is None:
            continue
        wanted = ids.get(meant.document), tokens(meant.text)
        quoted = [(answer.passages[each.passage], each) for each in one.quotes]
        right = any(same_words((at.document_id, tokens(at.text[each.start : each.end])), wanted) for at, each in quoted)
        added = min(1, one.added)
        total = total.plus(Corrections(one.marks, one.corrected, one.corrected * right, added, added * right))
    return total


async def measure(
    test: AnswerDataset, settings: Settings, writers: Mapping[str, Writer | None]
) -> dict[str, tuple[dict[str, Estimate], dict[str, Estimate], Corrections]]:
    """Of each writer the measures without and with verification, and what verification has done to its marks."""
    async with AsyncExitStack() as leaving:
        folder = leaving.enter_context(tempfile.TemporaryDirectory(prefix="anabranch-citations-"))
        settings = msgspec.structs.replace(settings, data_dir=folder, log_level="ERROR")
        _, ids = await leaving.enter_async_context(ingested(settings, test.name, test.documents, Chunking()))
        opened = [
            await leaving.enter_async_context(Anabranch.open(settings=msgspec.structs.replace(settings, verify=verify)))
            for verify in ("off", "on")
        ]
        checking = msgspec.structs.replace(settings, verify="on")
        checker = await leaving.enter_async_context(claims_for(checking, SystemClock(), SilentTelemetry()))
        space = await leaving.enter_async_context(Space())
        evaluation = AnswerEvaluation(checker, ids)
        found = {}
        for number, (name, writer) in enumerate(writers.items()):
            if writer is not None:
                space.model(f"writer-{number}", reply=writer)
            model = "extractive" if writer is None else f"{space.url}/writer-{number}"
            rows: tuple[list[MeasuredAnswer], list[MeasuredAnswer]] = ([], [])
            marks = Corrections()
            for asked in track(test.questions, name, transient=True):
                for anabranch, row in zip(opened, rows, strict=True):
                    try:
                        answer, _ = await answer_to(anabranch, asked.question, AnswerOptions(model=model))
                    except AnabranchError as error:
                        raise SystemExit(f"{name}: {error.message}") from None
                    row.append(await evaluation.measure(asked, answer))
                    marks = marks.plus(corrections(asked, answer, ids))
            found[name] = summary(rows[0]), summary(rows[1]), marks
        return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.citations", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="a dataset of `anabranch eval answers`, with evidence")
    parser.add_argument("--limit", type=int, help="only the first questions")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    options = parser.parse_args()
    test = read_dataset(options.data, options.limit)
    writers: dict[str, Writer | None] = {"extractive": None}
    for form in ("copied", "edited"):
        for marks in ("none", "third wrong"):
            writers[f"{form}, marks: {marks}"] = Writer(test.questions, edits=form == "edited", marks=marks)
    found = asyncio.run(measure(test, load(), writers))
    table = Table(
        "writer", "recall", "precision", "gold precision", "wrong", "corrected right", "added right", box=None
    )
    for name, (before, after, done) in found.items():
        pairs = [f"{before[field].value:.3f} → {after[field].value:.3f}" for field in MEASURES]
        writer = writers[name]
        shares = ["-", "-", "-"]
        if writer is not None:
            # It wrote everything twice: without and with verification.
            corrected = f"{done.corrected_right} of {done.corrected}"
            shares = [str(writer.wrong // 2), corrected, f"{done.added_right} of {done.added}"]
            name += f" ({writer.changed // 2} of {writer.written // 2} changed)"  # noqa: PLW2901  what is shown
        table.add_row(name, *pairs, *shares)
    Console(width=150).print(table)
    if options.json is not None:
        figures = {name: {"before": one[0], "after": one[1], "marks": one[2]._asdict()} for name, one in found.items()}
        options.json.write_text(json.dumps(msgspec.to_builtins(figures), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
