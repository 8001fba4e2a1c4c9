"""Checks of the records and of a data folder and its server: records, index, audit log, backups, and what confines the
parsers. They only read, also while a server runs."""

import asyncio
import operator
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from anabranch.domain.errors import AnabranchError
from anabranch.domain.model import Value
from anabranch.knowledge.index.manifest import Generations, IndexManifest, SegmentDamaged
from anabranch.knowledge.index.reader import is_foreign
from anabranch.knowledge.index.segment import Segment
from anabranch.knowledge.parse import restrictions
from anabranch.knowledge.parse.confinement import APPLIED
from anabranch.knowledge.records import audit, backup, documents, embeddings, erasures
from anabranch.knowledge.records.consistency import inconsistencies
from anabranch.knowledge.records.database import Database, Session
from anabranch.knowledge.records.encryption import Decryption, is_encrypted
from anabranch.knowledge.records.sqlite import NAME, read_only

MAX_PROBLEMS = 100
# Chunks of a segment that are compared with the records at once.
COMPARED = 5_000

T = TypeVar("T")

# Told how much is done, and of how much.
Progress = Callable[[int, int], None]


class CheckResult(Value):
    """`checked` says what was looked at; without `problems` it is as it should be."""

    name: str
    checked: str
    problems: tuple[str, ...] = ()


class CheckRequest(NamedTuple):
    """The data folder, the newest record of the audit log as it was noted earlier, backups besides those that the
    records name, and what decrypts them. Of records that are not in the folder: their database, and the node of which
    the folder has the index."""

    folder: Path
    noted: audit.AuditHead | None = None
    backups: Sequence[Path] = ()
    decryption: Decryption = Decryption()
    database: Database | None = None
    node: str = ""
    # What compares an index that is not in the folder.
    differences: Callable[[], Sequence[str]] | None = None

    def read(self, work: Callable[[Session], T]) -> T:
        """Read the records at one moment."""
        if self.database is not None:
            return self.database.reading(work)
        with read_only(self.folder / NAME) as db:
            return work(db)


class Check(NamedTuple):
    name: str
    run: Callable[[CheckRequest, Progress], CheckResult]


def check_records(request: CheckRequest, _: Progress) -> CheckResult:
    def check(db: Session) -> CheckResult:
        problems = tuple(inconsistencies(db))
        what = "the file and its rows" if db.kind == "sqlite" else "the rows"
        return CheckResult(name="records", checked=what if problems else _counted(db), problems=problems[:MAX_PROBLEMS])

    return request.read(check)


def _counted(db: Session) -> str:
    found, chunks = documents.counts(db)
    return f"{_number(found, 'document')}, {_number(chunks, 'chunk')}"


def check_index(request: CheckRequest, progress: Progress) -> CheckResult:
    """The checksums of all segments, and that they hold the chunks of the records with their vectors; of an index
    elsewhere, that it has the chunks of the records."""
    if request.differences is not None:
        problems = [f"The index has other chunks than the records: {one}." for one in request.differences()]
        return CheckResult(name="index", checked="the chunks of each document", problems=tuple(problems))
    generations = Generations(request.folder / "index", request.node)
    try:
        manifest, segments = _opened(generations)
    except SegmentDamaged:
        return CheckResult(name="index", checked="the manifest", problems=("The manifest of the index is damaged.",))
    problems = [f"Segment {name} is damaged." for name, segment in segments.items() if segment is None]

    # What a snapshot holds that begins now was there when the manifest was written.
    def compare(db: Session) -> list[str]:
        return [*_differences(db, manifest, segments, progress), *_lost(db, manifest, generations)]

    problems += request.read(compare)
    held = sum(len(segment) for segment in segments.values() if segment is not None)
    unchecked = sum(name not in manifest.checksums for name in segments)
    earlier = f", {unchecked} without a checksum: a server of this version rebuilds them" if unchecked else ""
    checked = f"{_number(len(segments), 'segment')}, {_number(held, 'chunk')}{earlier}"
    return CheckResult(name="index", checked=checked, problems=tuple(problems[:MAX_PROBLEMS]))


def _lost(db: Session, manifest: IndexManifest, generations: Generations) -> Iterator[str]:
    """Whether the index is that of the records."""
    if is_foreign(db, manifest):
        yield "The index is ahead of the records: it was made of others."
    if generations.intact() is None and (lost := documents.indexed(db, generations.node)):
        yield f"The manifest of the index is missing: no segment has {_number(lost, 'chunk')} of the records."


def _opened(generations: Generations) -> tuple[IndexManifest, dict[str, Segment | None]]:
    """The manifest and its segments, None for the damaged ones; those of a newer one if a segment was replaced."""
    while True:
        stamp = generations.stamp()
        if not stamp[0]:
            return IndexManifest(), {}
        manifest = generations.read() or IndexManifest()
        segments = {name: _whole(generations, manifest, name) for name in manifest.segments}
        if None not in segments.values() or generations.stamp() == stamp:
            return manifest, segments


