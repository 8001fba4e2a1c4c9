"""`anabranch replay`: a recorded run again, and what other settings would change."""

import asyncio
import sys
import textwrap
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from difflib import unified_diff
from pathlib import Path

import click
import msgspec
from rich.text import Text

from anabranch.app.replay import Replayed, replay
from anabranch.configuration.settings import Settings
from anabranch.domain.errors import NotRecorded, RecordingError
from anabranch.domain.events import Answered, AnswerEvent, Failed, FellBack, SourceReplied
from anabranch.domain.model import Answer, Passage, Prompt, Question
from anabranch.domain.recording import MAX_BYTES, Recording, decode
from anabranch.entrypoints.cli.ask import exit_status, print_answer
from anabranch.entrypoints.cli.options import json_option, pairs, settings_option
from anabranch.entrypoints.cli.terminal import flat, notes, output, printable, write_text

WIDTH = 100
# Fields of a question that are for its prompt only.
PROMPT_FIELDS = ("system_prompt", "answer_in", "max_tokens", "temperature")
STYLES = {"+": "green", "-": "red", "@": "cyan"}


@click.command("replay")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--with",
    "changes",
    multiple=True,
    callback=pairs,
    metavar="KEY=VALUE",
    help="Replay with another setting, and print what differs; repeatable. KEY is top_k, threshold, merge, prompt, "
    "near_duplicates, max_context_tokens, query_context_tokens, context, compact_tokens, evidence, evidence_passages… "
    "evidence_scores=recompute reads the passages again with the evidence model on this machine.",
)
@click.option(
    "--explain", is_flag=True, help="Show how each stage ranked each passage, also if the recorded run does not."
)
@click.option("--events", "as_events", is_flag=True, help="Print the events, one JSON document per line.")
@json_option
@settings_option
def command(
    file: Path, changes: dict[str, str], explain: bool, as_events: bool, as_json: bool, settings: Settings
) -> None:
    """Replay the run that is recorded in FILE, without a network.

    FILE is made by `anabranch ask --record FILE`. Sources, models and the evidence model are not asked: the recording
    has what they returned. The rest of the pipeline runs again, and has to give the same events. The exit status is
    that of `anabranch ask`, and 1 if the events are not the recorded ones.
    """
    if changes and explain:
        raise click.UsageError("--explain explains the recorded run: use it without --with.")
    recording = decode(_read(file))
    recorded = asyncio.run(replay(recording))
    same = recorded.same_as(recording)
    if not same:
        _report_difference(recording, recorded)
    shown = recorded
    if changes or explain:
        shown = asyncio.run(replay(recording, changes, settings.models_dir, explain=explain))
    if as_events:
        write_text("".join(event.decode() + "\n" for event in shown.events))
    elif changes and not as_json:
        _print_diff(recording, recorded, shown)
    else:
        status = exit_status(asyncio.run(print_answer(_each(shown), as_json=as_json)), settings)
        sys.exit(status if same else 1)
    sys.exit(0 if same else 1)


def _read(path: Path) -> bytes:
    if path.exists() and not path.is_file():
        raise RecordingError(f"{path} is not a file.")
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error.strerror}.") from None


async def _each(replayed: Replayed) -> AsyncIterator[AnswerEvent]:
    for event in replayed.values:
        yield event


def _report_difference(recording: Recording, replayed: Replayed) -> None:
    console = notes()
    made = recording.software.get("anabranch", "unknown")
    console.print(
        f"anabranch: The events differ from the recorded ones. The recording was made by Anabranch {flat(made)} on "
        f"{flat(recording.made)}. The events, recorded (-) and replayed (+):"
    )
    before, after = _formatted(recording.decoded_events()), _formatted(replayed.values)
    for line in unified_diff(before, after, "recorded", "replayed", n=1, lineterm=""):
        console.print(Text(printable(line), style=STYLES.get(line[:1], "")), soft_wrap=True)


def _formatted(events: Iterable[AnswerEvent]) -> list[str]:
    texts = (msgspec.json.format(msgspec.json.encode(event), indent=2).decode() for event in events)
    return [line for text in texts for line in text.split("\n")]


def _print_diff(recording: Recording, recorded: Replayed, changed: Replayed) -> None:
    """What the changes would have changed, as a unified diff of the two runs."""
    lines = list(unified_diff(rendered(recorded), rendered(changed), "recorded", "replayed", n=2, lineterm=""))
    console = notes()
    if lines:
        _print_lines(lines)
    else:
        console.print("No difference.")
    for note in _limits(recording, changed):
        console.print(Text(f"Note: {note}", style="yellow"))


def _limits(recording: Recording, changed: Replayed) -> Iterator[str]:
    """What the replay could not know."""
    end = changed.values[-1]
    if isinstance(end, Failed) and end.code == NotRecorded.code:
        yield f"{printable(end.message)} The difference above ends with the prompt."
    if changed.unread:
        yield (
            f"The recording has no result of the evidence model for {changed.unread} of the texts that it would have "
            "read. They count as not read."
        )
    if recording.question.evidence != changed.question.evidence and any(
        source.kind == "collection" for source in recording.question.sources
    ):
        yield "With another value of evidence, collections return other passages. The recorded ones were used."
    yield from _without_effect(recording.question, changed)


