"""The log in memory keeps what every log promises."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from anabranch.domain.eventlog import LogLimits
from anabranch.eventlog.memory import MemoryLog
from anabranch.testing import ManualClock
from anabranch.testing.contracts.event_log import EventLogContract, LogCase, OpenCase


def memory_log(clock: ManualClock, limits: LogLimits) -> MemoryLog:
    return MemoryLog(clock=clock, worker="here", limits=limits)


@pytest.fixture
def open_case() -> OpenCase:
    @asynccontextmanager
    async def opened(limits: LogLimits) -> AsyncIterator[LogCase]:
        clock = ManualClock(1_000.0)
        log = memory_log(clock, limits)

        async def advance(seconds: float) -> None:
            clock.advance(seconds)

        yield LogCase(writer=log, reader=log, advance=advance, limits=limits)

    return opened


class TestMemoryLog(EventLogContract):
    pass
