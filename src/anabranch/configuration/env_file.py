"""Reads `.env` of a folder: variables of ours for `anabranch serve`, which count less than those of the environment."""

import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from anabranch.configuration.settings import PREFIX, SPECIAL_NAMES
from anabranch.domain.errors import ConfigurationError

NAME = ".env"
MAX_BYTES = 64 * 1024
HEAD = re.compile(r"[^\S\n]*(?:export[^\S\n]+)?(?P<name>[^\s=#]*)[^\S\n]*(?P<equals>=?)[^\S\n]*")
QUOTED = re.compile(r"""'(?P<plain>[^']*)'|"(?P<escaped>(?:[^"\\]|\\.)*)\"""", re.DOTALL)
OURS_BELOW = re.compile(rf"\n[^\S\n]*(?:export[^\S\n]+)?{PREFIX}")
UNPREFIXED = re.compile(rf"^[^\S\n]*(?:export[^\S\n]+)?({'|'.join(SPECIAL_NAMES.values())})[^\S\n]*=", re.MULTILINE)
# The spaces before a comment are stripped later: a pattern that matches them is quadratic in their number.
COMMENT = re.compile(r"(?:^|(?<=[^\S\n]))#.*")
ESCAPE = re.compile(r"\\(.)")
ESCAPED = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "$": "$"}


class EnvFile(NamedTuple):
    """The variables of the file and their lines; or the reason for which the file is ignored. `unprefixed` are settings
    in it that are not read, because their names lack the prefix."""

    path: Path
    values: Mapping[str, str] = {}
    lines: Mapping[str, int] = {}
    ignored: str = ""
    unprefixed: Sequence[str] = ()

    def located(self, error: ConfigurationError, used: Iterable[str]) -> ConfigurationError:
        """The error, with the line of each variable in it that was taken from this file."""
        named = [name for name in used if re.search(rf"\b{name}\b", error.message)]
        lines = ", ".join(f"line {self.lines[name]}: {name}" for name in named)
        return ConfigurationError(f"{error.message} ({self.path}, {lines})") if named else error


def read(folder: Path) -> EnvFile:
    """The `.env` of the folder; empty if there is none. One that another user could have written is ignored; a line of
    ours that cannot be read is a ConfigurationError, without its value, which may be a secret."""
    path = folder / NAME
    try:
        target = path.resolve(strict=True)
        if not target.is_relative_to(folder.resolve()):
            return EnvFile(path, ignored="it is a link to a file outside this folder")
        descriptor = os.open(target, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0))
    except FileNotFoundError:
        return EnvFile(path, ignored="it is a link to a file that does not exist" if path.is_symlink() else "")
    except (OSError, RuntimeError) as error:  # a link to itself is a RuntimeError before Python 3.13
        return EnvFile(path, ignored=f"it cannot be read ({getattr(error, 'strerror', None) or 'a link to itself'})")
    try:
        distrusted = _distrust(os.fstat(descriptor))
        content = b"" if distrusted else os.read(descriptor, MAX_BYTES + 1)
    finally:
        os.close(descriptor)
    if distrusted:
        return EnvFile(path, ignored=distrusted)
    values: dict[str, str] = {}
    lines: dict[str, int] = {}
    text = _decoded(content, path)
    for line, name, value in _variables(text, path):
        if name in lines:
            raise ConfigurationError(f"{path}: {name} is there twice (lines {lines[name]} and {line}).")
        values[name], lines[name] = value, line
    return EnvFile(path, values, lines, unprefixed=sorted(set(UNPREFIXED.findall(text))))


def _distrust(status: os.stat_result) -> str:
    """Why the file is not to be trusted; empty if it is. Root can change everything anyway, and on many systems each
    user has a group of its own, which may then write."""
    if not stat.S_ISREG(status.st_mode):
        return "it is not a regular file"
    if sys.platform == "win32":
        return ""
    if status.st_uid not in (os.geteuid(), 0):
        return "it belongs to another user; if it is yours: chown"
    if status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and status.st_gid != os.getegid()):
        return "other users may write to it; if it is yours: chmod go-w"
    return ""


def _decoded(content: bytes, path: Path) -> str:
    if len(content) > MAX_BYTES:
        raise ConfigurationError(f"{path}: the file is larger than {MAX_BYTES:,} bytes.")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigurationError(f"{path}, line {line}: this is not UTF-8; save the file as UTF-8.") from None
    if "\0" in text:
        raise ConfigurationError(f"{path}: this is not UTF-8; save the file as UTF-8.")
    return text.replace("\r\n", "\n")


def _variables(text: str, path: Path) -> Iterator[tuple[int, str, str]]:
    """The line, name and value of each variable of ours. Quoted values of others may go over several lines."""
    at, line = 0, 1
    while at < len(text):
        head = HEAD.match(text, at)
        assert head is not None, "every part may be empty"
        quoted = QUOTED.match(text, head.end()) if head["equals"] else None
        end = text.find("\n", quoted.end() if quoted else head.end())
        end = len(text) if end < 0 else end
        where = f"{path}, line {line}"
        if quoted and OURS_BELOW.search(text, quoted.start(), quoted.end()):
            raise ConfigurationError(f"{where}: the quote that begins here is not closed on this line.")
        if head["name"].startswith(PREFIX):
            yield line, head["name"], _value(head, quoted, text[head.end() : end], where)
        line += text.count("\n", at, end + 1)
        at = end + 1


def _value(head: re.Match[str], quoted: re.Match[str] | None, given: str, where: str) -> str:
    if not re.fullmatch(r"\w+", head["name"], re.ASCII):
        raise ConfigurationError(f"{where}: the name of a variable has only letters, digits and _.")
    if not head["equals"]:
        raise ConfigurationError(f"{where}: {head['name']} has no value; write {head['name']}=value.")
    where = f"{where}: {head['name']}"
    if "\n" in quoted[0] if quoted else given.startswith(("'", '"')):
        raise ConfigurationError(f"{where}: the quote is not closed on this line.")
    if quoted is None:
        value = COMMENT.sub("", given).strip()
    elif COMMENT.sub("", given[quoted.end() - quoted.start() :]).strip():
        raise ConfigurationError(f"{where}: there is text after the closing quote.")
    else:
        value = quoted["plain"] if quoted["plain"] is not None else quoted["escaped"]
    if (quoted is None or quoted["plain"] is None) and re.search(r"(?<!\\)\$\{", value):
        raise ConfigurationError(f"{where}: ${{…}} is not expanded here; write the value, or single quotes around it.")
    if quoted is not None and quoted["escaped"] is not None:
        value = ESCAPE.sub(lambda found: ESCAPED.get(found[1], found[0]), value)
    return value
