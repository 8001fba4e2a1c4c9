"""Inline markup of reStructuredText: as plain words, and as Markdown."""

import re

_TITLED = re.compile(r"^(.*?)\s*<([^<>]*)>$", re.DOTALL)
_LITERAL = re.compile(r"``(.+?)``", re.DOTALL)
_LINK = re.compile(r"`([^`<]+?)\s*(?:<[^`>]*>)?`__?")
_PLAIN_LINK = re.compile(r"\b(\w[\w.-]*)__?(?=[\s.,;)])")
_TICKS = re.compile(r"`([^`]+)`")
_STRONG = re.compile(r"(?<![\w*])\*\*(?=\S)(.+?)(?<=\S)\*\*(?![\w*])", re.DOTALL)
_EMPHASIS = re.compile(r"(?<![\w*])\*(?=[^\s*])([^*]+?)(?<=[^\s*])\*(?![\w*])", re.DOTALL)
_SUBSTITUTION = re.compile(r"(?<!\w)\|(\w[^|\n]{0,40})\|(?!\w)")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_SPACE = re.compile(r"\s+")
_WORDS = frozenset(
    [
        "ref",
        "doc",
        "term",
        "abbr",
        "guilabel",
        "menuselection",
        "ticket",
        "pr",
        "issue",
        "commit",
        "rfc",
        "pep",
        "index",
        "numref",
        "any",
    ]
)
_NAMED = re.compile(r":([a-zA-Z][\w:+.-]*):`([^`]*)`")


def plain(text: str) -> str:
    """The words without markup, on one line."""
    return _SPACE.sub(" ", _inline(text, "", "")).strip().removesuffix("::").rstrip() + (
        ":" if text.rstrip().endswith("::") and not text.rstrip().endswith(" ::") else ""
    )


def markdown(text: str) -> str:
    """The same text in Markdown, on one line."""
    words = _SPACE.sub(" ", _inline(text, "`", "**")).strip()
    return words.removesuffix("::").rstrip() + ":" if words.endswith("::") else words


def _inline(text: str, code: str, strong: str) -> str:
    kept: list[str] = []

    def keep(words: str) -> str:
        kept.append(words)
        return f"\x00{len(kept) - 1}\x00"

    def role(found: re.Match[str]) -> str:
        name, content = found[1].rpartition(":")[2] if found[1] != "py:class" else "class", found[2]
        titled = _TITLED.match(content)
        words = titled[1] if titled and titled[1] else content
        if name in _WORDS:
            # A reference without a title shows its label.
            return words if titled else re.sub(r"[-_/]+", " ", words.lstrip("!~")).strip()
        if not titled:
            words = words.rpartition(".")[2] if words.startswith("~") else words.lstrip("!.@")
            words = words.lstrip("@")
            words = re.sub(r"^_\w+\.", "", words)
        return keep(f"{code}{words}{code}")

    text = text.replace("\x00", "")
    text = _LITERAL.sub(lambda found: keep(f"{code}{found[1]}{code}"), text)
    text = _NAMED.sub(role, text)
    text = _LINK.sub(lambda found: found[1], text)
    text = _TICKS.sub(lambda found: keep(f"{code}{found[1]}{code}"), text)
    text = _STRONG.sub(lambda found: f"{strong}{found[1]}{strong}", text)
    text = _EMPHASIS.sub(lambda found: found[1], text)
    text = _PLAIN_LINK.sub(lambda found: found[1], text)
    text = _SUBSTITUTION.sub(lambda found: found[1], text)
    text = _ESCAPE.sub(lambda found: "" if found[1].isspace() else found[1], text)
    while "\x00" in text:  # what is kept may hold what was kept before
        text = re.sub("\x00(\\d+)\x00", lambda found: kept[int(found[1])], text)
    return text