def _whole(generations: Generations, manifest: IndexManifest, name: str) -> Segment | None:
    try:
        generations.check(manifest, name)
        return Segment.map(generations.path(name), manifest.dimensions)
    except SegmentDamaged:
        return None


def _differences(
    db: Session, manifest: IndexManifest, segments: dict[str, Segment | None], progress: Progress
) -> Iterator[str]:
    """Which segments lack chunks of the records, or have them with other vectors."""
    last = 0
    for name, segment in segments.items():
        if segment is None or not len(segment):
            last = -1  # the next one does not say where its range begins
            continue
        begin = int(segment.keys[0]) if last < 0 else last + 1
        is_last = name == manifest.segments[-1]
        last = manifest.last_chunk if is_last else int(segment.keys[-1])
        missing = other = 0
        for chunks, vectors in embeddings.vectors_between(db, begin, last, COMPARED):
            keys = np.asarray(chunks)
            rows = np.minimum(segment.keys.searchsorted(keys), len(segment) - 1)
            held = segment.keys[rows] == keys
            missing += int((~held).sum())
            indexed = [row.tobytes() for row in segment.vectors[rows]]
            same = np.fromiter(map(operator.eq, vectors, indexed), bool, len(keys))
            other += int((held & ~same).sum())
            progress(min(int(keys[-1]), manifest.last_chunk), manifest.last_chunk)
        if missing:
            yield f"Segment {name} lacks {_number(missing, 'chunk')} of the records."
        if other:
            yield f"Segment {name} has other vectors than the records for {_number(other, 'chunk')}."


def check_audit(request: CheckRequest, _: Progress) -> CheckResult:
    return request.read(lambda db: _audit_log(db, request.noted))


def _audit_log(db: Session, noted: audit.AuditHead | None) -> CheckResult:
    if not audit.is_kept(db):
        return CheckResult(name="audit log", checked="not kept by the version that wrote the records")
    findings = audit.verify(db, noted)
    problems = tuple(f"Record {one.seq}: {one.problem}" if one.seq else one.problem for one in findings)
    checked = "the chain of hashes" if problems else f"up to record {audit.head(db).seq}"
    return CheckResult(name="audit log", checked=checked, problems=problems)


def check_backups(request: CheckRequest, progress: Progress) -> CheckResult:
    """The backups that the records name and that are still there, and those that are named."""
    noted = request.read(erasures.noted_backups)
    given = [file.resolve() for file in request.backups]
    files = list(dict.fromkeys([*given, *noted]))
    if request.database is not None and not files:
        return CheckResult(name="backups", checked="not applicable: the tools of PostgreSQL make and verify them")
    problems: list[str] = []
    unread = unchecked = 0
    for done, file in enumerate(files):
        progress(done, len(files))
        try:
            if file not in given and is_encrypted(file) and not request.decryption:
                unread += 1
                continue
            with backup.opened(file, request.decryption, request.folder) as found:
                unchecked += not found.has_checksum
                problems += (f"{file}: {one}" for one in inconsistencies(found.db))
                problems += (f"{file}: {one}" for one in _audit_log(found.db, None).problems)
        except AnabranchError as error:
            problems.append(error.message)
        except OSError as error:
            problems.append(f"{file} cannot be read ({error.strerror}).")
    skipped = f", {unread} of them encrypted and not read: name their key with --identity" if unread else ""
    earlier = f", {unchecked} of them without a checksum, so damaged texts are not found" if unchecked else ""
    checked = f"{_number(len(files), 'backup')}{skipped}{earlier}"
    return CheckResult(name="backups", checked=checked, problems=tuple(problems))


def check_parsers(_: CheckRequest, __: Progress) -> CheckResult:
    """What a parser gives up on this machine; what cannot be applied is no damage."""
    found = asyncio.run(restrictions())
    missing = [f"{name}: {state}" for name, state in found.items() if state != APPLIED]
    applied = _number(len(found) - len(missing), "restriction")
    return CheckResult(name="parsers", checked="; ".join((f"{applied} applied", *missing)))


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


# To check one more thing, add it here.
CHECKS = (
    Check("records", check_records),
    Check("index", check_index),
    Check("audit log", check_audit),
    Check("backups", check_backups),
    Check("parsers", check_parsers),
)


def run(check: Check, request: CheckRequest, progress: Progress) -> CheckResult:
    """The result of a check; what it cannot read is a problem."""
    try:
        return check.run(request, progress)
    except AnabranchError as error:
        reason = error.message
    except OSError as error:
        reason = f"{error.filename} cannot be read ({error.strerror})."
    return CheckResult(name=check.name, checked="", problems=(reason,))
