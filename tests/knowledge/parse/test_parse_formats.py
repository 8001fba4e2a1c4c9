"""What each kind of file says: its text, its structure, and what it says of itself."""

import io
import zipfile
from collections.abc import Sequence

import docx
import pytest
from docx.document import Document
from reportlab.lib.pdfencrypt import StandardEncryption
from reportlab.lib.styles import getSampleStyleSheet
from reportlab.pdfgen.canvas import Canvas
from reportlab.platypus import PageBreak, Paragraph, SimpleDocTemplate

from anabranch.knowledge.model import Parsed
from anabranch.knowledge.parse import ParseLimits, parse

LIMITS = ParseLimits()


def read(data: bytes | str, filename: str | None = None, media_type: str | None = None) -> Parsed:
    return parse(data.encode() if isinstance(data, str) else data, filename, LIMITS, media_type)


def shown(parsed: Parsed) -> list[tuple[str, str]]:
    return [(block.kind, parsed.text[block.start : block.end]) for block in parsed.blocks]


def pdf(pages: Sequence[Sequence[tuple[float, str]]], **options: object) -> bytes:
    """Pages of lines, each at its height."""
    file = io.BytesIO()
    canvas = Canvas(file, **options)
    for page in pages:
        for height, text in page:
            canvas.drawString(50, height, text)
        canvas.showPage()
    canvas.save()
    return file.getvalue()


def saved(document: Document) -> bytes:
    file = io.BytesIO()
    document.save(file)
    return file.getvalue()


def test_a_pdf_keeps_its_pages_and_its_paragraphs() -> None:
    styles = getSampleStyleSheet()
    sentence = "The river Aare flows through Bern, where its level is measured every day. "
    story = [
        part
        for number in (1, 2, 3)
        for part in (
            Paragraph(f"Station {number}", styles["Heading1"]),
            Paragraph(sentence * 6, styles["BodyText"]),
            Paragraph(sentence * 4, styles["BodyText"]),
            PageBreak(),
        )
    ]
    file = io.BytesIO()
    SimpleDocTemplate(file, title="Levels", author="A. Hydrologist", keywords="river, level").build(story)
    parsed = read(file.getvalue(), "levels.pdf")
    paragraphs = [(sentence * 6).strip(), (sentence * 4).strip()]
    assert [(block.page, parsed.text[block.start : block.end]) for block in parsed.blocks] == [
        (number, text) for number in (1, 2, 3) for text in (f"Station {number}", *paragraphs)
    ]
    assert (parsed.pages, parsed.title, parsed.author) == (3, "Levels", "A. Hydrologist")
    assert parsed.tags == ("river", "level")
    assert parsed.created_date is not None
    assert len(parsed.created_date) == len("2019-05-01")


def test_a_title_that_a_program_filled_in_is_none() -> None:
    """Canvas of reportlab writes `(anonymous)` and `untitled`."""
    parsed = read(pdf([[(800, "Found.")]]))
    assert parsed.author is None
    assert parsed.title != "untitled"


def test_hyphenated_words_in_a_pdf_are_joined() -> None:
    lines = ["This is an exam-", "ple by Jean-", "Paul on the B-", "52 bomber.", "• first", "• second"]
    parsed = read(pdf([[(800 - 14 * place, text) for place, text in enumerate(lines)]]))
    assert parsed.text == "This is an example by Jean-Paul on the B-52 bomber.\n• first\n• second"


def test_a_gap_in_a_pdf_separates_paragraphs() -> None:
    lines = [(800, "The level of the"), (786, "Aare is high."), (740, "The level of the"), (726, "Rhine is low.")]
    assert [text for _, text in shown(read(pdf([lines])))] == [
        "The level of the Aare is high.",
        "The level of the Rhine is low.",
    ]


def test_short_lines_of_a_pdf_stay_lines() -> None:
    lines = ["if river.level > 3.0:", "    warn()", "else:", "    sleep_until_the_next_measurement()"]
    parsed = read(pdf([[(800 - 14 * place, text) for place, text in enumerate(lines)]]))
    assert parsed.text.split("\n") == [line.strip() for line in lines]


def test_a_pdf_with_an_owner_password_is_read() -> None:
    restricted = pdf([[(800, "For all to read.")]], encrypt=StandardEncryption("", ownerPassword="owner", canModify=0))
    assert read(restricted, "restricted.pdf").text == "For all to read."


def test_pdf_is_detected_by_content() -> None:
    assert read(pdf([[(800, "Found.")]]), "../../etc/passwd\x00.txt").text == "Found."


