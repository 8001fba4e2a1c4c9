"""Values of the event log: entries, pages of a stream, and cursors.

A cursor is the sequence of the last entry that a reader has received; 0 is the beginning. A sequence is
`epoch * 2**32 + n`, and n counts 1, 2, 3… in each epoch. Example: a reader at 7 reads 8 next. If the owner loses Redis
after 7, it continues in epoch 1, where the first sequence is 4294967297. The cursor 7 is not valid there, so the reader
gets a page with `reset` and starts from the beginning of the stream.
"""

from anabranch.domain.model import Value
from anabranch.domain.shares import Limit

EPOCH = 2**32
# The largest integer that JSON numbers hold exactly everywhere. No cursor is larger.
LAST = 2**53 - 1
# Characters that are legal in JSON but end a line for many SSE parsers.
LINE_ENDS = ((b"\xe2\x80\xa8", rb"\u2028"), (b"\xe2\x80\xa9", rb"\u2029"), (b"\xc2\x85", rb"\u0085"))


class LogLimits(Value):
    """Bounds of a log: how long an ended stream is kept (`ttl_s`), how long an owner may be silent (`lease_s`), the
    size of one stream (`max_events`, `max_bytes`), of all streams in this process (`memory_bytes`), and of one
    caller's (`of_caller`)."""

    ttl_s: float = 1_800.0
    lease_s: float = 10.0
    max_events: int = 20_000
    max_bytes: int = 16 * 2**20
    memory_bytes: int = 256 * 2**20
    of_caller: Limit = Limit(name="stream_bytes", description="kept streams", unit="bytes")


class Entry(Value, gc=False):
    """An entry to append. An entry is a duplicate unless its `revision` is above the last one under its key. A
    `partial` entry may be skipped once a later revision exists. A `final` entry ends the stream."""

    key: str
    revision: int
    body: bytes
    partial: bool = False
    final: bool = False


class SequencedEntry(Entry, gc=False, kw_only=True):
    """An entry with its place in the stream."""

    sequence: int


class Page(Value):
    """The entries after a cursor. With `reset` the cursor is not valid (it is of another epoch, was trimmed, or lies
    beyond the head): the entries start at the beginning, and the reader discards what it had. `keeper` is the worker
    that writes the stream; `abandoned` says that its lease has expired. Entries up to `floor` were trimmed, so a lower
    cursor is not valid."""

    entries: tuple[SequencedEntry, ...]
    head: int
    reset: bool = False
    more: bool = False
    ended: bool = False
    identity: str = ""
    about: bytes = b""
    keeper: str = ""
    abandoned: bool = False
    floor: int = 0


def epoch(sequence: int) -> int:
    return sequence // EPOCH


def place(sequence: int) -> int:
    """The number of an entry within its epoch."""
    return sequence % EPOCH


def one_line(body: bytes) -> bytes:
    """JSON without any character that an SSE parser may take for a line end."""
    if body.isascii():  # by far the fastest check of a long body
        return body
    for character, escaped in LINE_ENDS:
        if character in body:
            body = body.replace(character, escaped)
    return body
