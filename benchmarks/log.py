"""What a stream costs: appending to the log one entry at a time, and replaying ten thousand into SSE frames."""

import argparse
import time
from collections.abc import Callable, Coroutine
from statistics import median
from typing import Any

import msgspec
import uvloop
from rich import box
from rich.console import Console
from rich.table import Table

from anabranch.domain.contracts import SystemClock
from anabranch.domain.eventlog import Entry, LogLimits, Page, SequencedEntry
from anabranch.domain.events import SubagentResult
from anabranch.domain.steps import Trace
from anabranch.eventlog.memory import MemoryLog
from anabranch.eventlog.reader import StreamReader
from anabranch.planner.encoder import encode, numbered, raw
from benchmarks.report import this_machine

EVENTS = 10_000
FRAME_EVENTS = 5
KEYS = 64
BODY_BYTES = 300
CAP_BYTES = 2**20
MIN_APPENDS_PER_S = 5_000.0
MAX_REPLAY_CPU_MS = 100.0
STREAM = "step:7:session:step"


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of the rounds; CPU is this process's."""

    name: str
    cpu_ms: float
    wall_ms: float
    events: int
    bound: str
    met: bool

    @property
    def events_per_s(self) -> float:
        return self.events / self.wall_ms * 1000


class Round(msgspec.Struct, frozen=True):
    cpu_ms: float
    wall_ms: float


def event(number: int) -> Entry:
    """A part of a result, as a subagent yields it: about 300 bytes when written."""
    happened = SubagentResult(
        subagent="documentation",
        result_key=f"result-{number % KEYS}",
        status="partial",
        revision=number // KEYS + 1,
        payload=raw({"text": "x"}),
    )
    trace = Trace(trace_id="0af7651916cd43dd8448eb211c80319c", span_id="b7ad6b7169203331")
    return encode(happened, session_id="session", plan_step_id="step", at=1_700_000_000.0, trace=trace).entry


def lost(page: Page) -> Entry:
    return Entry(key="end", revision=1, body=b"{}", final=True)


def memory_log() -> MemoryLog:
    return MemoryLog(clock=SystemClock(), worker="benchmark", limits=LogLimits())


def timed(started: tuple[float, float]) -> Round:
    wall, cpu = started
    return Round((time.process_time() - cpu) * 1000, (time.perf_counter() - wall) * 1000)


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


async def append_in_memory(entries: list[Entry]) -> Round:
    """As a step's writer does, one entry at a time."""
    log = memory_log()
    token = await log.open(STREAM, identity="operator")
    started = now()
    for each in entries:
        await log.append(STREAM, token, (each,))
    return timed(started)


async def replay_from_memory(entries: list[Entry]) -> Round:
    """Everything from the log through a reader into frames, as one client gets it."""
    log = memory_log()
    token = await log.open(STREAM, identity="operator")
    await log.append(STREAM, token, [*entries[:-1], msgspec.structs.replace(entries[-1], final=True)])
    sent = 0
    frames = 0
    started = now()
    async with StreamReader(log, STREAM, 0, cap_bytes=CAP_BYTES, lost=lost) as reader:
        ended = False
        while not ended and (batch := await reader.next(0)) is not None:
            for first in range(0, len(batch.entries), FRAME_EVENTS):
                frames += 1
                sent += len(frame(frames, batch.entries[first : first + FRAME_EVENTS]))
            ended = batch.ended
    took = timed(started)
    if frames != EVENTS / FRAME_EVENTS or sent < EVENTS * BODY_BYTES:
        raise RuntimeError(f"{frames} frames of {sent} bytes are not the whole stream")
    return took


def frame(number: int, entries: tuple[SequencedEntry, ...]) -> bytes:
    events = b",".join([numbered(each.body, each.sequence) for each in entries])
    return b'id: %d\nevent: planner_stream\ndata: {"type":"event_batch","batch_sequence":%d,"events":[%b]}\n\n' % (
        entries[-1].sequence,
        number,
        events,
    )


def rounds_of(measured: Callable[[list[Entry]], Coroutine[Any, Any, Round]], count: int) -> Round:
    entries = [event(number) for number in range(EVENTS)]
    taken = [uvloop.run(measured(entries)) for _ in range(count)]
    return Round(median(each.cpu_ms for each in taken), median(each.wall_ms for each in taken))


def appends(rounds: int) -> Figure:
    took = rounds_of(append_in_memory, rounds)
    met = EVENTS / took.wall_ms * 1000 > MIN_APPENDS_PER_S
    return figure("append, in memory", took, f"> {MIN_APPENDS_PER_S:,.0f} events/s", met)


def replays(rounds: int) -> Figure:
    took = rounds_of(replay_from_memory, rounds)
    met = took.cpu_ms < MAX_REPLAY_CPU_MS
    return figure("replay into SSE frames", took, f"< {MAX_REPLAY_CPU_MS:g} ms CPU", met)


def figure(name: str, took: Round, bound: str, met: bool) -> Figure:
    return Figure(name=name, cpu_ms=took.cpu_ms, wall_ms=took.wall_ms, events=EVENTS, bound=bound, met=met)


# A function each; another log adds its own here.
FIGURES: tuple[Callable[[int], Figure], ...] = (appends, replays)


def show(figures: list[Figure], console: Console) -> None:
    machine = this_machine()
    console.print(
        f"Python {machine.python}, {machine.system}, {machine.cores} cores, load average {machine.load_average}"
    )
    size = len(event(EVENTS - 1).body)
    table = Table(title=f"{EVENTS:,} events of {size} bytes", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("", "CPU ms", "wall ms", "events/s", "must be", ""):
        table.add_column(name, justify="right" if name not in ("", "must be") else "left")
    for each in figures:
        verdict = "[green]PASS[/]" if each.met else "[red]FAIL[/]"
        numbers = f"{each.cpu_ms:.1f}", f"{each.wall_ms:.1f}", f"{each.events_per_s:,.0f}"
        table.add_row(each.name, *numbers, each.bound, verdict)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    from benchmarks.sharedlog import shared_appends, shared_appends_to_many

    show([measure(rounds) for measure in (*FIGURES, shared_appends, shared_appends_to_many)], Console())


if __name__ == "__main__":
    main()
