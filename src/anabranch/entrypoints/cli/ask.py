"""`anabranch ask`: progress per source, the answer as it streams, and the sources with what they gave."""

import io
import sys
from collections.abc import Mapping, Sequence

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from anabranch.app import Anabranch
from anabranch.domain.events import (
    Answered,
    AnswerEvent,
    Failed,
    GenerationStarted,
    RetrievalFinished,
    RetrievalStarted,
    SourceReplied,
    Token,
)
from anabranch.domain.model import Answer, SourceReply, Status, Until, Value
from anabranch.entrypoints.cli.flow import Flow
from anabranch.runtime.settings import Settings

SNIPPET = 160


class Inquiry(Value):
    question: str
    sources: Sequence[str] | None
    model: str | None
    tokens: Mapping[str, str]
    top_k: int | None
    retrieve: bool


async def ask(settings: Settings, inquiry: Inquiry, *, as_json: bool) -> int:
    """The exit status: 0 for an answer, 1 for a failure, 3 when nothing was found to answer from."""
    async with (
        Anabranch.open(settings=settings) as anabranch,
        anabranch.stream(
            inquiry.question,
            sources=inquiry.sources,
            model=inquiry.model,
            tokens=inquiry.tokens,
            top_k=inquiry.top_k,
            until=Until.MERGE if inquiry.retrieve else Until.GENERATE,
        ) as events,
    ):
        screen: Screen | Quiet = Quiet() if as_json else Screen()
        with screen:
            async for event in events:
                screen.show(event)
    return screen.finish()


class Quiet:
    """Prints nothing until the end, and then JSON."""

    def __init__(self) -> None:
        self._end: Answered | Failed | None = None

    def __enter__(self) -> "Quiet":
        return self

    def __exit__(self, *_: object) -> None: ...

    def show(self, event: AnswerEvent) -> None:
        if isinstance(event, Answered | Failed):
            self._end = event

    def finish(self) -> int:
        end = self._end
        content: Value | None = end.answer if isinstance(end, Answered) else end
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(content), indent=2).decode() + "\n")
        return _exit_status(end)


class Screen:
    """A terminal: sources with spinners, then the answer word by word, then the table."""

    def __init__(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # a ✓ that the encoding lacks is no reason to fail
        self._console = Console(highlight=False)
        self._notes = Console(stderr=True, highlight=False)
        self._live = Live(console=self._notes, transient=True, refresh_per_second=12)
        self._paths: tuple[str, ...] = ()
        self._replies: dict[int, SourceReply] = {}
        self._spinners: dict[int, Spinner] = {}
        self._writing: Spinner | None = None
        self._flow = Flow(self._write, self._console.width if self._console.is_terminal else None)
        self._spoke = False
        self._end: Answered | Failed | None = None

    def __enter__(self) -> "Screen":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, event: AnswerEvent) -> None:
        match event:
            case RetrievalStarted():
                self._paths = event.sources
                self._spinners = {index: Spinner("dots") for index in range(len(event.sources))}
            case SourceReplied():
                self._replies[event.index] = event.reply
            case RetrievalFinished():
                pass
            case GenerationStarted():
                self._writing = Spinner("dots", text=Text(f"{event.model} is writing", style="dim"))
            case Token():
                self._speak(event.text)
            case Answered() | Failed():
                self._end = event
        if not self._spoke:
            self._live.update(self._progress())

    def _speak(self, text: str) -> None:
        if not self._spoke:
            self._spoke = True
            self._live.stop()
        self._flow.feed(_printable(text))

    def _write(self, text: str) -> None:
        self._console.print(Text(text), end="", soft_wrap=True)

    def _progress(self) -> RenderableType:
        rows = Table.grid(padding=(0, 1))
        for index, path in enumerate(self._paths):
            reply = self._replies.get(index)
            if reply is None:
                rows.add_row(self._spinners[index], Text(path), Text("asking", style="dim"))
            else:
                rows.add_row(_sign(reply), Text(path), _outcome(reply))
        return Group(rows, self._writing) if self._writing is not None and self._end is None else rows

    def finish(self) -> int:
        if self._spoke:
            self._flow.end()
            self._console.print()
        match self._end:
            case Answered(answer=answer):
                self._sources(self._console, answer.replies)
                self._evidence(answer)
                self._console.print()
                self._console.print(_summary(answer))
            case Failed(message=message):
                self._sources(self._notes, [self._replies[index] for index in sorted(self._replies)])
                self._notes.print(f"[red]✗[/red] {escape(_printable(message))}")
            case None:
                pass
        return _exit_status(self._end)

    def _sources(self, console: Console, replies: Sequence[SourceReply]) -> None:
        if not replies:
            return
        console.print()
        console.print(_table(replies))
        for reply in replies:
            if reply.error is not None:
                reason = Text.assemble((_printable(reply.path), "bold"), ": ", (_printable(reply.error), "yellow"))
                console.print(Padding(reason, (0, 0, 0, 3)))

    def _evidence(self, answer: Answer) -> None:
        """The words behind each mark, or, without an answer, what was found."""
        if answer.citations or answer.passages:
            self._console.print()
        if answer.citations:
            seen: dict[tuple[int, int], None] = {}
            for citation in answer.citations:
                place = (citation.passage, citation.passage_start)
                if place in seen:
                    continue
                seen[place] = None
                passage = answer.passages[citation.passage]
                quote = passage.text[citation.passage_start : citation.passage_end]
                self._quote(passage.title, citation.source, quote)
        elif not answer.text:
            for passage in answer.passages:
                self._quote(f"{passage.score:.2f} {passage.title}", passage.source, passage.text)

    def _quote(self, title: str, source: str, text: str) -> None:
        flat = " ".join(text.split())
        shown = flat if len(flat) <= SNIPPET else flat[: SNIPPET - 1] + "…"
        self._console.print(
            Text.assemble((f"[{_printable(source)}] ", "cyan"), (_printable(title), "bold")),
            Padding(Text(f"“{_printable(shown)}”", style="dim"), (0, 0, 0, 2)),
        )


def _printable(text: str) -> str:
    """Text of others as it is safe on a terminal: a control character other than a line's end is shown, not obeyed."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _exit_status(end: Answered | Failed | None) -> int:
    if not isinstance(end, Answered):
        return 1
    return 3 if end.answer.refused or not (end.answer.text or end.answer.passages) else 0


def _table(replies: Sequence[SourceReply]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    table.add_column("source")
    table.add_column("documents", justify="right")
    table.add_column("ms", justify="right")
    table.add_column("status")
    for reply in replies:
        status = Text(reply.status.value, style="" if reply.error is None else "yellow")
        table.add_row(
            _sign(reply), Text(_printable(reply.path)), str(len(reply.passages)), str(reply.latency_ms), status
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
    parts = [f"{times.total_ms} ms in all", f"{times.retrieval_ms} ms asking sources"]
    if answer.model:
        parts.append(f"{times.generation_ms} ms {answer.model}")
    if answer.usage:
        parts.append(f"{answer.usage.total_tokens} tokens")
    if answer.finish_reason not in (None, "stop"):
        parts.append(f"the model did not finish ({_printable(answer.finish_reason or '')})")
    if answer.omitted:
        parts.append(f"{answer.omitted} documents had no room")
    return Text(" · ".join(parts), style="dim")
