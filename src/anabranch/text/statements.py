"""Splits an answer into statements while it is being written, and says which of them claim something."""

import re
import sys
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile
from typing import NamedTuple

from anabranch.text.citation_marks import FENCE
from anabranch.text.non_claims import only_announces, says_nothing, states
from anabranch.text.sentences import Span, sentences, trim

_LINKED_NUMBER = r"\[[\d,; ]{1,500}\]\([^()\s]{0,2000}\)"
# Behind a sentence: not the box of a task, nor the words of a link, unless they are numbers.
_MARKS = re.compile(
    rf"(?:[ \t]*(?!\[[ xX]\])(?:{_LINKED_NUMBER}|\[?\[[^\[\]\n]{{1,500}}\]\]?(?!\()"
    r"|\u3010[^\u3010\u3011\n]{1,500}\u3011)[.!?]?)+"
)
# In marks directly behind a full stop no sentence may end: while the answer is written, they are not yet closed.
_INSIDE = r"(?:[^\[\]\u3010\u3011\s\u3002\uff01\uff1f\uff61]|(?<=[\w,;:])[ ]){1,500}"
_FOOTNOTE = r"[\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+"
_STOP, _CLOSER = r"[.!?\u2026]", r"[\"'\u201d\u2019\u00bb)*_]"
_DIRECTLY = rf"(?:(?<={_STOP})|(?<={_STOP}{_CLOSER})|(?<={_STOP}{_CLOSER}{{2}})|(?<={_STOP}{_CLOSER}{{3}}))"
_DIRECT_MARKS = re.compile(
    rf"{_DIRECTLY}(?:{_LINKED_NUMBER}|\[?\[{_INSIDE}\]\]?|\u3010{_INSIDE}\u3011|{_FOOTNOTE})+(?=\s)"
)
_ROW = re.compile(r"[ \t]*\|")
# The line below the header of a table, or as much of it as has come.
_SEPARATOR = re.compile(r"\|[-:| \t]*")
_TABLE_HEADER = re.compile(r"\|[^\n]*\n[ \t]*\|[:| \t]*-[-:| \t]*\Z")
# What begins with these may belong to the statement before: a mark, or the rest of dots ". . .".
_UNCERTAIN = "[\u3010.!?\u2026"
# Enough of the next statement to see that the last one has ended.
_BEGUN = re.compile(r"\s*(?:\S+\s|\S{24})")
# A time zone is known by its third word: "5 p.m. New York time".
_TIME, _BEGUN_AFTER_TIME = re.compile(r"[ap]\.m\.\s", re.IGNORECASE), re.compile(r"(?:\S+\s+){3}")

# Unfinished text is looked at again when it has grown by 1/64 of its length; from these lengths on by 1/8 and by half.
AGAIN, LONG, AGAIN_LONG, VERY_LONG, AGAIN_VERY_LONG = 64, 1_000, 8, 20_000, 2
# So many characters behind a statement, it is certain where it ends.
CERTAIN = 2_000

_WORD = re.compile(r"[^\W_]+")
_LEAD_IN = re.compile(r"\A(?:[#>*+\u2022\u2013-]+(?:[ \t]+|\Z)|\(?\d{1,3}[.)](?:[ \t]+|\Z))+")
_BOLD = re.compile(r"(?<!\w)\*\*|\*\*(?!\w)")
_LAST_FOOTNOTE = re.compile(rf"{_DIRECTLY}{_FOOTNOTE}\s*\Z")
_QUESTION = re.compile(r"[?\uff1f\u061f][\"'\u201d\u2019)\]*_]*\s*\Z")
_HEADING = re.compile(r"[ ]{0,3}#{1,6}[ \t]|\*\*[^*\n]{1,120}\*\*:?\s*\Z")
_ANNOUNCEMENT = re.compile(r"[:\uff1a][*_]*\s*\Z")
# Fewer words than this are a label, unless they end like a sentence.
_FEW = 3
_STOPPED = re.compile(r"[.!\u3002\uff01\uff61\u0964\u06d4][\"'\u201d\u2019\u00bb)\]*_\s]*\Z")
_LABELLED = re.compile(r"[^\W_][^:\n]*[:\uff1a]\s*[^\W_]")
# Chinese, Japanese, and scripts of South East Asia, which write words without spaces between them.
_UNSPACED = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]")
_LONG_LABEL = 6


class Statement(NamedTuple):
    """A sentence, list item, table row or code block of an answer, with the citation marks behind it. The header of a
    table is one with the line below it. `rest`: all that follows the last statement that is told apart.
    `unfinished`: the answer was cut off in it."""

    start: int
    end: int
    code: bool = False
    rest: bool = False
    unfinished: bool = False


