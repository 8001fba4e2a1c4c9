"""A file that cannot be taken in says why, and what to do about it."""

import io
import zipfile

import docx
import msgspec
import pytest
from reportlab.lib.pdfencrypt import StandardEncryption
from reportlab.pdfgen.canvas import Canvas

from anabranch.knowledge.model import Unprocessable
from anabranch.knowledge.parse import ParseLimits, parse

LIMITS = ParseLimits()
OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(504)


def reason(data: bytes, filename: str | None = None, **limits: int) -> str:
    with pytest.raises(Unprocessable) as refusal:
        parse(data, filename, msgspec.structs.replace(LIMITS, **limits))
    return refusal.value.message


def zipped(*names: str, content: str = "<x/>") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            archive.writestr(name, content)
    return file.getvalue()


def pdf(pages: int = 1, text: str = "Hello", encrypt: StandardEncryption | None = None) -> bytes:
    file = io.BytesIO()
    canvas = Canvas(file, encrypt=encrypt)
    for _ in range(pages):
        canvas.rect(10, 10, 100, 100, fill=1)
        canvas.drawString(50, 800, text)
        canvas.showPage()
    canvas.save()
    return file.getvalue()


def word(text: str = "Hello") -> bytes:
    document = docx.Document()
    document.add_paragraph(text)
    file = io.BytesIO()
    document.save(file)
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "filename", "said"),
    [
        (b"", "a.pdf", "is empty"),
        (b" \n\t\r\n ", "a.txt", "holds no text"),
        (b"\xef\xbb\xbf", "a.md", "holds no text"),
        (b"<html><body><script>1</script></body></html>", "a.html", "holds no text"),
        (b"[[], {}, null]", "a.json", "holds no text"),
        (b"---\ntitle: x\n---\n", "a.md", "holds no text"),
        (zipped("word/document.xml"), "a.docx", "holds no text"),
        (pdf(2, text=""), "a.pdf", "2 pages but no text: it looks scanned. Run OCR (for instance ocrmypdf)"),
        (pdf(encrypt=StandardEncryption("secret")), "a.pdf", "encrypted with a password"),
        (OLE + "EncryptedPackage".encode("utf-16-le"), "a.docx", "encrypted with a password"),
        (b"%PDF-1.7\nnothing of the kind", "a.pdf", "PDF is damaged"),
        (word()[:-40], "a.docx", "damaged"),
        (zipped("word/document.xml", content="<w:document"), "a.docx", "DOCX is damaged"),
        (b'{"a": 1,\n "b": }', "a.json", "damaged in line 2, column 7"),
        (b'{"a": 1}\n{"b"\n', "a.jsonl", "damaged in line 2"),
        (b"[" * 100_000, "a.json", "nested too deeply"),
        (b'{"a":' * 100_000, "a.jsonl", "nested too deeply"),
        (b"<!doctype html>" + b"<div>" * 100_000 + b"x", "a.html", "nested more than 5,000 deep"),
        (b'a,b\n"' + b"x" * 200_000, "a.csv", "line 2 on: field larger than field limit"),
        (zipped("readme.txt"), "a.pdf", "named .pdf, but is not a PDF; it looks like a ZIP archive"),
        (b"Just words.", "a.pdf", "named .pdf, but is not a PDF; it looks like plain text"),
        (b"Just words.", "a.XLSX", "named .xlsx, but is not an XLSX"),
        (b"\x89PNG\r\n\x1a\n\0\0", "a.pdf", "named .pdf, but is not a PDF; it looks like a PNG image"),
        (b"\xff\xd8\xff\xe0\0\x10JFIF", "scan.jpg", "JPEG image, which is not supported. Turn it into a PDF with text"),
        (zipped("xl/workbook.xml"), "a.xlsx", "Excel workbook, which is not supported. Save each sheet as CSV"),
        (zipped("ppt/presentation.xml"), "a.pptx", "PowerPoint presentation, which is not supported. Save it as PDF"),
        (zipped("a.txt", "b.txt"), "a.zip", "ZIP archive, which is not supported. Unpack it"),
        (OLE + "WordDocument".encode("utf-16-le"), "a.doc", "old .doc format, which is not supported. Save it as DOCX"),
        (OLE, "a.bin", "old Microsoft Office file"),
        (b"{\\rtf1 Hello}", "a.rtf", "RTF document"),
        (b"ID3\x04\0\0\0\0\0", "a.mp3", "MP3 recording"),
        (bytes(range(256)) * 8, "a.txt", "not text"),
        (b"\x01\x02\x03\x04" * 100, None, "not text"),
    ],
)
def test_unsupported_files_are_refused_with_what_to_do(data: bytes, filename: str | None, said: str) -> None:
    assert said in reason(data, filename)


