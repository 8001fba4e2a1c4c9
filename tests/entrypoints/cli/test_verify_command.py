"""`anabranch verify`: every damage of segments and of the audit log is found, and nothing is changed."""

import asyncio
import io
import json
import os
import random
import re
import shutil
import sqlite3
import zipfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from reportlab.pdfgen.canvas import Canvas

from anabranch.knowledge.integrity import CHECKS, CheckRequest
from anabranch.knowledge.integrity import run as run_check
from anabranch.knowledge.model import NewDocument
from anabranch.knowledge.records import audit
from anabranch.knowledge.records.database import StoreFailed
from anabranch.knowledge.records.sqlite import NAME, SqliteDatabase
from support.cli_runner import Run, here
from support.knowledge_fixtures import ALICE, OPERATOR, flip, workshop

RELEASED = Path(__file__).parents[2] / "knowledge" / "data" / "data_folder_0.1.0.zip"
FLIPS = 200
DOCUMENTS = 30


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with two segments and an audit log, which nobody has open."""
    folder = tmp_path_factory.mktemp("made") / "data"

    async def make() -> None:
        async with workshop(folder) as shop:
            await shop.collection(caller=ALICE)
            for part in range(2):
                texts = [f"{part}-{number} Herons eat fish and word{number}." for number in range(DOCUMENTS)]
                await shop.put(*texts, caller=ALICE)
                shop.writer.fold()
            await shop.room.delete_document(OPERATOR, "1-0")

    asyncio.run(make())
    return folder


@pytest.fixture
def data(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "data"))


@pytest.fixture
def run(data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    yield from here(data, monkeypatch, capsys)


def audit_bytes(records: Path) -> list[tuple[int, int]]:
    """Where the texts and digests of each record of the audit log are in the file: one after another, the hash last."""
    content = records.read_bytes()
    spans = []
    with closing(sqlite3.connect(records)) as db:
        for row in db.execute(f"SELECT {audit.raw(audit.COLUMNS)}, hash FROM audit"):
            values = b"".join(value for value in row if isinstance(value, bytes))
            begin = content.index(values)
            spans.append((begin, begin + len(values)))
    return spans


def problems(folder: Path) -> dict[str, tuple[str, ...]]:
    """What the checks of files find."""
    of_files = [check for check in CHECKS if check.name != "parsers"]
    found = [run_check(check, CheckRequest(folder), lambda done, total: None) for check in of_files]
    return {one.name: one.problems for one in found if one.problems}


def test_every_one_of_200_flips_in_segments_and_the_audit_log_is_found(data: Path) -> None:
    assert problems(data) == {}
    seeded = random.Random(18)
    segments = [file for file in sorted((data / "index").rglob("*")) if file.is_file()]
    spans = audit_bytes(data / NAME)
    assert len(segments) > 16
    assert len(spans) > DOCUMENTS
    missed = []
    for number in range(FLIPS):
        if number % 2:
            begin, end = seeded.choice(spans)
            file, at, name = data / NAME, seeded.randrange(begin, end), "audit log"
        else:
            # Each byte of the index is as probable as any other.
            [file] = seeded.choices(segments, [one.stat().st_size for one in segments])
            at, name = seeded.randrange(file.stat().st_size), "index"
        mask = 1 << seeded.randrange(8)
        flip(file, at, mask)
        if name not in problems(data):
            missed.append((file.name, at, mask))
        flip(file, at, mask)
    assert missed == []
    assert problems(data) == {}


def test_a_whole_folder_is_verified_and_not_changed(run: Run, data: Path) -> None:
    before = {file: file.read_bytes() for file in data.rglob("*") if file.is_file()}
    ran = run("verify")
    assert ran.code == 0
    assert [line.split()[0] for line in ran.out.splitlines()] == ["records", "index", "audit", "backups", "parsers"]
    assert ran.out.count(" ok ") == 5
    assert {file: file.read_bytes() for file in data.rglob("*") if file.is_file()} == before


def test_an_index_that_is_gone_is_a_problem(run: Run, data: Path) -> None:
    (data / "index" / "CURRENT").unlink()
    ran = run("verify")
    assert ran.code == 1
    chunks = 2 * DOCUMENTS - 1
    assert f"manifest of the index is missing: no segment has {chunks} chunks of the records." in ran.out


def test_chunks_that_are_not_indexed_yet_are_no_problem(tmp_path: Path) -> None:
    async def make() -> None:
        async with workshop(tmp_path / "fresh") as shop:
            await shop.collection()
            await shop.put("Herons eat fish.")

    asyncio.run(make())
    assert problems(tmp_path / "fresh") == {}


def test_restored_records_have_no_index_yet(run: Run, data: Path, tmp_path: Path) -> None:
    assert run("backup", str(tmp_path / "copy")).code == 0
    assert run("restore", str(tmp_path / "copy"), "--force").code == 0
    assert not (data / "index").exists()
    assert problems(data) == {}


def test_an_index_of_other_records_is_a_problem(data: Path, tmp_path: Path) -> None:
    SqliteDatabase.open(tmp_path / "other").close()
    shutil.copytree(data / "index", tmp_path / "other" / "index")
    assert problems(tmp_path / "other") == {"index": ("The index is ahead of the records: it was made of others.",)}


def test_records_that_are_gone_are_named(run: Run, data: Path) -> None:
    (data / NAME).unlink()
    ran = run("verify")
    assert ran.code != 0
    assert "records (records.sqlite) are missing" in ran.err
    assert "anabranch restore" in ran.err


def test_verify_works_while_the_folder_is_open(run: Run, data: Path) -> None:
    database = SqliteDatabase.open(data)
    database.writing(lambda db: db.execute("UPDATE documents SET title = title"))
    assert run("verify").code == 0
    database.writing(lambda db: db.execute("DELETE FROM contents"))
    assert run("verify").code == 1
    database.close()


def checked(run: Run, *arguments: str) -> tuple[int, dict[str, Any]]:
    ran = run("verify", "--json", *arguments)
    said = json.loads(ran.out)
    assert said["ok"] is (ran.code == 0)
    return ran.code, {one["name"]: one["problems"] for one in said["checks"]}


DAMAGED_RECORDS = {
    "DELETE FROM embeddings WHERE chunk = 3": "has no vector",
    "DELETE FROM chunks WHERE key = 3": "another number of chunks",
    "DELETE FROM contents": "has no text",
    "UPDATE embeddings SET vector = x'00' WHERE chunk = 3": "another length",
    "DELETE FROM collections": "refers to a row of collections that is not there",
    "UPDATE chunks SET document = 999 WHERE key = 3": "belongs to no document",
    "UPDATE chunks SET text = 'Herons eat bread.' WHERE key = 3": "Chunk 3 has another text than document",
    "UPDATE chunks SET start_char = 1 WHERE key = 3": "Chunk 3 has another text than document",
    "UPDATE chunks SET start_char = start_char - 500, end_char = end_char - 500": "Chunk 3 has another text",
    "UPDATE chunks SET end_char = 100000 WHERE key = 3": "Chunk 3 has another text than document",
    "UPDATE chunks SET end_char = 'x' WHERE key = 3": "cannot be read",
    "UPDATE contents SET content = content || 'x', page_starts = '[0,9000]'": "pages that begin outside of its text",
    "UPDATE contents SET page_starts = '[7,3]'": "pages that begin outside of its text",
    "UPDATE contents SET page_starts = 'none'": "pages that begin outside of its text",
    "UPDATE chunks SET page = 2 WHERE key = 3": "Chunk 3 is on a page that its document does not have",
    "UPDATE chunks SET later_pages = '[[5000,2]]' WHERE key = 3": "Chunk 3 has pages that begin outside of it",
    "UPDATE chunks SET later_pages = '[1]' WHERE key = 3": "Chunk 3 has pages that begin outside of it",
    "UPDATE documents SET visibility = 'nonsense' WHERE key = 2": "has permissions that cannot be read",
    "UPDATE documents SET allowed_users = 'bob' WHERE key = 2": "has permissions that cannot be read",
    "UPDATE documents SET allowed_groups = '{}' WHERE key = 2": "has permissions that cannot be read",
    "UPDATE collections SET settings = json_set(settings, '$.default_permissions.visibility', 'all')": "Collection",
}


@pytest.mark.parametrize("statement", DAMAGED_RECORDS)
def test_rows_that_do_not_fit_together_are_problems(run: Run, data: Path, statement: str) -> None:
    with closing(sqlite3.connect(data / NAME, isolation_level=None)) as db:
        db.execute(statement)
    code, found = checked(run)
    assert code == 1
    assert any(DAMAGED_RECORDS[statement] in one for one in found["records"]), found


def test_an_index_that_differs_from_the_records_is_a_problem(run: Run, data: Path) -> None:
    with closing(sqlite3.connect(data / NAME, isolation_level=None)) as db:
        [(vector,)] = db.execute("SELECT vector FROM embeddings WHERE chunk = 3")
        db.execute("UPDATE embeddings SET vector = ? WHERE chunk = 4", (vector,))
        db.execute("UPDATE embeddings SET chunk = 6 * 1000 WHERE chunk = 5")
    _, found = checked(run)
    assert [one.partition(" has ")[2] for one in found["index"]] == ["other vectors than the records for 1 chunk."]


def test_a_segment_that_is_gone_and_records_that_are_no_database_are_problems(run: Run, data: Path) -> None:
    [segment, _] = sorted(file.parent for file in (data / "index").rglob("keys.bin"))
    shutil.rmtree(segment)
    (data / NAME).write_bytes(b"no database")
    _, found = checked(run)
    assert found["index"]
    assert all(found[name] for name in ("records", "audit log"))


def test_an_audit_log_that_lacks_a_noted_record_is_a_problem(run: Run) -> None:
    _, found = checked(run, "--noted", f"3:{'00' * 32}")
    assert found["audit log"] == ["Record 3: The record has another hash than the one that was noted."]


def test_backups_that_were_made_or_are_named_are_verified(run: Run, data: Path) -> None:
    copies = data.parent / "copies"
    copies.mkdir()
    assert run("backup", str(copies / "monday.sqlite")).code == 0
    assert checked(run)[0] == 0
    shutil.copy(copies / "monday.sqlite", data.parent / "unknown.sqlite")
    flip(data.parent / "unknown.sqlite", 30, 0xFF)
    assert checked(run)[0] == 0
    assert checked(run, str(data.parent / "unknown.sqlite"))[0] == 1
    (copies / "monday.sqlite").write_bytes(b"no database")
    code, found = checked(run)
    assert (code, len(found["backups"])) == (1, 1)
    assert checked(run, str(copies))[1] == found
    (copies / "monday.sqlite").unlink()
    assert checked(run)[0] == 0
    assert "There are no files" in run("verify", str(copies)).err


def test_documents_with_pages_are_as_they_should_be(tmp_path: Path) -> None:
    file = io.BytesIO()
    canvas = Canvas(file)
    for lines in (["Herons eat fish."], [], ["They stand \u00e9 still.", "For hours."], []):
        for number, line in enumerate(lines):
            canvas.drawString(50, 700 - 40 * number, line)
        canvas.showPage()
    canvas.save()

    async def make() -> None:
        async with workshop(tmp_path / "pages") as shop:
            await shop.collection()
            document = NewDocument(source="file", data=file.getvalue(), filename="birds.pdf", identity="birds")
            await shop.room.ingest(OPERATOR, "notes", [document])
            await shop.ingest_pending()
            assert len((await shop.room.document(OPERATOR, "birds.pdf", content=True)).page_starts) == 4

    asyncio.run(make())
    assert problems(tmp_path / "pages") == {}


def test_a_released_data_folder_is_as_it_should_be(tmp_path: Path) -> None:
    with zipfile.ZipFile(RELEASED) as archive:
        archive.extractall(tmp_path)
    assert problems(tmp_path) == {}
    asyncio.run(migrated(tmp_path))
    assert problems(tmp_path) == {}


async def migrated(folder: Path) -> None:
    async with workshop(folder):
        pass


def test_records_of_an_earlier_version_are_verified_as_they_are(run: Run, data: Path) -> None:
    with closing(sqlite3.connect(data / NAME, isolation_level=None)) as db:
        db.execute("DROP TABLE audit")
        db.execute("DROP TABLE backups")
        db.execute("PRAGMA user_version = 8")
    ran = run("verify")
    assert (ran.code, "not kept by the version" in ran.out) == (0, True)


def test_without_records_there_is_nothing_to_verify(run: Run, data: Path) -> None:
    shutil.rmtree(data)
    assert run("verify").code == 1


def test_what_does_not_confine_parsers_is_shown_and_no_problem(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def restrictions() -> dict[str, str]:
        return {"no files (Landlock)": "the kernel refuses it (Function not implemented)", "no capabilities": "applied"}

    assert re.search(r"^parsers    ok \(\d restrictions? applied", run("verify").out, re.MULTILINE)
    monkeypatch.setattr("anabranch.knowledge.integrity.restrictions", restrictions)
    ran = run("verify")
    said = "(1 restriction applied; no files (Landlock): the kernel refuses it (Function not implemented))"
    assert (ran.code, f"parsers    ok {said}" in " ".join(ran.out.split("\n"))) == (0, True)


def test_what_a_check_cannot_read_is_a_problem() -> None:
    def failing(*_: object) -> Any:
        raise StoreFailed("The records cannot be read.")

    check = CHECKS[0]._replace(run=failing)
    assert run_check(check, CheckRequest(Path()), lambda *_: None).problems == ("The records cannot be read.",)


@pytest.mark.parametrize("place", ["a backup", "a segment", "the manifest"])
def test_a_pipe_is_a_problem_and_not_waited_for(run: Run, data: Path, place: str) -> None:
    pipe = {
        "a backup": data.parent / "pipe",
        "a segment": next((data / "index").glob("*/*.bin")),
        "the manifest": data / "index" / "CURRENT",
    }[place]
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    code, found = checked(run, *([str(pipe)] if place == "a backup" else []))
    assert (code, len(found["backups" if place == "a backup" else "index"])) == (1, 1)


def test_hostile_file_names_are_printed_on_one_line(run: Run, data: Path) -> None:
    file = data.parent / "a\x1b[31m\nrecords    ok"
    file.write_bytes(b"no database")
    ran = run("verify", str(file))
    assert (ran.code, ran.out.count("\nrecords    ok")) == (1, 0)
