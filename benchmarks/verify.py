"""What it costs to check an answer of ten reworded sentences over ten passages: CPU, and how much later the last event
comes than without, while a model writes 30 or 200 tokens a second."""

import argparse
import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from statistics import median

import msgspec
from rich.console import Console

from anabranch.domain.contracts import SystemClock
from anabranch.domain.events import Answered, Token
from anabranch.domain.model import QUERY, Context, Delta, Endpoint, Passage, Prompt, Question, SourceReply, Status
from anabranch.evidence.claims import ReadPassages
from anabranch.models.evidence import OnnxClaims
from anabranch.pipeline.answer import Limits, Pipeline
from anabranch.pipeline.run import Run
from anabranch.pipeline.verify import Verifier
from anabranch.testing import FakeDirectory, FakeSource, Recorder
from benchmarks.report import LimitedFigure, show_limited

LENGTH = 1_200
RATES = (30, 200)
MAX_CPU_MS, MAX_LATER_MS, MAX_READ_MS, MAX_SENTENCE_MS = 150.0, 60.0, 15.0, 1.5
# What a document says, and how a model says it.
FACTS = (
    (
        "The ferry to Zanzibar leaves Dar es Salaam at 7 every morning.",
        "Each morning at 7 the boat sets off for Zanzibar.",
    ),
    ("Murray cod reach 113 kg, and the largest was caught in 1902.", "In 1902 a Murray cod of 113 kg was landed."),
    ("Uppsala University was founded in 1477 by Jakob Ulvsson.", "Jakob Ulvsson established the university in 1477."),
    (
        "Refunds are paid within 30 days to the card that was charged.",
        "You get your money back on the same card in a month.",
    ),
    ("The bridge carries 42,000 vehicles a day and has six lanes.", "Six lanes take 42,000 cars across it daily."),
    (
        "A breaker opens after five failures and stays open for 30 s.",
        "Once five calls fail, it is open for half a minute.",
    ),
    ("Saffron is harvested by hand in October, before sunrise.", "Pickers gather saffron manually at dawn in October."),
    ("The observatory stands 2,635 metres above the sea in Chile.", "Its telescopes are in Chile at 2,635 m altitude."),
    (
        "Members may borrow twelve books for four weeks without a fee.",
        "For free, a member can take 12 books for 4 weeks.",
    ),
    (
        "The mill stopped in 1931, when its wheel broke in a flood.",
        "A flood that broke the wheel ended the mill in 1931.",
    ),
)
ANSWER = " ".join(f"{said} [{number}]" for number, (_, said) in enumerate(FACTS, 1))
QUESTION = Question(
    text="What do the documents say?",
    sources=(Endpoint(slug="docs"),),
    model=Endpoint(slug="writer", kind="openai", operator=True),
    top_k=len(FACTS),
    profile=QUERY,
)


class Writer:
    """Writes the answer at a rate, and keeps the time of its last token."""

    def __init__(self, tokens_per_s: float) -> None:
        self._pause_s = 1 / tokens_per_s
        self.ended = 0.0

    async def generate(self, prompt: Prompt, context: Context) -> AsyncGenerator[Delta, None]:
        for token in re.findall(r"\S+\s*", ANSWER):
            await asyncio.sleep(self._pause_s)
            yield Delta(text=token)
        self.ended = time.perf_counter()
        yield Delta(text="", finish_reason="stop")


def passages() -> tuple[Passage, ...]:
    """Each fact, followed by a part of this project's documentation, which has lists, tables and code."""
    texts = [page.read_text(encoding="utf-8") for page in sorted(Path("docs").glob("*.md"))]
    around = [text[at : at + LENGTH] for text in texts if len(text) > 3 * LENGTH for at in (LENGTH, 2 * LENGTH)]
    return tuple(
        Passage(
            source="docs",
            title=f"Document {number}",
            text=f"{fact}\n\n{text}"[:LENGTH],
            score=0.9 - number / 100,
            document_id=str(number),
        )
        for number, ((fact, _), text) in enumerate(zip(FACTS, around, strict=False))
    )


def timed(measured: Callable[[], object], rounds: int) -> float:
    """CPU in ms of this process, with all its threads."""
    spent = []
    for _ in range(rounds + 1):
        began = time.process_time()
        measured()
        spent.append((time.process_time() - began) * 1000)
    return median(spent[1:])


