"""Plain text: paragraphs stand between blank lines."""

import re

from anabranch.knowledge.parse.builder import check_blocks, check_text
from anabranch.knowledge.parse.limits import ParseLimits
from anabranch.knowledge.parsed import Block, Parsed

_BLANK = re.compile(r"\n\s*\n|\Z")


def read_prose(text: str, limits: ParseLimits) -> Parsed:
    check_text(len(text), limits)
    blocks = []
    at = 0
    for gap in _BLANK.finditer(text):
        if block := trimmed(text, at, gap.start()):
            blocks.append(block)
            check_blocks(len(blocks))
        at = gap.end()
    return Parsed(text=text, blocks=tuple(blocks))


def trimmed(text: str, start: int, end: int) -> Block | None:
    """The paragraph in `text[start:end]` without the white space around it."""
    words = text[start:end]
    start += len(words) - len(words.lstrip())
    end -= len(words) - len(words.rstrip())
    return Block(start=start, end=end) if start < end else None
