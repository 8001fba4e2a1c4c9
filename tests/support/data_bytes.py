"""The bytes of a data folder and of a Redis, to search for what must not be there any more."""

import io
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from anabranch.domain.contracts import SystemClock
from anabranch.redis.client import Redis, Reply
from anabranch.telemetry.log import SilentTelemetry

READS = {b"string": ("GET",), b"hash": ("HGETALL",), b"stream": ("XRANGE", "-", "+"), b"zset": ("ZRANGE", 0, -1)}


def files_with(marker: str, *folders: Path) -> list[str]:
    """The files that hold a text, in UTF-8 or UTF-16, or compressed; also files whose names do."""
    found = (path for folder in folders for path in sorted(folder.rglob("*")))
    return [path.name for path in found if marker in path.name or (path.is_file() and holds(path.read_bytes(), marker))]


def holds(data: bytes, marker: str) -> bool:
    wanted = [marker.encode(), marker.encode("utf-16-le"), marker.encode("utf-16-be")]
    return any(word in plain for plain in _plain(data) for word in wanted)


def _plain(data: bytes) -> Iterator[bytes]:
    yield data
    with suppress(zlib.error):
        yield zlib.decompress(data, wbits=47)  # zlib or gzip
    with suppress(zipfile.BadZipFile), zipfile.ZipFile(io.BytesIO(data)) as archive:
        yield from (archive.read(name) for name in archive.namelist())


async def keys_with(marker: str, url: str) -> list[str]:
    """The keys of a Redis whose names or values hold a text."""
    return [key for key, value in (await values(url)).items() if holds(key.encode() + value, marker)]


async def values(url: str) -> dict[str, bytes]:
    """All keys and their values."""
    redis = Redis(url, timeout_s=10.0, clock=SystemClock(), telemetry=SilentTelemetry())
    try:
        keys = await redis.execute("KEYS", "*")
        assert isinstance(keys, list)
        found = {}
        for key in keys:
            assert isinstance(key, bytes)
            kind = await redis.execute("TYPE", key)
            assert isinstance(kind, bytes)
            verb, *rest = READS[kind]
            found[key.decode()] = b" ".join(_flat(await redis.execute(str(verb), key, *rest)))
        return found
    finally:
        await redis.close()


def _flat(reply: Reply) -> Iterator[bytes]:
    if isinstance(reply, list):
        for one in reply:
            yield from _flat(one)
    else:
        yield reply if isinstance(reply, bytes) else str(reply).encode()
