"""Passages as the evidence model reads them: pages that fit its input."""

from hypothesis import given
from hypothesis import strategies as st

from anabranch.evidence.pages import MAX_PAGE, MAX_PAGES, MAX_PASSAGE, MAX_UNITS, paged
from support.quoted_answers import passage

QUESTION = "How long is the river?"
TABLE = """\
## Options

| Option | Default |
|---|---|
| port | 8000 |
| host | localhost |
"""
LONG = "".join(f"Sentence number {number} is about the river and its fish.\n" for number in range(100))


def test_a_short_passage_is_one_page_with_its_title_and_headings() -> None:
    pages = paged(QUESTION, [passage("It is long. It is wide.", "Murray River", headers=("Geography",))])
    [page] = pages.pages
    assert page.title == "Murray River > Geography"
    assert [unit.text for unit in page.units] == ["It is long.", "It is wide."]
    assert [(unit.passage, unit.order, unit.page, unit.place) for unit in pages.units] == [(0, 0, 0, 0), (0, 1, 0, 1)]


def test_a_table_row_is_read_with_its_header() -> None:
    [page] = paged(QUESTION, [passage(TABLE)]).pages
    assert [unit.text for unit in page.units] == ["| port | 8000 |", "| host | localhost |"]
    assert "| Option | Default |" in page.units[0].before


def test_a_long_passage_is_several_pages_of_its_own() -> None:
    pages = paged(QUESTION, [passage("Short."), passage(LONG), passage("Also short.")])
    assert len(pages.pages) == 2 + MAX_PAGES
    assert pages.passages == sorted(pages.passages)
    assert set(pages.passages) == {0, 1, 2}
    assert pages.end_of(1) == 1
    assert pages.end_of(2) == len(pages.pages) - 1
    assert pages.end_of(3) == pages.end_of(99) == len(pages.pages)
    assert [pages.passage_of(page) for page in (0, 1, len(pages.pages) - 1)] == [0, 1, 2]
    for page in pages.pages:
        assert sum(len(unit.text) for unit in page.units) <= MAX_PAGE


def test_of_a_long_passage_the_pages_with_most_words_of_the_question_are_read() -> None:
    text = LONG + "How long the whole river is, nobody knows.\n" + LONG
    pages = paged("How long is the whole river, does nobody know?", [passage(text[3_000:])])
    assert len(pages.pages) == MAX_PAGES
    assert any("nobody knows" in unit.text for page in pages.pages for unit in page.units)
    starts = [unit.unit.start for unit in pages.units]
    assert starts == sorted(starts), "in the order of the passage"
    assert len(pages.whole[0]) > len(pages.units)


def test_a_passage_without_words_has_no_page() -> None:
    pages = paged(QUESTION, [passage(""), passage(" \n\t "), passage("\u200b" * 100), passage("It is there.")])
    assert pages.passages == [3]


LINES = st.sampled_from(
    [
        *(
            "A sentence.",
            "# Heading",
            "- item",
            "| a | b |",
            "|---|---|",
            "```",
            "    code()",
            "Term:",
            "",
            "x" * 1_500,
        ),
        *("It is so: ", "1. first", "a,b,c", "\u200b", "=====", ".. note::", "> quote", "<!-- a", "-->"),
    ]
)
TEXTS = st.lists(LINES, max_size=60).map("\n".join) | st.text(max_size=300)


@given(st.lists(TEXTS, max_size=5))
def test_every_unit_is_on_one_page_at_its_place(texts: list[str]) -> None:
    passages = [passage(text, f"T{number}") for number, text in enumerate(texts)]
    pages = paged(QUESTION, passages)
    assert len(pages.pages) == len(pages.passages)
    assert sum(len(page.units) for page in pages.pages) == len(pages.units)
    assert all(pages.passages.count(number) <= MAX_PAGES for number in range(len(texts)))
    assert len(pages.whole) == len(texts)
    for placed in pages.units:
        page = pages.pages[placed.page]
        text = passages[placed.passage].text
        assert pages.passages[placed.page] == placed.passage
        assert pages.whole[placed.passage][placed.order] == placed.unit
        assert page.units[placed.place].text == text[placed.unit.start : placed.unit.end]
        assert page.title.startswith(f"T{placed.passage}")
        assert placed.order < MAX_UNITS
        assert placed.unit.end <= MAX_PASSAGE
    for page in pages.pages:
        assert len(page.units) == 1 or sum(len(unit.text) for unit in page.units) <= MAX_PAGE
