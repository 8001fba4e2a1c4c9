"""Files that are really on disk, and the one file that is swapped."""

import os
from pathlib import Path


def sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    sync_file(path)


def swap(path: Path, content: bytes) -> None:
    """Whoever reads `path`, also after a crash, sees the old content or the new."""
    beside = path.with_name(path.name + ".new")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)
    sync_folder(path.parent)