def test_a_docx_keeps_headings_lists_and_tables() -> None:
    document = docx.Document()
    document.core_properties.title = "Levels"
    document.core_properties.author = "A. Hydrologist"
    document.core_properties.keywords = "river; level"
    document.add_heading("Rivers", 1)
    document.add_paragraph("Of the north.")
    document.add_paragraph("Aare", style="List Bullet")
    document.add_paragraph("Rhine", style="List Number")
    document.add_heading("Figures", 2)
    table = document.add_table(2, 2)
    for cell, text in zip(table._cells, ("river", "level", "Aare", "high\nor low"), strict=True):
        cell.text = text
    document.add_heading("Lakes", 1)
    document.add_paragraph("None.")
    parsed = read(saved(document), "levels.docx")
    assert shown(parsed) == [
        ("heading", "Rivers"),
        ("paragraph", "Of the north."),
        ("list", "- Aare\n- Rhine"),
        ("heading", "Figures"),
        ("table", "river | level\nAare | high or low"),
        ("heading", "Lakes"),
        ("paragraph", "None."),
    ]
    assert [block.headers for block in parsed.blocks][-4:] == [
        ("Rivers", "Figures"),
        ("Rivers", "Figures"),
        ("Lakes",),
        ("Lakes",),
    ]
    assert (parsed.title, parsed.author, parsed.tags) == ("Levels", "A. Hydrologist", ("river", "level"))
    assert parsed.created_date == "2013-12-23"  # that of python-docx's template


def test_a_docx_reads_as_with_its_changes_accepted() -> None:
    body = (
        '<w:document xmlns:w="urn:w"><w:body><w:p><w:r><w:t>Kept, </w:t></w:r>'
        "<w:ins><w:r><w:t>added</w:t></w:r></w:ins><w:del><w:r><w:delText>, gone</w:delText></w:r></w:del>"
        "<w:hyperlink><w:r><w:t> and linked.</w:t></w:r></w:hyperlink></w:p>"
        "<w:sdt><w:sdtContent><w:p><w:r><w:t>Wrapped.</w:t></w:r></w:p></w:sdtContent></w:sdt></w:body></w:document>"
    )
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("word/document.xml", body)
    assert shown(read(file.getvalue())) == [("paragraph", "Kept, added and linked."), ("paragraph", "Wrapped.")]


HTML = """<!-- saved --><!DOCTYPE html><html><head><title>The  Aare</title><style>p {}</style>
<meta name=author content="A. Hydrologist"><meta name=keywords content="river, Bern, river">
<meta property="article:published_time" content="2019-05-01T10:00:00Z"></head>
<body><nav><a href=/>Home</a></nav><h1>Aare <em>river</em></h1><p>It is
<b>lo</b>ng.<br>Very.</p>Loose words<script>run()</script><noscript>Enable it</noscript>
<ul><li>one<li><p>two</p><ol><li>x<li>y</ol></ul><h2>Levels</h2>
<table><tr><th>day<th>level<tr><td>1<td>high<p>or low</table><pre><code>def f():
    return 1
</code></pre><div hidden>unseen</div><template>unseen</template></body></html>"""


def test_html_gives_the_visible_text() -> None:
    parsed = read(HTML, "aare.html")
    assert shown(parsed) == [
        ("heading", "Aare river"),
        ("paragraph", "It is long.\nVery."),
        ("paragraph", "Loose words"),
        ("list", "- one\n- two\n  1. x\n  2. y"),
        ("heading", "Levels"),
        ("table", "day | level\n1 | high or low"),
        ("code", "def f():\n    return 1"),
    ]
    assert parsed.blocks[-1].headers == ("Aare river", "Levels")
    assert (parsed.title, parsed.author, parsed.created_date) == ("The Aare", "A. Hydrologist", "2019-05-01")
    assert parsed.tags == ("river", "Bern")


def test_html_is_detected_by_content() -> None:
    assert read(HTML, "aare.pdf") == read(HTML, "aare.txt") == read(HTML)
    assert read("<p>By its type", None, "text/html; charset=utf-8").text == "By its type"


MARKDOWN = """---
title: The Aare
author: [A. Hydrologist, B. Swimmer]
date: 2019-05-01
tags: [river, Bern]
---

# Aare *river*

It is [long][1].

[1]: https://example.org

## Levels
- one
- two

  still two

```python
# not a heading

x = 1
```

| day | level |
|-----|-------|
| 1   | high  |

***

> quoted
"""


def test_markdown_text_is_unchanged() -> None:
    parsed = read(MARKDOWN, "aare.md")
    assert parsed.text == MARKDOWN
    assert shown(parsed) == [
        ("heading", "# Aare *river*"),
        ("paragraph", "It is [long][1]."),
        ("paragraph", "[1]: https://example.org"),
        ("heading", "## Levels"),
        ("list", "- one\n- two\n\n  still two"),
        ("code", "```python\n# not a heading\n\nx = 1\n```"),
        ("table", "| day | level |\n|-----|-------|\n| 1   | high  |\n\n***"),
        ("paragraph", "> quoted"),
    ]
    assert parsed.blocks[-1].headers == ("Aare river", "Levels")
    assert (parsed.title, parsed.author) == ("The Aare", "A. Hydrologist, B. Swimmer")
    assert (parsed.created_date, parsed.tags) == ("2019-05-01", ("river", "Bern"))


