"""Whose a session is, for as long as one of its steps runs and for a while after."""

import pytest

from anabranch.app.planner import Planner, StreamStores
from anabranch.app.stream_identity import StreamIdentity
from anabranch.domain.errors import NotFound
from anabranch.domain.model import Context
from anabranch.domain.steps import Cancel, Directive, Expected
from anabranch.planner.services import MemorySessions
from anabranch.testing import FakeSubagent
from support.planner_server import Workbench

TTL_S = 1_800.0
ANN, BOB = StreamIdentity(user="ann"), StreamIdentity(user="bob")


async def test_a_session_stays_its_owners_as_long_as_one_of_its_steps_runs() -> None:
    bench = Workbench({"notes": FakeSubagent()})
    sessions = MemorySessions(bench.clock)
    planner = Planner(
        StreamStores("w", bench.memory, sessions),
        bench.coordinator,
        ttl_s=TTL_S,
        client_bytes=2**20,
        streaming=True,
        wall=bench.clock.monotonic,
    )
    context = Context(correlation_id="c", deadline=1e9)

    def step(name: str) -> Directive:
        expected = Expected(key="notes", result_key="notes", deadline_ms=86_400_000)
        return Directive(session_id="s", plan_step_id=name, expected=(expected,))

    await planner.begin(step("long"), context, ANN)
    for _ in range(10):
        await bench.advance(TTL_S / 2)
        await planner.tend()
        with pytest.raises(NotFound):
            await planner.begin(step("other"), context, BOB)
    await planner.tell(ANN, "s", "long", Cancel())
    await bench.advance(2 * TTL_S)
    await planner.tend()
    created, _ = await planner.begin(step("other"), context, BOB)
    assert created
    await planner.drain(0)
