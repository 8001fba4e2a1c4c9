"""Free space of the disk that holds the data folder, and the reserve with which deletions work on a full disk."""

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path

# With less free space a server is not ready, and nothing is ingested.
LEAST_FREE = 32 * 1024 * 1024
# A deletion needs space in the write-ahead log: about a hundredth of what it deletes.
RESERVE_BYTES = 8 * 1024 * 1024
RESERVE = "reserve"
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def is_nearly_full(folder: Path, least_free: int = LEAST_FREE) -> bool:
    try:
        return shutil.disk_usage(folder).free < least_free
    except FileNotFoundError:
        return False


def keep_reserve(folder: Path) -> None:
    """Allocate the reserve, unless it is there already or the disk is nearly full."""
    file = folder / RESERVE
    if file.exists() or is_nearly_full(folder, LEAST_FREE + RESERVE_BYTES):
        return
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, RESERVE_BYTES)
        finally:
            os.close(descriptor)
    except OSError:
        release_reserve(folder)


def release_reserve(folder: Path) -> bool:
    """Delete the reserve; returns whether there was one."""
    with suppress(OSError):
        (folder / RESERVE).unlink()
        return True
    return False
