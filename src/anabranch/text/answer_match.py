"""Compares an answer with reference answers: containment and token F1, with SQuAD's normalisation."""

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def tokens(text: str) -> list[str]:
    """Lower-case words without punctuation and articles, as SQuAD's evaluation has them. A text of articles alone keeps
    them."""
    bare = text.lower().translate(_NO_PUNCTUATION)
    return _ARTICLE.sub(" ", bare).split() or bare.split()


def containment(answer: str, references: Sequence[str]) -> float:
    """1 if the answer contains all tokens of a reference, one after the other; else 0."""
    said = _joined(tokens(answer))
    return float(any(_joined(wanted) in said for reference in references if (wanted := tokens(reference))))


def token_f1(answer: str, references: Sequence[str]) -> float:
    """The F1 of the tokens that the answer shares with a reference: that of the best reference."""
    said = Counter(tokens(answer))
    return max((_f1(said, Counter(tokens(reference))) for reference in references), default=0.0)


def _f1(said: Counter[str], wanted: Counter[str]) -> float:
    shared = (said & wanted).total()
    return 2 * shared / (said.total() + wanted.total()) if shared else 0.0


def _joined(words: Sequence[str]) -> str:
    return f" {' '.join(words)} "
