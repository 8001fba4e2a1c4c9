"""PDF: the text of each page, with lines joined into paragraphs."""

import re
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from anabranch.knowledge.model import Parsed, Unprocessable
from anabranch.knowledge.parse.builder import ParseLimits, TextBuilder, day, line, tags

if TYPE_CHECKING:
    from pypdfium2 import PdfDocument, PdfTextPage

_UNOPENED = {  # by FPDF_ERR_PASSWORD and FPDF_ERR_SECURITY
    4: "The PDF is encrypted with a password. Save it without one (for instance with qpdf) and ingest it again.",
    5: "The PDF is protected in a way that cannot be opened. Print it to a new PDF and ingest that.",
}
_DAMAGED_PDF = "The PDF is damaged. Download or save it again, or print it to a new PDF, and ingest that."
_CLEAR_GAP = 1.35  # in usual distances between lines
_TALL_GAP = 1.9  # in heights of a line, where a page has too few lines to know what is usual
_RESIZED = 1.2
_SHORT = 0.7  # of the paragraph's width: the line break is intended, as in code and addresses
_LIGATURES = str.maketrans({"\ufb00": "ff", "\ufb01": "fi", "\ufb02": "fl", "\ufb03": "ffi", "\ufb04": "ffl"})
# pdfium marks a hyphen at a line end, without a line break.
_MARK = re.compile("[\ufffe\x02]")
_HYPHENS = "-\u2010\xad\ufffe\x02"
_ITEM = re.compile(r"(?:[\u2022\u2023\u25aa\u25cf\u25e6\u2043*-]|\(?(?:\d{1,3}|[a-z])[.)])\s")
_WIDE = re.compile("[\u3000-\u30ff\u3400-\u9fff\uf900-\ufaff\uff00-\uffef]")


class PdfLine(NamedTuple):
    """A line of a page. It begins at the height `first` and ends at `last` (below `first` if pdfium joined hyphenated
    lines); its letters are `low` to `high` tall. All in points, heights from the bottom of the page."""

    text: str
    first: float = 0.0
    last: float = 0.0
    low: float = 0.0
    high: float = 0.0
    left: float = 0.0
    right: float = 0.0


def read_pdf(data: bytes, limits: ParseLimits) -> Parsed:
    import pypdfium2  # noqa: PLC0415

    try:
        document = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        raise Unprocessable(_UNOPENED.get(error.err_code or 0, _DAMAGED_PDF)) from None
    with document:
        pages = len(document)
        if pages == 0:
            raise Unprocessable("The PDF has no pages. It may be damaged: print it to a new PDF and ingest that.")
        if pages > limits.max_pages:
            raise Unprocessable(f"The PDF has {pages:,} pages, more than the limit of {limits.max_pages:,}. Split it.")
        draft = TextBuilder(limits)
        for number in range(1, pages + 1):
            for paragraph in _paragraphs(_page_lines(document, number)):
                draft.add(paragraph, page=number)
        parsed = draft.parsed(pages=pages, **_properties(document))
    if not parsed.blocks:
        counted = "1 page" if pages == 1 else f"{pages:,} pages"
        raise Unprocessable(
            f"The PDF has {counted} but no text: it looks scanned. Run OCR (for instance ocrmypdf) and ingest it again."
        )
    return parsed


def _properties(document: "PdfDocument") -> dict[str, Any]:
    return {
        "title": _written_by_a_person(document.get_metadata_value("Title")),
        "author": _written_by_a_person(document.get_metadata_value("Author")),
        "created_date": day(document.get_metadata_value("CreationDate")),
        "tags": tags(document.get_metadata_value("Keywords")),
    }


def _written_by_a_person(value: str) -> str | None:
    """The property, unless a program filled it in."""
    words = line(value.removeprefix("Microsoft Word - "))
    return None if words is None or words.lower().strip("()") in ("untitled", "anonymous", "unknown") else words


def _page_lines(document: "PdfDocument", number: int) -> list[PdfLine]:
    import pypdfium2  # noqa: PLC0415

    try:
        page = document[number - 1]
        textpage = page.get_textpage()
    except pypdfium2.PdfiumError:
        raise Unprocessable(
            f"Page {number:,} of the PDF is damaged. Print it to a new PDF, or leave the page out, and ingest that."
        ) from None
    with closing(page), closing(textpage):
        return list(_lines(textpage))


def _lines(page: "PdfTextPage") -> Iterator[PdfLine]:
    try:
        text: str = page.get_text_range()
    except RecursionError:  # pdfium's wrapper recurses for every leading character outside the text
        text = page.get_text_bounded()
    at = 0
    characters = page.count_chars()
    for raw in text.split("\r\n"):
        units = len(raw) if raw.isascii() else len(raw.encode("utf-16-le", "surrogatepass")) // 2
        if raw.strip() and at + units <= characters:
            left, first, _, first_top = page.get_charbox(at, loose=True)
            _, last, right, last_top = page.get_charbox(at + units - 1, loose=True)
            low, high = sorted((first_top - first, last_top - last))
            yield PdfLine(raw, first, last, low, high, left, right)
        else:
            yield PdfLine(raw)
        at += units + 2


def _paragraphs(lines: list[PdfLine]) -> Iterator[str]:
    """Lines joined until a blank line, a clear gap, or a change of font size."""
    written = [each for each in lines if each.low > 0]
    gaps = [gap for above, below in pairwise(written) if (gap := above.last - below.first) > 1]
    usual = median(gaps) if len(gaps) >= 4 else None
    held: list[PdfLine] = []
    for each in lines:
        if not each.text.strip() or (held and _apart(held[-1], each, usual)):
            if held:
                yield _joined(held)
            held = []
        if each.text.strip():
            held.append(each)
    if held:
        yield _joined(held)


def _apart(above: PdfLine, below: PdfLine, usual: float | None) -> bool:
    if above.low <= 0 or below.low <= 0:
        return False
    gap = above.last - below.first
    if gap < -above.high:  # upwards: the next column
        return not below.text.lstrip()[:1].islower()
    # One word in another font does not make a line of another size.
    resized = above.low > _RESIZED * below.high or below.low > _RESIZED * above.high
    if resized and gap > 0.8 * min(above.low, below.low):
        return True
    return gap > max(_CLEAR_GAP * usual, above.low) if usual else gap > _TALL_GAP * max(above.high, below.high)


def _joined(lines: list[PdfLine]) -> str:
    left = min(each.left for each in lines)
    short = left + _SHORT * (max(each.right for each in lines) - left)
    parts = [lines[0].text.strip()]
    for before, each in pairwise(lines):
        words, above = each.text.strip(), parts[-1]
        if _ITEM.match(words) or before.right < short:
            parts.append("\n")
        elif above[-1:] in _HYPHENS and above[-2:-1].isalpha():
            parts[-1] = above[:-1] + _hyphen(above[-2], words[0])
        elif not (_WIDE.match(above[-1:]) and _WIDE.match(words)):
            parts.append(" ")
        parts.append(words)
    return _MARK.sub(_mark, "".join(parts)).replace("\xad", "").translate(_LIGATURES)


def _mark(found: re.Match[str]) -> str:
    text = found.string
    return _hyphen(text[found.start() - 1 : found.start()], text[found.end() : found.end() + 1])


def _hyphen(before: str, after: str) -> str:
    """What remains of a hyphen at a line end: nothing inside a word, "-" in "Jean-Paul" and "B-52"."""
    return "" if before.islower() and after.islower() else "-"
