"""A bar chart of an evaluation, as SVG."""

from collections.abc import Mapping
from xml.sax.saxutils import escape

from anabranch.knowledge.evaluate import Measures, Stage

NAMES = {"ndcg_10": "nDCG@10", "recall_10": "Recall@10", "recall_100": "Recall@100", "mrr_10": "MRR@10"}
COLOURS = ("#9aa5b1", "#5b8def", "#2bb3a3", "#e2725b")
LEFT, TOP, HEIGHT, BAR, GAP = 50, 60, 220, 26, 30


def chart(title: str, measured: Mapping[Stage, Measures]) -> str:
    """A group of bars for each measure, a bar for each stage."""
    group = BAR * len(measured) + GAP
    width = LEFT + group * len(NAMES) + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {TOP + HEIGHT + 60}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="{LEFT}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for line in range(6):
        y = TOP + HEIGHT * (1 - line / 5)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{width - GAP}" y2="{y:.1f}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#555">{line / 5:.1f}</text>')
    for number, (field, name) in enumerate(NAMES.items()):
        begin = LEFT + GAP / 2 + group * number
        for at, measures in enumerate(measured.values()):
            parts += _bar(begin + BAR * at, float(getattr(measures, field)), COLOURS[at % len(COLOURS)])
        middle = begin + BAR * len(measured) / 2
        parts.append(f'<text x="{middle:.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{name}</text>')
    for at, stage in enumerate(measured):
        x = LEFT + 90 * at
        parts.append(f'<rect x="{x}" y="{TOP + HEIGHT + 34}" width="12" height="12" fill="{COLOURS[at % 4]}"/>')
        parts.append(f'<text x="{x + 18}" y="{TOP + HEIGHT + 44}">{stage}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _bar(x: float, value: float, colour: str) -> list[str]:
    y = TOP + HEIGHT * (1 - value)
    return [
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{BAR - 3}" height="{HEIGHT * value:.1f}" fill="{colour}"/>',
        f'<text x="{x + (BAR - 3) / 2:.1f}" y="{y - 4:.1f}" text-anchor="middle" font-size="9">{value:.2f}</text>',
    ]
