import os
import sys
import threading

import pytest

from anabranch.domain.shares import Limit
from anabranch.policies.fair_threads import FairThreads


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
