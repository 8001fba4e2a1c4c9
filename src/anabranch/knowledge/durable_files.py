"""Files that survive a crash: fsync, and atomic replacement."""

import os
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
