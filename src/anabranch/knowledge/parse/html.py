"""HTML: the visible text of a page as blocks; nothing is fetched or executed."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from anabranch.knowledge.model import Parsed, Unprocessable
from anabranch.knowledge.parse.builder import ParseLimits, TextBuilder, day, line, tags

if TYPE_CHECKING:
    from selectolax.lexbor import LexborHTMLParser, LexborNode

_DROPPED_NAMES = (
    "script style nav template noscript head title svg iframe object embed canvas audio video select datalist"
)
_DROPPED = frozenset(_DROPPED_NAMES.split())
_INLINE_NAMES = (
    "a abbr acronym b bdi bdo big cite code data del dfn em font i ins kbd label mark q rp rt ruby s samp small span "
    "strike strong sub sup time tt u var wbr img"
)
_INLINE = frozenset(_INLINE_NAMES.split())
_HEADINGS = {"h1": 1, "h2": 2, "h3": 3, "h4": 4, "h5": 5, "h6": 6}
_SPACE = re.compile(r"\s+")
_DATES = ("article:published_time", "date", "dcterms.created", "dc.date", "datepublished", "created")
# Tags that nest; p, li and td do not, because the next one closes them.
_NESTING = re.compile(
    r"<(/?)(?:div|span|ul|ol|dl|table|section|article|main|aside|header|footer|blockquote|figure|center|details|form|"
    r"fieldset|b|i|u|em|strong|small|big|font|code|tt|s|strike|pre|svg|math|template|[a-z]+-[a-z-]+)[\s/>]",
    re.IGNORECASE,
)
MAX_DEPTH = 5_000


def read_html(text: str, limits: ParseLimits) -> Parsed:
    from selectolax.lexbor import LexborHTMLParser, SelectolaxError  # noqa: PLC0415

    _check_depth(text)
    try:
        page = LexborHTMLParser(text)
    except SelectolaxError:  # any text is valid HTML, so this is an allocation failure
        raise MemoryError from None
    reader = _HtmlReader(limits)
    if page.root is not None:
        for node, entering in _walk(page.root):
            reader.enter(node) if entering else reader.leave(node.tag or "")
    reader.flush()
    meta = _meta(page)
    title = page.css_first("title")
    return reader.draft.parsed(
        title=line(title.text() if title else None) or line(meta.get("og:title")),
        author=line(meta.get("author") or meta.get("article:author") or meta.get("dc.creator")),
        created_date=next(filter(None, (day(meta.get(name)) for name in _DATES)), None),
        tags=tags(meta.get("keywords")),
    )


def _check_depth(text: str) -> None:
    """The parser is quadratic in the depth: a megabyte of open tags would take minutes."""
    depth = 0
    for tag in _NESTING.finditer(text):
        depth += -1 if tag[1] else 1
        if depth > MAX_DEPTH:
            raise Unprocessable(
                f"The HTML is nested more than {MAX_DEPTH:,} deep. Simplify the page, or save it as text."
            )


def _meta(page: "LexborHTMLParser") -> dict[str, str]:
    found: dict[str, str] = {}
    for node in page.css("meta"):
        given = node.attributes
        name = given.get("name") or given.get("property") or given.get("itemprop")
        if name and (content := given.get("content")):
            found.setdefault(name.strip().lower(), content)
    return found


def _walk(root: "LexborNode") -> "Iterator[tuple[LexborNode, bool]]":
    """Every visible node, entering and leaving. Not recursive, because pages may nest deeper than Python's stack."""
    above: list[LexborNode] = []
    node: LexborNode | None = root
    while node is not None or above:
        if node is None:
            node = above.pop()
            yield node, False
        elif node.is_text_node:
            yield node, True
        elif node.is_element_node and node.tag not in _DROPPED and "hidden" not in node.attributes:
            yield node, True
            above.append(node)
            node = node.child
            continue
        node = node.next


class _HtmlReader:
    """Collects words until a block ends. Lists and tables collect lines; the outermost one determines the kind."""

    def __init__(self, limits: ParseLimits) -> None:
        self.draft = TextBuilder(limits)
        self._words: list[str] = []
        self._lines: list[str] = []
        self._cells: list[str] = []
        self._nested: list[str] = []  # the open lists and tables
        self._items: list[int] = []
        self._bullet = ""
        self._verbatim = 0
        self._heading = 0

    def enter(self, node: "LexborNode") -> None:
        tag = node.tag or ""
        if node.is_text_node:
            words = node.text_content or ""
            self._words.append(words if self._verbatim else _SPACE.sub(" ", words))
        elif tag in _HEADINGS:
            self.flush()
            self._heading += 1
        elif tag == "pre":
            self._verbatim += 1
            if self._verbatim == 1:
                self.flush()
        elif tag == "br":
            self._words.append("\n" if self._verbatim or not self._nested else " ")
        elif self._verbatim or tag in _INLINE:
            return
        elif tag in ("ul", "ol", "menu", "table"):
            self._end_line() if self._nested else self.flush()
            self._nested.append(tag)
            self._items.append(0)
        elif tag in ("li", "tr") and self._nested:
            self._end_line()
            if tag == "li" and self._nested[-1] != "table":
                self._items[-1] += 1
                mark = f"{self._items[-1]}." if self._nested[-1] == "ol" else "-"
                self._bullet = "  " * (min(len(self._nested), 12) - 1) + mark + " "
        else:
            self._boundary()

    def leave(self, tag: str) -> None:
        if tag in _HEADINGS:
            self._heading = max(0, self._heading - 1)
            self.draft.heading("".join(self._words), _HEADINGS[tag])
            self._words.clear()
        elif tag == "pre":
            self._verbatim -= 1
            if self._verbatim == 0:
                self.draft.add("".join(self._words), "code")
                self._words.clear()
        elif self._verbatim or tag in _INLINE or tag == "br":
            return
        elif tag in ("ul", "ol", "menu", "table"):
            self._end_line()
            self._items.pop()
            if len(self._nested) == 1:
                self._end_lines()
            self._nested.pop()
        elif tag in ("td", "th"):
            self._cells.append(self._take_words())
        elif tag in ("li", "tr") and self._nested:
            self._end_line()
        else:
            self._boundary()

    def flush(self) -> None:
        if self._nested:
            self._end_line()
            self._end_lines()
        elif self._heading == 0:
            lines = "".join(self._words).split("\n")
            self._words.clear()
            self.draft.add("\n".join(" ".join(each.split()) for each in lines))

    def _boundary(self) -> None:
        if self._nested or self._heading:
            self._words.append(" ")
        else:
            self.flush()

    def _take_words(self) -> str:
        words = " ".join("".join(self._words).split())
        self._words.clear()
        return words

    def _end_line(self) -> None:
        words = self._take_words()
        cells = [*self._cells, words] if words else self._cells
        if any(cells):
            self._lines.append(self._bullet + " | ".join(cells))
            self._bullet = ""
        self._cells = []

    def _end_lines(self) -> None:
        self.draft.add("\n".join(self._lines), "table" if self._nested[0] == "table" else "list")
        self._lines.clear()
        self._bullet = ""
