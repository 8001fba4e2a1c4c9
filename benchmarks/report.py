"""What a run of the chat benchmark found: figures, ratios and targets, as values and as a table."""

import os
import platform
from collections.abc import Iterable
from datetime import UTC, datetime
from statistics import median, quantiles

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.load import WORKLOAD, Burst

MAX_TIMES_FLOOR = 6.0
MIN_TIMES_CHEAPER_THAN_CLASSIC = 6.0
MAX_OVERHEAD_MS = 10.0
MAX_TIMES_BEFORE = 1.03


class LoadFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One server at one concurrency: CPU and throughput are medians of the rounds, percentiles are over all."""

    server: str
    concurrency: int
    requests: int
    cpu_ms: float
    cpu_ms_rounds: list[float]
    requests_per_s: float
    p50_ms: float
    p99_ms: float


class LimitedFigure(msgspec.Struct, frozen=True, kw_only=True):
    """The median of the rounds, in ms."""

    name: str
    ms: float
    must_be_below_ms: float | None = None


def show_limited(console: Console, title: str, unit: str, figures: Iterable[LimitedFigure]) -> None:
    machine = this_machine()
    console.print(
        f"Python {machine.python}, {machine.system}, {machine.cores} cores, load average {machine.load_average}"
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("", unit, "must be", ""):
        table.add_column(name, justify="right" if name == unit else "left")
    for each in figures:
        bound = each.must_be_below_ms
        verdict = "" if bound is None else "[green]PASS[/]" if each.ms < bound else "[red]FAIL[/]"
        table.add_row(each.name, f"{each.ms:.1f}", "" if bound is None else f"< {bound:.4g}", verdict)
    console.print(table)


class OverheadFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The median time over what the slowest source and the model take together."""

    server: str
    concurrency: int
    requests: int
    over_ms: float


class Target(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    concurrency: int
    measured: float
    met: bool


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    taken_at: str
    python: str
    system: str
    cores: int
    load_average: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    machine: Machine
    limit_ms: int
    load: list[LoadFigures]
    overhead: list[OverheadFigures]
    targets: list[Target]


def this_machine() -> Machine:
    return Machine(
        taken_at=datetime.now(UTC).isoformat(timespec="seconds"),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        cores=os.cpu_count() or 0,
        load_average=round(os.getloadavg()[0], 2),
    )


def load_figures(server: str, concurrency: int, bursts: list[Burst]) -> LoadFigures:
    latencies_ms = [latency for burst in bursts for latency in burst.latencies_ms]
    return LoadFigures(
        server=server,
        concurrency=concurrency,
        requests=len(latencies_ms),
        cpu_ms=_rounded(median(burst.cpu_ms_per_request for burst in bursts)),
        cpu_ms_rounds=[_rounded(burst.cpu_ms_per_request) for burst in bursts],
        requests_per_s=_rounded(median(burst.requests_per_s for burst in bursts)),
        p50_ms=_rounded(median(latencies_ms)),
        p99_ms=_rounded(quantiles(latencies_ms, n=100, method="inclusive")[-1]),
    )


def overhead_figures(server: str, concurrency: int, bursts: list[Burst], limit_ms: int) -> OverheadFigures:
    latencies_ms = [latency for burst in bursts for latency in burst.latencies_ms]
    over_ms = _rounded(median(latencies_ms) - limit_ms)
    return OverheadFigures(server=server, concurrency=concurrency, requests=len(latencies_ms), over_ms=over_ms)


def targets(load: Iterable[LoadFigures], overhead: Iterable[OverheadFigures]) -> list[Target]:
    """Those that the measured servers can answer."""
    load = list(load)
    cpu_ms = {(each.server, each.concurrency): each.cpu_ms for each in load}
    found = []
    for concurrency in dict.fromkeys(each.concurrency for each in load):
        ours, floor, classic, before = (
            cpu_ms.get((name, concurrency)) for name in ("anabranch", "floor", "classic", "before")
        )
        if ours and before:
            name = f"CPU ≤ {MAX_TIMES_BEFORE:g} times before"
            found.append(_at_most(name, concurrency, ours / before, MAX_TIMES_BEFORE))
        if ours and floor:
            found.append(_at_most(f"CPU ≤ {MAX_TIMES_FLOOR:g} times floor", concurrency, ours / floor, MAX_TIMES_FLOOR))
        if ours and classic:
            name = f"CPU ≤ 1/{MIN_TIMES_CHEAPER_THAN_CLASSIC:g} of classic"
            met = classic / ours >= MIN_TIMES_CHEAPER_THAN_CLASSIC
            found.append(Target(name=name, concurrency=concurrency, measured=_rounded(classic / ours), met=met))
    found += [
        _at_most(f"over the limit ≤ {MAX_OVERHEAD_MS:g} ms", each.concurrency, each.over_ms, MAX_OVERHEAD_MS)
        for each in overhead
        if each.server == "anabranch" and each.concurrency == 1
    ]
    return sorted(found, key=lambda target: target.name)


def show(report: Report, console: Console) -> None:
    machine = report.machine
    console.print(
        f"Python {machine.python}, {machine.system}, {machine.cores} cores, load average {machine.load_average}"
    )
    console.print(_load_table(report.load))
    console.print(_overhead_table(report))
    if report.targets:
        console.print(_target_table(report.targets))


def _load_table(load: list[LoadFigures]) -> Table:
    table = _table(f"{WORKLOAD}, all instant")
    for name in ("at once", "server", "CPU ms", "req/s", "p50 ms", "p99 ms", "/ floor", "/ ours"):
        table.add_column(name, justify="left" if name == "server" else "right")
    cpu_ms = {(each.server, each.concurrency): each.cpu_ms for each in load}
    previous = None
    for each in load:
        if previous not in (None, each.concurrency):
            table.add_section()
        table.add_row(
            str(each.concurrency) if each.concurrency != previous else "",
            each.server,
            f"{each.cpu_ms:.2f}",
            f"{each.requests_per_s:.0f}",
            f"{each.p50_ms:.1f}",
            f"{each.p99_ms:.1f}",
            _ratio(each.cpu_ms, cpu_ms.get(("floor", each.concurrency))),
            _ratio(each.cpu_ms, cpu_ms.get(("anabranch", each.concurrency))),
        )
        previous = each.concurrency
    return table


def _overhead_table(report: Report) -> Table:
    table = _table(f"Median time over the limit of {report.limit_ms} ms")
    table.add_column("server")
    figures = {(each.server, each.concurrency): each.over_ms for each in report.overhead}
    concurrencies = list(dict.fromkeys(each.concurrency for each in report.overhead))
    for concurrency in concurrencies:
        table.add_column(f"{concurrency} at once (ms)", justify="right")
    for server in dict.fromkeys(each.server for each in report.overhead):
        table.add_row(server, *(f"{figures[server, concurrency]:.1f}" for concurrency in concurrencies))
    return table


def _target_table(found: list[Target]) -> Table:
    table = _table("Targets")
    table.add_column("target")
    table.add_column("at once", justify="right")
    table.add_column("measured", justify="right")
    table.add_column("")
    for each in found:
        verdict = "[green]PASS[/]" if each.met else "[red]FAIL[/]"
        table.add_row(each.name, str(each.concurrency), f"{each.measured:.3g}", verdict)
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)


def _at_most(name: str, concurrency: int, measured: float, limit: float) -> Target:
    return Target(name=name, concurrency=concurrency, measured=_rounded(measured), met=measured <= limit)


def _ratio(value: float, of: float | None) -> str:
    return f"{value / of:.2g}" if of else "-"


def _rounded(value: float) -> float:
    return round(value, 3)