class StatementReader:
    """Reads an answer as it comes. The statements of a text are the same, however it is cut into parts. After `most`
    statements, or from one on with more than `longest` characters, the rest of the answer is one."""

    def __init__(self, most: int = sys.maxsize, longest: int = sys.maxsize) -> None:
        self._left = most
        self._longest = longest
        self._text = ""
        self._parts: list[str] = []
        self.length = 0
        # Where the first incomplete statement begins, and how much of the text was looked at.
        self._at = self._seen = 0

    @property
    def text(self) -> str:
        if self._parts:
            self._text = "".join((self._text, *self._parts))
            self._parts = []
        return self._text

    def add(self, part: str) -> list[Statement]:
        """The statements that are now complete. A long one is not looked at again for every part."""
        self._parts.append(part)
        self.length += len(part)
        if not self._left:
            return []
        unfinished = self.length - self._at
        again = AGAIN if unfinished < LONG else AGAIN_LONG if unfinished < VERY_LONG else AGAIN_VERY_LONG
        if (self.length - self._seen) * again < unfinished:
            return []
        self._seen = self.length
        found = list(_statements(self.text, self._at))
        certain = _unfinished_heading(self.text, self._at)
        while found and not _has_begun(self.text, found[-1], certain):
            found.pop()
        # The last one has begun, and goes on.
        found = self._told_apart(found[:-1])
        if self.length - self._at > self._longest + CERTAIN:
            self._left = 0
        return found

    def end(self, *, cut_off: bool = False) -> list[Statement]:
        """What is left. If the answer was `cut_off`, its last statement may not be finished."""
        found = self._told_apart(list(islice(_statements(self.text, self._at), self._left)))
        rest = trim(self.text, self._at, self.length)
        self._at = self.length
        if rest:
            return [*found, Statement(*rest, rest=True)]
        if cut_off and found and not found[-1].code and not _STOPPED.search(self.text, *found[-1][:2]):
            found[-1] = found[-1]._replace(unfinished=True)
        return found

    def _told_apart(self, found: Sequence[Statement]) -> list[Statement]:
        """Those before one that is too long; after it, no more are."""
        short = list(takewhile(lambda one: one.end - one.start <= self._longest, found[: self._left]))
        self._left = 0 if len(short) < len(found) else self._left - len(short)
        if short:
            self._at = short[-1].end
        return short


def statements(text: str) -> list[Statement]:
    return list(_statements(text, 0))


def _unfinished_heading(text: str, start: int) -> int:
    """Where the last line begins if it is a heading, which may go on; else the end of the text."""
    line = max(start, text.rfind("\n", start) + 1)
    at_head = line == 0 or text[line - 1] == "\n"
    return line if at_head and _HEADING.match(text, line) else len(text)


def _has_begun(text: str, statement: Statement, certain: int) -> bool:
    """Whether it is certain that this is a statement of its own, and no part of the one before."""
    after_time = _TIME.match(text, max(0, statement.start - 5), statement.start)
    begun = (_BEGUN_AFTER_TIME if after_time else _BEGUN).match(text, statement.start)
    return begun is not None and text[statement.start] not in _UNCERTAIN and statement.start <= certain


def _statements(text: str, start: int) -> Iterator[Statement]:
    """Marks at the beginning of a sentence belong to the one before, and the line below a header to it."""
    before: Statement | None = None
    unmarked = _without_direct_marks(text, start)
    for found in _pieces(text, unmarked, start):
        if before is not None and (
            _marks(text, unmarked, before, found) == found.end or _is_header(text, before, found)
        ):
            before = before._replace(end=found.end)
            continue
        if before is not None:
            yield before
        before = found
    if before is not None:
        yield before


def _marks(text: str, unmarked: str, before: Statement | None, found: Statement, end: int | None = None) -> int | None:
    """Where the marks end with which a sentence begins, and which belong to the one before. They may go on behind it,
    up to `end`."""
    if before is None or found.code or "\n\n" in text[before.end : found.start]:
        return None
    marks = _MARKS.match(text, found.start, found.end if end is None else end)
    return _past_direct_marks(text, unmarked, marks.end()) if marks else None


