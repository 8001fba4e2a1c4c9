"""`anabranch eval answers`: citations, faithfulness, refusals, correctness and latency of the answers to a dataset, for
one configuration or two side by side."""

import asyncio
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import click
import msgspec

from anabranch.app.anabranch import Anabranch
from anabranch.app.answer_evaluation import AnswerEvaluation, AnswerOptions, answer_to
from anabranch.configuration.config_file import convert_field
from anabranch.configuration.settings import PREFIX, Settings, converted
from anabranch.domain.contracts import SystemClock
from anabranch.domain.errors import AnabranchError, ConfigurationError, InvalidQuestion
from anabranch.entrypoints.cli.answer_dataset import AnswerDataset, read_dataset
from anabranch.entrypoints.cli.answer_results import (
    CHANGED,
    CONFIGURED,
    FIXED,
    HOPELESS,
    OWN,
    Configuration,
    Evaluated,
    kept,
    note_failures,
    note_interrupted,
    results_of,
    show,
    shown_change,
    write,
)
from anabranch.entrypoints.cli.evaluation_documents import ingested
from anabranch.entrypoints.cli.options import json_option, pairs, settings_option
from anabranch.entrypoints.cli.resources import OPERATOR, require_model
from anabranch.entrypoints.cli.terminal import counted, notes, print_json, progress
from anabranch.knowledge.knowledge import Knowledge
from anabranch.knowledge.model import Chunking
from anabranch.knowledge.parse.builder import clean
from anabranch.models.factory import check_evidence, claims_for
from anabranch.telemetry.log import SilentTelemetry

# What `--with` can change besides the settings.
OPTIONS = ("model", "top_k", "answer_policy")


@click.command()
@click.option(
    "--dataset",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="A folder with questions.jsonl and documents/ (or corpus.jsonl), or HotpotQA's questions.json.",
)
@click.option("-m", "--model", help="The model that answers, as in `anabranch ask` [default: the configured one].")
@click.option("-k", "--top-k", type=click.IntRange(min=1), help="Documents per question.")
@click.option(
    "--with",
    "changes",
    multiple=True,
    callback=pairs,
    metavar="KEY=VALUE",
    help="Measure a second configuration with this value, and compare; repeatable. KEY is any setting, or model, top_k "
    "or answer_policy.",
)
@click.option("--limit", type=click.IntRange(min=1), help="Ask only the first questions.")
@click.option(
    "--output",
    "into",
    type=click.Path(file_okay=False, path_type=Path),
    help="A folder for results.json, results.svg and answers.jsonl. An evaluation that was interrupted is continued "
    "from it.",
)
@json_option
@settings_option
def answers(
    dataset: Path,
    model: str | None,
    top_k: int | None,
    changes: dict[str, str],
    limit: int | None,
    into: Path | None,
    as_json: bool,
    settings: Settings,
) -> None:
    """Measure the answers to a dataset's questions.

    Measured are citations, faithfulness, refusals, correctness and latency. The documents are ingested into a temporary
    folder. If you press Ctrl-C, what was measured so far is printed, and the exit status is 130. It is 1 if the first
    questions all fail.
    """
    test = read_dataset(dataset, limit)
    if test.unknown_facts:
        notes().print(
            f"Ignored {counted(test.unknown_facts, 'supporting fact')} of the questions: they name no sentence of a "
            "document."
        )
    chosen = _configurations(settings, AnswerOptions(model=model, top_k=top_k), changes)
    for one in chosen:
        require_model(one.settings)
        check_evidence(_scoring(one.settings))
    evaluated = Evaluated([one.name for one in chosen])
    interrupted = False
    with kept(into, test, chosen, evaluated), tempfile.TemporaryDirectory(prefix="anabranch-eval-") as folder:
        try:
            if any(len(done) < len(test.questions) for done in evaluated.answers.values()):
                asyncio.run(_evaluate(Path(folder), test, chosen, evaluated))
        except KeyboardInterrupt:
            interrupted = True
    found = evaluated.complete()
    if interrupted and not found[CONFIGURED]:
        note_interrupted(evaluated, len(test.questions))
        sys.exit(130)
    results = results_of(test, chosen, found)
    if into is not None:
        write(into, results)
    if as_json:
        print_json(results)
    else:
        show(results)
    note_failures(found, len(test.questions))
    sys.exit(130 if interrupted else 0)


