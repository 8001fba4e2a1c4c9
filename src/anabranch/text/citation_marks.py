"""Citation marks in an answer, and the code in which there are none."""

import re

from anabranch.text.sentences import Span

# A citation mark: [3], [1, 2], [owner/slug], and with the brackets of Chinese and Japanese.
MARK = re.compile(r"[\[\u3010]([^\[\]\u3010\u3011\n]{1,500})[\]\u3011]")
FENCE = re.compile(r"[ ]{0,3}(`{3,}|~{3,})")
_CODE_SPAN = re.compile(r"(?<!`)(`{1,3})(?!`)[^`\n]{1,500}\1(?!`)")


def code_spans(statement: str) -> list[Span]:
    """The parts of a statement that are code: what is in brackets there is no mark."""
    if (fence := FENCE.match(statement)) is None:
        return [found.span() for found in _CODE_SPAN.finditer(statement)]
    # Marks may stand behind the line that ends a block.
    closed = statement.rfind("\n" + fence[1])
    end = statement.find("\n", closed + 1) if closed >= 0 else -1
    return [(0, end if end >= 0 else len(statement))]


def without_marks(statement: str) -> str:
    return MARK.sub("", statement)
