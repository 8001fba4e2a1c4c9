"""Documents that contradict each other on what was asked, as text."""

from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from anabranch.domain.model import Answer, QuotedSpan, SourceConflict
from anabranch.entrypoints.cli.terminal import flat

SNIPPET = 160


def conflicting_sources(answer: Answer) -> Group | None:
    """The conflicts of which the answer does not cite both sides; None if there are none."""
    cited = {(one.passage, one.passage_start, one.passage_end) for one in answer.citations}
    left = [one for one in answer.conflicts if not _is_shown(one, cited)]
    if not left:
        return None
    sides = dict.fromkeys(side for one in left for side in (one.claim, one.against))
    shown = (Padding(_said(answer, side), (0, 0, 0, 2), expand=False) for side in sides)
    return Group(Text("The sources disagree:", style="yellow"), *shown)


def _is_shown(conflict: SourceConflict, cited: set[tuple[int, int, int]]) -> bool:
    return all(
        any(passage == side.passage and start < side.end and side.start < end for passage, start, end in cited)
        for side in (conflict.claim, conflict.against)
    )


def _said(answer: Answer, side: QuotedSpan) -> Text:
    passage = answer.passages[side.passage]
    words = flat(passage.text[side.start : side.end])
    snippet = words if len(words) <= SNIPPET else words[: SNIPPET - 1] + "…"
    return Text.assemble((f"[{side.passage + 1}] ", "cyan"), (flat(passage.title), "bold"), f": “{snippet}”")
