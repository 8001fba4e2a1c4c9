"""What a document that has taken over its parser can do: nothing but answer."""

import io
import platform
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import docx
import pytest
import pytest_asyncio

from anabranch.knowledge.model import Unprocessable
from anabranch.knowledge.parse import ParseLimits, Sandbox, parse, restrictions
from anabranch.knowledge.parse.confinement import APPLIED, STEPS
from anabranch.knowledge.records.sqlite import NAME, SqliteDatabase
from support.slow_documents import slow_pdf

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.xdist_group("restrictions"),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these restrictions"),
]

FILTER = "few system calls (seccomp)"
# The parser's own program, in which a document is Python that runs in place of the parsers.
TAKEN_OVER = """
import ctypes, mmap, os, socket, subprocess, sys
import msgspec
from anabranch.knowledge.model import Parsed
from anabranch.knowledge.parse import __main__ as child
from anabranch.knowledge.parse.builder import ParseLimits

def getpid_of_32_bits():
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(b"\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3")  # mov eax, 20; int 0x80; ret
    return ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()

def run(data, filename, limits, media_type):
    try:
        found = eval(data.decode())
    except OSError as error:
        found = type(error).__name__
    return Parsed(text=str(found), blocks=())

child.parse = run
child.main(msgspec.json.decode(sys.argv[1], type=ParseLimits))
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def child() -> AsyncIterator[Sandbox]:
    taken_over = Sandbox(ParseLimits(), ("-c", TAKEN_OVER))
    await taken_over.start()
    if taken_over.restrictions[FILTER] != APPLIED:
        pytest.skip(taken_over.restrictions[FILTER])
    yield taken_over
    await taken_over.close()


async def outcome(child: Sandbox, code: str) -> str:
    return (await child.parse(code.encode(), "a.py")).text


async def test_it_is_the_parser_that_runs_the_code(child: Sandbox) -> None:
    assert await outcome(child, "1 + 1") == "2"
    assert child.restrictions == await restrictions()


@pytest.mark.parametrize(
    "code",
    [
        "socket.socket(socket.AF_INET)",
        "socket.socket(socket.AF_UNIX)",
        "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        "socket.create_connection(('127.0.0.1', {port}))",
        "socket.socketpair()",
        "subprocess.run(['/bin/true'])",
        "os.execv('/bin/true', ['true'])",
        "os.fork()",
        "open('/etc/passwd').read()",
        "open({records!r}, 'rb').read()",
        "open({folder!r} + '/written', 'w')",
        "open('/dev/shm/written', 'w')",
        "os.listdir('/')",
        "os.stat('/')",
        "os.unlink({records!r})",
        "os.mkdir({folder!r} + '/made')",
        "os.memfd_create('program')",
        "os.kill({parent}, 0)",
        "os.kill(1, 0)",
        "os.setuid(0)",
        "open('/proc/%d/mem' % {parent}, 'rb')",
    ],
)
async def test_a_parser_cannot(child: Sandbox, tmp_path: Path, code: str) -> None:
    SqliteDatabase.open(tmp_path).close()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        given = {"records": str(tmp_path / NAME), "folder": str(tmp_path), "parent": "os.getppid()"}
        code = code.format(port=listening.getsockname()[1], **given)
        assert await outcome(child, code) in ("PermissionError", "OSError")
    left = [one.name for one in tmp_path.iterdir()]  # noqa: ASYNC240
    assert NAME in left
    assert [name for name in left if not name.startswith(NAME)] == []


@pytest.mark.parametrize(
    ("alone", "code"),
    [
        ("no files (Landlock)", "open('/etc/passwd').read()"),
        ("no files (Landlock)", "os.listdir('/')"),
        ("no files (Landlock)", "open({folder!r} + '/written', 'w')"),
        ("network namespace", "socket.create_connection(('127.0.0.1', {port}), 5)"),
        ("own user", "open({records!r}, 'rb').read()"),
        ("own user", "open('/proc/%d/mem' % os.getppid(), 'rb')"),
        (FILTER, "open('/etc/passwd').read()"),
    ],
)
async def test_a_restriction_does_its_part_alone(tmp_path: Path, alone: str, code: str) -> None:
    only = f"from anabranch.knowledge.parse import confinement as c; c.STEPS = {{{alone!r}: c.STEPS[{alone!r}]}}"
    sandbox = Sandbox(ParseLimits(), ("-c", f"{only}\n{TAKEN_OVER}"))
    await sandbox.start()
    if (reason := sandbox.restrictions[alone]) != APPLIED:
        await sandbox.close()
        pytest.skip(reason)
    SqliteDatabase.open(tmp_path).close()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        given = {"records": str(tmp_path / NAME), "folder": str(tmp_path), "port": listening.getsockname()[1]}
        assert await outcome(sandbox, code.format(**given)) in ("PermissionError", "OSError")
    await sandbox.close()


@pytest.mark.parametrize(
    ("x86_64", "aarch64", "arguments"),
    [
        pytest.param(101, 117, "0, 1, 0, 0", id="ptrace"),
        pytest.param(425, 425, "8, 0", id="io_uring_setup"),
        pytest.param(250, 219, "0", id="keyctl"),
        pytest.param(321, 280, "0, 0, 0", id="bpf"),
        pytest.param(298, 241, "0, 0, -1, -1, 0", id="perf_event_open"),
        pytest.param(165, 40, "0, 0, 0, 0, 0", id="mount"),
        pytest.param(272, 97, "0x10000000", id="unshare"),
        pytest.param(308, 268, "0, 0", id="setns"),
        pytest.param(323, 282, "0", id="userfaultfd"),
        pytest.param(434, 434, "1, 0", id="pidfd_open"),
        pytest.param(310, 270, "1, 0, 0, 0, 0, 0", id="process_vm_readv"),
        pytest.param(157, 167, "4, 1, 0, 0, 0", id="prctl(PR_SET_DUMPABLE)"),
        pytest.param(435, 435, "0, 0", id="clone3"),
        pytest.param(437, 437, "-100, 0, 0, 0", id="openat2"),
        pytest.param(0x40000000 + 39, 0x40000000 + 172, "0", id="getpid of the x32 ABI"),
    ],
)
async def test_a_parser_is_refused_the_system_call(child: Sandbox, x86_64: int, aarch64: int, arguments: str) -> None:
    number = {"x86_64": x86_64, "aarch64": aarch64}[platform.machine()]
    call = f"libc.syscall({number}, {arguments})"
    code = f"(lambda libc: ({call}, ctypes.get_errno()))(ctypes.CDLL(None, use_errno=True))"
    assert await outcome(child, code) == "(-1, 1)"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="machine code of x86_64")
async def test_a_call_of_another_architecture_ends_the_parser(child: Sandbox) -> None:
    """There, other numbers mean other calls."""
    with pytest.raises(Unprocessable, match=r"signal (31|11)"):
        await outcome(child, "getpid_of_32_bits()")


async def test_the_child_has_none_of_the_parents_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANABRANCH_TEST_SECRET", "hidden")
    sandbox = Sandbox(ParseLimits(), ("-c", TAKEN_OVER))
    found = await outcome(sandbox, "sorted(os.environ)")
    assert "PYTHONPATH" in found
    assert "ANABRANCH_TEST_SECRET" not in found
    await sandbox.close()


async def test_a_parser_ends_itself_with_the_signal_of_its_failure(child: Sandbox) -> None:
    with pytest.raises(Unprocessable, match="signal 6"):
        await outcome(child, "os.abort()")


def letter() -> bytes:
    document = docx.Document()
    document.add_heading("Herons", 1)
    document.add_paragraph("They eat fish.", style="List Bullet")
    file = io.BytesIO()
    document.save(file)
    return file.getvalue()


SAMPLES: Mapping[str, bytes] = {
    "a.pdf": slow_pdf("Herons", depth=1, times=1),
    "a.docx": letter(),
    "a.html": b"<html><h1>Herons</h1><p>They eat fish.</p></html>",
    "a.md": b"# Herons\n\nThey eat *fish* [here](http://example.org) &amp; <b>there</b>.\n\n| a |\n|---|\n| 1 |\n",
    "a.csv": b"bird,food\nheron,fish\n",
    "a.json": b'{"bird": "heron"}',
    "a.jsonl": b'{"bird": "heron"}\n{"bird": "stork"}\n',
    "a.txt": "Reiher essen Fische, über alles.".encode("cp1252"),
    "b.txt": "サギは魚を食べる。".encode("shift_jis"),
    "c.txt": "Цапли едят рыбу.".encode("koi8_r"),
    "d.txt": "Herons eat fish.".encode("utf-16"),
}


async def test_every_format_is_parsed_as_without_restrictions() -> None:
    sandbox = Sandbox(ParseLimits())
    for name, data in SAMPLES.items():
        assert await sandbox.parse(data, name) == parse(data, name, ParseLimits()), name
    await sandbox.close()


async def test_what_is_applied_is_reported() -> None:
    found = await restrictions()
    assert list(found) == list(STEPS)
    # Every kernel that is supported has these.
    for name in ("no capabilities", "no new privileges", "private memory"):
        assert found[name] == APPLIED
