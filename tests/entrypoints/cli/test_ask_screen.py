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