def _is_header(text: str, row: Statement, below: Statement) -> bool:
    """Whether a row is the first of a table, and the line below it has no words."""
    if text[row.start] != "|" or not _SEPARATOR.fullmatch(text, below.start, below.end):
        return False
    if text.count("\n", row.start, row.end) or text.count("\n", row.end, below.start) != 1:
        return False
    line = text.rfind("\n", 0, row.start) + 1
    above = text.rfind("\n", 0, max(0, line - 1)) + 1
    return not text[line : row.start].strip() and (line == 0 or not _ROW.match(text, above))


def _without_direct_marks(text: str, start: int) -> str:
    """With tabs instead of the marks directly behind a full stop, which would hide the end of a sentence."""
    parts, at = [], 0
    for marks in _DIRECT_MARKS.finditer(text, start):
        parts += [text[at : marks.start()], "\t" * len(marks[0])]
        at = marks.end()
    return "".join((*parts, text[at:]))


def _past_direct_marks(text: str, unmarked: str, end: int) -> int:
    # There is no tab in such a mark.
    while end < len(text) and text[end] != unmarked[end]:
        end += 1
    return end


def _pieces(text: str, unmarked: str, start: int) -> Iterator[Statement]:
    """Code blocks, table rows, sentences, and the marks behind them, in order."""
    begin, fence = start, ""
    fence_start = start
    last: Statement | None = None
    for line_start, line_end in _lines(text, start):
        if line_start == start > 0 and text[start - 1] != "\n":
            # The rest of a line.
            continue
        mark = FENCE.match(text, line_start, line_end)
        if fence:
            if mark and mark[1].startswith(fence) and not text[mark.end() : line_end].strip():
                last = Statement(fence_start, mark.end(), code=True)
                yield last
                begin, fence = line_end, ""
        elif mark or _ROW.match(text, line_start, line_end):
            for found in _prose(text, unmarked, begin, line_start, last):
                yield found
                last = found
            begin = line_end
            if mark:
                fence, fence_start = mark[1], mark.start(1)
            elif (span := trim(text, line_start, line_end)) is not None:
                last = Statement(*span)
                yield last
    if fence:
        yield Statement(fence_start, len(text.rstrip()), code=True)
    else:
        yield from _prose(text, unmarked, begin, len(text), last)


def _prose(text: str, unmarked: str, start: int, end: int, last: Statement | None) -> Iterator[Statement]:
    """Sentences, and the marks behind them by themselves. After marks it begins anew, as after any statement that was
    complete when the rest had not yet come."""
    again = True
    while again:
        again = False
        for span in sentences(unmarked, start, end, of_answer=True):
            found = Statement(span[0], _past_direct_marks(text, unmarked, span[1]))
            if (marks := _marks(text, unmarked, last, found, end)) is not None:
                found, start, again = Statement(found.start, marks), marks, True
            last = found
            yield found
            if again:
                break


def _lines(text: str, start: int) -> Iterator[Span]:
    while start < len(text):
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        yield start, end
        start = end + 1


def claims_something(statement: str) -> bool:
    """Whether a statement, without its marks, says something that a source could support: not a heading, a question, a
    greeting, the announcement of a list, or a sentence about the answer itself."""
    bare = statement.strip()
    if _TABLE_HEADER.match(bare) or _QUESTION.search(bare):
        return False
    is_heading = _HEADING.match(bare) is not None and not _STOPPED.search(bare)
    bare = _LEAD_IN.sub("", bare, count=1).strip("*_ ").replace("\u2019", "'")
    if _is_label(bare) or (is_heading and not states(bare)):
        return False
    return not (only_announces(bare) if _ANNOUNCEMENT.search(bare) else says_nothing(bare))


def _is_label(bare: str) -> bool:
    """Whether a statement is a word or two without a sign that they are an answer: a full stop, a number, a label
    before them, a second cell."""
    words = len(_WORD.findall(bare))
    if not words or words >= _FEW or any(map(str.isdigit, bare)):
        return not words
    cells = [cell for cell in bare.split("|") if _WORD.search(cell)] if bare.startswith("|") else []
    if len(cells) > 1 or _STOPPED.search(bare) or _LABELLED.match(bare):
        return False
    return sum(1 for _ in _UNSPACED.finditer(bare)) < _LONG_LABEL


def without_signs(statement: str) -> str:
    """With spaces instead of a list marker, the signs of bold text and a footnote mark, which claim nothing."""
    marker = _LEAD_IN.match(statement)
    rest = statement[marker.end() :] if marker and not _HEADING.match(statement) else statement
    rest = _LAST_FOOTNOTE.sub(lambda found: " " * len(found[0]), rest)
    return " " * (len(statement) - len(rest)) + _BOLD.sub("  ", rest)
