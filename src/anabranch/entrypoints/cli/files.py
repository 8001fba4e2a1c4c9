"""The files to ingest: folders are walked, files that cannot be documents are skipped, each file gets a unique name."""

import os
import stat
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from anabranch.domain.errors import ConfigurationError, UpstreamError
from anabranch.network.urls import parse

SCHEMES = ("http://", "https://")
SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules"})
# Suffixes that are skipped in a folder. Presentations and workbooks are tried, so that the user gets an error that says
# what to do about them; so is every file that is named on the command line.
_SKIPPED_SUFFIXES = (
    ".png .jpg .jpeg .gif .bmp .ico .svg .tif .tiff .webp .heic .mp3 .mp4 .m4a .mov .avi .mkv .wav .ogg .flac .webm "
    ".zip .gz .bz2 .xz .7z .rar .tar .tgz .jar .whl .exe .dll .so .dylib .o .a .class .pyc .bin .dat .db .sqlite "
    ".woff .woff2 .ttf .otf .eot .lock .map .swp .tmp .bak"
)
SKIPPED_SUFFIXES = frozenset(_SKIPPED_SUFFIXES.split())


class FoundFile(NamedTuple):
    """A document and its unique name: its path in the given folder, its file name, or its URL (then there is no path).
    `inside` is the folder that the file must be in when it is opened."""

    name: str
    path: Path | None = None
    inside: Path | None = None


class FoundFiles(NamedTuple):
    """`skipped` counts skipped files by reason; `leaving` names the symbolic links that leave the folder."""

    found: tuple[FoundFile, ...]
    skipped: Counter[str]
    leaving: tuple[str, ...]


def find_files(given: Sequence[str], *, follow_links: bool = False) -> FoundFiles:
    """All files and URLs that the arguments name, in order. Two different files of one name would replace each other:
    that is an error."""
    search = _Search(follow_links)
    by_name: dict[str, FoundFile] = {}
    for one in given:
        for found in [_address(one)] if one.startswith(SCHEMES) else search.files(Path(one)):
            other = by_name.setdefault(found.name, found)
            if found.path and other.path and not found.path.samefile(other.path):
                raise ConfigurationError(
                    f"{other.path} and {found.path} would both be named {found.name!r} and replace each other. "
                    f"Ingest the folder that holds both, or use two collections."
                )
    leaving = tuple(name for name in dict.fromkeys(search.leaving) if name not in by_name)
    return FoundFiles(tuple(by_name.values()), search.skipped, leaving)


def open_file(found: FoundFile) -> BinaryIO:
    """Open a file for reading. Inside a folder no symbolic link is followed: the path was resolved when the folder was
    walked, so a link on it was created since."""
    assert found.path is not None
    if found.inside is None:
        return found.path.open("rb")
    *folders, name = found.path.relative_to(found.inside).parts
    at = os.open(found.inside, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for folder in folders:
            below = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = below
        # Without O_NONBLOCK, a pipe that took the file's place would block until something is written to it.
        return os.fdopen(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at), "rb")
    finally:
        os.close(at)


def _address(url: str) -> FoundFile:
    try:
        parse(url)
    except UpstreamError as error:
        raise ConfigurationError(f"{url!r} cannot be fetched. {error.message}") from None
    return FoundFile(url)


class _Search:
    def __init__(self, follow_links: bool) -> None:
        self._follow_links = follow_links
        self.skipped: Counter[str] = Counter()
        self.leaving: list[str] = []

    def files(self, given: Path) -> Iterator[FoundFile]:
        """A path given on the command line is followed, even if it is a symbolic link."""
        try:
            mode = given.stat().st_mode
        except OSError as error:
            raise ConfigurationError(f"{given} cannot be read ({error.strerror}).") from None
        if stat.S_ISDIR(mode):
            top = given.resolve()
            for name, path in self._walk(top):
                yield FoundFile(_name(name), path, None if self._follow_links else top)
        elif stat.S_ISREG(mode):
            yield FoundFile(_name(Path(given.name)), given)
        else:
            raise ConfigurationError(f"{given} is neither a file nor a folder.")

    def _walk(self, top: Path) -> Iterator[tuple[Path, Path]]:
        """The name and resolved path of each file in a folder, once. Links come last, so that a file is named for its
        own path if that is in the folder."""
        seen: set[Path] = set()
        waiting = deque([(Path(), top)])
        while waiting:
            name, target = waiting.popleft()
            if target in seen:
                self.skipped["repeated link"] += 1
                continue
            for path in self._entries(target, seen) if target.is_dir() else (target,):
                below = name / path.relative_to(target)
                if path.is_symlink():
                    waiting.extend(self._followed(below, path, top))
                elif path not in seen and self._accepts(_skip_by_content(path)):
                    seen.add(path)
                    yield below, path

    def _entries(self, top: Path, seen: set[Path]) -> Iterator[Path]:
        """The files below a folder and the links to folders, without folders that were seen already."""

        def unreadable(_: OSError) -> None:
            self.skipped["folder that cannot be read"] += 1

        for folder, folders, names in os.walk(top, onerror=unreadable):
            here = Path(folder)
            if here in seen:
                folders.clear()
                continue
            seen.add(here)
            yield from (here / name for name in sorted(names) if self._accepts(_skip_by_name(name)))
            folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in SKIPPED_FOLDERS)
            yield from (here / name for name in folders if (here / name).is_symlink())

    def _followed(self, name: Path, link: Path, top: Path) -> Sequence[tuple[Path, Path]]:
        """The name and target of a link that may be followed. The end of a chain of links decides."""
        try:
            target = Path(os.path.realpath(link, strict=True))
        except OSError:
            self.skipped["broken link"] += 1
            return ()
        if self._follow_links or target.is_relative_to(top):
            return ((name, target),)
        self.leaving.append(_name(name))
        return ()

    def _accepts(self, reason: str | None) -> bool:
        if reason is not None:
            self.skipped[reason] += 1
        return reason is None


def _skip_by_name(name: str) -> str | None:
    """The reason to skip a file because of its name, or None."""
    if name.startswith("."):
        return "hidden"
    suffix = Path(name).suffix.lower()
    return suffix if suffix in SKIPPED_SUFFIXES else None


def _skip_by_content(path: Path) -> str | None:
    """The reason to skip a file because of its content, or None. Unreadable files are tried, to show their error."""
    try:
        found = path.stat()
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode):  # reading a pipe would block
        return "not a file"
    return None if found.st_size else "empty"


def _name(path: Path) -> str:
    """File names may contain bytes that are not valid UTF-8."""
    return os.fsencode(path.as_posix()).decode("utf-8", "replace")
