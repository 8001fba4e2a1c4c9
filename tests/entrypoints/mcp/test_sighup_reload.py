"""SIGHUP: it is heard by who listens, waits until somebody does, and ends a server only with its terminal."""

import asyncio
import os
import pty
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from anabranch.entrypoints.reload_signal import hold_hangups, hung_up, on_hangup
from support.server_process import READY, Program, started

HUP = signal.SIGHUP


@pytest.fixture
def quiet() -> Iterator[None]:
    """The signal ends nobody who has forgotten to listen, and all is as it was afterwards."""
    before, held = signal.signal(HUP, lambda *_: None), signal.pthread_sigmask(signal.SIG_BLOCK, [])
    yield
    # In this order: one that is still held is let go to nobody.
    signal.pthread_sigmask(signal.SIG_SETMASK, held)
    signal.signal(HUP, before)


class Heard:
    def __init__(self) -> None:
        self.times = 0
        self.running = asyncio.Event()
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def __call__(self) -> None:
        self.times += 1
        self.running.set()
        await self.may_end.wait()

    async def until(self, times: int) -> None:
        async with asyncio.timeout(5):
            while self.times < times:  # noqa: ASYNC110  a signal comes when it comes
                await asyncio.sleep(0)


async def test_each_sighup_calls_the_handler(quiet: None) -> None:
    heard, before = Heard(), signal.getsignal(HUP)
    async with on_hangup(heard):
        for times in (1, 2):
            os.kill(os.getpid(), HUP)
            await heard.until(times)
    assert signal.getsignal(HUP) is before


async def test_sighups_during_a_reload_cause_one_more_reload(quiet: None) -> None:
    heard = Heard()
    heard.may_end.clear()
    async with on_hangup(heard):
        os.kill(os.getpid(), HUP)
        await heard.running.wait()
        for _ in range(3):
            os.kill(os.getpid(), HUP)
        heard.may_end.set()
        await heard.until(2)
        await asyncio.sleep(0)
    assert heard.times == 2


async def test_sighup_before_start_is_handled_and_after_stop_is_held(quiet: None) -> None:
    async def sent() -> None:
        # To this thread: others, of earlier tests, do not hold it.
        signal.pthread_kill(threading.get_ident(), HUP)
        async with asyncio.timeout(5):
            while HUP not in signal.sigpending():  # noqa: ASYNC110  a signal comes when it comes
                await asyncio.sleep(0)

    heard = Heard()
    hold_hangups()
    await sent()
    async with on_hangup(heard):
        await heard.until(1)
    await sent()
    assert hung_up()
    assert not hung_up()
    assert heard.times == 1


async def test_nested_sighup_handlers_are_restored(quiet: None) -> None:
    outer, inner = Heard(), Heard()
    async with on_hangup(outer):
        async with on_hangup(inner):
            os.kill(os.getpid(), HUP)
            await inner.until(1)
        os.kill(os.getpid(), HUP)
        await outer.until(1)
    assert (outer.times, inner.times) == (1, 1)


def test_sighup_handler_is_not_installed_outside_the_main_thread(quiet: None) -> None:
    before, found = signal.getsignal(HUP), []

    async def listen() -> None:
        async with on_hangup(Heard()):
            found.append(signal.getsignal(HUP))

    thread = threading.Thread(target=lambda: asyncio.run(listen()))
    thread.start()
    thread.join()
    assert found == [before]


# --- the server


def lines(program: Program, event: str) -> list[dict[str, Any]]:
    return [line for line in program.log if line["event"] == event]


@pytest.mark.parametrize("workers", [1, 2])
async def test_sighup_reloads_the_configuration_of_a_server(tmp_path: Path, workers: int) -> None:
    file = tmp_path / "anabranch.yaml"
    file.write_text("mcpServers: {first: {command: x, enabled: false}}", encoding="utf-8")
    fixed = ("--host", "127.0.0.1", "--port", "0", "--workers", str(workers))
    async with started(*fixed, home=tmp_path) as program:
        await program.logged("server_started")
        os.killpg(program.pid, HUP)  # nobody is up yet, and nobody dies of it
        await program.logged(READY, times=workers)
        await program.logged("configuration_reloaded", times=workers)
        file.write_text("mcpServers: {second: {command: x, enabled: false}}", encoding="utf-8")
        program.send(HUP)
        await program.logged("configuration_reloaded", times=2 * workers)
        file.write_text("mcpServers: {second: {comand: x}}", encoding="utf-8")
        program.send(HUP)
        await program.logged("configuration_refused", times=workers)
        for _ in range(50):
            os.killpg(program.pid, HUP)
        program.send(signal.SIGTERM)
        assert await program.ended() == 0
    said = [(line["added"], line["removed"]) for line in lines(program, "configuration_reloaded")]
    assert said.count((["second"], ["first"])) == workers
    assert said.count(([], [])) == workers
    reasons = {line["reason"] for line in lines(program, "configuration_refused")}
    assert reasons == {"anabranch.yaml: mcpServers.second has no field 'comand' (did you mean command?)."}
    assert program.text.count(READY) == workers  # nobody was started anew


@asynccontextmanager
async def in_a_terminal(home: Path, workers: int) -> AsyncIterator[tuple[int, psutil.Process]]:
    """`anabranch serve` as a person starts it, and the other end of the terminal."""
    ours, theirs = pty.openpty()
    arguments = ("serve", "--host", "127.0.0.1", "--port", "0", "--workers", str(workers))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", f"import os; os.login_tty({theirs}); import anabranch.__main__", *arguments),
        env={**os.environ, "AGGREGATOR_DATA_DIR": str(home / "data")},
        cwd=home,
        pass_fds=[theirs],
    )
    os.close(theirs)
    found = psutil.Process(process.pid)
    try:
        yield ours, found
    finally:
        with suppress(psutil.NoSuchProcess):  # it ends by itself while we look
            for one in (*found.children(recursive=True), found):
                one.kill()
        await process.wait()


def alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):  # it may end between the two
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_server_ends_when_its_terminal_closes(tmp_path: Path, workers: int) -> None:
    async with in_a_terminal(tmp_path, workers) as (terminal, process):
        text = b""
        while text.count(READY.encode()) < workers:
            text += await asyncio.to_thread(os.read, terminal, 65_536)
        family = [process, *process.children(recursive=True)]
        os.close(terminal)
        async with asyncio.timeout(15):
            while any(map(alive, family)):  # noqa: ASYNC110  nobody tells
                await asyncio.sleep(0.02)
