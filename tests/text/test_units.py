"""Units of evidence: what is quoted of a text, with exact offsets."""

import time
from textwrap import dedent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.text.units import Unit, units
from support.examples import examples


def read(text: str) -> list[tuple[str, str]]:
    return [(unit.kind, text[unit.start : unit.end]) for unit in units(text)]


def part(text: str, span: tuple[int, int] | None) -> str | None:
    return None if span is None else text[span[0] : span[1]]


def details(text: str) -> list[tuple[str, str, str | None, str | None]]:
    """Kind, body, lead and subject of each unit."""
    return [(u.kind, text[u.start : u.end], part(text, u.lead), part(text, u.subject)) for u in units(text)]


def headings(text: str) -> list[str | None]:
    return [part(text, unit.heading) for unit in units(text)]


def test_prose_is_split_into_sentences_and_a_wrapped_paragraph_is_one() -> None:
    text = "One river\nis long. Another is\nshort.\n\nA third dries out."
    assert read(text) == [
        ("sentence", "One river\nis long."),
        ("sentence", "Another is\nshort."),
        ("sentence", "A third dries out."),
    ]


@pytest.mark.parametrize(
    "title",
    [
        "## Rivers",
        "## Rivers ##",
        "Rivers\n======",
        "Rivers\n~~~~~~",
        "******\nRivers\n******",
        "Rivers\n",
        "**Rivers**\n",
    ],
)
def test_a_heading_is_no_unit_and_belongs_to_what_follows(title: str) -> None:
    text = f"Above it is water.\n\n{title}\nThey flow."
    assert read(text) == [("sentence", "Above it is water."), ("sentence", "They flow.")]
    assert headings(text) == [None, "Rivers"]


def test_a_list_item_is_whole_and_knows_the_sentence_that_introduces_the_list() -> None:
    lead = "Two shops return goods:"
    text = f"Some text. {lead}\n\n- `north`: within 30 days. Unopened,\n  in the box.\n- **south** - never\n"
    assert details(text)[1:] == [
        ("sentence", lead, None, None),
        ("item", "`north`: within 30 days. Unopened,\n  in the box.", lead, "north"),
        ("item", "**south** - never", lead, "south"),
    ]


def test_a_nested_item_is_introduced_by_its_parent() -> None:
    text = "Formats are these:\n- text:\n  - Markdown\n  - plain\n- tables\n  - CSV\n"
    assert [(body, lead) for _, body, lead, _ in details(text)[1:]] == [
        ("text:", "Formats are these:"),
        ("Markdown", "text:"),
        ("plain", "text:"),
        ("tables", "Formats are these:"),
        ("CSV", "Formats are these:"),
    ]


def test_a_very_long_item_is_cut_into_sentences_that_keep_its_subject() -> None:
    text = "- `depth`: " + "A river has a depth in metres. " * 30
    found = details(text)
    assert len(found) == 30
    assert {(kind, subject) for kind, _, _, subject in found} == {("item", "depth")}


def test_a_markdown_table_gives_its_rows_under_the_header() -> None:
    header = "| option | default |\n|---|---|"
    text = f"{header}\n| `--port` | 8080 |\n| `--host` | localhost |\n\nText."
    assert details(text) == [
        ("row", "| `--port` | 8080 |", header, "--port"),
        ("row", "| `--host` | localhost |", header, "--host"),
        ("sentence", "Text.", None, None),
    ]


def test_rows_without_a_header_have_no_lead() -> None:
    assert details("| `--port` | 8080 |\n| `--host` | localhost |")[0][2] is None


def test_a_simple_table_keeps_wrapped_cells_in_their_row() -> None:
    text = dedent("""\
        ======  ==========
        Name    Meaning
        ======  ==========
        port    where it
                listens
        host    the name
        ======  ==========

        Text.
        """)
    header = "Name    Meaning\n======  =========="
    assert details(text) == [
        ("row", "port    where it\n        listens", header, "port"),
        ("row", "host    the name", header, "host"),
        ("sentence", "Text.", None, None),
    ]


def test_a_grid_table_gives_its_rows() -> None:
    text = "+---+---+\n| a | b |\n+===+===+\n| 1 | x |\n|   | y |\n+---+---+\n| 2 | z |\n+---+---+\n"
    header = "| a | b |\n+===+===+"
    assert details(text) == [("row", "| 1 | x |\n|   | y |", header, "1"), ("row", "| 2 | z |", header, "2")]


