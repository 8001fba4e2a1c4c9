"""Which files a folder means."""

import os
from pathlib import Path

import pytest

from anabranch.domain.errors import ConfigurationError
from anabranch.entrypoints.cli.files import find_files


def put(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def names(*given: Path) -> list[str]:
    return [found.name for found in find_files([str(one) for one in given]).found]


def test_a_folder_is_all_that_is_in_it_by_its_path_there(tmp_path: Path) -> None:
    put(tmp_path, "b.md", "a/z.txt", "a/y/x.pdf", "a.txt")
    assert names(tmp_path) == ["a.txt", "b.md", "a/z.txt", "a/y/x.pdf"]
    assert names(tmp_path / "a" / "z.txt") == ["z.txt"]


def test_what_is_no_document_is_left_out_and_counted(tmp_path: Path) -> None:
    put(tmp_path, "a.txt", ".env", ".git/config", "__pycache__/a.pyc", "node_modules/x/readme.md", "photo.JPG")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "gone").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    sought = find_files([str(tmp_path)])
    assert [found.name for found in sought.found] == ["a.txt"]
    assert sought.skipped == {"hidden": 1, ".jpg": 1, "empty": 1, "broken link": 1, "not a file": 1}


def test_what_is_named_by_itself_is_meant(tmp_path: Path) -> None:
    put(tmp_path, ".notes.txt", "photo.jpg")
    assert names(tmp_path / ".notes.txt", tmp_path / "photo.jpg") == [".notes.txt", "photo.jpg"]


def test_links_are_followed_and_loops_are_not(tmp_path: Path) -> None:
    put(tmp_path, "a/b/c.txt", "elsewhere/d.txt")
    (tmp_path / "a" / "up").symlink_to("..")
    (tmp_path / "a" / "self").symlink_to(".")
    found = names(tmp_path / "a")
    assert [name for name in found if name.endswith("c.txt")] == ["b/c.txt"]
    assert [name for name in found if name.endswith("d.txt")] == ["up/elsewhere/d.txt"]


def test_two_files_of_one_name_are_an_error_and_the_same_one_twice_is_not(tmp_path: Path) -> None:
    put(tmp_path, "a/x.txt", "b/x.txt")
    assert names(tmp_path / "a", tmp_path / "a" / "x.txt") == ["x.txt"]
    with pytest.raises(ConfigurationError, match=r"would both be named 'x.txt'"):
        names(tmp_path / "a", tmp_path / "b")


def test_addresses_are_documents_too(tmp_path: Path) -> None:
    put(tmp_path, "a.txt")
    sought = find_files(["https://example.org/a.html", str(tmp_path), "https://example.org/a.html"])
    assert [(found.name, found.path is None) for found in sought.found] == [
        ("https://example.org/a.html", True),
        ("a.txt", False),
    ]


def test_a_name_that_is_no_text_is_made_one(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("x")
    assert names(tmp_path) == ["caf�.txt"]


@pytest.mark.parametrize("name", ["missing", "pipe"])
def test_what_is_neither_file_nor_folder_is_one_sentence(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigurationError, match=name):
        names(tmp_path / name)
