"""What verification found, as text: sentences that no source supports, missing and wrong citations, the faithfulness,
and sources that disagree."""

from collections import Counter
from collections.abc import Iterator, Mapping

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from anabranch.domain.model import (
    Answer,
    CheckedSentence,
    QuotedSpan,
    SourceConflict,
    Support,
    SupportingQuote,
    UncheckedReason,
)
from anabranch.entrypoints.cli.terminal import counted, flat, joined
from anabranch.pipeline.marks import MarkStyle, with_marks

SNIPPET = 160
# How each verdict is shown: a sign with its style, before a sentence, and in a count.
DOUBTFUL: dict[Support, tuple[str, str, str]] = {
    "contradicted": ("✗", "red", "A source says otherwise"),
    "unsupported": ("✗", "red", "No source says this"),
    "partly": ("~", "yellow", "Supported in part"),
}
COUNTED = {
    "supported": "supported",
    "partly": "in part",
    "unsupported": "unsupported",
    "contradicted": "contradicted",
}
# Why a sentence was not checked, where that is worth knowing.
UNCHECKED: dict[UncheckedReason, str] = {
    "off": "AGGREGATOR_VERIFY is off",
    "over_budget": "there was no time left",
    "not_english": "not English",
    "unfinished": "the model did not finish it",
    "unavailable": "the model that checks is not available",
}


def checked_sentences(answer: Answer) -> Group | None:
    """None if there is nothing to say."""
    parts: list[RenderableType] = [*_doubtful(answer), *_citations(answer)]
    if summary := _summary(answer):
        parts.append(Text(summary))
    # A blank line between them.
    shown = [one for part in parts for one in (Text(), part)][1:]
    return Group(*shown) if shown else None


def conflicting_sources(answer: Answer) -> Group | None:
    """The conflicts of which the answer does not cite both sides; None if there are none."""
    cited = {(one.passage, one.passage_start, one.passage_end) for one in answer.citations}
    left = [one for one in answer.conflicts if not _is_shown(one, cited)]
    if not left:
        return None
    marks = MarkStyle(answer)
    sides = dict.fromkeys(side for one in left for side in (one.claim, one.against))
    shown = (Padding(_source_says(answer, side, marks), (0, 0, 0, 2), expand=False) for side in sides)
    return Group(Text("The sources disagree:", style="yellow"), *shown)


def _is_shown(conflict: SourceConflict, cited: set[tuple[int, int, int]]) -> bool:
    return all(
        any(passage == side.passage and start < side.end and side.start < end for passage, start, end in cited)
        for side in (conflict.claim, conflict.against)
    )


def _doubtful(answer: Answer) -> Iterator[RenderableType]:
    rows, marks = _rows(), MarkStyle(answer)
    for sentence in answer.sentences:
        if sentence.verdict not in DOUBTFUL:
            continue
        sign, style, meaning = DOUBTFUL[sentence.verdict]
        shown = [Text.assemble((meaning, style), ": ", _quoted(answer.text, sentence.start, sentence.end))]
        shown += [_source_says(answer, quote, marks) for quote in sentence.quotes]
        if sentence.doubted:
            words = ", ".join(_quoted(answer.text, *span) for span in sentence.doubted)
            shown.append(Text(f"not in {'it' if len(sentence.quotes) == 1 else 'the sources'}: {words}"))
        rows.add_row(Text(sign, style=style), Group(*shown))
    if rows.rows:
        yield rows


def _rows() -> Table:
    """A narrow column, and text that is wrapped beside it."""
    return Table.grid(padding=(0, 1))


def _source_says(answer: Answer, quote: SupportingQuote | QuotedSpan, style: MarkStyle) -> Text:
    passage = answer.passages[quote.passage]
    said = _quoted(passage.text, quote.start, quote.end)
    return Text.assemble((flat(style.mark([quote.passage])), "cyan"), f" {flat(passage.title)}: ", (said, "dim"))


def _citations(answer: Answer) -> Iterator[RenderableType]:
    """Of sentences that are supported; the others are shown with what their sources say."""
    marked = with_marks(answer)
    changed = [
        (written, right)
        for written, right in zip(answer.sentences, marked.sentences, strict=True)
        if written.verdict == "supported" and (written.corrected or written.added)
    ]
    if not changed:
        return
    rows = _rows()
    for written, right in changed:
        marks = _marks(marked, right)
        wrong = [mark for mark in _marks(answer, written) if mark not in marks]
        instead = f", not {' '.join(wrong)}" if wrong else ""
        said = _quoted(answer.text, written.start, written.end)
        rows.add_row("", Text.assemble((" ".join(marks), "cyan"), f"{instead}: ", said))
    yield Group(Text("Missing or wrong citations:"), rows)


def _marks(answer: Answer, sentence: CheckedSentence) -> list[str]:
    """The marks of a sentence, each once."""
    places = ((one.start, one.end) for one in answer.citations if sentence.start <= one.start < one.end <= sentence.end)
    return list(dict.fromkeys(flat(answer.text[start:end]) for start, end in places))


def _quoted(text: str, start: int, end: int) -> str:
    words = flat(text[start:end])
    return f"“{words if len(words) <= SNIPPET else words[: SNIPPET - 1] + '…'}”"


def verdict_counts(verdicts: Mapping[str, int]) -> str:
    """How many sentences have each verdict, as text; without those that were not checked."""
    return ", ".join(f"{verdicts[verdict]} {name}" for verdict, name in COUNTED.items() if verdicts.get(verdict))


def _summary(answer: Answer) -> str:
    """The faithfulness with the number of sentences of each verdict; then what was changed in citation marks."""
    judged = verdict_counts(answer.verdicts)
    score = f"faithfulness {answer.faithfulness:.2f}" if answer.faithfulness is not None else ""
    reasons = Counter(one.reason for one in answer.sentences if one.reason in UNCHECKED)
    found = joined(
        f"{score} ({judged})" if score and judged else score,
        "below AGGREGATOR_MIN_FAITHFULNESS" if answer.unfaithful else "",
        f"{answer.left_out} left out" if answer.left_out else "",
        *(f"{counted(reasons[one], 'sentence')} not checked ({why})" for one, why in UNCHECKED.items() if reasons[one]),
    )
    marks = ", ".join(f"{number} {kind}" for kind, number in answer.marks.items() if number and kind != "written")
    return "\n".join(filter(None, (found, f"citation marks: {marks}" if marks else "")))