def test_a_text_with_a_magic_number_is_text() -> None:
    for text in ("ID3 tags are", "PAR1 is a magic", "BZh too", "PK is not", "MZ neither", "%PDF is a sign"):
        assert parse(text.encode(), "a.txt", LIMITS).text == text


@pytest.mark.parametrize(
    ("data", "filename", "limits", "said"),
    [
        (b"x" * 2_097_152, "a.txt", {"max_bytes": 1_048_576}, "has 2 MiB, more than the limit of 1 MiB"),
        (pdf(3), "a.pdf", {"max_pages": 2}, "has 3 pages, more than the limit of 2"),
        (b"x" * 1001, "a.txt", {"max_text": 1000}, "more than 1,000 characters of text"),
        (b"# a\n" * 400, "a.md", {"max_text": 1000}, "more than 1,000 characters of text"),
        (b"name,b\n" + b"1,2\n" * 200, "a.csv", {"max_text": 1000}, "more than 1,000 characters of text"),
        (b"<html><p>" + b"x " * 800, "a.html", {"max_text": 1000}, "more than 1,000 characters of text"),
        (word("x" * 1500), "a.docx", {"max_text": 1000}, "more than 1,000 characters of text"),
        (pdf(30, text="x" * 50), "a.pdf", {"max_text": 1000}, "more than 1,000 characters of text"),
        (word(), "a.docx", {"max_expanded": 1000}, "bytes, more than the limit of 1,000 bytes"),
    ],
)
def test_a_file_over_a_limit_is_refused_with_the_limit(
    data: bytes, filename: str, limits: dict[str, int], said: str
) -> None:
    assert said in reason(data, filename, **limits)


def test_a_zip_bomb_is_not_unpacked() -> None:
    bomb = zipped("word/document.xml", content="0" * 40_000_000)
    assert len(bomb) < 100_000
    assert "unpacks to 38 MiB, more than the limit of 10 MiB" in reason(bomb, max_expanded=10 * 2**20)


def test_a_zip_bomb_that_lies_about_its_size_is_damaged() -> None:
    bomb = bytearray(zipped("word/document.xml", content="0" * 4_000_000))
    size = (4_000_000).to_bytes(4, "little")
    while (place := bomb.find(size)) >= 0:
        bomb[place : place + 4] = (10).to_bytes(4, "little")
    assert "damaged" in reason(bytes(bomb))


def test_an_xml_bomb_is_not_expanded() -> None:
    entities = "".join(f'<!ENTITY e{n} "{f"&e{n - 1};" * 10}">' for n in range(1, 12))
    bomb = f'<!DOCTYPE x [<!ENTITY e0 "boom">{entities}]><x><p><t>&e11;</t></p></x>'
    assert "declares XML entities" in reason(zipped("word/document.xml", content=bomb))


def test_external_xml_entities_are_not_read() -> None:
    outside = '<!DOCTYPE x [<!ENTITY e SYSTEM "file:///etc/passwd">]><x><p><t>&e;</t></p></x>'
    assert "declares XML entities" in reason(zipped("word/document.xml", content=outside))


def test_front_matter_builds_no_objects() -> None:
    head = b"---\na: &a [x, x]\nb: &b [*a, *a]\ntags: *b\ntitle: !!python/object/apply:os.getpid []\n---\nWords.\n"
    parsed = parse(head, "a.md", LIMITS)
    assert (parsed.title, parsed.tags, len(parsed.blocks)) == (None, (), 1)
