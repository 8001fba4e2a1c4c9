"""Splits text into sentences, list items and lines."""

# ruff: noqa: RUF001, SIM905  the signs of other scripts are meant, and word lists read better as words

import re
from collections.abc import Iterator
from itertools import pairwise

Span = tuple[int, int]

_CLOSERS = "\"'”’»)\\]}*_"
_WIDE_CLOSERS = "”’」』）】》〉\"')\\]"
_MARKER = r"(?:[-*+•‣◦▪●–—]|\(?\d{1,3}[.)]|\(?[a-zA-Z]\)|\[[ xX]\])[ \t]"
_HEADING = r"[ ]{0,3}\#{1,6}[ \t]"
_CANDIDATE = re.compile(
    # It begins with a set of signs, because the search for one is fast. The look-behind `(?<![.!?…].)` avoids quadratic
    # time on a long row of dots.
    r"[.!?…؟۔।॥։።။។。！？｡\n#](?:"
    rf"(?<=[.!?…؟۔।॥։።။។])(?<![.!?…].)(?:[ ]?[.!?…])*(?P<closers>[{_CLOSERS}]*)(?=\s)"
    rf"|(?<=[。！？｡])[。！？｡]*[{_WIDE_CLOSERS}]*"
    rf"|(?<=\n)(?:[ \t\r]*\n|(?=[ \t]*{_MARKER})|(?={_HEADING}))"
    r"|(?m:(?<=^\#)|(?<=^[ ]\#)|(?<=^[ ]{2}\#)|(?<=^[ ]{3}\#))\#{0,5}[ \t][^\n]*\n)"
)
_ITEM = re.compile(rf"^[ \t]*{_MARKER}", re.MULTILINE)
_LINE = re.compile(r"\S(?:[^\n]*\S)?")
_WORD = re.compile(r"\w+")
_NEXT = re.compile(r"\S")
_DOTTED = re.compile(r"(?:\w\.)+\w{1,2}|\w{1,2}(?:\.\w)+")
_ENUMERATOR = re.compile(r"\d{1,3}(?:\.\d{1,3})*|[a-zA-Z]|[ivxIVX]{1,5}")
_OPENERS = "\"'“‘«([{*_"

# Abbreviations that never end a sentence.
_LEADS = frozenset(
    "dr mr mrs ms mx prof rev hon gen col capt lt sgt maj cmdr sen rep gov pres st mt messrs mme mlle "
    "e.g i.e eg ie cf viz vs v bzw z.b d.h u.a dipl ing".split()
)
# Abbreviations before a number; elsewhere words.
_COUNTED = frozenset(
    "no nos nr fig figs eq eqs eqn sec sect ch chap vol vols art p pp par para pt ref refs tab ex app abs ver v "
    "jan feb mar apr jun jul aug sep sept oct nov dec".split()
)
# These may end a sentence, depending on what follows.
_OPEN = frozenset(
    "etc al inc ltd co corp bros jr sr ed eds est dept univ assn approx ca resp incl excl max avg ave blvd rd "
    "mg ml cm mm kg km hr hrs hz ft lb lbs oz a.m p.m usw".split()
)
_OPENINGS = frozenset(
    "The This That These Those There Then They It Its In He She We I You But And Or So If When While Where What Why "
    "Who How A An As At On For From To No Not After Before Although However Both Each All Some Many Most Our My His "
    "Her Their With Since Thus Therefore".split()
)
# What may follow a time of day within a sentence; so may a time zone in capitals.
_AFTER_TIME = frozenset(
    "Monday Tuesday Wednesday Thursday Friday Saturday Sunday Mon Tue Tues Wed Thu Thurs Fri Sat Sun January February "
    "March April May June July August September October November December Jan Feb Mar Apr Jun Jul Aug Sep Sept Oct Nov "
    "Dec Eastern Central Mountain Pacific Atlantic Greenwich Coordinated Local Standard Daylight Today Tomorrow".split()
)
_TIME = re.compile(r"\d\s?[ap]\.m\Z", re.IGNORECASE)
# Of answers only: a number with a unit. Within a sentence, what follows is in lower case or a number.
_MEASURE = re.compile(
    r"\d[ \u00a0\u202f-]?(?:[kcm]?m|[km]?g|mcg|[mcd]?l|kWh?|[kMG]?[Hh]z|ft|yd|mi|lbs?|oz|hrs?|mins?|secs?)\Z"
)
_AFTER_ETC = frozenset(["etc", "usw"])
# What may end a sentence before a plural with a verb in the plural: "Acme Inc. Refunds are paid".
_TITLES = frozenset("inc ltd corp bros llc ph.d m.d d.phil b.a m.a b.sc m.sc".split())
_PLURAL = re.compile(r"[A-Z][a-z]+s (?:are|were|have|had|must|can|cannot|may|will|should|do|take|cost)\s")
_TIME_ZONE = re.compile(r"[A-Z]\w+(?: [A-Z]\w+)? time\b")
_CAPITAL = re.compile(rf"[{re.escape(_OPENERS)}]*[^\W\d_]")


