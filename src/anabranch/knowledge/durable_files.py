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


def replace_file(path: Path, content: bytes) -> None:
    """Readers of `path` see the old content or the new, also after a crash."""
    beside = path.with_name(path.name + ".new")
    beside.write_bytes(content)
    sync_file(beside)
    beside.rename(path)
    sync_file(path.parent)
