"""The folder of the index: the manifest of its segments, and which of them are damaged."""

import errno
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from anabranch.domain.model import Value
from anabranch.knowledge.durable_files import regular, replace_file, sync_file

CURRENT = "CURRENT"
FOUND_DAMAGED = ".damaged"
READ_BYTES = 1 << 20
# Reading fails like this if a file is gone, is no regular file, or the disk is bad; after other errors, such as too
# many open files, it may work again.
LOST = (errno.ENOENT, errno.ENOTDIR, errno.EIO, errno.EBADMSG, errno.EINVAL)


class SegmentDamaged(Exception):
    """The files of a segment are not what was written, or are gone."""


class IndexManifest(Value):
    """`seq` is the last change that the segments include, made at `seq_at`; `last_chunk` their highest chunk key: later
    chunks are the delta. Segments of earlier versions have no checksum. Nothing is read from `damaged` segments."""

    number: int = 0
    seq: int = 0
    seq_at: float | None = None
    last_chunk: int = 0
    embedder: str = ""
    dimensions: int = 0
    segments: tuple[str, ...] = ()
    checksums: Mapping[str, str] = {}
    damaged: tuple[str, ...] = ()
    built_at: float = 0.0


class Generations:
    """The folder of the index. One process writes; readers detect changes by the stamp of `CURRENT`."""

    def __init__(self, folder: Path, node: str = "") -> None:
        self.folder = folder
        # Each node has an index of its own.
        self.node = node

    def stamp(self) -> tuple[int, int]:
        try:
            found = (self.folder / CURRENT).stat()
        except FileNotFoundError:
            return 0, 0
        return found.st_ino, found.st_mtime_ns

    def current(self) -> IndexManifest:
        """The manifest; an empty one if there is none, or a damaged one: then all chunks are read from the records
        until the index is rebuilt."""
        return self.intact() or IndexManifest()

    def intact(self) -> IndexManifest | None:
        """The manifest; None if there is none, or a damaged one."""
        try:
            return self.read()
        except SegmentDamaged:
            return None

    def read(self) -> IndexManifest | None:
        """The manifest; None if there is none, SegmentDamaged if it is damaged."""
        try:
            with open(self.folder / CURRENT, "rb", opener=regular) as file:
                return decoded(file.read())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise lost(error, self.folder / CURRENT) from None

    def path(self, segment: str) -> Path:
        return self.folder / segment

    def publish(self, manifest: IndexManifest) -> None:
        """Make a manifest current; its segments must be on disk."""
        self.folder.mkdir(parents=True, exist_ok=True)
        sync_file(self.folder)
        replace_file(self.folder / CURRENT, encoded(manifest))

    def sweep(self, keep: IndexManifest) -> None:
        """Delete segments that are not in the manifest. Readers that have them mapped can still read them."""
        if not self.folder.is_dir():
            return
        for entry in self.folder.iterdir():
            if entry.is_dir() and entry.name not in keep.segments:
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.suffix == FOUND_DAMAGED and entry.stem not in keep.segments:
                entry.unlink(missing_ok=True)

    def report(self, segment: str) -> None:
        """Tell the process that writes the index that a segment is damaged."""
        with suppress(OSError):  # that process reads all segments itself from time to time
            (self.folder / f"{segment}{FOUND_DAMAGED}").touch()

    def reported(self) -> set[str]:
        """The segments that readers have found damaged."""
        return {entry.stem for entry in self.folder.glob(f"*{FOUND_DAMAGED}")}

    def check(self, manifest: IndexManifest, segment: str, paced: Callable[[int], None] = lambda _: None) -> None:
        """Raise SegmentDamaged if a segment's files are not those that were written. `paced` is called with the number
        of bytes after each part that was read."""
        wanted = manifest.checksums.get(segment)
        if segment in manifest.damaged or (
            wanted is not None and wanted != checksum_of_files(self.path(segment), paced)
        ):
            raise SegmentDamaged(segment)


def encoded(manifest: IndexManifest) -> bytes:
    """The checksum of the manifest, and below it the manifest."""
    content = msgspec.json.encode(manifest)
    return f"{zlib.crc32(content):08x}\n".encode() + content


def decoded(content: bytes) -> IndexManifest:
    """The manifest; SegmentDamaged if it is not what was written. Those of earlier versions have no checksum."""
    checksum, _, manifest = content.partition(b"\n")
    if not manifest:
        manifest = content
    elif checksum != f"{zlib.crc32(manifest):08x}".encode():
        raise SegmentDamaged(CURRENT)
    try:
        return msgspec.json.decode(manifest, type=IndexManifest)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise SegmentDamaged(CURRENT) from None


def checksum(files: Iterable[tuple[str, int, Iterable[bytes | memoryview]]]) -> str:
    """The CRC-32 of the names, sizes and contents of some files: every damage of up to 32 bits in a row changes it."""
    total = 0
    for name, size, parts in files:
        total = zlib.crc32(f"{name} {size}\n".encode(), total)
        for part in parts:
            total = zlib.crc32(part, total)
    return f"{total:08x}"


def checksum_of_files(folder: Path, paced: Callable[[int], None] = lambda _: None) -> str:
    """The checksum of a segment's files as they are now; SegmentDamaged if they cannot be read."""
    try:
        files = sorted(folder.iterdir())
        return checksum((file.name, file.stat().st_size, _read(file, paced)) for file in files)
    except OSError as error:
        raise lost(error, folder) from None


def lost(error: OSError, folder: Path) -> Exception:
    """SegmentDamaged if the error means that a file is gone or cannot be read any more, else the error."""
    return SegmentDamaged(folder.name) if error.errno in LOST else error


def _read(file: Path, paced: Callable[[int], None]) -> Iterable[memoryview]:
    # Not mapped: where the disk is bad, reading a map ends the process.
    buffer = memoryview(bytearray(READ_BYTES))
    with open(file, "rb", buffering=0, opener=regular) as opened:
        while count := opened.readinto(buffer):
            yield buffer[:count]
            paced(count)
