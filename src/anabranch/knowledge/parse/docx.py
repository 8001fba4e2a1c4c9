"""DOCX: paragraphs, headings, lists, code, tables, notes and text boxes of a Word document."""

import io
import re
import zipfile
import zlib
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple, TypeAlias

from anabranch.knowledge.model import Parsed, Unprocessable
from anabranch.knowledge.parse.builder import ParseLimits, TextBuilder, day, line, mebibytes, tags

Element: TypeAlias = Any  # lxml carries no types

_HEADING = re.compile(r"heading (\d)", re.IGNORECASE)
_CODE = re.compile(r"code|preformatted|macro text|source text", re.IGNORECASE)
_MAX_CHAIN = 20


class Style(NamedTuple):
    heading: int | None = None
    list_level: int | None = None
    code: bool = False


class Styles:
    """Resolves the style of a paragraph from its own properties and the chain of base styles."""

    def __init__(self, root: Element) -> None:
        styles = () if root is None else root.iterchildren("{*}style")
        self._elements: dict[str | None, Element] = {_attribute(style, "styleId"): style for style in styles}
        self._named = cache(self._resolved)

    def of(self, paragraph: Element) -> Style:
        properties = paragraph.find("{*}pPr")
        style = self._named(_value(properties, "pStyle") or "")
        heading = _outline(properties)
        if (style.heading or heading) is not None:
            return Style(heading=style.heading if style.heading is not None else heading)
        return style._replace(list_level=_list_level(properties, style.list_level))

    def _resolved(self, name: str) -> Style:
        heading: int | None = None
        list_level: int | None = None
        code = False
        for _ in range(_MAX_CHAIN):  # base styles of a hostile file may form a cycle
            element = self._elements.get(name)
            title = _value(element, "name") or name
            properties = _child(element, "pPr")
            heading = _heading_level(title, properties) if heading is None else heading
            list_level = _list_level(properties, None) if list_level is None else list_level
            code = code or _CODE.search(title) is not None
            base = _value(element, "basedOn")
            if base is None:
                break
            name = base
        return Style(heading=heading, list_level=None if heading is not None else list_level, code=code)


def _heading_level(title: str, properties: Element) -> int | None:
    if found := _HEADING.fullmatch(title):
        return int(found[1])
    return 0 if title.lower() == "title" else _outline(properties)


def _outline(properties: Element) -> int | None:
    level = _value(properties, "outlineLvl") or ""
    return int(level) + 1 if level in tuple("012345678") else None


def _list_level(properties: Element, inherited: int | None) -> int | None:
    numbering = _child(properties, "numPr")
    if numbering is None:
        return inherited
    if _value(numbering, "numId") == "0":  # how Word removes a paragraph from its style's list
        return None
    level = _value(numbering, "ilvl") or "0"
    return int(level) if level in tuple("012345678") else 0


def _child(parent: Element, name: str) -> Element:
    return None if parent is None else parent.find("{*}" + name)


def _value(parent: Element, name: str) -> str | None:
    child = _child(parent, name)
    return None if child is None else _attribute(child, "val")


def _attribute(element: Element, name: str) -> str | None:
    return next((str(value) for key, value in element.attrib.items() if key.rpartition("}")[2] == name), None)


