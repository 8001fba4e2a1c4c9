"""The files that `anabranch ingest` finds in a folder."""

import os
from pathlib import Path

import pytest

from anabranch.domain.errors import ConfigurationError
from anabranch.entrypoints.cli.ingest import FoundFile, find_files, open_file


def put(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def names(*given: Path) -> list[str]:
    return [found.name for found in find_files([str(one) for one in given]).found]


def read(found: FoundFile) -> bytes:
    with open_file(found) as file:
        return file.read()


def test_files_of_a_folder_are_named_by_relative_path(tmp_path: Path) -> None:
    put(tmp_path, "b.md", "a/z.txt", "a/y/x.pdf", "a.txt")
    assert names(tmp_path) == ["a.txt", "b.md", "a/z.txt", "a/y/x.pdf"]
    assert names(tmp_path / "a" / "z.txt") == ["z.txt"]


def test_files_that_cannot_be_documents_are_skipped_and_counted(tmp_path: Path) -> None:
    put(tmp_path, "a.txt", ".env", ".git/config", "__pycache__/a.pyc", "node_modules/x/readme.md", "photo.JPG")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "gone").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    sought = find_files([str(tmp_path)])
    assert [found.name for found in sought.found] == ["a.txt"]
    assert sought.skipped == {"hidden": 1, ".jpg": 1, "empty": 1, "broken link": 1, "not a file": 1}


def test_a_file_named_on_the_command_line_is_never_skipped(tmp_path: Path) -> None:
    put(tmp_path, ".notes.txt", "photo.jpg")
    assert names(tmp_path / ".notes.txt", tmp_path / "photo.jpg") == [".notes.txt", "photo.jpg"]


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """A folder with links to a file, to a folder and to a chain of links outside of it."""
    put(tmp_path, "inside/a.txt", "secret.txt", "secrets/b.txt", "secrets/deep/c.txt")
    folder = tmp_path / "inside"
    (folder / "file.txt").symlink_to(tmp_path / "secret.txt")
    (folder / "folder").symlink_to("../secrets")
    (folder / "chain.txt").symlink_to("link.txt")
    (folder / "link.txt").symlink_to("folder/b.txt")
    return folder


LEAVING = ("chain.txt", "file.txt", "link.txt", "folder")


def test_links_that_leave_the_folder_are_skipped_and_named(linked: Path) -> None:
    sought = find_files([str(linked)])
    assert [found.name for found in sought.found] == ["a.txt"]
    assert sought.leaving == LEAVING
    assert sought.skipped == {}


def test_links_that_leave_the_folder_are_followed_if_asked(linked: Path) -> None:
    sought = find_files([str(linked)], follow_links=True)
    assert [found.name for found in sought.found] == ["a.txt", "chain.txt", "file.txt", "folder/deep/c.txt"]
    assert {found.name: read(found) for found in sought.found}["chain.txt"] == b"secrets/b.txt"
    assert (sought.leaving, sought.skipped) == ((), {"repeated link": 1})


def test_a_link_named_on_the_command_line_is_followed(linked: Path) -> None:
    (linked.parent / "way").symlink_to(linked)
    sought = find_files([str(linked.parent / "way"), str(linked / "file.txt")])
    assert [(found.name, read(found)) for found in sought.found] == [
        ("a.txt", b"inside/a.txt"),
        ("file.txt", b"secret.txt"),
    ]
    assert sought.leaving == ("chain.txt", "link.txt", "folder")


def test_a_folder_with_the_same_name_prefix_is_outside(tmp_path: Path) -> None:
    put(tmp_path, "notes/a.txt", "notes-private/b.txt")
    (tmp_path / "notes" / "b.txt").symlink_to("../notes-private/b.txt")
    assert find_files([str(tmp_path / "notes")]).leaving == ("b.txt",)


def test_links_within_a_folder_are_followed_but_no_file_is_found_twice(tmp_path: Path) -> None:
    put(tmp_path, "a/b/c.txt", ".store/d.txt", ".store/deep/e.txt", ".store/deep/f.txt")
    for name, target in {
        "a/up": "..",
        "a/self": ".",
        "a/loop": "loop",
        "0.txt": "a/b/c.txt",
        "e.txt": "again.txt",
        "again.txt": ".store/deep/e.txt",
        "kept": ".store",
        "kept-too": str(tmp_path / ".store" / "deep"),
    }.items():
        (tmp_path / name).symlink_to(target)
    sought = find_files([str(tmp_path)])
    assert [(found.name, read(found)) for found in sought.found] == [
        ("a/b/c.txt", b"a/b/c.txt"),
        ("again.txt", b".store/deep/e.txt"),
        ("kept/d.txt", b".store/d.txt"),
        ("kept/deep/f.txt", b".store/deep/f.txt"),
    ]
    assert sought.leaving == ()
    assert sought.skipped == {"broken link": 1, "repeated link": 5}


@pytest.mark.parametrize("swapped", ["b/c.txt", "b"])
def test_a_file_replaced_by_a_link_is_not_read(tmp_path: Path, swapped: str) -> None:
    put(tmp_path, "a/b/c.txt", "secrets/c.txt")
    (found,) = find_files([str(tmp_path / "a")]).found
    assert read(found) == b"a/b/c.txt"
    (tmp_path / "a" / swapped).rename(tmp_path / "before")
    (tmp_path / "a" / swapped).symlink_to(tmp_path / "secrets" / swapped.removeprefix("b").removeprefix("/"))
    assert (tmp_path / "a" / "b" / "c.txt").read_text() == "secrets/c.txt"
    with pytest.raises(OSError, match=r"symbolic links|Not a directory"):
        read(found)


def test_a_file_replaced_by_a_pipe_does_not_block(tmp_path: Path) -> None:
    put(tmp_path, "a.txt")
    (found,) = find_files([str(tmp_path)]).found
    (tmp_path / "a.txt").unlink()
    os.mkfifo(tmp_path / "a.txt")
    assert read(found) == b""


def test_two_files_of_one_name_are_an_error_and_the_same_one_twice_is_not(tmp_path: Path) -> None:
    put(tmp_path, "a/x.txt", "b/x.txt")
    assert names(tmp_path / "a", tmp_path / "a" / "x.txt") == ["x.txt"]
    with pytest.raises(ConfigurationError, match=r"would both be named 'x.txt'"):
        names(tmp_path / "a", tmp_path / "b")


def test_urls_are_accepted(tmp_path: Path) -> None:
    put(tmp_path, "a.txt")
    sought = find_files(["https://example.org/a.html", str(tmp_path), "https://example.org/a.html"])
    assert [(found.name, found.path is None) for found in sought.found] == [
        ("https://example.org/a.html", True),
        ("a.txt", False),
    ]


def test_a_file_name_that_is_not_utf8_is_decoded(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("x")
    assert names(tmp_path) == ["caf�.txt"]


@pytest.mark.parametrize("name", ["missing", "pipe"])
def test_a_path_that_is_neither_file_nor_folder_is_an_error(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigurationError, match=name):
        names(tmp_path / name)
