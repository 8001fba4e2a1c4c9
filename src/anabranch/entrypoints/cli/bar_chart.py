"""Draws SVG bar charts of values from 0 to 1."""

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

COLOURS = ("#9aa5b1", "#5b8def", "#2bb3a3", "#e2725b")
LEFT, TOP, HEIGHT, BAR, GAP = 50, 60, 220, 26, 30
SHORT = 10


def bar_chart(title: str, names: Sequence[str], series: Mapping[str, Sequence[float | None]], *, group: int = 0) -> str:
    """One group per name, one bar per series. A group is at least `group` wide. A bar without a value is left out."""
    group = max(BAR * len(series) + GAP, group)
    width = LEFT + group * len(names) + GAP
    # Long names of series are below each other.
    across, down = (90, 0) if max(map(len, series)) <= SHORT else (0, 18)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {TOP + HEIGHT + 60 + down * (len(series) - 1)}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="{LEFT}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for line in range(6):
        y = TOP + HEIGHT * (1 - line / 5)
        parts += [
            f'<line x1="{LEFT}" y1="{y:.1f}" x2="{width - GAP}" y2="{y:.1f}" stroke="#e5e7eb"/>',
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#555">{line / 5:.1f}</text>',
        ]
    for number, name in enumerate(names):
        middle = LEFT + group * (number + 0.5)
        begin = middle - BAR * len(series) / 2
        for at, values in enumerate(series.values()):
            parts += _bar(begin + BAR * at, values[number], COLOURS[at % len(COLOURS)])
        parts.append(f'<text x="{middle:.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{escape(name)}</text>')
    for at, name in enumerate(series):
        x, y = LEFT + across * at, TOP + HEIGHT + 34 + down * at
        parts += [
            f'<rect x="{x}" y="{y}" width="12" height="12" fill="{COLOURS[at % 4]}"/>',
            f'<text x="{x + 18}" y="{y + 10}">{escape(name)}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def _bar(x: float, value: float | None, colour: str) -> list[str]:
    if value is None:
        return []
    y = TOP + HEIGHT * (1 - value)
    return [
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{BAR - 3}" height="{HEIGHT * value:.1f}" fill="{colour}"/>',
        f'<text x="{x + (BAR - 3) / 2:.1f}" y="{y - 4:.1f}" text-anchor="middle" font-size="9">{value:.2f}</text>',
    ]