def test_a_list_table_gives_its_rows() -> None:
    rows = ["* - Name\n     - Default", "* - port\n     - 80", "* - host\n     - any"]
    text = ".. list-table:: T\n   :header-rows: 1\n\n   " + "\n   ".join(rows)
    assert read(text) == [("row", rows[1]), ("row", rows[2])]
    assert details(text)[0][2] == rows[0]


@pytest.mark.parametrize(
    "text",
    [
        "name: Ob; length: 3650\nname: Lena; length: 4294",
        "Ob | 3650\nLena | 4294",
        "Ob\t3650\nLena\t4294\nYenisei\t3487",
    ],
)
def test_lines_of_a_table_are_rows(text: str) -> None:
    assert read(text) == [("row", line) for line in text.split("\n")]


def test_a_definition_list_gives_a_unit_for_each_term() -> None:
    text = "delta\n    Where a river ends.\n\nsource\n    Where it begins.\n\nDone."
    assert details(text) == [
        ("definition", "delta\n    Where a river ends.", None, "delta"),
        ("definition", "source\n    Where it begins.", None, "source"),
        ("sentence", "Done.", None, None),
    ]
    assert details("delta\n: Where a river ends.\n")[0][::3] == ("definition", "delta")


@pytest.mark.parametrize(
    ("text", "subject"),
    [
        (".. option:: --port PORT\n\n   The port.", "--port"),
        (".. confval:: theme\n   :default: dark\n\n   The theme.", "theme"),
        (".. py:function:: flow(depth)\n\n   Flows.", "flow"),
        (":param int depth: the depth", "depth"),
        ("@param depth the depth", "depth"),
    ],
)
def test_a_description_is_one_definition(text: str, subject: str) -> None:
    ((kind, _, _, about),) = details(text)
    assert (kind, about) == ("definition", subject)


def test_a_setting_without_content_is_the_subject_of_the_section_that_follows() -> None:
    text = ".. setting:: DEBUG\n\nThe debug flag\n==============\n\nDefault: ``False``\n\nOther\n=====\n\nText."
    assert [subject for *_, subject in details(text)] == ["DEBUG", None]


def test_a_long_definition_is_cut_into_sentences_with_the_same_subject() -> None:
    text = ".. option:: --depth\n\n   " + "A river has a depth in metres. " * 30
    found = details(text)
    assert len(found) == 30
    assert found[0][1].startswith("--depth\n\n   A river")
    assert {(kind, subject) for kind, _, _, subject in found} == {("definition", "--depth")}


@pytest.mark.parametrize(
    "code",
    [
        "```sh\npip install it\n```",
        "    pip install it",
        ".. code-block:: sh\n\n    pip install it",
        ">>> install(it)\nTrue",
        "~~~\npip install it\n~~~",
    ],
)
def test_code_is_a_unit_with_the_sentence_that_introduces_it(code: str) -> None:
    text = f"It is small. Install it::\n\n{code}\n\nThen use it."
    assert read(text) == [
        ("sentence", "It is small."),
        ("code", f"Install it::\n\n{code}"),
        ("sentence", "Then use it."),
    ]


def test_code_below_a_heading_is_a_unit_by_itself() -> None:
    assert read("# Install\n\n```sh\npip install it\n```\n") == [("code", "```sh\npip install it\n```")]


def test_long_code_ends_with_a_whole_line() -> None:
    text = "```\n" + "x = 1\n" * 1000 + "```\n"
    ((_, body),) = read(text)
    assert 1400 < len(body) <= 1500
    assert body.endswith("\nx = 1")


@pytest.mark.parametrize(
    "marked",
    [
        ".. note::\n\n   Mind it. Now.",
        ".. note:: Mind it. Now.",
        "> **Note**\n> Mind it. Now.",
        "!!! note\n    Mind it. Now.",
    ],
)
def test_an_admonition_gives_its_sentences(marked: str) -> None:
    assert read(marked) == [("sentence", "Mind it."), ("sentence", "Now.")]


