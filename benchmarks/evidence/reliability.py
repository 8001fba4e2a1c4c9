"""The reliability of `support`: of the answers with about this probability, how many questions the passages answer."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

BINS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
# A dot for fewer questions says nothing.
LEAST = 5
COLOURS = ("#0b7285", "#e8590c", "#5f3dc4", "#2b8a3e", "#9aa5b1")

# Of each question: the support, and whether the passages answer it.
Judged = Sequence[tuple[float, bool]]


def binned(judged: Judged) -> list[tuple[float, float, int]]:
    """The mean support, the share that is answered, and the number of questions of each bin."""
    support = np.array([value for value, _ in judged])
    answered = np.array([answers for _, answers in judged], float)
    places = np.clip(np.digitize(support, BINS) - 1, 0, len(BINS) - 2)
    found = [
        (float(support[places == place].mean()), float(answered[places == place].mean()), int((places == place).sum()))
        for place in np.unique(places)
    ]
    return [one for one in found if one[2] >= LEAST]


def draw(sets: Mapping[str, Judged], path: Path) -> None:
    mpl.use("Agg")
    figure = Figure(figsize=(6.4, 5.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.plot((0, 1), (0, 1), color="#adb5bd", linewidth=1, linestyle="--", zorder=1)
    for (name, judged), colour in zip(sets.items(), COLOURS, strict=False):
        support, share, counts = zip(*binned(judged), strict=True)
        axes.plot(support, share, color=colour, linewidth=1.2, zorder=2, label=f"{name} ({len(judged)} questions)")
        axes.scatter(support, share, s=[10 + count for count in counts], color=colour, zorder=3, linewidths=0)
    axes.set_xlabel("support, as answered")
    axes.set_ylabel("share of questions that the passages answer")
    axes.set_title("Reliability of support; larger dots have more questions", loc="left", fontsize=11)
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.02, 1.02)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e9ecef", zorder=0)
    axes.legend(frameon=False, loc="upper left", fontsize=9)
    figure.savefig(path)
