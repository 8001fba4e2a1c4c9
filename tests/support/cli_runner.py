"""The program for the tests of its commands: in this process where that is enough, as a process where it matters."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from anabranch.entrypoints.cli import main

# What would color the output, and what would configure the program behind a test's back.
MEDDLING = ("AGGREGATOR_", "FORCE_COLOR", "NO_COLOR", "COLUMNS", "TTY_", "PYTHONWARNINGS")
PATIENCE_S = 50


class Ran(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Ran]


def environment(data: Path, **variables: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(MEDDLING)}
    models = {name: value for name, value in os.environ.items() if name == "AGGREGATOR_MODELS_DIR"}
    # Rules choose what is quoted: the evidence model would be loaded by every command that asks.
    return {**inherited, **models, "AGGREGATOR_DATA_DIR": str(data), "AGGREGATOR_EVIDENCE": "off", **variables}


def process(data: Path, *arguments: str, **variables: str) -> Ran:
    """As a person runs it."""
    return _process(data, arguments, variables, subprocess.DEVNULL)


def _process(data: Path, arguments: Sequence[str], variables: Mapping[str, str], stdin: int) -> Ran:
    done = subprocess.run(
        [sys.executable, "-m", "anabranch", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        cwd=data.parent,
        env=environment(data, **variables),
        stdin=stdin,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return Ran(done.returncode, done.stdout, done.stderr)


def on_terminal(data: Path, *arguments: str, typed: str) -> Ran:
    """With a terminal as standard input, on which a person has typed something."""
    ours, theirs = os.openpty()
    try:
        os.write(ours, typed.encode())
        return _process(data, arguments, {}, theirs)
    finally:
        os.close(ours)
        os.close(theirs)


def here(data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """The same without the start of a process."""
    monkeypatch.chdir(data.parent)

    def run(*arguments: str, **variables: str) -> Ran:
        with monkeypatch.context() as patch:
            wanted = environment(data, **variables)
            for name in set(os.environ) - set(wanted):
                patch.delenv(name)
            for name, value in wanted.items():
                patch.setenv(name, value)
            capsys.readouterr()
            with pytest.raises(SystemExit) as ended:
                main(arguments)
        said = capsys.readouterr()
        assert "\x1b" not in said.out + said.err
        code = ended.value.code
        assert code is None or isinstance(code, int)
        return Ran(code or 0, said.out, said.err)

    yield run
