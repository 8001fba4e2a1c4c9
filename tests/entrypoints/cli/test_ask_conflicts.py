"""What `anabranch ask` prints if the sources disagree."""

import pytest

from anabranch.domain.events import Answered
from anabranch.domain.model import Answer, Citation, Ground, Passage, QuotedSpan, SourceConflict
from anabranch.entrypoints.cli.ask import AskScreen

TEXTS = {"Policy": "Employees get 30 days.", "Handbook": "Employees get 45 days."}
PASSAGES = tuple(Passage(source="hr", title=title, text=text, score=0.9) for title, text in TEXTS.items())
CONFLICT = SourceConflict(
    claim=QuotedSpan(passage=0, start=0, end=22),
    against=QuotedSpan(passage=1, start=0, end=22),
    kind="number",
    probability=0.97,
)


def printed(capsys: pytest.CaptureFixture[str], text: str, *cited: int) -> str:
    citations = tuple(
        Citation(
            start=text.index(f"[{at + 1}]"), end=len(text), source="hr", passage=at, passage_start=0, passage_end=22
        )
        for at in cited
    )
    answer = Answer(text=text, ground=Ground.DOCUMENTS, passages=PASSAGES, citations=citations, conflicts=(CONFLICT,))
    AskScreen().finish(Answered(answer=answer))
    return capsys.readouterr().out


def test_an_answer_that_cites_one_side_is_followed_by_what_both_say(capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys, "They get 30 days [1].", 0)
    assert (
        "The sources disagree:\n  [1] Policy: “Employees get 30 days.”\n  [2] Handbook: “Employees get 45 days.”"
        in shown
    )


def test_an_answer_that_cites_both_sides_is_not_followed_by_them_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert "The sources disagree" not in printed(capsys, "One says 30 [1], one 45 [2].", 0, 1)
