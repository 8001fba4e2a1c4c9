"""Children that misbehave: what they write, what they do not read, and how they will not go."""

import asyncio
import os
import shlex
import signal
import sys
import time
from pathlib import Path

import anyio
import pytest
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCError, JSONRPCNotification, JSONRPCRequest

from anabranch.domain.errors import FailureKind, UpstreamError
from anabranch.domain.mcp import McpServer
from anabranch.sources.mcp.framing import BURST
from anabranch.sources.mcp.services import McpTiming
from support.mcp_children import DAEMON, TELLS_PID, Child, child, lives

NOTICE = '{"jsonrpc": "2.0", "method": "notifications/hello"}'
READS_ON = "for line in sys.stdin: pass\n"


def writes(*written: str) -> str:
    """A script that writes these Python expressions of bytes and then reads until its input ends."""
    return "".join(f"sys.stdout.buffer.write({one}); sys.stdout.flush()\n" for one in written) + READS_ON


async def ended(started: Child) -> UpstreamError:
    """How the connection ended; nothing comes after that."""
    error = await started.receive()
    assert isinstance(error, UpstreamError)
    with pytest.raises(anyio.EndOfStream):
        await started.receive()
    return error


async def test_stdio_output_that_is_not_a_message_is_ignored() -> None:
    banner = [r"b'Server 1.0 is ready\n\n'", r"b'\xff\xfe \x1b[31mred\n'", r"b'{\"level\": 30}\r\n[]\n'"]
    async with child(writes(*banner, f"b'{NOTICE}\\r\\n'", f"b'{NOTICE}\\nrest'")) as started:
        for _ in range(2):
            message = await started.receive()
            assert isinstance(message.message, JSONRPCNotification)
        await started.pid()
    assert sorted(line for line in started.lines if not line.startswith("pid")) == [
        "Server 1.0 is ready",
        "[]",
        '{"level": 30}',
        "\ufffd\ufffd  [31mred",
    ]


async def test_an_endless_stdio_line_ends_the_connection() -> None:
    async with child("print('x' * 50_000_000)\n" + READS_ON) as started:
        error = await ended(started)
        assert error.message == "The server sent a message of more than 1,000,000 bytes."
        assert error.failure_kind is FailureKind.UNUSABLE


def notice(size: int) -> str:
    """A Python expression: a message in a line of so many bytes."""
    begins, ends = NOTICE[:-1] + ', "params": {"text": "', '"}}'
    return f"b'{begins}' + b'x' * {size - len(begins) - len(ends)} + b'{ends}\\n'"


async def test_the_stdio_line_limit_is_exact() -> None:
    async with child(writes(notice(1000), notice(1001)), max_line=1000) as started:
        assert isinstance(await started.receive(), SessionMessage)
        assert "more than 1,000 bytes" in (await ended(started)).message


async def test_long_stdio_lines_take_linear_time() -> None:
    """8 MB, in the small pieces that a pipe gives."""
    begun_at = time.process_time()
    async with child(writes(notice(8_000_000)), max_line=8_000_000) as started:
        assert isinstance(await started.receive(), SessionMessage)
    assert time.process_time() - begun_at < 1.0


@pytest.mark.parametrize(
    "line", ["b'\\n' * 1000", notice(70) + " * 1000", notice(1_000_000)], ids=["blank", "small", "large"]
)
async def test_too_much_unsolicited_stdio_data_ends_the_connection(line: str) -> None:
    async with child(f"while True: sys.stdout.buffer.write({line})\n", max_line=2_000_000) as started:
        async with asyncio.timeout(20):
            while isinstance(said := await started.receive(), SessionMessage):
                pass
        assert isinstance(said, UpstreamError)
        assert said.message == "The server sends too much unsolicited data."


async def test_a_lone_surrogate_over_stdio_is_replaced() -> None:
    said = NOTICE[:-1] + ', "params": {"text": "cut \\\\ud83d"}}'
    async with child(writes(f"b'{said}\\n'")) as started:
        message = await started.receive()
    assert isinstance(message, SessionMessage)
    assert isinstance(message.message, JSONRPCNotification)
    assert message.message.params == {"text": "cut \ufffd"}


async def test_stderr_without_a_final_newline_is_reported() -> None:
    async with child("sys.stderr.write('no key'); sys.stderr.flush()\n") as started:
        await ended(started)
    assert started.lines[-1] == "no key"