def comparing(found: Sequence[Passage], rounds: int) -> list[LimitedFigure]:
    read = ReadPassages(found)

    def compare() -> None:
        for _, said in FACTS:
            if read.copied(said) is None:
                for one in read.candidates(said):
                    read.comparison(said, one)

    return [
        LimitedFigure(
            name="CPU: passages read", ms=timed(lambda: ReadPassages(found), rounds), must_be_below_ms=MAX_READ_MS
        ),
        LimitedFigure(
            name="CPU: comparison of a sentence",
            ms=timed(compare, rounds) / len(FACTS),
            must_be_below_ms=MAX_SENTENCE_MS,
        ),
    ]


class Answering:
    """Answers with a scripted model, verified or not."""

    def __init__(self, claims: OnnxClaims, found: Sequence[Passage]) -> None:
        clock = SystemClock()
        self._reply = SourceReply(path="docs", status=Status.SUCCESS, passages=tuple(found))
        self._verifier = Verifier(claims, clock, reason="unavailable")
        self._clock = clock
        self.verdicts: tuple[str, ...] = ()

    async def late_ms(self, tokens_per_s: float, *, verify: bool) -> float:
        """From the last token to the last event."""
        writer = Writer(tokens_per_s)
        recorder = Recorder()
        pipeline = Pipeline(
            directory=FakeDirectory({"docs": FakeSource(self._reply)}, {"writer": writer}),
            clock=self._clock,
            telemetry=recorder,
            limits=Limits(
                retrieval_timeout_s=5, generation_timeout_s=60, context_tokens=8_000, query_context_tokens=8_000
            ),
            verifier=lambda: self._verifier,
        )
        context = Context(correlation_id="benchmark", deadline=time.monotonic() + 120, streaming=True)
        run = Run(pipeline, msgspec.structs.replace(QUESTION, verify=verify), context, recorder).start()
        ended = 0.0
        async with run.listen() as listener:
            async for event in listener:
                if isinstance(event, Answered):
                    ended = time.perf_counter()
        answer = await run.value()
        if answer.text != ANSWER or verify != bool(answer.sentences) or len(answer.passages) != len(FACTS):
            raise SystemExit("The answer is wrong: nothing was measured.")
        self.verdicts = tuple(one.reason or one.verdict for one in answer.sentences) or self.verdicts
        return (ended - writer.ended) * 1000

    async def cpu_ms(self) -> float:
        """Checking the whole answer, which comes at once."""
        events: list[object] = []

        async def emit(event: object) -> None:
            events.append(event)

        began = time.process_time()
        verifying = self._verifier.verifying(
            self._reply.passages, emit, strict=False, streaming=True, deadline=time.monotonic() + 60, language=None
        )
        async with verifying:
            await verifying.emit(Token(text=ANSWER))
            await verifying.finish()
        return (time.process_time() - began) * 1000


async def answering(console: Console, models: Path, found: Sequence[Passage], rounds: int) -> list[LimitedFigure]:
    claims = OnnxClaims(models)
    measured = Answering(claims, found)
    await measured.cpu_ms()
    figures = [
        LimitedFigure(
            name="CPU: ten sentences checked",
            ms=median([await measured.cpu_ms() for _ in range(rounds * 4)]),
            must_be_below_ms=MAX_CPU_MS,
        )
    ]
    for rate in RATES:
        late: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(rounds):
            for verify in (False, True):
                late[verify].append(await measured.late_ms(rate, verify=verify))
        off, on = median(late[False]), median(late[True])
        figures += [
            LimitedFigure(name=f"{rate} tokens/s: last token to last event, off", ms=off),
            LimitedFigure(
                name=f"{rate} tokens/s: last token to last event, on", ms=on, must_be_below_ms=off + MAX_LATER_MS
            ),
        ]
    await claims.close()
    console.print(f"Verdicts: {', '.join(measured.verdicts)}")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--models", type=Path, default=Path.home() / ".cache/anabranch/models")
    told = parser.parse_args()
    console = Console(highlight=False, width=100)
    found = passages()
    figures = comparing(found, told.rounds * 4)
    figures += asyncio.run(answering(console, told.models, found, told.rounds))
    title = f"{len(FACTS)} reworded sentences, {len(found)} passages of {LENGTH:,} characters"
    show_limited(console, title, "median ms", figures)


if __name__ == "__main__":
    main()
