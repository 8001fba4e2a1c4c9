"""Unicode normalization in linear time."""

import re
import unicodedata
from typing import Literal

# `unicodedata.normalize` sorts a run of combining marks in quadratic time, and no other thread runs meanwhile. No
# language writes more marks on a letter than this; Unicode's stream-safe text format has the same limit.
MOST_MARKS = 30
# Characters that are no marks but become marks only.
BECOME_MARKS = "\u0f73\u0f75\u0f81\uff9e\uff9f"
# A run that may have too many: no mark is a word character, except the last two.
LONG_RUN = re.compile(rf"(?<![\W\uff9e\uff9f])[\W\uff9e\uff9f]{{{MOST_MARKS + 1},}}+")


def normal_form(text: str, form: Literal["NFC", "NFKC", "NFKD"]) -> str:
    """The text in this normal form, without the marks of a run after the first MOST_MARKS."""
    if text.isascii():
        return text
    return unicodedata.normalize(form, LONG_RUN.sub(_first_marks, text))


def without_accents(text: str) -> str:
    """Letters without accents, in their compatible form (NFKD)."""
    if text.isascii():
        return text
    return "".join(sign for sign in normal_form(text, "NFKD") if not unicodedata.combining(sign))


def _first_marks(run: re.Match[str]) -> str:
    kept, marks = [], 0
    for sign in run[0]:
        marks = marks + 1 if unicodedata.combining(sign) or sign in BECOME_MARKS else 0
        if marks <= MOST_MARKS:
            kept.append(sign)
    return "".join(kept)
