"""Reads the lines of Markdown, reStructuredText and plain text: what each one begins with, and where blocks end."""

# ruff: noqa: RUF001  the dashes of list markers are meant

import re
from typing import NamedTuple

_MARKER = r"(?:[-*+•‣◦▪●–—]|\(?\d{1,3}[.)]|\(?[a-zA-Z]\)|\#\.|(?:\.\.[ ]\[|\[\^)[^\]\n]{1,40}\]:?)(?=[^\S\n]|\n|\Z)"
_TAG = r"<[/!?]?[a-zA-Z][^<>\n]{0,500}>"
_IMAGE = r"\[?!\[[^\]\n]{0,500}\]\([^)\n]{0,1000}\)(?:\]\([^)\n]{0,1000}\))?"
# Each line is of the kind of the first group that matches. All quantifiers are bounded or possessive: linear time.
_LINE = re.compile(
    rf"""
    [^\S\n]*+ (?:>(?!>>[\s])[^\S\n]*+)*+
    (?:
      (?P<text> (?=[^\W\d_][^\W_]))
    | (?P<blank> (?=\n|\Z))
    | (?P<fence> `{{3,}}+(?=[^`\n]*+(?:\n|\Z)) | ~{{3,}}+(?=[^\S\n]*+[^\s~]))
    | (?P<heading> \#{{1,6}}+(?=[^\S\n]++\S))
    | (?P<adornment> ([^\w\s\\])\6{{2,}}+(?=[^\S\n]*+(?:\n|\Z)))
    | (?P<border> (?:={{2,}}+(?:[ ]++={{2,}}+)++ | -{{2,}}+(?:[ ]++-{{2,}}+)++)(?=[^\S\n]*+(?:\n|\Z)))
    | (?P<grid> \+(?:[-=]{{2,}}+\+)++)
    | (?P<separator> (?=[^\n|]*+\|) \|?+[ \t]*+:?+-++:?+[ \t]*+(?:\|[ \t]*+:?+-++:?+[ \t]*+)*+\|?+
                     (?=[^\S\n]*+(?:\n|\Z)))
    | (?P<row> \|(?=[^|\n]*+\|[^|\n]*+\| | [ \t][^|\n]*+\|))
    | (?P<item> {_MARKER} (?:[ \t]*+\[[ xX]\](?=[ \t]))?+)
    | (?P<directive> \.\.[ \t]++(?:\|[^|\n]{{1,80}}\|[ \t]++)?+[\w:.+-]{{1,60}}?::(?=[^\S\n]|\n|\Z))
    | (?P<comment> \.\.(?=[^\S\n]|\n|\Z) | __(?=[ \t]))
    | (?P<field> :(?=\S)(?!:)[^:\n]{{1,80}}+:(?=[^\S\n]|\n|\Z)
               | @(?:param|arg|returns?|throws|raises|exception|since|deprecated)(?=[ \t]))
    | (?P<colon> :(?=[ \t]))
    | (?P<doctest> >>>(?=\s|\Z))
    | (?P<html> <!--)
    | (?P<mark> (?:(?:{_TAG}|{_IMAGE})[^\S\n]*+)++(?=\n|\Z) | \[[^\]^\n][^\]\n]{{0,200}}\]:(?=[ \t]*+\S)
              | :::[^\n]*+ | \[!\w++\](?=[^\S\n]*+(?:\n|\Z))
              | \*\*(?:Note|Tip|Important|Warning|Caution):?\*\*(?=[^\S\n]*+(?:\n|\Z)))
    | (?P<admonition> (?:!!!|\?\?\?\+?)(?=[ \t]++\w))
    | (?P<plain> )
    )
    [^\n]*+ (?:\n|\Z)
    """,
    re.VERBOSE,
)


class TextLine(NamedTuple):
    """A line: text[start:end] is what is visible of it, without indentation and quotation marks ">". `body` is where
    the text after its marker begins."""

    kind: str
    start: int
    end: int
    indent: int
    body: int


def read_lines(text: str) -> list[TextLine]:
    found: list[TextLine] = []
    for match in _LINE.finditer(text):
        kind = match.lastgroup or "text"
        start, body = match.span(match.lastindex or 0)
        begin, end = match.span()
        while end > body and text[end - 1].isspace():
            end -= 1
        indent = _indent(text[begin:start]) if start > begin else 0
        found.append(TextLine("text" if kind == "plain" else kind, start, end, indent, body))
    return found


def _indent(before: str) -> int:
    quoted = before.rfind(">")
    return len(before[quoted + 1 :].expandtabs(4)) - (quoted >= 0)