def _without_effect(asked: Question, changed: Replayed) -> Iterator[str]:
    """The changes that this run has no use for."""
    question, end = changed.question, changed.values[-1]
    kinds = {model.kind for model, _ in changed.prompts}
    for name in PROMPT_FIELDS:
        if getattr(asked, name) != getattr(question, name) and not kinds - {"extractive"}:
            yield f"{name} has no effect: no model reads a prompt in this run."
        elif name == "answer_in" and asked.answer_in != question.answer_in and question.profile.prompt != "numbered":
            yield "answer_in has no effect: only a prompt with numbered passages names the language of the answer."
    if asked.profile.marks != question.profile.marks and "extractive" not in kinds:
        yield "marks has no effect: it is for answers that quote the passages."
    if asked.language != question.language and isinstance(end, Answered) and not _has_own_text(end.answer):
        yield "language has no effect: it is that of Anabranch's own messages, and the answer has none."


def _has_own_text(answer: Answer) -> bool:
    return bool(answer.refused or answer.left_out or answer.conflicts)


def _print_lines(lines: Iterable[str]) -> None:
    console = output()
    for line in lines:
        console.print(Text(printable(line), style=STYLES.get(line[:1], "")), soft_wrap=True)


def rendered(replayed: Replayed) -> list[str]:
    """A run as text for people, without its times."""
    lines: list[str] = []
    for event in replayed.values:
        if isinstance(event, SourceReplied):
            reply = event.reply
            lines.append(f"source {reply.path}: {reply.status.value}, {_count(len(reply.passages), 'passage')}")
            lines += _indented([f"error: {reply.error}"] if reply.error is not None else [])
            lines += _indented(f"{passage.score:.4f} {_name(passage)}" for passage in reply.passages)
    lines += [
        f"model {event.fallback.failed} failed ({event.fallback.reason}); {event.model} answers"
        for event in replayed.values
        if isinstance(event, FellBack)
    ]
    end = replayed.values[-1]
    if isinstance(end, Answered):
        lines += [*_passages(end.answer.passages, end.answer.omitted), *_answer(end.answer)]
    elif isinstance(end, Failed):
        prompts = [prompt for _, prompt in replayed.prompts[-1:]]
        lines += [line for prompt in prompts for line in _passages(prompt.passages, prompt.omitted)]
        lines += ["answer: not known"] if end.code == NotRecorded.code else _failure(end)
    for model, prompt in replayed.prompts:
        # A model that quotes reads the passages, not the prompt.
        lines += _prompt(prompt) if model.kind != "extractive" else []
    return lines


def _prompt(prompt: Prompt) -> list[str]:
    head = f"prompt {prompt.version}: max_tokens {prompt.max_tokens}, temperature {prompt.temperature:g}"
    lines = [head]
    for message in prompt.messages:
        lines += [f"  {message.role}:", *_indented(_wrapped(message.content), "    ")]
    return lines


def _passages(passages: Sequence[Passage], omitted: int) -> list[str]:
    lines = [f"passages: {len(passages)}" + (f", {omitted} left out" if omitted else "")]
    for number, passage in enumerate(passages, 1):
        evidence = f", evidence {passage.evidence:.4f}" if passage.evidence is not None else ""
        orders = ", seems to give orders" if passage.suspected_instructions else ""
        lines.append(f"  [{number}] {_name(passage)} (score {passage.score:.4f}{evidence}{orders})")
    return lines


def _answer(answer: Answer) -> list[str]:
    lines = [f"answer: {'refused' if answer.refused else answer.finish_reason or answer.ground.value}"]
    lines += _indented(_wrapped(answer.text))
    if answer.support is not None:
        lines.append(f"support: {answer.support:.4f}")
    for citation in answer.citations:
        words = answer.passages[citation.passage].text[citation.passage_start : citation.passage_end]
        # A mark may be missing in the text, or name another passage.
        quoted = f"[{citation.passage + 1}] “{flat(words)}”"
        lines += _indented(textwrap.wrap(quoted, WIDTH, subsequent_indent="  "))
    lines += [*_verdicts(answer), *(f"removed link: {flat(address)}" for address in answer.removed_links)]
    return lines


def _verdicts(answer: Answer) -> Iterator[str]:
    """What was found about each sentence of a verified answer, and its faithfulness."""
    for one in answer.sentences:
        support = f" {one.support:.2f}" if one.support is not None else ""
        reason = f" ({one.reason})" if one.reason is not None else ""
        yield f"{one.verdict}{support}{reason}: “{flat(answer.text[one.start : one.end])}”"
    if answer.faithfulness is not None:
        low = ", below the minimum" if answer.unfaithful else ""
        withheld = ", withheld" if answer.unfaithful and answer.refused else ""
        yield f"faithfulness: {answer.faithfulness:.2f}{low}{withheld}"
    if answer.left_out:
        yield f"left out: {_count(answer.left_out, 'sentence')}"


def _failure(end: Failed) -> list[str]:
    return [f"failed: {end.code}", *_indented(_wrapped(end.message))]


def _name(passage: Passage) -> str:
    where = f" {passage.place.start}-{passage.place.end}" if passage.place is not None else ""
    return f"{flat(passage.source)} · {flat(passage.title)}{where}"


def _wrapped(text: str) -> Iterator[str]:
    for line in text.split("\n"):
        yield from textwrap.wrap(line, WIDTH, replace_whitespace=False) or [""]


def _indented(lines: Iterable[str], by: str = "  ") -> Iterator[str]:
    return (by + line for line in lines)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
