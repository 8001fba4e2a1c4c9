"""`anabranch ask`: a question and its answer on the terminal."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import click
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.spinner import Spinner
from rich.table import Column, Table
from rich.text import Text

from anabranch.app.anabranch import Anabranch
from anabranch.configuration.settings import Settings
from anabranch.domain.errors import ConfigurationError, GenerationFailed
from anabranch.domain.events import (
    Answered,
    AnswerEvent,
    Failed,
    FellBack,
    GenerationStarted,
    RetrievalFinished,
    RetrievalStarted,
    SentenceChecked,
    SourceReplied,
    Token,
)
from anabranch.domain.model import Answer, Citation, Ground, Passage, SourceReply, Status, Until
from anabranch.entrypoints.cli.explanation import explained
from anabranch.entrypoints.cli.options import json_option, settings_option
from anabranch.entrypoints.cli.resources import require_model
from anabranch.entrypoints.cli.terminal import flat, joined, notes, output, place_of, print_json, printable
from anabranch.entrypoints.cli.verification import checked_sentences, conflicting_sources
from anabranch.pipeline.ground import refusal
from anabranch.pipeline.marks import with_marks

PIECE = re.compile(r"\n|[^\S\n]+|\S+")


class WordWrap:
    """Wraps streamed text: writes each word once it is complete, on a new line if it does not fit. Without a width,
    text is written unchanged at once."""

    def __init__(self, write: Callable[[str], None], width: int | None) -> None:
        self._write = write
        self._width = width
        self._column = 0
        self._space = ""
        self._word = ""

    def feed(self, text: str) -> None:
        if self._width is None:
            self._write(text)
            return
        pieces = PIECE.findall(self._word + text)
        self._word = pieces.pop() if pieces and not pieces[-1].isspace() else ""
        for piece in pieces:
            self._place(piece)

    def end(self) -> None:
        self._place(self._word)
        self._word = ""

    def _place(self, piece: str) -> None:
        if piece == "\n":
            self._write("\n")
            self._column, self._space = 0, ""
        elif piece.isspace():
            self._space += piece.replace("\t", "    ")
        elif piece:
            length = cell_len(self._space) + cell_len(piece)
            if self._column and self._width is not None and self._column + length > self._width:
                self._write("\n")
                self._column, self._space = 0, ""
            self._write(self._space + piece)
            self._column += cell_len(self._space) + cell_len(piece)
            self._space = ""


SNIPPET = 160


class AskScreen:
    """Prints sources with spinners (while `live` is running), then the streamed answer, then a table of sources and the
    citations."""

    def __init__(self) -> None:
        self._console = output(wrapped=True)
        self._notes = notes()
        self.live = Live(console=self._notes, transient=True, refresh_per_second=12)
        self._asked: list[tuple[str, Spinner]] = []
        self._replies: dict[int, SourceReply] = {}
        self._generating: Spinner | None = None
        self._wrap = WordWrap(self._write, self._console.width if self._console.is_terminal else None)
        self._streamed = False

    def show(self, event: AnswerEvent) -> None:
        match event:
            case RetrievalStarted():
                self._asked = [(path, Spinner("dots")) for path in event.sources]
            case SourceReplied():
                self._replies[event.index] = event.reply
            case GenerationStarted():
                self._generating = Spinner("dots", text=Text(f"{event.model} is writing", style="dim"))
            case FellBack(fallback=why):
                self._generating = None
                failed = f"{printable(why.failed)} failed: {printable(why.message).removesuffix('.')}."
                self._notes.print(Text.assemble(("✗", "red"), f" {failed} The documents are quoted instead."))
            case Token():
                self.live.stop()
                self._streamed = True
                self._wrap.feed(printable(event.text))
            case Answered() | Failed():
                self._generating = None
            case RetrievalFinished() | SentenceChecked():
                pass
        if not self._streamed:
            self.live.update(self._progress())

    def _write(self, text: str) -> None:
        self._console.print(Text(text), end="", soft_wrap=True)

    def _progress(self) -> RenderableType:
        rows = Table.grid(padding=(0, 1))
        for index, (path, spinner) in enumerate(self._asked):
            reply = self._replies.get(index)
            if reply is None:
                rows.add_row(spinner, Text(path), Text("asking", style="dim"))
            else:
                rows.add_row(_sign(reply), Text(path), _outcome(reply))
        return Group(rows, self._generating) if self._generating is not None else rows

    def finish(self, end: Answered | Failed | None) -> None:
        if self._streamed:
            self._wrap.end()
            self._console.print()
        if isinstance(end, Answered):
            if not end.answer.text and end.answer.ground is Ground.NO_SOURCES:
                self._notes.print(refusal(end.answer.ground, end.answer.replies))
            self._sources(self._console, end.answer.replies)
            self._citations(with_marks(end.answer))
            for part in (conflicting_sources(end.answer), checked_sentences(end.answer)):
                if part is not None:
                    self._console.print()
                    self._console.print(part)
            if end.answer.explanation is not None:
                self._console.print()
                self._console.print(explained(end.answer.explanation))
            self._console.print()
            self._console.print(_summary(end.answer))
        elif end is not None:
            self._sources(self._notes, [self._replies[index] for index in sorted(self._replies)])
            self._notes.print(Text.assemble(("✗", "red"), " ", printable(end.message)))
            if end.code == GenerationFailed.code:
                self._notes.print("Without a model, -m extractive answers with sentences of the documents.")

    def _sources(self, console: Console, replies: Sequence[SourceReply]) -> None:
        if not replies:
            return
        console.print()
        console.print(_table(replies))
        for reply in replies:
            if reply.error is not None:
                reason = Text.assemble((printable(reply.path), "bold"), ": ", (printable(reply.error), "yellow"))
                console.print(Padding(reason, (0, 0, 0, 3), expand=False))

    def _citations(self, answer: Answer) -> None:
        """The quoted text of each citation or, without an answer, the passages."""
        if answer.citations or (answer.passages and not answer.text):
            self._console.print()
        if answer.citations:
            by_passage: dict[int, list[Citation]] = {}
            for citation in answer.citations:
                by_passage.setdefault(citation.passage, []).append(citation)
            for index, citations in sorted(by_passage.items()):
                mark = answer.text[citations[0].start : citations[0].end]
                self._quote(mark, answer.passages[index], _quotations(citations, answer.passages[index].text))
        elif not answer.text:
            for passage in answer.passages:
                self._quote(f"[{passage.source}]", passage, [passage.text], f"{passage.score:.2f} ")

    def _quote(self, mark: str, passage: Passage, texts: Iterable[str], score: str = "") -> None:
        """A citation mark, and the texts that it refers to."""
        words = map(flat, texts)
        snippets = [one if len(one) <= SNIPPET else one[: SNIPPET - 1] + "…" for one in words]
        where = joined("" if flat(passage.source) in flat(mark) else flat(passage.source), place_of(passage))
        self._console.print(
            Text.assemble(
                (f"{flat(mark)} ", "cyan"), (score + flat(passage.title), "bold"), f" · {where}" if where else ""
            ),
            *(Padding(Text(f"“{snippet}”", style="dim"), (0, 0, 0, 2), expand=False) for snippet in snippets),
        )


def _quotations(citations: Sequence[Citation], text: str) -> Iterable[str]:
    """The words of each citation mark, once. A quotation may have several parts: an ellipsis is where words are left
    out between two of them."""
    at_mark: dict[int, list[Citation]] = {}
    for citation in citations:
        at_mark.setdefault(citation.start, []).append(citation)
    return dict.fromkeys(_quotation(parts, text) for parts in at_mark.values())


def _quotation(parts: Sequence[Citation], text: str) -> str:
    words = text[parts[0].passage_start : parts[0].passage_end]
    for before, part in pairwise(parts):
        between = text[before.passage_end : part.passage_start]
        words += " … " if any(map(str.isalnum, between)) else between
        words += text[part.passage_start : part.passage_end]
    return words


def _table(replies: Sequence[SourceReply]) -> Table:
    numbers = (Column("documents", justify="right"), Column("ms", justify="right"))
    table = Table("", "source", *numbers, "status", box=None, pad_edge=False, header_style="dim")
    for reply in replies:
        status = Text(reply.status.value, style="" if reply.error is None else "yellow")
        table.add_row(
            _sign(reply), Text(printable(reply.path)), str(len(reply.passages)), str(reply.latency_ms), status
        )
    return table


def _sign(reply: SourceReply) -> Text:
    return Text("✓", style="green") if reply.status is Status.SUCCESS else Text("✗", style="red")


def _outcome(reply: SourceReply) -> Text:
    if reply.status is Status.SUCCESS:
        return Text(f"{len(reply.passages)} documents in {reply.latency_ms} ms", style="dim")
    return Text(f"{reply.status.value} after {reply.latency_ms} ms", style="yellow")


def _summary(answer: Answer) -> Text:
    times = answer.timings
    writer = answer.model if answer.fallback is None else f"{answer.fallback.failed}, then {answer.model}"
    suspects = sum(bool(passage.suspected_instructions) for passage in answer.passages)
    removed = len(answer.removed_links)
    is_unfinished = not answer.refused and answer.finish_reason not in (None, "stop")
    text = joined(
        f"{times.total_ms} ms in all",
        f"{times.retrieval_ms} ms asking sources",
        f"{times.generation_ms} ms {printable(writer)}" if writer else "",
        f"support {answer.support:.2f}" if answer.support is not None else "",
        f"{answer.usage.total_tokens} tokens" if answer.usage and answer.usage.total_tokens else "",
        f"the model did not finish ({printable(answer.finish_reason or '')})" if is_unfinished else "",
        f"{answer.omitted} documents left out of the prompt" if answer.omitted else "",
        f"{suspects} {'passage contains' if suspects == 1 else 'passages contain'} suspected instructions to a model"
        if suspects
        else "",
        f"{removed} {'link' if removed == 1 else 'links'} removed: no source has the address" if removed else "",
    )
    return Text(text, style="dim")


@click.command("ask")
@click.argument("question")
@click.option(
    "-s",
    "--source",
    "sources",
    multiple=True,
    metavar="SOURCE",
    help="A collection, a configured source, an MCP server, URL/slug, or owner/slug on the hub; repeatable "
    "[default: every collection, configured source and MCP server].",
)
@click.option(
    "-m",
    "--model",
    metavar="MODEL",
    help="URL/slug, owner/slug on the hub, a configured name, 'default' (AGGREGATOR_MODEL_URL, else the first in "
    "anabranch.yaml), or 'extractive', which quotes the documents without a model [default: 'default'].",
)
@click.option(
    "-t",
    "--token",
    "tokens",
    multiple=True,
    metavar="OWNER=TOKEN",
    help="A token for an owner's endpoints; OWNER=@FILE reads it from a file. Give a URL's owner as OWNER@URL/slug.",
)
@click.option("-k", "--top-k", type=click.IntRange(min=1), help="Documents per source.")
@click.option(
    "--fallback/--no-fallback",
    default=None,
    help="Whether to quote the documents if the model fails before its first token "
    "[default: as AGGREGATOR_MODEL_FALLBACK says].",
)
@click.option(
    "--verify/--no-verify",
    default=None,
    help="Whether to check each sentence of the answer against the sources [default: as AGGREGATOR_VERIFY says].",
)
@click.option("--strict", is_flag=True, help="Leave out the sentences that no source supports.")
@click.option("--explain", is_flag=True, help="Show how each stage ranked each passage, and why others were left out.")
@click.option("--retrieve", is_flag=True, help="Only retrieve passages; do not generate an answer.")
@click.option(
    "--record",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Record the run in FILE, without secrets, for `anabranch replay`. The file has the question, the passages, "
    "the prompt and the answer.",
)
@json_option
@settings_option
def command(
    question: str,
    sources: tuple[str, ...],
    model: str | None,
    tokens: tuple[str, ...],
    top_k: int | None,
    fallback: bool | None,
    verify: bool | None,
    strict: bool,
    explain: bool,
    retrieve: bool,
    record: Path | None,
    as_json: bool,
    settings: Settings,
) -> None:
    """Ask a QUESTION; the answer is streamed, with its sources below it.

    The exit status is 0 for an answer, 1 if the question or every source failed, 3 if no source has anything to answer
    from.
    """
    if strict and verify is False:
        raise click.UsageError("--strict cannot be used with --no-verify.")
    given = dict(_token(entry) for entry in tokens)

    async def ask() -> int:
        async with (
            Anabranch.open(settings=settings, surface="cli", log_queries=True) as anabranch,
            anabranch.stream(
                question,
                sources=sources or None,
                model=model,
                tokens=given,
                top_k=top_k,
                until=Until.MERGE if retrieve else Until.GENERATE,
                fallback=fallback,
                explain=explain,
                verify=verify,
                answer_policy="strict" if strict else "all",
                record=record,
                streaming=not as_json,
            ) as events,
        ):
            return exit_status(await print_answer(events, as_json=as_json), settings)

    status = asyncio.run(ask())
    if record is not None:
        notes().print(
            f"Recorded in {printable(str(record))}. Replay it with: anabranch replay {printable(str(record))}"
        )
    sys.exit(status)


async def print_answer(events: AsyncIterator[AnswerEvent], *, as_json: bool) -> Answered | Failed | None:
    """Returns the end."""
    screen = None if as_json else AskScreen()
    end: Answered | Failed | None = None
    with screen.live if screen is not None else nullcontext():
        async for event in events:
            end = event if isinstance(event, Answered | Failed) else end
            if screen is not None:
                screen.show(event)
    if screen is None:
        print_json(end.answer if isinstance(end, Answered) else end)
    else:
        screen.finish(end)
    return end


def exit_status(end: Answered | Failed | None, settings: Settings) -> int:
    if not isinstance(end, Answered):
        return 1
    if not end.answer.refused and (end.answer.text or end.answer.passages):
        return 0
    if end.answer.ground is not Ground.ALL_FAILED:
        return 3
    return 2 if _model_missing(settings, end.answer.replies) else 1


def _model_missing(settings: Settings, replies: Sequence[SourceReply]) -> bool:
    """Whether a source failed because the embedding model is not installed."""
    try:
        require_model(settings)
    except ConfigurationError as error:
        return any(reply.error == error.message for reply in replies)
    return False


def _token(entry: str) -> tuple[str, str]:
    owner, equals, token = entry.partition("=")
    if not (owner and equals and token):
        raise ConfigurationError("--token takes OWNER=TOKEN.")
    if token.startswith("@"):
        try:
            token = Path(token[1:]).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigurationError(f"--token: {token[1:]} cannot be read ({error.strerror}).") from None
        except UnicodeDecodeError:
            raise ConfigurationError(f"--token: {token[1:]} is not a text file.") from None
    return owner, token
