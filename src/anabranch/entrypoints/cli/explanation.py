"""An explanation as text: each passage's way to the prompt, then what was left out, by reason."""

from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from anabranch.domain.explanation import MAX_TEXT, ExplainedPassage, Explanation, Key, PassageStep
from anabranch.entrypoints.cli.terminal import counted, flat, one_line

INDENT = 4
# Of those that were left out for the same reason, so many are shown.
MOST_ALIKE = 5
# Values that need no name.
PLAIN = ("score", "probability", "most")


def explained(explanation: Explanation) -> Group:
    """Each passage has its number or a cross, its beginning, and its rank after each stage with the stage's values."""
    kept = [one for one in explanation.passages if one.left_out is None]
    numbers: dict[Key, int | None] = {one.key: one.steps[-1].rank for one in kept}
    shown = [part for one in kept for part in _passage(one, numbers)]
    for reason, passages in _by_reason(explanation.passages).items():
        shown += [Text(), Text.assemble(("Left out: ", "yellow"), reason)]
        shown += [part for one in passages[:MOST_ALIKE] for part in _passage(one, numbers)]
        if len(passages) > MOST_ALIKE:
            shown.append(Text(f"… and {len(passages) - MOST_ALIKE:,} more (--json has all)", style="dim"))
    if explanation.more:
        shown += [Text(), Text(f"{counted(explanation.more, 'more passage')} left out", style="dim")]
    heading = Text.assemble(("Passages", "bold"), (": rank after each stage (scores) → … → place in the prompt", "dim"))
    return Group(heading, *shown)


def _by_reason(passages: Sequence[ExplainedPassage]) -> dict[str, list[ExplainedPassage]]:
    groups: dict[str, list[ExplainedPassage]] = {}
    for passage in passages:
        if passage.left_out is not None:
            step = next(step for step in passage.steps if step.stage == passage.left_out and step.left_out)
            groups.setdefault(flat(step.note), []).append(passage)
    return groups


def _passage(passage: ExplainedPassage, numbers: dict[Key, int | None]) -> Iterator[RenderableType]:
    mark = ("✗", "red") if passage.left_out else (f"[{passage.steps[-1].rank}]", "cyan")
    yield Text.assemble(mark, " ", (flat(passage.title), "bold"), f" · {flat(passage.source)}")
    beginning = one_line(f"“{passage.text}{'…' if len(passage.text) == MAX_TEXT else ''}”")
    beginning.stylize("dim")
    yield Padding(
        Group(beginning, _Way([_step(step, numbers) for step in passage.steps])), (0, 0, 0, INDENT), expand=False
    )


class _Way:
    """Steps with arrows between them. A step is not split over two lines if it fits one."""

    def __init__(self, steps: Sequence[Text]) -> None:
        self._steps = steps

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        line = Text()
        for step in self._steps:
            if line and line.cell_len + len(" → ") + step.cell_len > options.max_width:
                yield line
                line = Text()
            arrow = " → " if line else "→ "
            line = step if step is self._steps[0] else Text.assemble(line, arrow, step)
        yield line


def _step(step: PassageStep, numbers: dict[Key, int | None]) -> Text:
    values = [
        _number(value) if name in PLAIN else f"{name.replace('_', ' ')} {_number(value)}"
        for name, value in step.values.items()
    ]
    # The reason for leaving passages out stands above them.
    note = "" if step.left_out else flat(step.note)
    inside = ", ".join(filter(None, (*values, note, _other(step, numbers))))
    rank = "" if step.rank is None else str(step.rank)
    parts = (step.stage.replace("_", "-"), rank, f"({inside})" if inside else "")
    return Text(" ".join(filter(None, parts)), style="yellow" if step.left_out else "")


def _other(step: PassageStep, numbers: dict[Key, int | None]) -> str:
    if step.other is None:
        return ""
    number = numbers.get(step.other.key)
    mark = f"[{number}] " if number is not None else ""
    return f"see {mark}{flat(step.other.title)} · {flat(step.other.source)}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.3g}"
