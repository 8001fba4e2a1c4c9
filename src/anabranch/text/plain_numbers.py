"""Numbers in the form that most texts have: "fifty-one" as 51, "1,250" as 1250. Small ones stay as they are."""

# ruff: noqa: SIM905  word lists read better as words

import re

_UNITS = "one two three four five six seven eight nine".split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_VALUES = {word: number for number, word in enumerate(_UNITS, start=1)}
_VALUES |= {word: 20 + 10 * number for number, word in enumerate(_TENS)}
_NUMBER = re.compile(
    rf"(?<![\w-])(?P<tens>{'|'.join(_TENS)})(?:[- ](?P<units>{'|'.join(_UNITS)}))?(?![\w-])"
    r"|(?<![\d.,])(?P<grouped>\d{1,3}(?:,\d{3})+)(?![\d,])",
    re.IGNORECASE,
)


def plain_numbers(text: str) -> tuple[str, list[int]]:
    """The text with its numbers in digits, and for each place in it, also its end, the place in the original."""
    parts: list[str] = []
    places: list[int] = []
    at = 0
    for found in _NUMBER.finditer(text):
        digits = _digits(found)
        parts += (text[at : found.start()], digits)
        places += (*range(at, found.start()), *[found.start()] * len(digits))
        at = found.end()
    return "".join((*parts, text[at:])), [*places, *range(at, len(text) + 1)]


def _digits(found: re.Match[str]) -> str:
    if found["grouped"]:
        return found["grouped"].replace(",", "")
    return str(sum(_VALUES[word.lower()] for word in (found["tens"], found["units"]) if word))