# A line that a program or a terminal would read. Prose has none of these; half of a code block's lines have.
_CODE_LINE = re.compile(
    r"""[$%❯][ ]\S | >>> | \.\.\.[ ]? | [{}\[\]()]+[,;]?$ | ["'{<\[] | [\#/]{1,2}[ !] | --?\w | @\w+
    | from[ ][\w.]+[ ]import[ ]
    | (?:import|from|def|class|return|if|for|while|with|try|else|elif|except|raise|await|async|const|let|var|function
        |export|public|private|static|void|int|using|package|fn|pub|use)\b(?=[^.]*$|.*[(:;{]$)
    | (?:SELECT|INSERT|UPDATE|DELETE|CREATE|ALTER|DROP|BEGIN|COMMIT|FROM|WHERE|JOIN)\b
    | (?:pip|python3?|npm|npx|curl|docker|git|sudo|cd|mkdir|export|apt|brew|make|celery|pytest|scrapy)[ ]\S
    | [\w.\[\]"']+(?:,[ ][\w.]+)*[ ]?(?::[ ][\w\[\], |]+)?[-+*/|]?=[ ]?\S | [\w.]+\([^)]*$ | [\w.]+\(.*\)[,;:]?$
    | [\w.-]+:(?:$|[ ]\S{1,30}$) | \w+/[\w./]*$ | .*[;{}\\]$ | .*\)[,:]?$ | .*=\S""",
    re.VERBOSE,
)
_STATEMENT = re.compile(
    r"""(?=[a-z@\#$❯<{\[]|\w+(?:[ ]?=|[.(]\w))
    (?:from[ ][\w.]+[ ]import|import[ ][\w.]+(?:[ ]as[ ]\w+|,.*)?$|(?:async[ ])?def[ ]\w+\(|class[ ]\w+.*:$
    |@\w[\w.]*\(?|\#!|\#include|[$❯][ ]\S|<\?\w|[{\[]$|(?:const|let|var)[ ]\w+[ ]=|(?:public|private|export)[ ]\w+
    |(?:pip|npm|docker|git|curl|sudo)[ ][a-z-]+[ ]?[^.\s]|[\w.]+[ ]=[ ]\S|[\w.]+\(.*\)$)""",
    re.VERBOSE,
)
MAX_LOOKED_AT = 40


def looks_like_code(text: str, lines: list[TextLine], first: int, stop: int) -> bool:
    """Whether at least half of the lines look like code."""
    votes = [
        _CODE_LINE.match(text[line.start : min(line.end, line.start + 300)]) is not None
        for line in lines[first : min(stop, first + MAX_LOOKED_AT)]
        if line.kind != "blank"
    ]
    return 2 * sum(votes) >= len(votes) > 0


def is_statement(text: str, line: TextLine) -> bool:
    """Whether a line at the head of a paragraph can only be code."""
    return _STATEMENT.match(text[line.start : min(line.end, line.start + 300)]) is not None


def fence_end(text: str, lines: list[TextLine], at: int, stop: int) -> int:
    """The index after the line that closes the fence, or `stop`."""
    opener = lines[at]
    sign, length = text[opener.start], opener.body - opener.start
    for index in range(at + 1, stop):
        line = lines[index]
        if line.kind in ("fence", "adornment") and line.body == line.end and text[line.start] == sign:
            if line.end - line.start >= length:
                return index + 1
        elif line.kind == "fence" and text[line.start] == sign and opener.body == opener.end:
            return index
    return stop


def indented_end(lines: list[TextLine], at: int, stop: int, indent: int) -> int:
    """The index after the last line from `at` on that is indented by more than `indent`."""
    end = at
    while at < stop and (lines[at].kind == "blank" or lines[at].indent > indent):
        at += 1
        end = at if lines[at - 1].kind != "blank" else end
    return end


def item_end(lines: list[TextLine], at: int, stop: int) -> int:
    """The index after a list item: what is indented further, and a paragraph that is continued without
    indentation."""
    indent, end = lines[at].indent, at + 1
    for index in range(at + 1, stop):
        line = lines[index]
        if line.kind == "blank":
            continue
        continued = line.kind == "text" and end == index and lines[index - 1].kind in ("text", "item")
        if line.indent <= indent and not continued:
            break
        end = index + 1
    return end


def spanned(lines: list[TextLine]) -> tuple[int, int]:
    return lines[0].start, lines[-1].end


def after_blank(lines: list[TextLine], at: int, stop: int) -> int:
    while at < stop and lines[at].kind == "blank":
        at += 1
    return at