@pytest.mark.parametrize(
    "ignored",
    [
        "<!-- a comment.\nof two lines -->",
        ".. _a-label:",
        ".. index:: rivers",
        ".. toctree::\n   :maxdepth: 2\n\n   one\n   two",
        "[![badge](https://example.org/b.svg)](https://example.org)",
        "[link]: https://example.org",
        "---",
        '<div align="center">',
    ],
)
def test_marks_and_comments_are_no_units(ignored: str) -> None:
    assert read(f"A river flows.\n\n{ignored}\n\nIt ends.") == [
        ("sentence", "A river flows."),
        ("sentence", "It ends."),
    ]


def test_front_matter_is_no_unit() -> None:
    assert read("---\ntitle: Rivers\ntags: [a]\n---\nThey flow.") == [("sentence", "They flow.")]


def test_a_question_in_its_own_line_is_the_heading_of_its_answer() -> None:
    text = "How long may I return it?\n\nWithin 30 days."
    assert read(text) == [("sentence", "Within 30 days.")]
    assert headings(text) == ["How long may I return it?"]


def test_a_paragraph_that_begins_with_a_bold_heading_is_about_it() -> None:
    text = "**Empty lists.** They ask nothing. They cost nothing."
    assert details(text) == [
        ("sentence", "**Empty lists.** They ask nothing.", None, "Empty lists"),
        ("sentence", "They cost nothing.", None, "Empty lists"),
    ]


def test_a_heading_that_is_code_is_the_subject() -> None:
    assert details("## `mcpServers`\n\nA name has letters.")[0][3] == "mcpServers"


def test_a_complete_sentence_that_announces_nothing_stays_apart_from_the_code_below_it() -> None:
    assert [kind for kind, _ in read("It never fails.\n\n```\na -> b\n```")] == ["sentence", "code"]
    assert [kind for kind, _ in read("See the example.\n\n```\na -> b\n```")] == ["code"]


def test_code_in_a_list_item_is_a_unit_with_its_item() -> None:
    text = "1. Install it:\n\n   ```\n   pip install it\n   ```\n\n2. Run it."
    assert read(text) == [("code", "Install it:\n\n   ```\n   pip install it\n   ```"), ("item", "Run it.")]


def test_a_text_that_begins_inside_a_code_block_is_read_from_its_end_on() -> None:
    text = "x = 1\ny = 2\n```\n\nIt ends here. Then:\n\n```\nz = 3\n```\n"
    assert read(text) == [
        ("code", "x = 1\ny = 2"),
        ("sentence", "It ends here."),
        ("code", "Then:\n\n```\nz = 3\n```"),
    ]


def test_the_text_of_an_html_page_has_rows_under_a_header_and_code_with_blank_lines() -> None:
    text = (
        "Name | Default\nport | 8080\nhost | localhost\n\nIn Python:\n\nimport flow\n\nwith flow.open() as f:\n    f()"
    )
    assert details(text) == [
        ("row", "port | 8080", "Name | Default", "port"),
        ("row", "host | localhost", "Name | Default", "host"),
        ("code", "In Python:\n\nimport flow\n\nwith flow.open() as f:\n    f()", None, None),
    ]


def test_a_record_of_fields_is_one_row() -> None:
    assert read("city: Bonn\npeople: 300000\n\ncity: Ulm\npeople: 120000") == [
        ("row", "city: Bonn\npeople: 300000"),
        ("row", "city: Ulm\npeople: 120000"),
    ]


def test_a_comment_of_several_lines_in_source_code_is_prose() -> None:
    text = "# The factor is 17. It was\n# measured.\nFACTOR = 17\n"
    assert read(text) == [
        ("sentence", "The factor is 17."),
        ("sentence", "It was\n# measured."),
        ("code", "FACTOR = 17"),
    ]


def test_an_item_that_describes_something_is_about_it() -> None:
    text = "* .. attribute:: CASCADE\n\n    Cascade deletes.\n\n* `args`\n\n    The arguments.\n"
    assert [(body, subject) for _, body, _, subject in details(text)] == [
        ("CASCADE\n\n    Cascade deletes.", "CASCADE"),
        ("`args`\n\n    The arguments.", "args"),
    ]


@pytest.mark.parametrize("text", [".. [1] It is so. Really.", "[^1]: It is so. Really."])
def test_a_footnote_is_a_unit(text: str) -> None:
    assert read(text) == [("item", "It is so. Really.")]


