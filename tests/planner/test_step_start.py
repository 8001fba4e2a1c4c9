"""Steps whose start event could not be written."""

import asyncio

import pytest

from anabranch.domain.errors import StreamUnavailable
from support.planner_server import Workbench, expects, told


async def test_a_push_to_a_step_whose_start_could_not_be_written_is_refused() -> None:
    """Seed 148 of the simulated runs: the push of one that is switched off was accepted, without its payload."""
    bench = Workbench()
    bench.log.faults = [StreamUnavailable("The log is out of reach.")]
    beginning = asyncio.create_task(bench.begin(expects("off"), expects("docs")))
    await bench.until(lambda: len(bench.coordinator._steps))
    pushing = [asyncio.create_task(bench.push(name, "success", {"n": 1})) for name in ("off", "docs")]
    with pytest.raises(StreamUnavailable):
        await beginning
    for push in pushing:
        with pytest.raises(StreamUnavailable):
            await push
    await bench.advance(1.0)
    assert told(await bench.ended()) == [("step_completed", "failed"), ("plan_step_completed", "failed")]