def _configurations(settings: Settings, options: AnswerOptions, changes: Mapping[str, str]) -> list[Configuration]:
    first = Configuration(CONFIGURED, settings, options)
    if not changes:
        return [first]
    shown: dict[str, str] = {}
    for given, value in changes.items():
        name = given.upper().removeprefix(PREFIX).lower()
        where = f"--with {given}"
        if name in OPTIONS:
            options = msgspec.structs.replace(options, **{name: convert_field(AnswerOptions, name, value, where)})
        elif name in Settings.__struct_fields__ and name not in FIXED:
            settings = msgspec.structs.replace(settings, **{name: converted(name, value, where)})
        else:
            known = "is set by this command" if name in FIXED else "is not a setting"
            raise ConfigurationError(f"{where}: {name} {known}. Use a setting, or one of: {', '.join(OPTIONS)}.")
        shown[name] = shown_change(name, value)
    return [first, Configuration(CHANGED, settings, options, shown)]


def _scoring(settings: Settings) -> Settings:
    """The settings of the model that measures: it is that of the package, however answers are verified."""
    return msgspec.structs.replace(settings, verify="on", verifier_path=None, verifier_url=None)


async def _evaluate(folder: Path, test: AnswerDataset, chosen: Sequence[Configuration], evaluated: Evaluated) -> None:
    async with AsyncExitStack() as leaving:
        opened = []
        clock, telemetry = SystemClock(), SilentTelemetry()
        checker = await leaving.enter_async_context(claims_for(_scoring(chosen[0].settings), clock, telemetry))
        warm: set[str] = set()
        known: dict[str, tuple[str, dict[str, str]]] = {}
        for one in chosen:
            data, ids = await _ingested_once(folder, test, one.settings, known)
            settings = msgspec.structs.replace(one.settings, data_dir=data, **OWN)
            anabranch = await leaving.enter_async_context(Anabranch.open(settings=settings, surface="cli"))
            opened.append((one, anabranch, AnswerEvaluation(checker, ids)))
        with progress("Asking", unit="questions") as advance:
            advance(0, len(test.questions))
            for number, asked in enumerate(test.questions):
                # Each is first in turn, so that neither profits from what the other has left in the machine's caches.
                for one, anabranch, evaluation in opened if number % 2 == 0 else reversed(opened):
                    if number in evaluated.answers[one.name]:
                        continue
                    if one.name not in warm:
                        await _warm(anabranch, asked.question, one.options)
                        warm.add(one.name)
                    evaluated.add(one.name, number, await evaluation.measured(anabranch, asked, one.options))
                    if (why := evaluated.hopeless(one.name)) is not None:
                        raise AnabranchError(f"The first {HOPELESS} questions failed ({one.name}): {why}")
                advance(number + 1, len(test.questions))


async def _warm(anabranch: Anabranch, question: str, options: AnswerOptions) -> None:
    """Ask once without measuring, so that no answer's time has that of loading the models."""
    try:
        await answer_to(anabranch, question, options)
    except (InvalidQuestion, ConfigurationError):
        raise
    except AnabranchError:
        pass  # the question is asked again, and counts as failed then


async def _ingested_once(
    folder: Path, test: AnswerDataset, settings: Settings, known: dict[str, tuple[str, dict[str, str]]]
) -> tuple[str, dict[str, str]]:
    """The data folder with the documents, and their ids. Configurations with one embedder share it."""
    embedder = repr([getattr(settings, name) for name in Settings.__struct_fields__ if name.startswith("embedding")])
    if embedder not in known:
        data = str(folder / str(len(known)))
        ingesting = msgspec.structs.replace(settings, data_dir=data, **OWN)
        async with ingested(ingesting, test.name, test.documents, Chunking()) as (opened, ids):
            if not known:
                await _check_gold(opened, test, ids)
            known[embedder] = data, ids
    return known[embedder]


async def _check_gold(opened: Knowledge, test: AnswerDataset, ids: Mapping[str, str]) -> None:
    """ConfigurationError if a gold sentence is not in the text of its document. Documents without text are left out."""
    texts: dict[str, str] = {}
    for number, question in enumerate(test.questions, 1):
        for gold in question.evidence:
            if gold.document in ids and gold.document not in texts:
                found = await opened.document(OPERATOR, ids[gold.document], content=True)
                texts[gold.document] = _folded(found.content or "")
            text = texts.get(gold.document)
            if text and _folded(gold.text) not in text:
                raise ConfigurationError(
                    f"Question {number} of {test.name} has evidence that is not in {gold.document!r}: {gold.text!r}."
                )


def _folded(text: str) -> str:
    return " ".join(clean(text).split())
