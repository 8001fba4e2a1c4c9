"""The list of restrictions of parsers: what each came to, and the numbers of system calls."""

import ctypes
import io
import logging
import platform
import sys

import msgspec
import pytest

from anabranch.app.indexer import log_missing
from anabranch.knowledge.parse import confinement
from anabranch.knowledge.parse.confinement import APPLIED
from anabranch.telemetry.log import Log


@pytest.mark.parametrize("name", confinement.ARCHITECTURES)
def test_each_architecture_has_a_number_for_every_call(name: str) -> None:
    numbers = confinement.ARCHITECTURES[name].numbers
    assert len(set(numbers.values())) == len(numbers)
    missing = {*confinement.CALLS.split(), *confinement.OWN_CALLS, "capset"} ^ numbers.keys()
    assert missing == (set() if name == "x86_64" else {"poll"})


@pytest.mark.parametrize("name", confinement.ARCHITECTURES)
def test_the_numbers_of_system_calls_are_those_that_libseccomp_knows(name: str) -> None:
    """It knows them for every architecture. apt and systemd need it, so that nearly every Linux has it."""
    try:
        known = ctypes.CDLL("libseccomp.so.2").seccomp_syscall_resolve_name_arch
    except OSError:
        pytest.skip("libseccomp is not installed")
    machine = confinement.ARCHITECTURES[name]
    landlock = {
        "landlock_create_ruleset": confinement.LANDLOCK_CREATE_RULESET,
        "landlock_restrict_self": confinement.LANDLOCK_RESTRICT_SELF,
    }
    ours = {**machine.numbers, **landlock}
    assert ours == {call: known(ctypes.c_uint32(machine.audit), call.encode()) for call in ours}


def test_what_the_kernel_refuses_is_reported_and_the_rest_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(confinement, "STEPS", {"network namespace": refused, "no new privileges": lambda: None})
    assert confinement.confine() == {
        "network namespace": "the kernel refuses it (Operation not permitted)",
        "no new privileges": APPLIED,
    }


def test_other_systems_say_that_they_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert set(confinement.confine().values()) == {"Darwin has no such restriction"}


def test_what_could_not_be_applied_is_logged() -> None:
    stream = io.StringIO()
    log = Log(stream, logging.INFO, lambda line: msgspec.json.encode(line).decode())
    log_missing(log, {"network namespace": APPLIED, "own user": "the kernel refuses it"})
    log_missing(log, {"network namespace": APPLIED})
    log.flush()
    [line] = map(msgspec.json.decode, stream.getvalue().splitlines())
    assert line["event"] == "parser_restrictions_missing"
    assert line["restrictions"] == {"own user": "the kernel refuses it"}