async def test_stderr_is_rate_limited() -> None:
    flood = "for n in range(20_000): print('line', n, file=sys.stderr)\n"
    endless = "print('y' * 5_000_000, file=sys.stderr, flush=True)\n"
    async with child(endless + flood + "time.sleep(0.1); print('later', file=sys.stderr, flush=True)\n") as started:
        await ended(started)
    assert started.lines[1] == "y" * 2_000
    assert BURST <= len(started.lines) < BURST + 100
    assert any("lines dropped" in line for line in started.lines)


async def flooded(started: Child, message: SessionMessage) -> None:
    while True:
        await started.write.send(message)


async def test_a_server_that_never_reads_its_input_is_disconnected() -> None:
    async with child("time.sleep(600)", timing=McpTiming(write_s=0.2)) as started:
        message = SessionMessage(JSONRPCNotification(jsonrpc="2.0", method="x", params={"text": "x" * 60_000}))
        listening = asyncio.create_task(ended(started))
        with pytest.raises(anyio.BrokenResourceError):
            await asyncio.wait_for(flooded(started, message), 5)
        assert (await listening).message == "The server does not read its input."
        os.kill(await started.pid(), signal.SIGKILL)


async def test_a_server_that_closes_its_output_is_disconnected() -> None:
    async with child("os.close(1)\n" + READS_ON) as started:
        assert (await ended(started)).message == "The server closed its output."
        assert lives(await started.pid())
    assert not lives(started.pids[0])


async def test_a_server_that_closes_its_input_is_disconnected() -> None:
    async with child("os.close(0); print('pid', 0, file=sys.stderr, flush=True); time.sleep(600)") as started:
        await started.pid(1)
        await started.write.send(SessionMessage(JSONRPCNotification(jsonrpc="2.0", method="x")))
        assert (await ended(started)).message == "The server closed its input."
        os.kill(started.pids[0], signal.SIGKILL)


@pytest.mark.parametrize(
    ("ends", "sentence"),
    [
        ("sys.exit(4)", "The server's process ended with status 4."),
        ("os.kill(os.getpid(), 9)", "The server's process was ended by SIGKILL."),
        ("sys.exit(250)", "The server's process ended with status 250."),
    ],
    ids=["status", "signal", "high status"],
)
async def test_exit_status_and_signal_of_a_server_are_reported(ends: str, sentence: str) -> None:
    async with child(ends) as started:
        assert (await ended(started)).message == sentence


async def test_a_message_that_cannot_be_encoded_fails_alone() -> None:
    echoes = "for line in sys.stdin: print(line, flush=True)"
    async with child(echoes) as started:
        request = JSONRPCRequest(jsonrpc="2.0", id=7, method="x", params={"text": "\ud800"})
        await started.write.send(SessionMessage(request))
        answer = await started.receive()
        assert isinstance(answer.message, JSONRPCError)
        assert answer.message.id == 7
        await started.write.send(SessionMessage(JSONRPCRequest(jsonrpc="2.0", id=8, method="x")))
        assert (await started.receive()).message.id == 8


async def test_a_server_may_finish_within_the_grace_period(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    async with child(READS_ON + f"time.sleep(0.3); open({str(kept)!r}, 'w').close()") as started:
        await started.pid()
    assert kept.exists()


async def test_servers_that_ignore_signals_are_killed() -> None:
    """Deaf to the end of their input and to SIGTERM, unable to end for all that they have to say, or with a daemon."""
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    stubborn = deaf + "print('pid', 0, file=sys.stderr, flush=True)\nwhile True: time.sleep(600)"
    talkative = deaf + "while True: print('x' * 1000)"
    daemon = DAEMON + READS_ON

    async def seen_off(code: str, pids: int) -> None:
        async with child(code) as started:
            await started.pid(pids - 1)
            begun_at = time.monotonic()
        assert time.monotonic() - begun_at < 3.0
        assert not any(map(lives, filter(None, started.pids)))

    await asyncio.gather(seen_off(stubborn, 2), seen_off(talkative, 1), seen_off(daemon, 2))


async def test_a_server_started_by_a_shell_is_ended() -> None:
    """As with npx: what answers is a grandchild."""
    script = shlex.join([sys.executable, "-c", TELLS_PID + writes(f"b'{NOTICE}\\n'")])
    async with child(McpServer(name="npx", command="sh", args=("-c", f"{script}; true"))) as started:
        assert isinstance(await started.receive(), SessionMessage)
        pid = await started.pid()
    assert not lives(pid)
