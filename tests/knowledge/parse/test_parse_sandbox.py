"""A bad file takes down nothing but itself."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable

import psutil
import pytest

from anabranch.domain.errors import ShuttingDown
from anabranch.knowledge.model import Parsed, Unprocessable
from anabranch.knowledge.parse import ParseLimits, Sandbox

ENDLESS = b"a\n" * 5_000_000  # as Markdown: the better part of a minute
HUGE = b"[" + b"{}," * 5_000_000 + b"{}]"


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what another process does sets no event
        await asyncio.sleep(0.01)


def gone(pid: int | None) -> bool:
    assert pid is not None
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def at_work(sandbox: Sandbox) -> tuple[asyncio.Task[Parsed], psutil.Process]:
    """A file that the child is in the middle of."""
    await sandbox.parse(b"ready", "a.txt")
    child = psutil.Process(sandbox.pid)
    before = child.cpu_times().user
    task = asyncio.create_task(sandbox.parse(ENDLESS, "a.md"))
    await until(lambda: child.cpu_times().user > before + 0.2)
    return task, child


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    made = Sandbox(ParseLimits())
    yield made
    await made.close()


async def test_files_share_a_parser_process(sandbox: Sandbox) -> None:
    assert sandbox.pid is None
    assert (await sandbox.parse(b"# One\n", "a.md")).title == "One"
    first = sandbox.pid
    with pytest.raises(Unprocessable, match="PDF is damaged"):
        await sandbox.parse(b"%PDF-1.7", "a.pdf")
    texts = await asyncio.gather(*(sandbox.parse(b"number %d" % n, "a.txt") for n in range(20)))
    assert [parsed.text for parsed in texts] == [f"number {n}" for n in range(20)]
    assert sandbox.pid == first


async def test_a_large_file_is_parsed(sandbox: Sandbox) -> None:
    text = "The river Aare flows through Bern.\n\n" * 100_000
    parsed = await sandbox.parse(text.encode(), "a.txt")
    assert parsed.text == text
    assert len(parsed.blocks) == 100_000


async def test_invalid_file_names_are_accepted(sandbox: Sandbox) -> None:
    name = os.fsdecode(b"../\xff\xfe/" + b"a" * 5000 + b".md")
    assert (await sandbox.parse(b"# One\n", name, "text/\udcff")).title == "One"


async def test_a_parser_crash_fails_only_its_file(sandbox: Sandbox) -> None:
    task, child = await at_work(sandbox)
    waiting = asyncio.create_task(sandbox.parse(b"next", "a.txt"))
    child.kill()
    with pytest.raises(Unprocessable, match=r"made its parser crash \(signal 9\)"):
        await task
    assert (await waiting).text == "next"


async def test_a_child_that_died_idle_is_replaced(sandbox: Sandbox) -> None:
    await sandbox.parse(b"one", "a.txt")
    assert sandbox.pid is not None
    child = psutil.Process(sandbox.pid)
    child.kill()
    await until(lambda: gone(child.pid))
    await until(lambda: sandbox._child is not None and sandbox._child.returncode is not None)
    assert (await sandbox.parse(b"two", "a.txt")).text == "two"
    assert sandbox.pid != child.pid


async def test_a_file_that_takes_too_long_fails() -> None:
    sandbox = Sandbox(ParseLimits(timeout_s=1.0))
    await sandbox.parse(b"one", "a.txt")
    first = sandbox.pid
    with pytest.raises(Unprocessable, match="took longer than 1 seconds"):
        await sandbox.parse(ENDLESS, "a.md")
    assert gone(first)
    assert (await sandbox.parse(b"two", "a.txt")).text == "two"
    await sandbox.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process's memory")
async def test_a_file_that_needs_too_much_memory_fails() -> None:
    sandbox = Sandbox(ParseLimits(max_memory=256 * 2**20))
    with pytest.raises(Unprocessable, match="needs more than 256 MiB of memory"):
        await sandbox.parse(HUGE, "a.json")
    assert (await sandbox.parse(b"two", "a.txt")).text == "two"
    await sandbox.close()


async def test_a_cancelled_file_leaves_no_reply_behind(sandbox: Sandbox) -> None:
    task, child = await at_work(sandbox)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gone(child.pid)
    assert (await sandbox.parse(b"two", "a.txt")).text == "two"


async def test_cancelling_a_waiting_file_does_not_affect_others(sandbox: Sandbox) -> None:
    first = asyncio.create_task(sandbox.parse(b"one", "a.txt"))
    second = asyncio.create_task(sandbox.parse(b"two", "a.txt"))
    await until(lambda: sandbox.pid is not None)
    second.cancel()
    assert (await first).text == "one"
    pid = sandbox.pid
    assert (await sandbox.parse(b"three", "a.txt")).text == "three"
    assert sandbox.pid == pid


async def test_a_file_over_the_limit_starts_no_process() -> None:
    sandbox = Sandbox(ParseLimits(max_bytes=10))
    with pytest.raises(Unprocessable, match="has 11 bytes, more than the limit of 10 bytes"):
        await sandbox.parse(b"x" * 11, "a.txt")
    assert sandbox.pid is None


async def test_closing_ends_the_child_and_its_file(sandbox: Sandbox) -> None:
    task, child = await at_work(sandbox)
    await sandbox.close()
    assert gone(child.pid)
    with pytest.raises(ShuttingDown):
        await task
    with pytest.raises(ShuttingDown):
        await sandbox.parse(b"late", "a.txt")


PARENT = """
import asyncio, sys
from anabranch.knowledge.parse import ParseLimits, Sandbox

async def main():
    sandbox = Sandbox(ParseLimits())
    await sandbox.parse(b"one", "a.txt")
    print(sandbox.pid, flush=True)
    await sandbox.parse(b"a\\n" * 5_000_000, "a.md") if sys.argv[1] == "busy" else await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("state", ["idle", "busy"])
async def test_the_child_does_not_outlive_its_parent(state: str) -> None:
    if state == "busy" and sys.platform != "linux":
        pytest.skip("elsewhere it ends with its file, or at the time-out")
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT, state, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    child = psutil.Process(int(await parent.stdout.readline()))
    if state == "busy":
        before = child.cpu_times().user
        await until(lambda: child.cpu_times().user > before + 0.2)
    parent.kill()
    await parent.wait()
    await until(lambda: gone(child.pid))
