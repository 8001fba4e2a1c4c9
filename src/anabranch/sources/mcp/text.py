"""Text and names from MCP servers: safe to show, and comparable."""

import re
from functools import lru_cache

MAX_KEY = 64
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
# Control and bidirectional characters are removed; line ends of every kind become \n.
REPLACEMENTS: dict[int, str | None] = {
    **dict.fromkeys((*range(32), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))),
    **{ord(character): character for character in "\t\n"},
    **dict.fromkeys((0x0B, 0x0C, 0x85, 0x2028, 0x2029), "\n"),
}


def ranked(names: str) -> dict[str, int]:
    return {name: rank for rank, name in enumerate(names.split())}


def normalized(name: object) -> str:
    """pageContent, page_content and page-content are one name."""
    return _normalized(name) if isinstance(name, str) and len(name) <= MAX_KEY else ""


@lru_cache(maxsize=4_096)
def _normalized(name: str) -> str:
    """Cached, because all results of a server have the same field names."""
    return "".join(filter(str.isalnum, name.lower()))


def printable(text: str) -> str:
    """Without lone surrogates, control characters and bidirectional overrides, which must not reach a terminal or a
    database."""
    text = text.encode(errors="replace").decode()
    return (text.translate(REPLACEMENTS) if CONTROL.search(text) else text).strip()


def one_line(text: str, limit: int) -> str:
    line = " ".join(printable(text[: 8 * limit]).split())
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "…"
