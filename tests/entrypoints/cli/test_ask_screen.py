"""What `anabranch ask` prints below the answer."""

import re

import msgspec
import pytest

from anabranch.domain.events import Answered
from anabranch.domain.model import Answer, CheckedSentence, Citation, Ground, Passage, SupportingQuote
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


def checked(text: str, *sentences: CheckedSentence, citations: tuple[Citation, ...] = ()) -> Answer:
    passages = tuple(
        Passage(source="notes", title=title, text=said, score=0.9)
        for title, said in (("Pumps", "The pump runs at 4 bar."), ("Tanks", "The tank holds 20 litres."))
    )
    return Answer(
        text=text,
        ground=Ground.DOCUMENTS,
        passages=passages,
        citations=citations,
        sentences=sentences,
        faithfulness=0.5,
    )


def test_a_contradicted_sentence_is_named_with_what_the_source_says(capsys: pytest.CaptureFixture[str]) -> None:
    sentence = CheckedSentence(
        start=0,
        end=28,
        verdict="contradicted",
        support=0.1,
        quotes=(SupportingQuote(passage=0, start=0, end=23, support=0.1),),
        doubted=((17, 19),),
        marks=1,
    )
    cited = Citation(start=24, end=27, source="notes", passage=0, passage_start=0, passage_end=23)
    AskScreen().finish(Answered(answer=checked("The pump runs at 40 bar [1].", sentence, citations=(cited,))))
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    at = printed.index("✗ A source says otherwise: “The pump runs at 40 bar [1].”")
    assert printed[at + 1 :][:4] == [
        "  [1] Pumps: “The pump runs at 4 bar.”",
        "  not in it: “40”",
        "",
        "faithfulness 0.50 (1 contradicted)",
    ]


def test_unsupported_and_partly_supported_sentences_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    text = "It was built in 2019. The pump runs at 4 bar in summer."
    AskScreen().finish(
        Answered(
            answer=checked(
                text,
                CheckedSentence(start=0, end=21, verdict="unsupported", support=0.0),
                CheckedSentence(start=22, end=55, verdict="partly", support=0.5, doubted=((45, 54),)),
            )
        )
    )
    printed = capsys.readouterr().out
    assert "✗ No source says this: “It was built in 2019.”" in printed
    assert "~ Supported in part: “The pump runs at 4 bar in summer.”" in printed
    assert "not in the sources: “in summer”" in printed
    assert "faithfulness 0.50 (1 in part, 1 unsupported)" in printed


def test_corrected_and_missing_citations_are_listed_with_their_right_numbers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = "The tank holds 20 litres [1]. The pump runs at 4 bar."
    AskScreen().finish(
        Answered(
            answer=checked(
                text,
                CheckedSentence(start=0, end=29, verdict="supported", support=1.0, marks=1, corrected=1),
                CheckedSentence(start=30, end=53, verdict="supported", support=1.0, added=1),
                citations=(
                    Citation(start=25, end=28, source="notes", passage=1, passage_start=0, passage_end=25),
                    Citation(start=53, end=53, source="notes", passage=0, passage_start=0, passage_end=23),
                ),
            )
        )
    )
    printed = capsys.readouterr().out
    assert re.findall(r"^\[(\d)\] (\w+)", printed, re.MULTILINE) == [("1", "Pumps"), ("2", "Tanks")]
    assert "[2], not [1]: “The tank holds 20 litres [1].”" in printed
    assert "[1]: “The pump runs at 4 bar.”" in printed
    assert "citation marks: 1 corrected, 1 added\n" in printed


def test_sentences_that_were_not_checked_are_counted_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    sentences = (
        CheckedSentence(start=0, end=5, verdict="unchecked", reason="no_claim"),
        CheckedSentence(start=6, end=20, verdict="unchecked", reason="not_english"),
    )
    answer = msgspec.structs.replace(checked("Hello Das ist alles.", *sentences), faithfulness=None)
    AskScreen().finish(Answered(answer=answer))
    assert "\n1 sentence not checked (not English)\n" in capsys.readouterr().out