@pytest.mark.parametrize("head", ["---\nnot: [closed\n---\n", "---\njust words\n---\n", "---\nno end\n"])
def test_what_only_looks_like_front_matter_is_text(head: str) -> None:
    parsed = read(f"{head}\n# Real\n", "a.md")
    assert parsed.blocks[0].start == 0
    assert parsed.title == "Real"


def test_plain_text_is_cut_at_blank_lines() -> None:
    assert shown(read("One\r\nline.\r\n\r\n  \r\n\fTwo\x00.\r\n", "a.txt")) == [
        ("paragraph", "One\nline."),
        ("paragraph", "Two."),
    ]


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("Zürich und Genève liegen an Seen.", "utf-8-sig"),
        ("Zürich und Genève liegen an Seen.", "utf-16"),
        ("Zürich und Genève liegen an Seen.", "utf-32"),
        ("Zürich und Genève liegen an Seen.", "utf-16-le"),
        ("Zürich und Genève liegen an Seen.", "cp1252"),
        ("Привет, как дела? Сегодня вода высокая.", "cp1251"),
        ("日本語のテキストです。川の水位。", "shift_jis"),
        ("中文文本在这里。测试水位高低。", "gb18030"),
    ],
)
def test_text_is_read_in_its_encoding(text: str, encoding: str) -> None:
    assert read(text.encode(encoding), "a.txt").text == text


def test_html_is_read_in_the_encoding_it_declares() -> None:
    page = '<html><meta charset="iso-8859-2"><p>Zażółć gęślą jaźń'
    assert read(page.encode("iso-8859-2")).text == "Zażółć gęślą jaźń"


@pytest.mark.parametrize(
    ("filename", "table"),
    [
        ("a.csv", 'river,level,note\nAare,3.10,"high, or ""low"""\nRhine,,x,more\n'),
        ("a.csv", 'river;level;note\nAare;3.10;"high, or ""low"""\nRhine;;x;more\n'),
        ("a.tsv", "river\tlevel\tnote\nAare\t3.10\t'high, or low'\nRhine\t\tx\tmore\n"),
    ],
)
def test_csv_rows_repeat_the_column_names(filename: str, table: str) -> None:
    parsed = read(table, filename)
    quoted = "'high, or low'" if filename == "a.tsv" else 'high, or "low"'
    assert shown(parsed) == [
        ("table", f"river: Aare; level: 3.10; note: {quoted}\nriver: Rhine; note: x; column 4: more")
    ]


def test_csv_without_header_is_unchanged() -> None:
    assert read("1,2\n3,4\n", "a.csv").text == "1 | 2\n3 | 4"


def test_a_long_csv_has_few_blocks() -> None:
    parsed = read("river,level\n" + "Aare,high\n" * 20_000, "a.csv")
    assert parsed.text.count("\n") == 19_999
    assert len(parsed.blocks) < 400


def test_a_json_record_reads_like_a_text() -> None:
    parsed = read(
        '{"title": "Aare", "body": "It is long.\\n\\nVery.", "author": "A. Hydrologist", "date": "2019-05-01",'
        ' "tags": ["river"], "level": {"low": 1.10, "days": [1, 2]}}',
        "a.json",
    )
    assert [text for _, text in shown(parsed)] == [
        "Aare",
        "It is long.",
        "Very.",
        "author: A. Hydrologist\ndate: 2019-05-01\ntags: river\nlevel.low: 1.10\nlevel.days: 1, 2",
    ]
    assert (parsed.title, parsed.author, parsed.created_date) == ("Aare", "A. Hydrologist", "2019-05-01")
    assert parsed.tags == ("river",)


@pytest.mark.parametrize("filename", ["a.json", None])
def test_a_json_list_is_a_block_for_each_record(filename: str | None) -> None:
    parsed = read('[{"title": "Aare", "text": "Long."}, {"a": {"b": true, "c": null}}, "word", 7]', filename)
    assert [text for _, text in shown(parsed)] == ["Aare\n\nLong.", "a.b: true", "word", "7"]
    assert parsed.blocks[0].headers == ("Aare",)


def test_records_inside_of_an_object_are_found() -> None:
    parsed = read('{"count": 2, "rivers": [{"title": "Aare", "text": "Long."}, {"name": "Rhine"}]}', "a.json")
    assert [text for _, text in shown(parsed)] == ["count: 2", "Aare\n\nLong.", "name: Rhine"]
    assert [block.headers for block in parsed.blocks] == [(), ("rivers", "Aare"), ("rivers",)]


@pytest.mark.parametrize("filename", ["a.jsonl", "a.ndjson", "a.json"])
def test_json_lines_are_a_block_each(filename: str) -> None:
    assert [text for _, text in shown(read('{"a": 1}\n\n{"a": "\\ud800"}\n', filename))] == ["a: 1", "a: \ufffd"]


def test_text_in_brackets_is_not_json() -> None:
    assert read("[sic] he wrote [sic]").text == "[sic] he wrote [sic]"
