"""A small disk that can be filled. It is a file system in memory, which only the administrator may mount."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.knowledge_fixtures import Workshop


class SmallDisk:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    @property
    def free(self) -> int:
        return shutil.disk_usage(self.folder).free

    def fill(self) -> None:
        with self._filler.open("ab", buffering=0) as file:
            while free := self.free:
                file.write(bytes(min(free, 1 << 20)))

    def empty(self) -> None:
        self._filler.unlink()


async def add_until_full(shop: Workshop) -> None:
    """Create collections: what was allocated before is used first."""
    for number in range(200):
        await shop.collection(f"more-{number}")


@contextmanager
def small_disk(folder: Path, mebibytes: int) -> Iterator[SmallDisk]:
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("only the administrator may mount a file system")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
