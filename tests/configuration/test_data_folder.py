"""A data folder that cannot be read or written: the start and the commands say so, in one sentence."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cli_runner import PATIENCE_S, environment

# Root may read everything, unless it gives that up.
ORDINARY = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
pytestmark = pytest.mark.skipif(bool(ORDINARY) and shutil.which("setpriv") is None, reason="root, and no setpriv")


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "locked"
    (folder / "data").mkdir(parents=True)
    folder.chmod(0)
    yield folder / "data"
    folder.chmod(0o700)


def run(data: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*ORDINARY, sys.executable, *arguments]
    home, given = data.parents[1], environment(data)
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, cwd=home, env=given)


def refused(data: Path, *arguments: str) -> str:
    """What a command says before it ends with status 2."""
    done = run(data, "-m", "anabranch", *arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    return done.stderr


@pytest.mark.parametrize("command", ["serve", "collections", "ask Why?"])
def test_a_data_folder_that_may_not_be_read_is_one_sentence(locked: Path, command: str) -> None:
    assert refused(locked, *command.split()) == (
        f"anabranch: AGGREGATOR_DATA_DIR: this user may not read {locked}. Change its permissions, or set another "
        "folder.\n"
    )


def test_a_data_folder_that_may_not_be_created_is_one_sentence(locked: Path) -> None:
    said = refused(locked, "collections", "create", "x")
    assert f"the records in {locked} cannot be opened" in said
    assert "Check who may read and write them" in said


START = """
from anabranch.app.startup import check
from anabranch.configuration.settings import load
from anabranch.telemetry.log import configured_log

settings = load()
check(settings, configured_log(settings))
"""


@pytest.mark.parametrize(("mode", "warned"), [(0o500, True), (0o700, False)])
def test_the_start_warns_of_a_data_folder_that_may_not_be_written(tmp_path: Path, mode: int, warned: bool) -> None:
    """A server that only forwards questions needs none, so it starts."""
    folder = tmp_path / "folder"
    folder.mkdir(mode=mode)
    done = run(folder / "data", "-c", START)
    assert done.returncode == 0
    assert ("data_folder_not_writable" in done.stderr) is warned
