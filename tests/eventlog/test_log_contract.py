"""The log in memory keeps what every log promises."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from anabranch.eventlog.memory import MemoryLog
from anabranch.testing import ManualClock
from support.event_log_contract import Bench, Benches, LogContract, LogSettings

USUAL = LogSettings()


def memory_log(clock: ManualClock, settings: LogSettings) -> MemoryLog:
    return MemoryLog(
        clock=clock, worker="here", **{name: getattr(settings, name) for name in settings.__struct_fields__}
    )


@pytest.fixture
def benches() -> Benches:
    @asynccontextmanager
    async def bench(settings: LogSettings = USUAL) -> AsyncIterator[Bench]:
        clock = ManualClock(1_000.0)
        log = memory_log(clock, settings)

        async def advance(seconds: float) -> None:
            clock.advance(seconds)

        yield Bench(writer=log, reader=log, advance=advance, settings=settings)

    return bench


class TestMemoryLog(LogContract):
    pass
