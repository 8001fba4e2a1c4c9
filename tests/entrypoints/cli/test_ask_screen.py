"""What `anabranch ask` prints below the answer."""

import re

import pytest

from anabranch.domain.events import Answered
from anabranch.domain.model import Answer, Citation, Ground, Passage
from anabranch.entrypoints.cli.ask import AskScreen


def test_citations_are_listed_by_number(capsys: pytest.CaptureFixture[str]) -> None:
    text = "Trains leave at noon [2]. Hotels have lakes [1]."
    passages = tuple(
        Passage(source="notes", title=title, text=said, score=0.9)
        for title, said in (("Hotels", "Hotels have lakes."), ("Trains", "Trains leave at noon."))
    )
    marks = [(found.start(), found.end(), int(found[1]) - 1) for found in re.finditer(r"\[(\d)\]", text)]
    citations = tuple(
        Citation(start=start, end=end, source="notes", passage=at, passage_start=0, passage_end=6)
        for start, end, at in marks
    )
    answer = Answer(text=text, ground=Ground.DOCUMENTS, passages=passages, citations=citations)
    AskScreen().finish(Answered(answer=answer))
    assert re.findall(r"^\[(\d)\] (\w+)", capsys.readouterr().out, re.MULTILINE) == [("1", "Hotels"), ("2", "Trains")]


TABLE = "| Country | Fee |\n|---|---|\n| Germany | 4.90 |\n| France | 6.50 |\n\nIt is paid:\n\n- by card\n- in cash\n"


def quoting(text: str, *quotations: tuple[str, ...]) -> Answer:
    """An answer with a mark `[1]` for each quotation, which has one or several parts of the table's passage."""
    marks = [(found.start(), found.end()) for found in re.finditer(r"\[1\]", text)]
    citations = tuple(
        Citation(start=start, end=end, source="notes", passage=0, passage_start=at, passage_end=at + len(part))
        for (start, end), parts in zip(marks, quotations, strict=True)
        for part in parts
        if (at := TABLE.index(part)) >= 0
    )
    passage = Passage(source="notes", title="Fees", text=TABLE, score=0.9)
    return Answer(text=text, ground=Ground.DOCUMENTS, passages=(passage,), citations=citations, support=0.934)


def test_a_quotation_of_several_parts_has_one_number_and_dots_where_words_are_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    header, row = "| Country | Fee |\n|---|---|", "| France | 6.50 |"
    AskScreen().finish(Answered(answer=quoting(f"{header}\n{row}\n[1]", (header, row))))
    assert capsys.readouterr().out.startswith(
        "\n[1] Fees · notes\n  “| Country | Fee | |---|---| … | France | 6.50 |”\n\n"
    )
    AskScreen().finish(Answered(answer=quoting("[1]", ("It is paid:", "by card", "in cash"))))
    assert "“It is paid: - by card - in cash”\n" in capsys.readouterr().out


def test_quotations_of_one_passage_are_below_one_number_and_each_is_shown_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer = quoting("Germany: 4.90 [1]. France: 6.50 [1]. 4.90 [1].", ("4.90",), ("6.50",), ("4.90",))
    AskScreen().finish(Answered(answer=answer))
    assert capsys.readouterr().out.startswith("\n[1] Fees · notes\n  “4.90”\n  “6.50”\n\n")


def test_the_last_line_has_the_support(capsys: pytest.CaptureFixture[str]) -> None:
    AskScreen().finish(Answered(answer=quoting("4.90 [1].", ("4.90",))))
    assert capsys.readouterr().out.endswith(" · support 0.93\n")
