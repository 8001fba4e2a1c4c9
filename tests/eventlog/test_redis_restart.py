"""A worker that starts together with Redis, and does not know which streams there were before."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.domain.errors import Conflict, NotFound
from anabranch.testing.contracts.event_log import entry
from support.shared_log import Wire, worker
from support.valkey_server import Valkey, running_valkey

PLENTY = 1_000

pytestmark = pytest.mark.xdist_group("fresh-workers")


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Valkey]:
    with running_valkey(tmp_path) as started:
        yield started


async def test_a_new_worker_waits_for_restores_after_a_restart_of_redis(mortal: Valkey) -> None:
    """Seed 230 of the runs with real processes: clients were told 404, and left."""
    async with Wire(mortal.port) as wire, worker(wire.url, name="a") as owner:
        token = await owner.log.open("s", identity="")
        await owner.log.append("s", token, [entry("a")])
        wire.become("cut")
        mortal.kill()
        mortal.start()
        async with worker(mortal.url, name="b") as fresh, worker(mortal.url, name="c") as another:
            reading = asyncio.create_task(fresh.log.read("s", 0, PLENTY))
            opening = asyncio.create_task(another.log.open("s", identity=""))
            wire.become("open")
            assert (await reading).head > 0
            with pytest.raises(Conflict):
                await opening
            with pytest.raises(NotFound):
                await fresh.log.read("never", 0, PLENTY)
