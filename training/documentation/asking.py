"""Questions, where they come from, and what is worth asking about."""

import re
from typing import NamedTuple

from training.documentation.structure import Leaf, Node, Thing


class Question(NamedTuple):
    """`answer` is the part of the evidence that answers, if it is short. `thing` is what the question is about."""

    text: str
    kind: str
    evidence: tuple[Leaf, ...]
    answer: str | None = None
    thing: Thing | None = None
    # What a passage must lose so that it does not answer; None if the evidence is all.
    scope: Node | None = None


class Place(NamedTuple):
    """Where a node is: the headings above it, and the class or function that it belongs to."""

    package: str
    owner: str = ""


_UNINFORMATIVE = re.compile(
    r"(?i)(?:see\b|for (?:more|further|a full|a complete|example|instance)|tutorial:|example|note\b|say you|suppose|"
    r"this (?:section|document|page|chapter|guide)|scope:|here (?:is|are)|import path|new in|changed in|first,|let's|"
    r"in this|the following|as |refer to|consult)"
)


def is_informative(leaf: Leaf) -> bool:
    return len(leaf.words) > 25 and not _UNINFORMATIVE.match(leaf.words)


def is_code(name: str) -> bool:
    """Whether a name looks like code: no blanks, and not an ordinary word."""
    return re.fullmatch(r"\S+", name) is not None and re.fullmatch(r"[A-Z]?[a-z]+", name) is None
