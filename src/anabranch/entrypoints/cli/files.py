"""Which files an ingest means: folders walked through, what cannot be a document left out, each under its own name."""

import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from anabranch.domain.errors import ConfigurationError, UpstreamError
from anabranch.network.urls import parse

SCHEMES = ("http://", "https://")
FOLDERS = frozenset({"__pycache__", "node_modules"})
# In a folder these are company, not documents. What a person could have meant (a presentation, a workbook) is tried,
# so that they are told what to do about it; so is everything that is named by itself.
_COMPANY = (
    ".png .jpg .jpeg .gif .bmp .ico .svg .tif .tiff .webp .heic .mp3 .mp4 .m4a .mov .avi .mkv .wav .ogg .flac .webm "
    ".zip .gz .bz2 .xz .7z .rar .tar .tgz .jar .whl .exe .dll .so .dylib .o .a .class .pyc .bin .dat .db .sqlite "
    ".woff .woff2 .ttf .otf .eot .lock .map .swp .tmp .bak"
)
COMPANY = frozenset(_COMPANY.split())


class FoundFile(NamedTuple):
    """A document by the name that tells it from the others: its path below the folder that was given, its file name,
    or its address (then there is no path)."""

    name: str
    path: Path | None = None


class FoundFiles(NamedTuple):
    found: tuple[FoundFile, ...]
    skipped: Counter[str]


def find_files(given: Sequence[str]) -> FoundFiles:
    """Everything that the arguments mean, in order. Two files of one name would replace each other, so that is an
    error; the same file twice is not."""
    skipped: Counter[str] = Counter()
    by_name: dict[str, FoundFile] = {}
    for one in given:
        for found in [_address(one)] if one.startswith(SCHEMES) else _files(Path(one), skipped):
            other = by_name.setdefault(found.name, found)
            if found.path and other.path and not found.path.samefile(other.path):
                raise ConfigurationError(
                    f"{other.path} and {found.path} would both be named {found.name!r} and replace each other. "
                    f"Ingest the folder that holds both, or use two collections."
                )
    return FoundFiles(tuple(by_name.values()), skipped)


def _address(url: str) -> FoundFile:
    try:
        parse(url)
    except UpstreamError as error:
        raise ConfigurationError(f"{url!r} cannot be fetched. {error.message}") from None
    return FoundFile(url)


def _files(given: Path, skipped: Counter[str]) -> Iterator[FoundFile]:
    try:
        mode = given.stat().st_mode
    except OSError as error:
        raise ConfigurationError(f"{given} cannot be read ({error.strerror}).") from None
    if stat.S_ISDIR(mode):
        for path in _walk(given, skipped):
            yield FoundFile(_name(path.relative_to(given)), path)
    elif stat.S_ISREG(mode):
        yield FoundFile(_name(Path(given.name)), given)
    else:
        raise ConfigurationError(f"{given} is neither a file nor a folder.")


def _walk(top: Path, skipped: Counter[str]) -> Iterator[Path]:
    """Links are followed, but no folder is entered twice."""
    entered: set[tuple[int, int]] = set()

    def unreadable(_: OSError) -> None:
        skipped["folder that cannot be read"] += 1

    for folder, folders, names in os.walk(top, followlinks=True, onerror=unreadable):
        here = Path(folder).stat()
        if (here.st_dev, here.st_ino) in entered:
            folders.clear()
            continue
        entered.add((here.st_dev, here.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in FOLDERS)
        for name in sorted(names):
            path = Path(folder, name)
            reason = _reason_to_skip(path)
            if reason is None:
                yield path
            else:
                skipped[reason] += 1


def _reason_to_skip(path: Path) -> str | None:
    if path.name.startswith("."):
        return "hidden"
    if path.suffix.lower() in COMPANY:
        return path.suffix.lower()
    try:
        found = path.stat()
    except OSError:
        return "broken link" if path.is_symlink() else None
    if not stat.S_ISREG(found.st_mode):  # reading a pipe would wait for ever
        return "not a file"
    return None if found.st_size else "empty"


def _name(path: Path) -> str:
    """Names may hold bytes that are no characters."""
    return os.fsencode(path.as_posix()).decode("utf-8", "replace")
