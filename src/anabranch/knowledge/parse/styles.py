"""What a Word document's styles mean: headings, lists, code."""

import re
from typing import Any, NamedTuple, TypeAlias

Element: TypeAlias = Any  # lxml carries no types

_HEADING = re.compile(r"heading (\d)", re.IGNORECASE)
_CODE = re.compile(r"code|preformatted|macro text|source text", re.IGNORECASE)
_MAX_CHAIN = 20


class Style(NamedTuple):
    heading: int | None = None
    list_level: int | None = None
    code: bool = False


class Styles:
    """Looks a paragraph's style up, by its own marks and by those of the styles that it is based on."""

    def __init__(self, root: Element) -> None:
        self._elements: dict[str, Element] = {}
        self._known: dict[str, Style] = {"": Style()}
        for style in () if root is None else root.iterchildren("{*}style"):
            if (name := _attribute(style, "styleId")) is not None:
                self._elements[name] = style

    def of(self, paragraph: Element) -> Style:
        properties = paragraph.find("{*}pPr")
        if properties is None:
            return Style()
        style = self._named(_value(properties, "pStyle") or "")
        heading = _outline(properties)
        if (style.heading or heading) is not None:
            return Style(heading=style.heading if style.heading is not None else heading)
        return style._replace(list_level=_list_level(properties, style.list_level))

    def _named(self, name: str) -> Style:
        if name not in self._known:
            self._known[name] = self._resolved(name)
        return self._known[name]

    def _resolved(self, name: str) -> Style:
        heading: int | None = None
        list_level: int | None = None
        code = False
        for _ in range(_MAX_CHAIN):  # a hostile file may let styles be based on each other in a circle
            element = self._elements.get(name)
            title = (_value(element, "name") if element is not None else None) or name
            if heading is None:
                heading = _heading_level(title, element)
            properties = None if element is None else element.find("{*}pPr")
            if properties is not None and list_level is None:
                list_level = _list_level(properties, None)
            code = code or _CODE.search(title) is not None
            base = None if element is None else _value(element, "basedOn")
            if base is None:
                break
            name = base
        return Style(heading=heading, list_level=None if heading is not None else list_level, code=code)


def _heading_level(title: str, element: Element) -> int | None:
    if found := _HEADING.fullmatch(title):
        return int(found[1])
    if title.lower() == "title":
        return 0
    properties = None if element is None else element.find("{*}pPr")
    return None if properties is None else _outline(properties)


def _outline(properties: Element) -> int | None:
    level = _value(properties, "outlineLvl") or ""
    return int(level) + 1 if level in tuple("012345678") else None


def _list_level(properties: Element, inherited: int | None) -> int | None:
    numbering = properties.find("{*}numPr")
    if numbering is None:
        return inherited
    if _value(numbering, "numId") == "0":  # how Word takes a paragraph out of its style's list
        return None
    level = _value(numbering, "ilvl") or "0"
    return int(level) if level in tuple("012345678") else 0


def _value(parent: Element, name: str) -> str | None:
    child = parent.find("{*}" + name)
    return None if child is None else _attribute(child, "val")


def _attribute(element: Element, name: str) -> str | None:
    for key, value in element.attrib.items():
        if key.rpartition("}")[2] == name:
            return str(value)
    return None
