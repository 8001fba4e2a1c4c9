"""The results of an evaluation of answers: kept while it runs, and shown as a table, JSON and an SVG bar chart."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from anabranch.app.answer_evaluation import AnswerOptions, MeasuredAnswer
from anabranch.app.recording_redaction import CREDENTIALS
from anabranch.configuration.settings import SECRET, Settings
from anabranch.domain.errors import ConfigurationError
from anabranch.entrypoints.cli.answer_dataset import AnswerDataset
from anabranch.entrypoints.cli.bar_chart import bar_chart
from anabranch.entrypoints.cli.evaluation_documents import writing
from anabranch.entrypoints.cli.terminal import counted, flat, notes, output, print_table

LABELS = {
    "citation_recall": "citation recall",
    "citation_precision": "citation precision",
    "gold_recall": "gold sentences cited",
    "gold_precision": "citations that are gold",
    "faithfulness": "faithfulness",
    "containment": "containment",
    "token_f1": "token F1",
    "answerable_refused": "refused, answerable",
    "unanswerable_refused": "refused, unanswerable",
    "latency_p50_ms": "latency p50, ms",
    "latency_p95_ms": "latency p95, ms",
}
CONFIGURED, CHANGED = "configured", "changed"
# The command's own settings: nothing of an evaluation is kept where a server would read it.
OWN: Mapping[str, Any] = {
    "log_level": "ERROR",
    "recordings_dir": None,
    "redis_url": None,
    "database_url": None,
    "index_url": None,
}
FIXED = ("data_dir", *OWN)
# If so many questions fail and none was answered, the rest is not asked.
HOPELESS = 3
RESULTS, CHART, ANSWERS = "results.json", "results.svg", "answers.jsonl"
# Pixels of a group of bars in the chart.
GROUP = 150


class Configuration(NamedTuple):
    """What is measured; `changes` are as the command line has them, without secrets."""

    name: str
    settings: Settings
    options: AnswerOptions
    changes: Mapping[str, str] = {}

    @property
    def model(self) -> str:
        chosen = self.settings.default_model
        return CREDENTIALS.sub("***", self.options.model or (chosen.path if chosen is not None else "extractive"))

    def described(self) -> dict[str, Any]:
        return {"model": self.model, "top_k": self.options.top_k, "changes": self.changes}

    def fingerprint(self) -> str:
        """It changes with every setting, except secrets and nested ones."""
        found = {name: getattr(self.settings, name) for name in Settings.__struct_fields__}
        plain = {
            name: value
            for name, value in found.items()
            if name not in (*FIXED, *SECRET) and isinstance(value, str | int | float | None)
        }
        return hashlib.sha256(repr((sorted(plain.items()), self.options, self.model)).encode()).hexdigest()


def shown_change(name: str, value: str) -> str:
    return "***" if name in SECRET else CREDENTIALS.sub("***", value)


class Evaluated:
    """The measured answers of each configuration, by the number of the question; each is kept in a file at once, if
    there is one."""

    def __init__(self, names: Sequence[str]) -> None:
        self.answers: dict[str, dict[int, MeasuredAnswer]] = {name: {} for name in names}
        self.file: IO[bytes] | None = None

    def add(self, name: str, number: int, measured: MeasuredAnswer) -> None:
        self.answers[name][number] = measured
        if self.file is not None:
            line = {"configuration": name, "number": number, **msgspec.to_builtins(measured)}
            self.file.write(msgspec.json.encode(line) + b"\n")
            self.file.flush()

    def answered(self, name: str) -> bool:
        return any(one.failed is None for one in self.answers[name].values())

    def hopeless(self, name: str) -> str | None:
        """Why the first questions failed, if all of them did."""
        found = list(self.answers[name].values())
        return found[0].failed if len(found) >= HOPELESS and not self.answered(name) else None

    def complete(self) -> dict[str, list[MeasuredAnswer]]:
        """The answers to the questions that every configuration was asked, in the order of the dataset."""
        asked = set.intersection(*(set(one) for one in self.answers.values()))
        return {name: [found[number] for number in sorted(asked)] for name, found in self.answers.items()}


@contextmanager
def kept(
    into: Path | None, test: AnswerDataset, chosen: Sequence[Configuration], evaluated: Evaluated
) -> Iterator[None]:
    """Keep each measured answer in the folder, and continue after those that an interrupted evaluation has left."""
    if into is None:
        yield
        return
    path = into / ANSWERS
    header = {
        "dataset": test.name,
        "digest": test.digest,
        "configurations": {one.name: {**one.described(), "fingerprint": one.fingerprint()} for one in chosen},
    }
    with writing(into, "written to"):
        into.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _continue(path, header, evaluated, len(test.questions))
        file = path.open("ab")
    with file:
        if not file.tell():
            file.write(msgspec.json.encode(header) + b"\n")
            file.flush()
        evaluated.file = file
        yield


def _continue(path: Path, header: Mapping[str, Any], evaluated: Evaluated, count: int) -> None:
    content = path.read_bytes()
    # A line that was being written when the program ended is written again.
    whole = content[: content.rfind(b"\n") + 1]
    try:
        first, *lines = [msgspec.json.decode(line) for line in whole.splitlines()] or [header]
        for line in lines if first == header else ():
            measured = msgspec.convert(line, MeasuredAnswer)
            # What failed is asked again.
            if line["number"] < count and measured.failed is None:
                evaluated.answers[line["configuration"]][line["number"]] = measured
    except (msgspec.MsgspecError, KeyError, TypeError, UnicodeDecodeError):
        raise ConfigurationError(f"{path} is not a file of this command. Choose another folder.") from None
    if first != header:
        raise ConfigurationError(
            f"{path} has the answers of another dataset or configuration. Choose another folder, or delete it."
        )
    if len(whole) != len(content):
        path.write_bytes(whole)
    if done := min(map(len, evaluated.answers.values())):
        notes().print(f"Continuing after {counted(done, 'question')} in {flat(str(path))}.")


def results_of(
    test: AnswerDataset, chosen: Sequence[Configuration], found: Mapping[str, Sequence[MeasuredAnswer]]
) -> dict[str, Any]:
    """As `--json` and results.json have them."""
    from anabranch.app.answer_comparison import RESAMPLES, differences, summary  # noqa: PLC0415  it loads numpy

    results: dict[str, Any] = {
        "dataset": test.name,
        "documents": len(test.documents),
        "questions": len(found[CONFIGURED]),
        "resamples": RESAMPLES,
        "configurations": {
            one.name: {
                **one.described(),
                "sentences": sum(answer.sentences for answer in found[one.name]),
                "citations": sum(answer.citations for answer in found[one.name]),
                "unchecked_sentences": sum(answer.unchecked for answer in found[one.name]),
                "failed": sum(answer.failed is not None for answer in found[one.name]),
                "measures": summary(found[one.name]),
            }
            for one in chosen
        },
    }
    if CHANGED in found:
        results["differences"] = differences(found[CONFIGURED], found[CHANGED])
    return results


def write(into: Path, results: Mapping[str, Any]) -> None:
    names = [name for name in LABELS if not name.endswith("_ms")]
    series = {
        _title(name, one): [one["measures"][field].value if field in one["measures"] else None for field in names]
        for name, one in results["configurations"].items()
    }
    title = f"{results['dataset']}: {counted(results['questions'], 'question')}"
    drawn = bar_chart(title, [LABELS[name] for name in names], series, group=GROUP)
    with writing(into, "written to"):
        (into / RESULTS).write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n")
        (into / CHART).write_text(drawn, encoding="utf-8")


def show(results: Mapping[str, Any]) -> None:
    ran = results["configurations"]
    _print_measures({name: one["measures"] for name, one in ran.items()}, results.get("differences"))
    console = output(wrapped=True)
    for name, one in ran.items():
        unchecked = f", {one['unchecked_sentences']:,} not checked" if one["unchecked_sentences"] else ""
        counts = f"{counted(one['sentences'], 'sentence')}, {counted(one['citations'], 'citation')}{unchecked}"
        console.print(f"{flat(_title(name, one))}: {counts}")
    documents, questions = counted(results["documents"], "document"), counted(results["questions"], "question")
    console.print(f"{flat(results['dataset'])}: {documents}, {questions}")


def _print_measures(measured: Mapping[str, Mapping[str, Any]], differing: Mapping[str, Any] | None) -> None:
    fields = [field for field in LABELS if any(field in one for one in measured.values())]
    if differing is None:
        rows = [(field, measured[CONFIGURED][field]) for field in fields]
        print_table(
            ("measure", "value", "95% interval", "questions"),
            [(LABELS[field], _number(field, one.value), _interval(field, one), one.questions) for field, one in rows],
        )
        return
    print_table(
        ("measure", *measured, "difference", "95% interval"),
        [
            (
                LABELS[field],
                *(_number(field, one[field].value) if field in one else "-" for one in measured.values()),
                _number(field, differing[field].value, "+") if field in differing else "-",
                _interval(field, differing[field], "+") if field in differing else "-",
            )
            for field in fields
        ],
    )


def note_interrupted(evaluated: Evaluated, total: int) -> None:
    """How many questions were answered, if there is none that all configurations have answered."""
    answered = {name: sum(one.failed is None for one in found.values()) for name, found in evaluated.answers.items()}
    each = ", ".join(f"{count:,} ({name})" for name, count in answered.items())
    notes().print(f"Interrupted, nothing measured. Answered of {counted(total, 'question')}: {each}.")


def note_failures(found: Mapping[str, Sequence[MeasuredAnswer]], total: int) -> None:
    """What the measures do not have, on standard error."""
    console = notes()
    asked = len(found[CONFIGURED])
    if asked < total:
        console.print(f"Interrupted: {asked:,} of {counted(total, 'question')} measured.")
    for name, measured in found.items():
        failed = [one.failed for one in measured if one.failed is not None]
        if failed:
            console.print(f"Not measured ({name}): {counted(len(failed), 'question')} failed, first: {flat(failed[0])}")


def _title(name: str, one: Mapping[str, Any]) -> str:
    changes = "".join(f", {key}={value}" for key, value in one["changes"].items())
    return f"{name}: {one['model']}{changes}"


def _interval(field: str, one: Any, sign: str = "") -> str:
    return f"{_number(field, one.low, sign)} to {_number(field, one.high, sign)}"


def _number(field: str, value: float, sign: str = "") -> str:
    # `z`: no minus before a zero.
    return f"{value:{sign}z,.0f}" if field.endswith("_ms") else f"{value:{sign}z.3f}"
