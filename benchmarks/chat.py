"""`make bench`: CPU, latency and time over the limit of a chat answer, for our server and two comparisons."""

import argparse
from contextlib import ExitStack
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console

from benchmarks import plot, report
from benchmarks.load import DOCUMENT_BYTES, DOCUMENTS, Burst, burst, question
from benchmarks.servers import COMMANDS, Server, on_terminate_as_on_interrupt, serving, upstream

RESULTS = Path(__file__).parent / "results"
LOAD_CONCURRENCIES = (1, 16, 64)
OVERHEAD_CONCURRENCIES = (1, 16)
SOURCE_DELAY_MS = 50
MODEL_DELAY_MS = 100

Bursts = dict[tuple[int, str], list[Burst]]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How long to measure: `rounds` times, each server and load in turn."""

    rounds: int
    load_s: float
    overhead_s: float
    warm_up_s: float


FULL = Plan(rounds=5, load_s=0.8, overhead_s=0.6, warm_up_s=1.0)
QUICK = Plan(rounds=2, load_s=0.2, overhead_s=0.2, warm_up_s=0.3)


async def measure(servers: list[Server], instant: Server, slow: Server, plan: Plan, console: Console) -> report.Report:
    machine = report.this_machine()
    instant_question, slow_question = question(instant), question(slow)
    for server in servers:
        await burst(server, instant_question, concurrency=16, seconds=plan.warm_up_s)
    names = list(dict.fromkeys(server.name for server in servers))
    load: Bursts = {(c, name): [] for c in LOAD_CONCURRENCIES for name in names}
    overhead: Bursts = {(c, name): [] for c in OVERHEAD_CONCURRENCIES for name in names}
    for number in range(1, plan.rounds + 1):
        console.print(f"[dim]round {number} of {plan.rounds}[/]")
        await _round(servers, instant_question, plan.load_s, load)
        await _round(servers, slow_question, plan.overhead_s, overhead)
    load_figures = [report.load_figures(name, c, bursts) for (c, name), bursts in load.items()]
    limit_ms = SOURCE_DELAY_MS + MODEL_DELAY_MS
    overhead_figures = [report.overhead_figures(name, c, bursts, limit_ms) for (c, name), bursts in overhead.items()]
    return report.Report(
        machine=machine,
        limit_ms=limit_ms,
        load=load_figures,
        overhead=overhead_figures,
        targets=report.targets(load_figures, overhead_figures),
    )


async def _round(servers: list[Server], body: bytes, seconds: float, found: Bursts) -> None:
    """The servers take turns at each load, so that noise of the machine falls on all of them."""
    for concurrency in dict.fromkeys(concurrency for concurrency, _ in found):
        for server in servers:
            bursts = found[concurrency, server.name]
            bursts.append(await burst(server, body, concurrency=concurrency, seconds=seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", default=",".join(COMMANDS), help="which to measure, separated by commas")
    parser.add_argument("--before", type=Path, metavar="ANABRANCH", help="the executable of an earlier commit's .venv")
    parser.add_argument("--copies", type=int, default=1, metavar="N", help="processes of each server")
    parser.add_argument("--quick", action="store_true", help="about 15 s instead of 90, with more noise")
    parser.add_argument("--results", type=Path, help="folder for chat.json and chat.png; a full run has its own")
    options = parser.parse_args()
    names = options.servers.split(",")
    if unknown := set(names) - set(COMMANDS):
        parser.error(f"no such server: {', '.join(sorted(unknown))}")

    on_terminate_as_on_interrupt()
    console = Console()
    documents = ("--documents", str(DOCUMENTS), "--document-bytes", str(DOCUMENT_BYTES))
    with ExitStack() as running:
        instant = running.enter_context(upstream(*documents))
        delays = ("--delay-ms", str(SOURCE_DELAY_MS), "--model-delay-ms", str(MODEL_DELAY_MS))
        slow = running.enter_context(upstream(*documents, *delays))
        servers: list[Server] = []
        # Two processes of one version can differ by some percent for as long as they run.
        for _ in range(options.copies):
            servers += [running.enter_context(serving(name)) for name in names]
            if options.before is not None:
                servers.append(running.enter_context(serving("before", executable=options.before.absolute())))
        found = uvloop.run(measure(servers, instant, slow, QUICK if options.quick else FULL, console))

    report.show(found, console)
    is_full = not options.quick and len(names) == len(COMMANDS) and options.before is None
    results = options.results or (RESULTS if is_full else None)
    if results is not None:
        results.mkdir(parents=True, exist_ok=True)
        written = msgspec.json.format(msgspec.json.encode(found), indent=2)
        (results / "chat.json").write_bytes(written + b"\n")
        plot.draw(found, results / "chat.png")


if __name__ == "__main__":
    main()
