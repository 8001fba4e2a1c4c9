"""The files of `anabranch backup`: damage is found and not restored, and what is interrupted leaves nothing."""

import fcntl
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pyrage
import pytest

from anabranch.domain.errors import ConfigurationError
from anabranch.knowledge.integrity import CHECKS, CheckRequest
from anabranch.knowledge.integrity import run as run_check
from anabranch.knowledge.records import backup, checksum, erasures
from anabranch.knowledge.records.encryption import Decryption
from anabranch.knowledge.records.sqlite import NAME, SqliteDatabase
from support.cli_runner import Ran, Run, environment, here
from support.full_disk import small_disk
from support.knowledge_fixtures import flip, folder_with

FLIPS = 200
SECRET = "Herons keep their secrets."
TEXTS = [f"{number} Herons eat fish." for number in range(50)]
HEADER_BYTES = 100
ENCRYPTED = {"AGGREGATOR_BACKUP_PASSPHRASE": "correct horse battery staple"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_with(tmp_path_factory.mktemp("made") / "data", SECRET, *TEXTS)


@pytest.fixture
def data(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "data"))


@pytest.fixture
def run(data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    yield from here(data, monkeypatch, capsys)


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    """A folder in which only backups are."""
    folder = tmp_path / "copies"
    folder.mkdir()
    return folder


@pytest.fixture
def monday(run: Run, copies: Path) -> Path:
    """A plain backup."""
    assert run("backup", str(copies / "monday.sqlite")).code == 0
    return copies / "monday.sqlite"


def left_in(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def verified(data: Path, file: Path, *identities: str) -> tuple[str, ...]:
    """The problems that `anabranch verify FILE` prints of backups."""
    [check] = [one for one in CHECKS if one.name == "backups"]
    decryption = Decryption(identities=identities)
    return run_check(check, CheckRequest(data, backups=[file], decryption=decryption), lambda *_: None).problems


# --- damage


@pytest.mark.parametrize("kind", ["plain", "encrypted"])
def test_every_one_of_200_flips_in_a_backup_is_found_and_not_restored(
    run: Run, data: Path, copies: Path, kind: str
) -> None:
    file, key = copies / "monday", pyrage.x25519.Identity.generate()
    (data.parent / "key").write_text(f"{key}\n", encoding="utf-8")
    encrypted = kind == "encrypted"
    assert run("backup", str(file), *(("--encrypt-to", str(key.to_public())) if encrypted else ())).code == 0
    decryption = ("--identity", str(data.parent / "key")) if encrypted else ()
    identities = (str(key),) if encrypted else ()
    assert verified(data, file, *identities) == ()
    before, seeded, size = (data / NAME).read_bytes(), random.Random(34), file.stat().st_size
    missed = []
    for _ in range(FLIPS):
        at, mask = seeded.randrange(size), seeded.randrange(1, 256)
        flip(file, at, mask)
        problems, ran = verified(data, file, *identities), run("restore", str(file), "--force", *decryption)
        flip(file, at, mask)
        if not problems or ran.code != 2 or ran.err.count("\n") != 1 or str(file) not in ran.err:
            missed.append((at, mask, problems, ran))
    assert missed == []
    assert (data / NAME).read_bytes() == before
    assert run("restore", str(file), "--force", *decryption).code == 0


def test_every_byte_of_the_header_and_of_the_checksum_counts(data: Path, monday: Path) -> None:
    size = monday.stat().st_size
    missed = []
    for at in (*range(HEADER_BYTES), *range(size - checksum.LENGTH, size)):
        for mask in (0x01, 0x20, 0xFF):
            flip(monday, at, mask)
            if not verified(data, monday):
                missed.append((at, mask))
            flip(monday, at, mask)
    assert missed == []
    assert verified(data, monday) == ()


def test_a_damaged_backup_is_an_error_that_says_what_to_do(run: Run, monday: Path) -> None:
    flip(monday, monday.read_bytes().index(SECRET.encode()), 0x20)
    said = (
        f"anabranch: {monday} is damaged: it does not end with the checksum of its content, so it was changed or cut "
        "short. Copy it again from where it is kept, or use another backup.\n"
    )
    assert run("restore", str(monday), "--force") == Ran(2, "", said)
    ran = run("verify")
    assert (ran.code, f"{monday} is damaged: " in ran.out) == (1, True)
    with closing(sqlite3.connect(monday)) as db, closing(sqlite3.connect(monday.with_name("copy"))) as copy:
        db.backup(copy)  # if there is no other one
    ran = run("restore", str(monday.with_name("copy")), "--force")
    assert (ran.code, "has no checksum" in ran.err) == (0, True)


@pytest.mark.parametrize("cut", [1, checksum.LENGTH - 1, checksum.LENGTH + 1, checksum.LENGTH + 4096, 100_000])
def test_a_backup_that_was_cut_short_is_not_restored(run: Run, data: Path, monday: Path, cut: int) -> None:
    os.truncate(monday, monday.stat().st_size - cut)
    assert verified(data, monday)
    assert "is damaged" in run("restore", str(monday), "--force").err


def test_a_backup_to_which_something_was_appended_is_not_restored(run: Run, monday: Path) -> None:
    with monday.open("ab") as opened:
        opened.write(b"\n")
    assert "is damaged" in run("restore", str(monday), "--force").err


def test_a_backup_without_a_checksum_is_restored_and_named(run: Run, monday: Path) -> None:
    """As earlier versions made it."""
    os.truncate(monday, monday.stat().st_size - checksum.LENGTH)
    ran = run("verify")
    assert (ran.code, "1 backup, 1 of them without a checksum, so damaged texts are not found" in ran.out) == (0, True)
    ran = run("restore", str(monday), "--force")
    assert (ran.code, ran.err.count(f"{monday} has no checksum, so damaged texts in it are not found")) == (0, 1)


def test_an_encrypted_backup_of_an_earlier_version_is_restored(run: Run, data: Path, monday: Path) -> None:
    key = pyrage.x25519.Identity.generate()
    (data.parent / "key").write_text(f"{key}\n", encoding="utf-8")
    content = monday.read_bytes()[: -checksum.LENGTH]
    (data.parent / "old.age").write_bytes(pyrage.encrypt(content, [key.to_public()]))
    ran = run("restore", str(data.parent / "old.age"), "--force", "--identity", str(data.parent / "key"))
    assert (ran.code, "no checksum" in ran.err) == (0, False), "age has checked it"


def test_what_age_decrypts_has_the_checksum(run: Run, data: Path, copies: Path) -> None:
    key = pyrage.x25519.Identity.generate()
    assert run("backup", str(copies / "monday.age"), "--encrypt-to", str(key.to_public())).code == 0
    (copies / "monday.age").write_bytes(pyrage.decrypt((copies / "monday.age").read_bytes(), [key]))
    assert run("verify", str(copies)).code == 0
    assert "no checksum" not in run("restore", str(copies / "monday.age"), "--force").err


def test_the_checksum_is_that_of_standard_tools(monday: Path) -> None:
    last = subprocess.run(["tail", "-n", "1", monday], capture_output=True, check=True, text=True).stdout
    pipe = f"head -c -{checksum.LENGTH} '{monday}' | sha256sum"
    found = subprocess.run(["sh", "-c", pipe], capture_output=True, check=True, text=True).stdout
    assert last == f"anabranch backup sha256:{found.split()[0]}\n"


# --- a backup is a database


def test_a_backup_is_a_database_that_sqlite_opens(run: Run, monday: Path, copies: Path) -> None:
    with closing(sqlite3.connect(monday)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert db.execute("SELECT count(*) FROM documents").fetchone() == (51,)
        db.execute(f"VACUUM INTO '{copies / 'vacuumed'}'")
        with closing(sqlite3.connect(copies / "copied")) as copied:
            db.backup(copied)
    with closing(sqlite3.connect(":memory:")) as db:
        db.execute("ATTACH ? AS monday", (str(monday),))
        assert db.execute("PRAGMA monday.integrity_check").fetchall() == [("ok",)]
        assert db.execute("SELECT count(*) FROM monday.chunks").fetchone() == (51,)
    assert run("verify", str(monday)).code == 0, "reading has not changed it"
    for name in ("vacuumed", "copied"):  # databases of their own, without the checksum
        ran = run("restore", str(copies / name), "--force")
        assert (ran.code, "has no checksum" in ran.err) == (0, True)


def test_a_backup_that_is_copied_to_the_place_of_the_records_works(run: Run, data: Path, monday: Path) -> None:
    shutil.rmtree(data)
    data.mkdir()
    shutil.copy(monday, data / NAME)
    assert run("verify").code == 0
    assert run("keys", "create", "--user", "alice").code == 0
    assert run("verify").code == 0
    assert run("backup", str(monday), "--force").code == 0
    assert run("restore", str(monday), "--force").code == 0
    [before] = data.glob(f"{NAME}.before-restore-*")
    assert run("restore", str(before), "--force").code == 0
    assert "alice" in run("keys").out


# --- interruption

# Where a backup waits, so that it can be killed there: the copy of the records is complete; the file is on disk.
STAGES = {
    "copied": "from anabranch.knowledge.records import checksum\nchecksum.append = wait",
    "written": "import os\nos.fsync = wait",
}
WAITING = """
import signal, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run where it is ignored, as with nohup
def wait(*_):
    print("waiting", flush=True)
    time.sleep(60)
{}
from anabranch.entrypoints.cli.main import main
main()
"""


@contextmanager
def waiting(data: Path, program: str, *arguments: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command that waits."""
    command = [sys.executable, "-c", WAITING.format(program), *arguments]
    with subprocess.Popen(command, env=environment(data, **variables), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"waiting\n"
            yield process
        except BaseException:
            process.kill()
            raise


def in_clear(folder: Path) -> list[str]:
    """The files that have the text of a document."""
    found = [file.name for file in folder.rglob("*") if file.is_file() and SECRET.encode() in file.read_bytes()]
    return sorted(name for name in found if name not in (NAME, f"{NAME}-wal"))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["plain", "encrypted"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_backup_that_is_stopped_leaves_nothing(
    run: Run, data: Path, copies: Path, stage: str, kind: str, number: int
) -> None:
    file, variables = copies / "monday", ENCRYPTED if kind == "encrypted" else {}
    with waiting(data, STAGES[stage], "backup", str(file), **variables) as process:
        before = left_in(copies), in_clear(data.parent)
        process.send_signal(number)
    assert before == ([], [])
    assert (left_in(copies), in_clear(data.parent)) == ([], [])
    assert [name for name in left_in(data) if name.startswith(backup.PLAIN)] == []
    assert run("backup", str(file)).code == 0


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["plain", "encrypted"])
def test_where_files_need_names_a_killed_backup_leaves_one_that_the_next_replaces(
    run: Run, data: Path, copies: Path, stage: str, kind: str
) -> None:
    file, left, variables = copies / "monday", copies / ".monday.partial", ENCRYPTED if kind == "encrypted" else {}
    with waiting(data, f"import os\ndel os.O_TMPFILE\n{STAGES[stage]}", "backup", str(file), **variables) as process:
        process.kill()
    assert left_in(copies) == [left.name]
    assert in_clear(data.parent) == ([left.name] if kind == "plain" else [])
    assert left.stat().st_mode & 0o077 == 0
    assert run("verify").code == 0, "it is no backup"
    assert str(left) in run("erase", "--user", "erin", "--yes").err
    assert run("backup", str(file)).code == 0
    assert (left_in(copies), run("verify", str(file)).code) == ([file.name], 0)


# Where a restore waits: the new records are complete; the old ones have a second name.
RESTORING = {"copied": "import os\nos.fsync = wait", "kept": "from pathlib import Path\nPath.replace = wait"}


@pytest.mark.parametrize("stage", RESTORING)
def test_a_restore_that_is_killed_changes_nothing(run: Run, data: Path, monday: Path, stage: str) -> None:
    assert run("keys", "create", "--user", "alice").code == 0
    before = (data / NAME).read_bytes()
    with waiting(data, RESTORING[stage], "restore", str(monday), "--force") as process:
        process.kill()
    assert (data / NAME).read_bytes() == before
    assert run("verify", str(monday)).code == 0
    assert "alice" in run("keys").out
    assert (data / f"{NAME}.restoring").exists()
    # A second name of records that are in use is not opened: SQLite would use another log for it.
    assert run("erase", "--user", "erin", "--yes").code == 0
    assert [name for name in left_in(data) if "restor" in name] == []
    assert run("verify").code == 0
    assert run("restore", str(monday), "--force").code == 0
    assert "alice" not in run("keys").out


def test_what_a_killed_restore_has_left_is_replaced(run: Run, data: Path, monday: Path) -> None:
    for name in (f"{NAME}.restoring", f"{NAME}.restoring-journal", f"{NAME}.restoring-wal"):
        (data / name).write_text("left", encoding="utf-8")
    assert run("restore", str(monday), "--force").code == 0
    assert [name for name in left_in(data) if ".restoring" in name] == []


@pytest.mark.parametrize("named", [False, True])
def test_two_backups_of_one_name_do_not_meet(
    run: Run, copies: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    if named:
        monkeypatch.delattr(os, "O_TMPFILE")
    left = copies / ".monday.sqlite.partial"
    left.touch()
    with left.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        ran = run("backup", str(copies / "monday.sqlite"))
    assert (ran.code, "Another backup of this name is running" in ran.err) == (1, True)
    assert run("backup", str(copies / "monday.sqlite")).code == 0
    assert left_in(copies) == ["monday.sqlite"]


@pytest.mark.parametrize("named", [False, True])
def test_a_file_that_appears_meanwhile_is_not_replaced_without_force(
    data: Path, copies: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    if named:
        monkeypatch.delattr(os, "O_TMPFILE")
    copied = backup._copy

    def appearing(*arguments: object) -> dict[str, int]:
        (copies / "monday.sqlite").write_text("precious", encoding="utf-8")
        return copied(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(backup, "_copy", appearing)
    with closing(SqliteDatabase.open(data)) as database:
        with pytest.raises(ConfigurationError, match="--force replaces it"):
            backup.back_up(database, copies / "monday.sqlite", replace=False)
        assert left_in(copies) == ["monday.sqlite"]
        assert (copies / "monday.sqlite").read_text(encoding="utf-8") == "precious"
        backup.back_up(database, copies / "monday.sqlite")
    assert left_in(copies) == ["monday.sqlite"]
    assert verified(data, copies / "monday.sqlite") == ()


def test_a_backup_that_was_not_replaced_is_known_to_be_older_than_an_erasure(
    data: Path, monday: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    erased_at = time.time()
    with closing(SqliteDatabase.open(data)) as database:
        with monkeypatch.context() as patch:
            patch.setattr(SqliteDatabase, "backup", interrupt)
            with pytest.raises(KeyboardInterrupt):
                backup.back_up(database, monday)
        assert database.reading(lambda db: erasures.backups_before(db, erased_at)) == [monday]
        backup.back_up(database, monday)
        assert database.reading(lambda db: erasures.backups_before(db, erased_at)) == []


def test_a_file_that_cannot_be_replaced_is_an_error_and_nothing_is_left(
    data: Path, copies: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = backup._copy

    def appearing(*arguments: object) -> dict[str, int]:
        (copies / "monday.sqlite").mkdir()
        return copied(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(backup, "_copy", appearing)
    with closing(SqliteDatabase.open(data)) as database, pytest.raises(ConfigurationError, match="cannot be written"):
        backup.back_up(database, copies / "monday.sqlite")
    assert left_in(copies) == ["monday.sqlite"]


# --- targets and sources


def test_a_link_stays_a_link(run: Run, data: Path, monday: Path, copies: Path) -> None:
    latest, dangling = copies / "latest", copies / "dangling"
    latest.symlink_to(monday.name)
    dangling.symlink_to("tuesday.sqlite")
    for link in (latest, dangling):
        assert "exists already" in run("backup", str(link)).err
    assert left_in(copies) == ["dangling", "latest", "monday.sqlite"]
    before = monday.stat().st_ino
    assert run("backup", str(latest), "--force").code == 0
    assert (latest.is_symlink(), monday.stat().st_ino != before) == (True, True)
    assert run("backup", str(dangling), "--force").code == 0
    assert verified(data, copies / "tuesday.sqlite") == ()


REFUSED = {
    "pipe": "is no regular file, but a folder, a pipe or a device",
    "loop": "is no regular file, but a folder, a pipe or a device",
    "missing/monday.sqlite": "There is no folder",
    "data/records.sqlite": "is the file of the records themselves",
    "data/records.sqlite-wal": "is the file of the records themselves",
    "linked/records.sqlite-shm": "is the file of the records themselves",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_file_for_a_backup_is_refused(run: Run, data: Path, name: str) -> None:
    os.mkfifo(data.parent / "pipe")
    (data.parent / "loop").symlink_to("loop")
    (data.parent / "linked").symlink_to("data")
    with closing(SqliteDatabase.open(data)):  # as a server does
        before = left_in(data), left_in(data.parent)
        ran = run("backup", str(data.parent / name), "--force")
        assert (ran.code, REFUSED[name] in ran.err, ran.err.count("\n")) == (2, True, 1), ran
        assert (left_in(data), left_in(data.parent)) == before
    assert (data.parent / "pipe").is_fifo()
    assert run("verify").code == 0


@pytest.mark.parametrize("name", ["pipe", "data/records.sqlite"])
def test_what_is_no_backup_is_not_restored(run: Run, data: Path, name: str) -> None:
    os.mkfifo(data.parent / "pipe")
    ran = run("restore", str(data.parent / name), "--force")
    assert (ran.code, ran.err.count("\n")) == (2, 1), ran


def test_a_data_folder_that_cannot_be_made_is_an_error(run: Run, data: Path, monday: Path) -> None:
    ran = run("restore", str(monday), AGGREGATOR_DATA_DIR="/proc/nothing")
    assert (ran.code, "/proc/nothing cannot be written" in ran.err, ran.err.count("\n")) == (2, True, 1), ran


def test_control_characters_in_the_name_of_a_file_are_replaced(run: Run, copies: Path) -> None:
    ran = run("backup", str(copies / "mon\x1b[31m\nday"))
    assert (ran.code, ran.out.count("\n")) == (0, 1)


# --- full disks


def test_a_backup_that_does_not_fit_says_how_much_it_takes(run: Run, data: Path, copies: Path) -> None:
    with closing(SqliteDatabase.open(data)) as database:
        database.writing(lambda db: db.execute("INSERT INTO facts VALUES ('filling', hex(randomblob(2000000)))"))
    with small_disk(copies / "small", 40) as disk:
        file = disk.folder / "monday.sqlite"
        assert run("backup", str(file)).code == 0  # not twice
        before = file.read_bytes()
        for name, variables in (("monday.sqlite", {}), ("monday.age", ENCRYPTED)):
            disk.fill()
            ran = run("backup", str(disk.folder / name), "--force", **variables)
            assert (ran.code, "it takes 4 MB" in ran.err, ran.err.count("\n")) == (2, True, 1), ran
            disk.empty()
            assert left_in(disk.folder) == ["monday.sqlite"]
        assert file.read_bytes() == before
    assert run("verify").code == 0


def test_records_on_a_full_disk_are_backed_up_to_another_one(run: Run, made: Path, copies: Path) -> None:
    with small_disk(copies / "small", 40) as disk:
        data = Path(shutil.copytree(made, disk.folder / "data"))
        variables = {"AGGREGATOR_DATA_DIR": str(data)}
        assert run("keys", "create", "--user", "alice", **variables).code == 0
        (data / "reserve").write_bytes(bytes(4_000_000))
        disk.fill()
        assert run("backup", str(copies / "monday.sqlite"), **variables).code == 0
        before = (data / NAME).read_bytes()
        ran = run("restore", str(copies / "monday.sqlite"), "--force", **variables)
        assert (ran.code, "database or disk is full: it takes" in ran.err, ran.err.count("\n")) == (2, True, 1), ran
        assert (data / NAME).read_bytes() == before
        assert not list(data.glob("*restor*"))
        assert run("verify", str(copies / "monday.sqlite"), **variables).code == 0
