"""Whatever the bytes, a file either keeps the rules of a parsed text or is refused with a reason."""

import io
import json
import re
import subprocess
import sys
import zipfile

import docx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reportlab.pdfgen.canvas import Canvas

from anabranch.knowledge.model import Parsed, Unprocessable
from anabranch.knowledge.parse import ParseLimits, parse
from support.examples import examples

LIMITS = ParseLimits()
SUFFIXES = ("", ".txt", ".md", ".html", ".csv", ".tsv", ".json", ".jsonl", ".pdf", ".docx", ".log", ".xyz")
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")
FRONT_MATTER = re.compile(r"\s*---[ \t]*\n.*?\n?(?:---|\.\.\.)[ \t]*\n?\s*", re.DOTALL)
QUICK = settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])


def check(parsed: Parsed, front_matter: bool = False) -> None:
    assert not CONTROLS.search(parsed.text)
    assert parsed.blocks
    at = 0
    for block in parsed.blocks:
        assert at <= block.start < block.end <= len(parsed.text)
        gap = parsed.text[at : block.start]
        assert not gap.strip() or (front_matter and at == 0 and FRONT_MATTER.fullmatch(gap))
        words = parsed.text[block.start : block.end]
        assert words == words.rstrip()
        assert words.strip()
        if block.kind != "code":
            assert words == words.lstrip()
        if block.kind == "heading" and block.headers:
            assert block.headers[-1]
        at = block.end
    assert not parsed.text[at:].strip()
    for said in (parsed.title, parsed.author, parsed.created_date, *parsed.tags):
        assert said is None or (said == said.strip() and said and "\n" not in said and len(said) <= 300)
    if parsed.created_date:
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", parsed.created_date)


def survives(data: bytes, filename: str, media_type: str | None = None) -> None:
    try:
        parsed = parse(data, filename, LIMITS, media_type)
    except Unprocessable:
        return
    check(parsed, front_matter=filename.endswith(".md"))


@given(st.binary(max_size=400), st.sampled_from(SUFFIXES))
@QUICK
def test_parsing_any_bytes(data: bytes, suffix: str) -> None:
    survives(data, f"a{suffix}")


@given(st.text(max_size=400), st.sampled_from(SUFFIXES))
@QUICK
def test_parsing_any_text(text: str, suffix: str) -> None:
    survives(text.encode("utf-8", "surrogatepass"), f"a{suffix}")


@given(st.binary(max_size=50), st.text(max_size=40), st.none() | st.text(max_size=40))
@QUICK
def test_parsing_any_name(data: bytes, filename: str, media_type: str | None) -> None:
    survives(data, filename, media_type)
    survives(b"\xe9t\xe9 " + data, filename, f"text/html; charset={media_type}")


MARKS = ["# ", "## ", "- ", "1. ", "> ", "```\n", "    ", "---\n", "***\n", "| a | b |\n|---|---|\n", "[x]: y\n", "\n"]
MARKS += ["\n\n", "===\n", "\t", "words ", "title: x\n", "<div>", "</div>", "\x0b", "\u2028", "\r", "\xa0", "\ufeff"]


@given(st.lists(st.sampled_from(MARKS), max_size=30).map("".join))
@settings(QUICK, max_examples=examples(250))
def test_parsing_any_markdown(text: str) -> None:
    survives(text.encode(), "a.md")


NAMES = "h1 h2 p ul ol li table tr td th pre code div b br nav a"
TAGS = [f"<{slash}{name}>" for name in NAMES.split() for slash in ("", "/")]
TAGS += [
    "<script>",
    "</script>",
    "words ",
    " ",
    "\n",
    "&nbsp;",
    "&#0;",
    "&#xd800;",
    "<title>",
    "</title>",
    "<!--",
    "-->",
]


@given(st.lists(st.sampled_from(TAGS), max_size=40).map("".join))
@settings(QUICK, max_examples=examples(250))
def test_parsing_any_html(text: str) -> None:
    survives(text.encode(), "a.html")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["title", "text", "tags", "date"]) | st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(JSON, st.booleans())
@QUICK
def test_parsing_any_json(value: object, escaped: bool) -> None:
    text = json.dumps(value, ensure_ascii=escaped)
    survives(text.encode("utf-8", "surrogatepass"), "a.json")
    survives(f"{text}\n{text}".encode("utf-8", "surrogatepass"), "a.jsonl")


@given(st.lists(st.lists(st.text(max_size=8), max_size=5), max_size=6), st.sampled_from(",;\t|"))
@QUICK
def test_parsing_any_table(rows: list[list[str]], delimiter: str) -> None:
    text = "\n".join(delimiter.join(row) for row in rows)
    survives(text.encode("utf-8", "surrogatepass"), "a.csv")


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    document = docx.Document()
    document.add_heading("Rivers", 1)
    document.add_paragraph("Aare", style="List Bullet")
    word, portable = io.BytesIO(), io.BytesIO()
    document.save(word)
    canvas = Canvas(portable, pageCompression=0)
    canvas.drawString(50, 800, "The river Aare flows through Bern.")
    canvas.save()
    return {"a.docx": word.getvalue(), "a.pdf": portable.getvalue()}


@given(st.data(), st.sampled_from(["a.docx", "a.pdf"]))
@settings(QUICK, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_parsing_any_damage(files: dict[str, bytes], data: st.DataObject, name: str) -> None:
    damaged = bytearray(files[name])
    for _ in range(data.draw(st.integers(1, 20))):
        place = data.draw(st.integers(0, len(damaged) - 1))
        damaged[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    survives(bytes(damaged), name)


@given(st.lists(st.sampled_from(["p", "r", "t", "tbl", "tr", "tc", "sdt", "ins", "del", "txbxContent"]), max_size=12))
@QUICK
def test_parsing_any_word_structure(tags: list[str]) -> None:
    body = "".join(f"<{tag}>" for tag in tags) + "<t>words</t>" + "".join(f"</{tag}>" for tag in reversed(tags))
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("word/document.xml", f"<document><body>{body}<p><r><t>end</t></r></p></body></document>")
    survives(file.getvalue(), "a.docx")


def test_no_parser_loads_before_its_first_file() -> None:
    heavy = "pypdfium2,lxml,docx,selectolax,markdown_it,charset_normalizer"
    code = f"import sys, anabranch.knowledge.parse; print([m for m in '{heavy}'.split(',') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
