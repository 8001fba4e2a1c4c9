"""Free space of the disk that holds the data folder, and the reserve with which deletions work on a full disk."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# With less free space a server is not ready, and nothing is ingested.
LEAST_FREE = 32 * 1024 * 1024
# A deletion needs space in the write-ahead log: 5% of what it deletes (docs/adr/0032-whole-or-honest.md).
RESERVE_BYTES = 8 * 1024 * 1024
RESERVE_SHARE = 12
MAX_RESERVE_BYTES = 1024 * 1024 * 1024
RESERVE = "reserve"
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def is_nearly_full(folder: Path, least_free: int = LEAST_FREE) -> bool:
    try:
        return shutil.disk_usage(folder).free < least_free
    except FileNotFoundError:
        return False


def keep_reserve(folder: Path, records_bytes: int) -> None:
    """Allocate the reserve for records of this size, unless it is there already or the disk is nearly full. On a small
    disk it takes half of what may be filled at most."""
    wanted = min(max(RESERVE_BYTES, records_bytes // RESERVE_SHARE), MAX_RESERVE_BYTES)
    held = reserve_bytes(folder)
    wanted = min(wanted, held + (free_bytes(folder) - LEAST_FREE) // 2)
    # It grows by a fifth at least: otherwise every upload would make it grow.
    if held * 6 >= wanted * 5:
        return
    _allocate(folder, wanted)


def _allocate(folder: Path, size: int) -> None:
    try:
        descriptor = os.open(folder / RESERVE, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
        finally:
            os.close(descriptor)
    except OSError:
        release_reserve(folder)


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def reserve_bytes(folder: Path) -> int:
    with suppress(FileNotFoundError):
        return (folder / RESERVE).stat().st_size
    return 0


@contextmanager
def reserve_released(folder: Path, at_least: int = 0) -> Iterator[None]:
    """Give the reserve up for a moment. Afterwards as much as is free of it, or of `at_least`, is allocated again."""
    held = reserve_bytes(folder)
    release_reserve(folder)
    try:
        yield
    finally:
        if size := min(max(held, at_least), free_bytes(folder)):
            _allocate(folder, size)


def release_reserve(folder: Path) -> bool:
    """Delete the reserve; returns whether there was one."""
    with suppress(OSError):
        (folder / RESERVE).unlink()
        return True
    return False