def test_an_option_without_content_is_the_subject_of_the_text_below_it() -> None:
    text = ".. option:: --all\n\nShows all.\n\n.. option:: --none\n\nShows none."
    assert [subject for *_, subject in details(text)] == ["--all", "--none"]


def check(text: str) -> list[Unit]:
    found = units(text)
    at = 0
    for unit in found:
        assert at <= unit.start < unit.end <= len(text)
        at = unit.end
        for span in ((unit.start, unit.end), unit.lead, unit.heading, unit.subject):
            if span is not None:
                words = text[span[0] : span[1]]
                assert words
                assert words == words.strip()
    return found


_PIECES = [
    *(
        "- ",
        "* - ",
        "1. ",
        "# ",
        "```",
        "~~~",
        "::",
        ".. note::",
        ".. option:: --x",
        ".. _l:",
        "|",
        "|---|---|",
        "| a | b |",
    ),
    *(
        "=====",
        "== ==",
        "+--+",
        "> ",
        ">>> ",
        ": ",
        ":x: ",
        "<!--",
        "-->",
        "![a](b)",
        "[a]: b",
        "!!! n",
        "---",
        "a | b",
    ),
    *(
        "word",
        "Two words.",
        "Why?",
        "a: b; c: d",
        "`x`: y",
        "\n",
        "\n\n",
        "\n    ",
        "\n  ",
        "\t",
        " ",
        "\r\n",
        "\u2028",
        "。",
    ),
]


@settings(max_examples=examples(300))
@given(st.lists(st.sampled_from(_PIECES), max_size=40).map("".join) | st.text(max_size=200))
def test_units_are_exact_ordered_spans_of_any_text(text: str) -> None:
    check(text)


_SENTENCE = st.lists(st.sampled_from(["river", "flows", "past", "the", "old", "mill"]), min_size=2, max_size=12).map(
    lambda words: " ".join(words).capitalize() + "."
)


@settings(max_examples=examples(100))
@given(st.lists(st.lists(_SENTENCE, min_size=1, max_size=4), min_size=1, max_size=5), st.sampled_from(" \n"))
def test_every_sentence_of_prose_is_in_exactly_one_unit(paragraphs: list[list[str]], between: str) -> None:
    text = "\n\n".join(between.join(paragraph) for paragraph in paragraphs)
    expected = [sentence for paragraph in paragraphs for sentence in paragraph]
    assert [text[unit.start : unit.end] for unit in check(text)] == expected


@pytest.mark.parametrize(
    "piece",
    [
        *(
            "|",
            ">",
            "`",
            "```\n",
            "- ",
            "\n- ",
            "  - x\n",
            "~~~\n",
            "+--+\n",
            "== ==\n",
            ".. a:: b\n\n",
            "x\n  y\n",
            "x",
        ),
        *(
            "a: b; c: d\n",
            ":x: y\n",
            "# a\n",
            "<!--\n",
            "<a ",
            "![a](",
            "1) ",
            "\n",
            "a | b\n",
            "|-|-|\n",
            "**",
            "x::\n\n",
        ),
    ],
)
def test_units_take_linear_time(piece: str) -> None:
    text = piece * (100_000 // len(piece)) + "x"
    began = time.process_time()
    check(text)
    assert time.process_time() - began < 2


def test_deep_nesting_is_read() -> None:
    for line in ("- x\n", "a\n", ".. note:: a\n\n", "> "):
        check("".join(" " * depth + line for depth in range(1_000)))


def test_lines_with_aligned_columns_are_rows_also_without_the_borders_of_their_table() -> None:
    text = (
        "``AutoField``     integer   serial\n``BigAutoField``  integer   bigserial\n``TextField``     text      text\n"
    )
    found = units(text)
    assert [unit.kind for unit in found] == ["row"] * 3
    assert [text[slice(*unit.subject)] for unit in found if unit.subject] == ["AutoField", "BigAutoField", "TextField"]


def test_two_spaces_after_sentences_make_no_table() -> None:
    text = "It is so.  It was so.\nIt has to be.  It is not.\nIt will be.  It may be.\n"
    assert {unit.kind for unit in units(text)} == {"sentence"}
