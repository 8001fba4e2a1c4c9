"""Text of documents as a prompt shows it: without characters that nobody sees, and without what the prompt itself
writes around passages."""

import os
import re
import string

# Control characters; spaces and joiners without width; the marks of writing direction; fillers; tag characters; the
# variation selectors that emojis do not need. Whole messages can be hidden in them.
INVISIBLE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200e\u200f"
    "\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0d\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0000-\U000e0fff]+"
)
CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]+")
# Persian, the languages of India and emojis need one of them between two characters; nothing needs more.
JOINERS = re.compile("[\u200c\u200d]+")
SEPARATORS = re.compile("\r\n?|[\x85\u2028\u2029]")
# A line that begins as a numbered passage does, also behind characters that show nothing.
BLANK = r"(?:[^\S\n]|[\u200c\u200d\u2800\ufe0e\ufe0f])*"
NUMBER = re.compile(rf"^({BLANK})[\[［【〔]([^\S\n]*\d{{1,6}}[^\S\n]*)[\]］】〕]", re.MULTILINE)  # noqa: RUF001
BRACKETS = "[［【〔"  # noqa: RUF001
BOUNDARY_LETTERS = 12


def new_boundary() -> str:
    """Letters that no document can know: 56 random bits. Only letters, so that every boundary has as many tokens."""
    return "".join(string.ascii_lowercase[byte % 26] for byte in os.urandom(BOUNDARY_LETTERS))


def visible(text: str) -> str:
    """The text without invisible characters, with `\\n` for every line break."""
    if text.isascii():
        text = CONTROLS.sub("", text) if not text.isprintable() else text
        return text if "\r" not in text else SEPARATORS.sub("\n", text)
    text = INVISIBLE.sub("", SEPARATORS.sub("\n", text))
    return JOINERS.sub(_joiner, text)


def _joiner(found: re.Match[str]) -> str:
    before, after = found.string[max(0, found.start() - 1) : found.start()], found.string[found.end() : found.end() + 1]
    needed = len(found[0]) == 1 and before > "\x7f" and after > "\x7f"
    return found[0] if needed else ""


def neutralised(text: str, boundary: str) -> str:
    """The visible text, without the boundary, and without lines that look like the beginning of another passage."""
    text = visible(text)
    if boundary in text.lower():
        text = re.sub(boundary, "***", text, flags=re.IGNORECASE)
    return NUMBER.sub(r"\1(\2)", text) if any(bracket in text for bracket in BRACKETS) else text