def sentences(text: str, start: int = 0, end: int | None = None, *, of_answer: bool = False) -> Iterator[Span]:
    """The sentences of text[start:end] in order. They begin and end on something visible, and nothing visible is
    outside of them. A blank line and a list marker at the head of a line always begin a new one, and a Markdown heading
    is one by itself. In an answer, more sentences end with an abbreviation ("500 kg. Refunds"): two statements must not
    be checked as one. Documents are split as their stored chunks were."""
    end = len(text) if end is None else end
    begin = start
    for found in _CANDIDATE.finditer(text, start, end):
        if found["closers"] is not None and not _ends(text, begin, found, end, of_answer):
            continue
        if (span := trim(text, begin, found.end())) is not None:
            yield span
        begin = found.end()
    if (span := trim(text, begin, end)) is not None:
        yield span


def items(text: str, start: int = 0, end: int | None = None) -> Iterator[Span]:
    """The items of a list, each from its marker to the next; without markers, the lines."""
    end = len(text) if end is None else end
    heads = [found.start() for found in _ITEM.finditer(text, start, end)]
    if not heads:
        yield from lines(text, start, end)
        return
    for low, high in pairwise([start, *heads, end]):
        if (span := trim(text, low, high)) is not None:
            yield span


def lines(text: str, start: int = 0, end: int | None = None) -> Iterator[Span]:
    """The lines that are not blank."""
    yield from (found.span() for found in _LINE.finditer(text, start, len(text) if end is None else end))


def trim(text: str, start: int, end: int) -> Span | None:
    """The span without surrounding white space; None if it is blank."""
    inner = text[start:end]
    left = len(inner) - len(inner.lstrip())
    if left == len(inner):
        return None
    return start + left, start + len(inner.rstrip())


def _ends(text: str, begin: int, found: re.Match[str], end: int, of_answer: bool) -> bool:
    """Whether the matched stop ends the sentence that begins at `begin`."""
    following = _NEXT.search(text, found.end(), end)
    if following is None:
        return True
    after = following[0]
    at = found.start()
    stop = text[at : found.start("closers")]
    if stop != ".":
        # A question inside a sentence ("Why?" she asked) goes on in lower case, and so does a pause ... like this.
        return not after.islower() or (not found["closers"] and stop[0] not in ".…")
    word = text[max(begin, at - 24) : at]
    word = word.rsplit(None, 1)[-1].lstrip(_OPENERS) if word and not word[-1].isspace() else ""
    if not word:
        return True
    if at - begin < 40 and _ENUMERATOR.fullmatch(word) and not text[begin : at - len(word)].strip():
        return False
    if word[-1] in "mM" and _TIME.search(text, max(begin, at - 5), at):
        if of_answer and at + 2 == following.start() and _TIME_ZONE.match(text, following.start()):
            return False
        begins = _WORD.match(text, following.start())
        return begins is not None and _begins_after_time(begins[0])
    if of_answer and not after.islower() and _ends_answer(word, text, max(begin, at - 12), at, following.start()):
        return True
    return _breaks(word, text, following.start(), after)


def _breaks(word: str, text: str, at: int, after: str) -> bool:
    """Whether a full stop after this word ends a sentence, given the text at `at`."""
    known = word.lower()
    if known in _LEADS or (known in _COUNTED and after.isdigit()):
        return False
    if after.islower():
        return len(word) >= 4 and word.isalpha() and known not in _OPEN and known not in _COUNTED
    if known in _OPEN or _DOTTED.fullmatch(word) or (len(word) == 1 and word.isupper()):
        begins = _WORD.match(text, at)
        return begins is not None and begins[0] in _OPENINGS
    return True


def _ends_answer(word: str, text: str, begin: int, at: int, following: int) -> bool:
    """Whether a full stop ends a sentence of an answer after a unit or an abbreviation that it would not end in a
    document: the stop is at `at`, the next word at `following`."""
    if text[following] in "[\u3010":
        # Citation marks.
        return _MEASURE.search(text, begin, at) is not None
    capital = _CAPITAL.match(text, following)
    if capital is None or not capital[0][-1].isupper():
        return False
    known = word.lower()
    if known in _AFTER_ETC or _MEASURE.search(text, begin, at):
        return True
    return known in _TITLES and _PLURAL.match(text, following) is not None


def _begins_after_time(word: str) -> bool:
    """Whether this word begins a sentence if it follows "10 a.m."."""
    return word in _OPENINGS or (word[0].isupper() and not word.isupper() and word not in _AFTER_TIME)
