"""Files that survive a crash: fsync, and atomic replacement; and opening regular files only."""

import errno
import os
import stat
from pathlib import Path


def sync_file(path: Path) -> None:
    """Flush a file, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Readers of `path` see the old content or the new, also after a crash. The file has the mode, less the umask, from
    its creation."""
    beside = path.with_name(path.name + ".new")
    beside.unlink(missing_ok=True)  # of a writer that crashed; it may have another mode
    with open(beside, "wb", opener=lambda name, flags: os.open(name, flags | os.O_EXCL, mode)) as file:
        file.write(content)
    sync_file(beside)
    beside.rename(path)
    sync_file(path.parent)


def regular(path: str, flags: int) -> int:
    """An opener of files; a pipe or a device is an error, and is not waited for."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no regular file", path)
