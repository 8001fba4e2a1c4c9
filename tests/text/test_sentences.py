"""Sentence splitting, with exact offsets in the text."""

# ruff: noqa: RUF001  the signs of other scripts are meant

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.text.sentences import items, lines, sentences


def read(text: str) -> list[str]:
    return [text[start:end] for start, end in sentences(text)]


@pytest.mark.parametrize(
    "expected",
    [
        ["One is here.", "Two is there!", "Is three?", "Four"],
        ["Dr. Smith met Mrs. Jones at St. Pancras.", "They left."],
        ["Rivers divide, e.g. the Ob, i.e. the long one.", "Others do not."],
        ["See Fig. 3 and Eq. 12 on p. 7.", "No. 5 is lost."],
        ["He said no.", "Then he left."],
        ["The U.S. Army crossed.", "It was in the U.S.", "The river rose."],
        ["J. R. R. Tolkien wrote it.", "So did C. S. Lewis."],
        ["It costs 3.14 dollars.", "Version 2.0.1 costs more."],
        ["It was... well, late.", "And then...", "Nothing."],
        ['"Why?" she asked.', '"Because."', "(He left.)", "[End.]", "It was “over.”"],
        ["Jones et al. (1999) gave 10 mg. of it.", "Smith et al. disagree."],
        ["She works at Acme Inc. in Bonn.", "He works at Acme Inc.", "They met at 9 a.m. on Monday."],
        [
            "Check-in starts at 3 p.m.",
            "Breakfast is served until 10 a.m.",
            "Kraft was founded in 1903.",
            "It is 9 a.m.",
        ],
        [
            "They met at 9 a.m. Monday or 3 P.M. EST, or 5 p.m. Pacific time.",
            "At 7 a.m. 20 left.",
            "The a.m. News is on.",
        ],
        ["what a day!", "nobody wrote in capitals.", "the notes continue.", "why?", "yes"],
        ["the stops stand apart .", "so do these .", "and the last ."],
        ["Dots . . . and more dots follow."],
        ["我喜欢河流。", "你呢？", "“很好！”", "他说。", "今日は晴れ。", "はい！"],
        ["यह एक नदी है।", "यह दूसरी है।"],
        ["هل هذا نهر؟", "نعم."],
        ["Ask www.example.org or mail a.b@example.org.", "Read main.py."],
    ],
    ids=lambda expected: expected[0][:20],
)
def test_sentence_splitting_examples(expected: list[str]) -> None:
    joined = "".join(part + ("" if part[-1] in "。？！”" else " ") for part in expected).strip()
    assert read(joined) == expected


def test_a_blank_line_and_a_list_marker_begin_a_sentence_and_a_wrapped_line_does_not() -> None:
    text = "Buy before noon\nand pay:\n- bread\n- milk. Cold\n1. First\n2) Second\n\nA title without a stop\n\nText."
    assert read(text) == [
        "Buy before noon\nand pay:",
        "- bread",
        "- milk.",
        "Cold",
        "1. First",
        "2) Second",
        "A title without a stop",
        "Text.",
    ]


def test_a_list_item_ends_at_the_next_marker() -> None:
    text = "To do:\n- one\n  continued\n- two\n  - nested"
    assert [text[a:b] for a, b in items(text)] == ["To do:", "- one\n  continued", "- two", "- nested"]
    plain = "bread\nmilk"
    assert [plain[a:b] for a, b in items(plain)] == ["bread", "milk"]


def test_blank_lines_are_left_out() -> None:
    text = "\n  a b \n\t\n c"
    assert [text[a:b] for a, b in lines(text)] == ["a b", "c"]


@given(st.text(alphabet=st.sampled_from("aB1 .!?…\"')(-\n\t\r。」’é\u0301 "), max_size=120), st.data())
def test_sentences_cover_all_visible_text_once(text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    for split in (sentences, items, lines):
        at = start
        for low, high in split(text, start, end):
            assert at <= low < high <= end
            assert not text[at:low].strip()
            assert text[low:high] == text[low:high].strip()
            at = high
        assert not text[at:end].strip()


@pytest.mark.parametrize(
    "piece", ["x. ", ". ", ".", "?!", "1. ", ")", ".)", "\n", "\n ", "- ", "\n- ", "a", "。", "a.b. "]
)
def test_sentence_splitting_takes_linear_time(piece: str) -> None:
    text = piece * (400_000 // len(piece)) + "x"
    began = time.process_time()
    for split in (sentences, items, lines):
        assert sum(1 for _ in split(text)) >= 1
    assert time.process_time() - began < 3


def test_documents_are_split_as_before_after_units_and_abbreviations() -> None:
    """Chunks are stored, and the evidence model was trained on these sentences. Answers are split otherwise."""
    for text in ("The limit is 500 kg. Refunds are paid.", "We sell cheese etc. Refunds are paid."):
        assert read(text) == [text]
        assert len([*sentences(text, of_answer=True)]) == 2


def test_a_heading_without_a_blank_line_is_not_part_of_the_sentence_below_it() -> None:
    text = "# Greeble\nThe greeble factor is 17 units. It was measured.\n## Older\nIt was 12."
    assert [text[start:end] for start, end in sentences(text)] == [
        "# Greeble",
        "The greeble factor is 17 units.",
        "It was measured.",
        "## Older",
        "It was 12.",
    ]
