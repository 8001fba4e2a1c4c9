"""A text as words with stems and places: what exact checks compare."""

import re
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from anabranch.text.normal_forms import without_accents
from anabranch.text.support import STOP, stem

_TOKEN = re.compile(r"(?<![\w.])\.\d+|\d+(?:[.,:]\d+)*|[^\W\d_]+(?:'[^\W\d_]+)*|\S")
_SIGNS = str.maketrans(
    {"\u2019": "'", "\u2018": "'", "\u2010": "-", "\u2011": "-", "\u2012": "-", "\u2013": "-", "\u2014": "-"}
    | {"\u2212": "-", "\u03bc": "u", "\u00b5": "u", "\u00a0": " ", "\u202f": " ", "\u2009": " "}
)
_FRACTIONS = {"\u00bd": ".5", "\u00bc": ".25", "\u00be": ".75"}
_FRACTION = re.compile(r"(\d?)([\u00bd\u00bc\u00be])")
_CLAUSE = frozenset(".;:!?()")
_NEGATED = re.compile(
    r"(?:ca|is|are|was|were|does|do|did|has|have|had|wo|would|should|could|must|need|ai|sha|might)n't$"
)


class ExactDifference(NamedTuple):
    """Something exact that a claim says and its evidence does not. `found`: what the evidence says in its place.
    `certain`: both cannot be right, whatever the words around say."""

    kind: Literal["number", "unit", "date", "name", "negation", "quantifier", "direction"]
    claimed: str
    found: str | None
    certain: bool = False


class TextToken(NamedTuple):
    """A word, a number or a sign. `glued`: it follows the token before without a space."""

    raw: str
    low: str
    stem: str
    glued: bool


class ReadText:
    """A text that is read when it is needed: its tokens, and sets of its words and stems."""

    def __init__(self, text: str) -> None:
        self.text = text if text.isascii() else plain(text)

    @cached_property
    def tokens(self) -> list[TextToken]:
        tokens, end = [], -1
        for found in _TOKEN.finditer(self.text):
            start, stop = found.span()
            tokens.append(_token(found[0], start == end))
            end = stop
        return tokens

    @cached_property
    def words(self) -> set[str]:
        return {token.low for token in self.tokens}

    @cached_property
    def stems(self) -> set[str]:
        return {token.stem for token in self.tokens}


def plain(text: str) -> str:
    """With plain dashes, apostrophes and letters without accents."""
    text = text.translate(_SIGNS)
    return without_accents(_FRACTION.sub(lambda found: (found[1] or "0") + _FRACTIONS[found[2]], text))


@lru_cache(maxsize=20_000)
def _token(raw: str, glued: bool) -> TextToken:
    low = raw.lower()
    if _NEGATED.match(low):
        return TextToken(raw, low, "n't", glued)
    low = low.removesuffix("'s")
    return TextToken(raw, low, root(low), glued)


def root(word: str) -> str:
    """The stem, the same for a doubled consonant: stopped, stop."""
    short = stem(word)
    if len(short) > 3 and short[-1] == short[-2] and short[-1] not in "sl":
        return short[:-1]
    if len(short) > 4 and short.endswith("i"):
        return short[:-1] + "y"
    return short


def is_content(token: TextToken) -> bool:
    return token.low not in STOP and token.low[0].isalnum()


def ends_clause(token: TextToken) -> bool:
    return token.raw in _CLAUSE
