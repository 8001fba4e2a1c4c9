"""Names and identifiers of a claim that stand nowhere in its evidence."""

# ruff: noqa: SIM905  word lists read better as words

import re
from collections import defaultdict
from collections.abc import Iterator

from anabranch.text.quantities import MONTHS, UNITS
from anabranch.text.reading import ExactDifference, ReadText, root
from anabranch.text.support import STOP

_EMAIL = re.compile(r"(?<![\w+-])(?<![\w+-]\.)[\w+-]+(?:\.[\w+-]+)*@[\w-]+(?:\.[\w-]+)+")
_CODE = re.compile(r"`([^`\n]{1,200})`")
_CHUNK = re.compile(r"\S+")
_EDGES = "\"'()[]{}<>.,;:!?*`\u201c\u201d\u2026"
_PIECE = re.compile(r"[^\W_]+")
_SENTENCE_END = frozenset(".!?:\u2026")
_IDENTIFIER = re.compile(r".*(?:[a-z][A-Z]|_|\(\)|[A-Za-z]\.[A-Za-z]|[A-Za-z]\d|\d[A-Z])|--?[A-Za-z]")
_DAYS = frozenset("monday tuesday wednesday thursday friday saturday sunday".split())
_TITLES = frozenset(
    "mr mrs ms dr sir lady lord saint st prof president king queen prince princess i ii iii iv v vi".split()
)
# A country, its adjective and its other names, one line each.
_COUNTRIES = """
us usa u.s america american americans united_states|oscar oscars academy
uk u.k britain british england english briton britons united_kingdom
france french|germany german germans|spain spanish spaniard spaniards|netherlands dutch holland|wales welsh
ireland irish
scotland scottish scots|switzerland swiss|greece greek greeks|denmark danish danes|sweden swedish swedes
norway norwegian
poland polish poles|turkey turkish turks ottoman|china chinese|japan japanese|portugal portuguese|czech bohemia czechia
soviet ussr russia russian russians|thailand thai|iraq iraqi|finland finnish finns|iceland icelandic|congo congolese
philippines filipino filipinos|cyprus cypriot|lebanon lebanese|vietnam vietnamese|burma burmese myanmar|israel israeli
hungary hungarian hungarians|belgium belgian|europe european eu|korea korean|wien vienna viennese|rome roman romans
paris parisian|london londoner|moscow muscovite|naples neapolitan|venice venetian|mexico mexican|peru peruvian
argentina argentine argentinian|zealand zealander|wales welshman|persia persian iran iranian|asia asian|africa african
"""
_SAME: dict[str, list[str]] = defaultdict(list)
for _line in re.split(r"[|\n]", _COUNTRIES):
    for _one in _line.replace("_", " ").split():
        _SAME[_one] += [other.replace("_", " ") for other in _line.split()]
MAX_NAMES = 100


def name_findings(claim: ReadText, evidence: ReadText, context: ReadText) -> Iterator[ExactDifference]:
    """Names that stand nowhere, where the evidence has a name that the claim does not have: a replaced name leaves the
    right one unused. An identifier of the context alone counts as replaced if the evidence has another identifier."""
    written, known_addresses = _EMAIL.findall(claim.text), _EMAIL.findall(evidence.text)
    if known_addresses and (wrong := next((one for one in written if one not in known_addresses), None)) is not None:
        yield ExactDifference("name", wrong, known_addresses[0], certain=True)
    own = list(dict.fromkeys(_names(claim.text)))[:MAX_NAMES]
    shown = _Known(evidence)
    missing = [name for name in own if not shown.has(name)]
    if not missing:
        return
    short = _abbreviated(claim, evidence)
    said, known = _Known(claim), _Known(context)
    unused = [name for name in dict.fromkeys(_names(evidence.text)) if not said.has(name)]
    for name in missing:
        if name.lower() in short:
            continue
        is_identifier = _is_identifier(name)
        rival = next((other for other in unused if _is_identifier(other) == is_identifier), None)
        if rival is not None and ((is_identifier and name not in own[:1]) or not known.has(name)):
            yield ExactDifference("name", name, rival)


def _abbreviated(claim: ReadText, evidence: ReadText) -> set[str]:
    """The words of the claim that the evidence has as an acronym: World Health Organization, WHO."""
    named = [token for token in claim.tokens if token.raw[0].isupper()]
    initials = "".join(token.low[0] for token in named)
    words: set[str] = set()
    for acronym in {token.low for token in evidence.tokens if token.raw.isupper() and 2 <= len(token.raw) <= 6}:
        at = initials.find(acronym)
        if at >= 0:
            words.update(token.low for token in named[at : at + len(acronym)])
    return words


def _names(text: str) -> Iterator[str]:
    for found in _CODE.finditer(text):
        yield found[1]
    if "`" in text:
        text = _CODE.sub(" x ", text)
    starts = True
    for found in _CHUNK.finditer(text):
        chunk = found[0]
        word = chunk.strip(_EDGES).removesuffix("'s")
        if word:
            if _is_identifier(word) or (word[0].isupper() and _is_name(word, starts=starts)):
                yield word
            starts = chunk.rstrip("\"')]*")[-1:] in _SENTENCE_END and len(word) > 2


def _is_identifier(word: str) -> bool:
    return not word[0].isdigit() and _IDENTIFIER.match(word) is not None


def _is_name(word: str, *, starts: bool) -> bool:
    low = word.lower()
    if low in UNITS or low.removesuffix("s") in UNITS:
        return False
    if starts and not (word.isupper() and len(word) > 1):
        return False
    return (
        low not in STOP
        and low not in MONTHS
        and low.removesuffix("s") not in _DAYS
        and low not in _TITLES
        and len(word) > 1
    )


class _Known:
    """The names that a text knows in some form."""

    def __init__(self, reading: ReadText) -> None:
        self._reading = reading
        self._text = reading.text.lower()
        self._initials = ""

    def has(self, name: str) -> bool:
        pieces = [piece for piece in _PIECE.findall(name.lower()) if piece not in STOP and not piece.isdigit()]
        return all(self._has(piece) for piece in pieces)

    def _has(self, piece: str) -> bool:
        short = root(piece)
        if piece in self._reading.words or short in self._reading.stems:
            return True
        if not piece.isalpha() and piece in self._text.replace(" ", ""):
            return True
        if len(short) > 2 and short in self._text:
            return True
        return self._is_acronym(piece) or self._is_form(piece)

    def _is_acronym(self, piece: str) -> bool:
        if len(piece) > 6:
            return False
        if not self._initials:
            words = [token for token in self._reading.tokens if token.raw[0].isalpha()]
            every = "".join(token.low[0] for token in words)
            self._initials = every + " " + "".join(token.low[0] for token in words if token.low not in STOP)
        return piece in self._initials or (piece.endswith("s") and len(piece) > 2 and piece[:-1] in self._initials)

    def _is_form(self, piece: str) -> bool:
        """Another form of a name: France for French, or the same beginning."""
        for other in _SAME.get(piece, ()):
            if other in self._reading.words or (not other.isalpha() and other in self._text):
                return True
        if len(piece) < 5:
            return False
        head = piece[: max(4, (len(piece) * 5 + 7) // 8)]
        return any(word.startswith(head) for word in self._reading.words)
