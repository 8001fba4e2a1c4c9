"""Generations: which segments make up the index, and up to which change. A new one is swapped in whole."""

import shutil
from pathlib import Path

import msgspec

from anabranch.domain.model import Value
from anabranch.knowledge.durable_files import replace_file, sync_file

CURRENT = "CURRENT"


class IndexManifest(Value):
    """`seq` is the last change that the segments have seen, `last_chunk` the highest key that they hold: chunks beyond
    it are the delta."""

    number: int = 0
    seq: int = 0
    last_chunk: int = 0
    embedder: str = ""
    dimensions: int = 0
    segments: tuple[str, ...] = ()
    built_at: float = 0.0


class Generations:
    """The folder of the index. One process writes; readers notice by the stamp of `CURRENT`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def stamp(self) -> tuple[int, int]:
        try:
            found = (self.folder / CURRENT).stat()
        except FileNotFoundError:
            return 0, 0
        return found.st_ino, found.st_mtime_ns

    def current(self) -> IndexManifest:
        try:
            return msgspec.json.decode((self.folder / CURRENT).read_bytes(), type=IndexManifest)
        except (FileNotFoundError, msgspec.MsgspecError):
            return IndexManifest()  # derived, so it can be made again

    def path(self, segment: str) -> Path:
        return self.folder / segment

    def publish(self, manifest: IndexManifest) -> None:
        """Make it the current one; the segments are on disk already."""
        self.folder.mkdir(parents=True, exist_ok=True)
        sync_file(self.folder)
        replace_file(self.folder / CURRENT, msgspec.json.encode(manifest))

    def sweep(self, keep: IndexManifest) -> None:
        """Remove what no generation names. Readers that have it mapped keep it until they let go."""
        if not self.folder.is_dir():
            return
        for entry in self.folder.iterdir():
            if entry.is_dir() and entry.name not in keep.segments:
                shutil.rmtree(entry, ignore_errors=True)
