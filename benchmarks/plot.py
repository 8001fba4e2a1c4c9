"""The figure of a chat benchmark report."""

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from benchmarks.load import WORKLOAD
from benchmarks.report import MAX_OVERHEAD_MS, Report

COLOURS = {"floor": "#9aa5b1", "anabranch": "#0b7285", "classic": "#e8590c"}
LABELS = {"floor": "floor (raw asyncio)", "anabranch": "anabranch", "classic": "classic (FastAPI + httpx)"}
BAR_WIDTH = 0.27


def draw(report: Report, path: Path) -> None:
    mpl.use("Agg")
    figure = Figure(figsize=(10, 4.4), dpi=150, layout="constrained")
    cpu, overhead = figure.subplots(1, 2, width_ratios=(3, 2))
    _bars(cpu, {(each.server, each.concurrency): each.cpu_ms for each in report.load})
    cpu.set_title("CPU per request, ms (log scale)", loc="left", fontsize=11)
    _bars(overhead, {(each.server, each.concurrency): each.over_ms for each in report.overhead})
    overhead.set_title(f"Median over the limit of {report.limit_ms} ms, ms (log scale)", loc="left", fontsize=11)
    overhead.hlines(MAX_OVERHEAD_MS, -0.5, 0.42, color="#212529", linewidth=1, linestyle="--", zorder=3)
    overhead.annotate("target", (-0.48, MAX_OVERHEAD_MS), (0, 3), textcoords="offset points", fontsize=8)
    handles, labels = cpu.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(f"One question: {WORKLOAD}", x=0.01, ha="left", fontweight="bold")
    figure.savefig(path)


def _bars(axes: Axes, values: dict[tuple[str, int], float]) -> None:
    servers = [name for name in COLOURS if any(name == server for server, _ in values)]
    concurrencies = list(dict.fromkeys(concurrency for _, concurrency in values))
    for place, server in enumerate(servers):
        offset = (place - (len(servers) - 1) / 2) * BAR_WIDTH
        positions = [index + offset for index in range(len(concurrencies))]
        heights = [values[server, concurrency] for concurrency in concurrencies]
        bars = axes.bar(positions, heights, BAR_WIDTH * 0.94, label=LABELS[server], color=COLOURS[server], zorder=2)
        axes.bar_label(bars, fmt=_figure, padding=2, fontsize=9)
    axes.set_yscale("log")
    axes.margins(y=0.15)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xticks(range(len(concurrencies)), [f"{concurrency} at once" for concurrency in concurrencies])
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e9ecef", zorder=0)


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"