_DAMAGED = "The DOCX is damaged. Open it in Word or LibreOffice, save it again, and ingest the copy."
_ENTITIES = "The DOCX declares XML entities, which no word processor does: it may be an attack. Save it again in Word."
_UNSEEN = frozenset(("del", "moveFrom", "Fallback", "txbxContent", "pPr", "rPr", "instrText", "delText"))
_SIGNS = {"tab": "\t", "ptab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "-"}
_WRAPPERS = frozenset(("sdt", "sdtContent", "customXml", "ins", "moveTo", "body", "AlternateContent", "Choice"))


def read_docx(data: bytes, limits: ParseLimits) -> Parsed:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            _check_expansion(archive, limits)
            body = _part(archive, _main_part(archive))
            styles = _part(archive, "word/styles.xml", required=False)
            notes = [_part(archive, f"word/{name}.xml", required=False) for name in ("footnotes", "endnotes")]
            core = _part(archive, "docProps/core.xml", required=False)
    except (zipfile.BadZipFile, KeyError, ValueError, NotImplementedError, OSError, EOFError, zlib.error):
        raise Unprocessable(_DAMAGED) from None
    except RuntimeError:  # zipfile raises it for an encrypted entry
        raise Unprocessable(
            "The document is encrypted with a password. Save it without one and ingest it again."
        ) from None
    reader = _DocxReader(limits, Styles(styles))
    for part in (body, *notes):
        if part is not None:
            reader.read(part)
    return reader.draft.parsed(**_properties(core))


def _check_expansion(archive: zipfile.ZipFile, limits: ParseLimits) -> None:
    # zipfile reads no more of an entry than its declared size, so the sum is a bound even if it is wrong.
    expanded = sum(entry.file_size for entry in archive.infolist())
    if expanded > limits.max_expanded:
        raise Unprocessable(
            f"The DOCX unpacks to {mebibytes(expanded)}, more than the limit of {mebibytes(limits.max_expanded)}. "
            "Remove its pictures or split it."
        )


def _main_part(archive: zipfile.ZipFile) -> str:
    found = sorted(name for name in archive.namelist() if re.fullmatch(r"word/document\d*\.xml", name))
    if not found:
        raise Unprocessable(_DAMAGED)
    return found[0]


def _part(archive: zipfile.ZipFile, name: str, *, required: bool = True) -> Element:
    from lxml import etree  # noqa: PLC0415

    if not required and name not in archive.namelist():
        return None
    content = archive.read(name)
    if b"<!DOCTYPE" in content[:4096].replace(b"\0", b""):
        raise Unprocessable(_ENTITIES)
    parser = etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False, remove_comments=True)
    try:
        root = etree.fromstring(content, parser)
    except etree.XMLSyntaxError:
        raise Unprocessable(_DAMAGED) from None
    if root.getroottree().docinfo.internalDTD is not None:
        raise Unprocessable(_ENTITIES)
    return root


def _properties(core: Element) -> dict[str, Any]:
    # Reversed, so that the first of two equal names counts.
    found = {local(element): element.text for element in reversed([] if core is None else core) if element.text}
    return {
        "title": line(found.get("title")),
        "author": line(found.get("creator")),
        "created_date": day(found.get("created")),
        "tags": tags(found.get("keywords")),
    }


def local(element: Element) -> str:
    """The tag without its namespace, in which strict and transitional documents differ."""
    tag = element.tag
    return tag.rpartition("}")[2] if isinstance(tag, str) else ""


class _DocxReader:
    def __init__(self, limits: ParseLimits, styles: Styles) -> None:
        self.draft = TextBuilder(limits)
        self._styles = styles
        self._items: list[str] = []

    def read(self, root: Element) -> None:
        for block in _blocks(root):
            if local(block) == "tbl":
                self._end_list()
                self.draft.add("\n".join(_rows(block)), "table")
            else:
                self._paragraph(block)
        self._end_list()

    def _paragraph(self, paragraph: Element) -> None:
        style = self._styles.of(paragraph)
        text = "".join(_words(paragraph)).strip()
        if text and style.list_level is not None:
            self._items.append("  " * min(style.list_level, 9) + "- " + " ".join(text.split()))
        elif text:
            self._end_list()
            if style.heading is not None:
                self.draft.heading(text, style.heading)
            else:
                self.draft.add(text, "code" if style.code else "paragraph")
        for box in _boxes(paragraph):
            self.read(box)

    def _end_list(self) -> None:
        self.draft.add("\n".join(self._items), "list")
        self._items.clear()


def _blocks(root: Element) -> Iterator[Element]:
    """Paragraphs and tables in order, without their wrappers."""
    for element in root:
        name = local(element)
        if name in ("p", "tbl"):
            yield element
        elif name in _WRAPPERS or name in ("footnote", "endnote"):
            yield from _blocks(element)


def _words(element: Element) -> Iterator[str]:
    for child in element:
        name = local(child)
        if name == "t":
            yield child.text or ""
        elif name in _SIGNS:
            yield _SIGNS[name]
        elif name == "p":  # a table's cell
            yield from _words(child)
            yield " "
        elif name and name not in _UNSEEN:
            yield from _words(child)


def _boxes(paragraph: Element) -> Iterator[Element]:
    """The text boxes of a paragraph, without the fallback copies for older versions of Word."""
    return (
        box
        for box in paragraph.iter("{*}txbxContent")
        if not any(local(above) in ("Fallback", "txbxContent") for above in box.iterancestors())
    )


def _rows(table: Element) -> Iterator[str]:
    for row in table.iter("{*}tr"):
        if next(row.iterancestors("{*}tbl")) is not table:
            continue  # a nested table: its text is in the outer cell already
        cells = [" ".join("".join(_words(cell)).split()) for cell in row.iterchildren("{*}tc", "{*}sdt")]
        if any(cells):
            yield " | ".join(cells)
