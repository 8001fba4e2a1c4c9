"""The checksum at the end of a backup: the SHA-256 of all bytes before it. SQLite reads nothing after the last page."""

import hashlib
import os
from typing import BinaryIO

LABEL = b"\nanabranch backup sha256:"
LENGTH = len(LABEL) + 2 * hashlib.sha256().digest_size + 1
# A database without a checksum is a multiple of this long, the smallest page of SQLite. One with a checksum is not:
# whichever of its bytes is damaged, it is known to have one.
SMALLEST_PAGE = 512
BLOCK = 1 << 20


def append(database: BinaryIO) -> None:
    size = database.seek(0, os.SEEK_END)
    line = _line(database, size)
    database.seek(size)
    database.write(line)
    database.flush()
    database.seek(0)


def exists(backup: BinaryIO) -> bool:
    return backup.seek(0, os.SEEK_END) % SMALLEST_PAGE != 0


def matches(backup: BinaryIO) -> bool:
    """Whether a file ends with the checksum of what is before it."""
    size = max(0, backup.seek(0, os.SEEK_END) - LENGTH)
    line = _line(backup, size)
    return backup.read() == line


def _line(file: BinaryIO, size: int) -> bytes:
    """The checksum of the first bytes of a file, which is read up to there."""
    digest = hashlib.sha256()
    file.seek(0)
    while size and (block := file.read(min(BLOCK, size))):
        digest.update(block)
        size -= len(block)
    return LABEL + digest.hexdigest().encode() + b"\n"
