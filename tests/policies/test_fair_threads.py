import asyncio
import os
import sys
import threading
from collections.abc import Callable

import pytest

from anabranch.configuration.settings import Settings
from anabranch.domain.shares import Claimant, Limit, claimant
from anabranch.policies.fair_threads import FairThreads
from anabranch.policies.limits import limits_of


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere priorities are those of processes")
async def test_threads_that_compute_have_a_lower_priority_than_the_event_loop() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    here = niceness()
    threads = FairThreads(Limit(name="computations", description="calls at once", total=1), niceness=3)
    try:
        assert await threads.run(niceness) == min(here + 3, 19)
        assert niceness() == here
    finally:
        threads.close()


async def test_a_caller_with_long_work_leaves_a_thread_to_others() -> None:
    threads = FairThreads(limits_of(Settings(computing_threads=1))["computations"])
    ended = threading.Event()

    async def run(name: str, work: Callable[[], object]) -> None:
        claimant.set(Claimant(name=name))
        await threads.run(work)

    async with asyncio.TaskGroup() as tasks, asyncio.timeout(10):
        long = [tasks.create_task(run("mallory", ended.wait)) for _ in range(3)]
        await asyncio.sleep(0)
        await tasks.create_task(run("ada", lambda: None))
        assert not any(one.done() for one in long)
        ended.set()
    threads.close()
