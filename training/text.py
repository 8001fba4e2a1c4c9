"""Questions as people type them, and the words by which answers are compared."""

import re
from collections import Counter

STOPWORDS = frozenset(
    re.findall(
        r"\w+",
        "a an and are as at be been by did do does for from had has have how in is it its many much of on or that the "
        "this to was were what when where which who whom whose why with",
    )
)
WORD = re.compile(r"[\w'.-]+")
ARTICLE = re.compile(r"\b(?:a|an|the)\b")
PUNCTUATION = re.compile(r"[^\w\s]")


def keywords(question: str) -> str:
    """The question as somebody types it into a search box; short ones as they are."""
    words = [word for word in WORD.findall(question) if word.lower().strip(".") not in STOPWORDS]
    return " ".join(words) if len(words) > 1 else question


def normal(text: str) -> str:
    """As SQuAD's own evaluation compares answers: no case, punctuation or articles."""
    return " ".join(ARTICLE.sub(" ", PUNCTUATION.sub("", text.lower())).split())


def overlap(found: str, right: str) -> float:
    """F1 of the words of two answers."""
    left, other = normal(found).split(), normal(right).split()
    if not left or not other:
        return float(left == other)
    same = sum((Counter(left) & Counter(other)).values())
    return 2 * same / (len(left) + len(other))
