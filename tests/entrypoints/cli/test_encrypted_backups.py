"""`anabranch backup` encrypts for age recipients or with a passphrase; `restore` and `verify` decrypt."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pyrage
import pytest

from anabranch.configuration import extras
from anabranch.domain.errors import ConfigurationError
from anabranch.knowledge.records import backup, encryption
from anabranch.knowledge.records.encryption import HEADER, Encryption
from anabranch.knowledge.records.sqlite import SqliteDatabase
from support.cli_runner import Run, here
from support.knowledge_fixtures import folder_with

SECRET = "Herons keep their secrets."
PASSPHRASE = "correct horse battery staple"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_with(tmp_path_factory.mktemp("made") / "data", SECRET)


@pytest.fixture
def data(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "data"))


@pytest.fixture
def run(data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    yield from here(data, monkeypatch, capsys)


@pytest.fixture
def identity(tmp_path: Path) -> Path:
    key = pyrage.x25519.Identity.generate()
    file = tmp_path / "key.txt"
    file.write_text(f"# public key: {key.to_public()}\n{key}\n", encoding="utf-8")
    return file


def recipient(identity: Path) -> str:
    return identity.read_text(encoding="utf-8").splitlines()[0].rpartition(" ")[2]


def plaintext_in(folder: Path) -> list[str]:
    return [file.name for file in folder.rglob("*") if file.is_file() and SECRET.encode() in file.read_bytes()]


def test_a_backup_for_a_recipient_is_restored_with_its_identity(run: Run, data: Path, identity: Path) -> None:
    file = data.parent / "monday.age"
    ran = run("backup", str(file), "--encrypt-to", recipient(identity))
    assert (ran.code, "Backed up and encrypted 1 collection, 1 document" in ran.out) == (0, True)
    assert file.read_bytes().startswith(HEADER)
    assert file.stat().st_mode & 0o077 == 0
    shutil.rmtree(data)
    assert plaintext_in(data.parent) == []
    assert "is encrypted" in run("restore", str(file)).err
    ran = run("restore", str(file), "--identity", str(identity))
    assert (ran.code, "Restored 1 collection, 1 document" in ran.out) == (0, True)
    assert plaintext_in(data.parent) == ["records.sqlite"]


def test_the_format_is_that_of_age(run: Run, data: Path, identity: Path) -> None:
    file = data.parent / "monday.age"
    run("backup", str(file), "--encrypt-to", recipient(identity))
    key = pyrage.x25519.Identity.from_str(identity.read_text(encoding="utf-8").splitlines()[1])
    assert pyrage.decrypt(file.read_bytes(), [key]).startswith(b"SQLite format 3")


def test_a_passphrase_is_read_from_a_file_or_the_environment(run: Run, data: Path) -> None:
    file, passphrase = data.parent / "monday.age", data.parent / "passphrase"
    passphrase.write_text(f"{PASSPHRASE}\n", encoding="utf-8")
    assert run("backup", str(file), AGGREGATOR_BACKUP_PASSPHRASE=PASSPHRASE).code == 0
    assert file.read_bytes().startswith(HEADER)
    wrong = run("restore", str(file), "--force", AGGREGATOR_BACKUP_PASSPHRASE="wrong")
    assert wrong.code == 2
    assert "cannot be decrypted: the passphrase is not the right one" in wrong.err
    assert run("restore", str(file), "--force", "--passphrase-file", str(passphrase)).code == 0
    assert not list(data.glob(f"{backup.PLAIN}*"))


def test_encrypted_backups_are_verified(run: Run, data: Path, identity: Path) -> None:
    file = data.parent / "monday.age"
    run("backup", str(file), "--encrypt-to", recipient(identity))
    ran = run("verify")
    assert (ran.code, "1 of them encrypted and not read" in ran.out) == (0, True)
    assert run("verify", "--identity", str(identity)).code == 0
    assert run("verify", str(file)).code == 1  # it was named, and cannot be read
    assert "with --identity FILE" in run("verify", str(file), AGGREGATOR_BACKUP_PASSPHRASE=PASSPHRASE).out
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    ran = run("verify", "--identity", str(identity))
    assert (ran.code, "cannot be decrypted" in ran.out) == (1, True)


def test_a_backup_that_is_interrupted_leaves_nothing(
    data: Path, identity: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Encryption, "encrypt", interrupted)
    target = data.parent / "copies"
    target.mkdir()
    database = SqliteDatabase.open(data)
    with pytest.raises(KeyboardInterrupt):
        backup.back_up(database, target / "monday.age", Encryption(recipients=(recipient(identity),)))
    database.close()
    assert list(target.iterdir()) == []
    assert not list(data.glob(f"{backup.PLAIN}*"))


def test_what_an_earlier_version_has_left_in_clear_is_erased(run: Run, data: Path) -> None:
    left = data / f"{backup.PLAIN}123"
    left.write_text(SECRET, encoding="utf-8")
    assert run("erase", "--user", "erin", "--yes").code == 0
    assert not left.exists()


def test_what_is_no_text_is_an_error(run: Run) -> None:
    ran = run("erase", "--document", "\udcff", "--yes")
    assert (ran.code, ran.err) == (2, "anabranch: b'\\xff' is not valid UTF-8.\n")


REFUSED = {
    "no key": (("--encrypt-to", "age1nothing"), "A recipient is the public key"),
    "an option of rage": (("--encrypt-to", "AGE-SECRET-KEY-1"), "A recipient is the public key"),
    "both": (("--encrypt-to", "age1nothing", "--passphrase-file", "PASSPHRASE"), "not with both"),
    "an empty passphrase": (("--passphrase-file", "EMPTY"), "The passphrase is empty."),
    "bytes": (("--passphrase-file", "BYTES"), "cannot be read"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_cannot_encrypt_is_an_error(run: Run, data: Path, how: str) -> None:
    for name, content in (("PASSPHRASE", b"secret"), ("EMPTY", b"\n"), ("BYTES", b"\xff\xfe")):
        (data.parent / name).write_bytes(content)
    options, said = REFUSED[how]
    ran = run("backup", str(data.parent / "monday.age"), *options)
    assert (ran.code, said in ran.err) == (2, True), ran
    assert not (data.parent / "monday.age").exists()


def test_a_file_without_identities_is_an_error(run: Run, data: Path, identity: Path) -> None:
    file = data.parent / "monday.age"
    run("backup", str(file), "--encrypt-to", recipient(identity))
    identity.write_text("nonsense\n", encoding="utf-8")
    assert "AGE-SECRET-KEY-1" in run("restore", str(file), "--force", "--identity", str(identity)).err
    identity.write_text("# nothing\n", encoding="utf-8")
    assert "is encrypted" in run("restore", str(file), "--force", "--identity", str(identity)).err


def test_large_records_need_recipients(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encryption, "MAX_PASSPHRASE_BYTES", 1_000)
    database = SqliteDatabase.open(data)
    with pytest.raises(ConfigurationError, match="--encrypt-to"):
        backup.back_up(database, data.parent / "monday.age", Encryption(passphrase=PASSPHRASE))
    database.close()
    assert not (data.parent / "monday.age").exists()


def test_without_the_extra_the_error_names_it(run: Run, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(extras.MODULES, "encryption", ("pyrage_that_is_missing",))
    ran = run("backup", str(data.parent / "monday.age"), AGGREGATOR_BACKUP_PASSPHRASE=PASSPHRASE)
    assert "pip install 'anabranch[encryption]'" in ran.err
