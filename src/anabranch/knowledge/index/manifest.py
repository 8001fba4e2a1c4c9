"""Generations of the index: the manifest lists the segments of the current one and is replaced atomically."""

import shutil
from pathlib import Path

import msgspec

from anabranch.domain.model import Value
from anabranch.knowledge.durable_files import replace_file, sync_file

CURRENT = "CURRENT"


class IndexManifest(Value):
    """`seq` is the last change that the segments include, `last_chunk` their highest chunk key: later chunks are the
    delta."""

    number: int = 0
    seq: int = 0
    last_chunk: int = 0
    embedder: str = ""
    dimensions: int = 0
    segments: tuple[str, ...] = ()
    built_at: float = 0.0


class Generations:
    """The folder of the index. One process writes; readers detect changes by the stamp of `CURRENT`."""

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
            return IndexManifest()  # the index can be rebuilt

    def path(self, segment: str) -> Path:
        return self.folder / segment

    def publish(self, manifest: IndexManifest) -> None:
        """Make a manifest current; its segments must be on disk."""
        self.folder.mkdir(parents=True, exist_ok=True)
        sync_file(self.folder)
        replace_file(self.folder / CURRENT, msgspec.json.encode(manifest))

    def sweep(self, keep: IndexManifest) -> None:
        """Delete segments that are not in the manifest. Readers that have them mapped can still read them."""
        if not self.folder.is_dir():
            return
        for entry in self.folder.iterdir():
            if entry.is_dir() and entry.name not in keep.segments:
                shutil.rmtree(entry, ignore_errors=True)
