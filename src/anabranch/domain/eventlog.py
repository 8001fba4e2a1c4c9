"""A stream as its log keeps it: numbered entries, pages of them, and the cursor that points between two."""

from anabranch.domain.model import Value

EPOCH = 2**32
# What JSON numbers hold exactly everywhere; nothing larger can be a cursor of ours.
LAST = 2**53 - 1
# Characters that JSON may hold as they are, but at which many readers of server-sent events break lines.
LINE_ENDS = ((b"\xe2\x80\xa8", rb"\u2028"), (b"\xe2\x80\xa9", rb"\u2029"), (b"\xc2\x85", rb"\u0085"))


class Entry(Value, gc=False):
    """What is to be written. Under one key only a higher `revision` counts. One that is `partial` may be passed over
    once a later revision is there to be delivered; one that is `final` ends the stream."""

    key: str
    revision: int
    body: bytes
    partial: bool = False
    final: bool = False


class SequencedEntry(Value, gc=False):
    """An entry in its place: `sequence` is `epoch * 2**32 + n`, and n counts 1, 2, 3…"""

    sequence: int
    key: str
    revision: int
    body: bytes
    partial: bool = False
    final: bool = False


class Page(Value):
    """What stands behind a cursor. `reset` says that the cursor means nothing here (it is of another epoch, it was
    trimmed away, or it lies beyond the head): then the entries begin at the beginning, and whoever reads throws away
    what it had. `keeper` is the worker that writes; `abandoned` says that it has not been heard of for its lease."""

    entries: tuple[SequencedEntry, ...]
    head: int
    reset: bool = False
    more: bool = False
    ended: bool = False
    identity: str = ""
    about: bytes = b""
    keeper: str = ""
    abandoned: bool = False


def epoch(sequence: int) -> int:
    return sequence // EPOCH


def place(sequence: int) -> int:
    """Which one it is within its epoch."""
    return sequence % EPOCH


def one_line(body: bytes) -> bytes:
    """JSON in which nothing ends a line, for readers that break lines at more than the newline."""
    for character, escaped in LINE_ENDS:
        if character in body:
            body = body.replace(character, escaped)
    return body
