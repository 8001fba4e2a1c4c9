"""Free space of the disk that holds the data folder, and the reserve with which deletions work on a full disk."""

import errno
import os
import shutil
from contextlib import suppress
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
    """Allocate the reserve for records of this size, unless it is there already or the disk is nearly full."""
    file = folder / RESERVE
    wanted = min(max(RESERVE_BYTES, records_bytes // RESERVE_SHARE), MAX_RESERVE_BYTES)
    held = file.stat().st_size if file.exists() else 0
    # It grows by a fifth at least: otherwise every upload would make it grow.
    if held * 6 >= wanted * 5 or is_nearly_full(folder, LEAST_FREE + wanted - held):
        return
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, wanted)
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
