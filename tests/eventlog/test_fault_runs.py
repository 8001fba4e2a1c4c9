"""Real servers with three of the fifty faults of `make soak`: Redis frozen, Redis emptied, a worker killed."""

from pathlib import Path

import pytest

from support.fault_run import Outing
from support.worker_fleet import fleet

SEEDS = {16: ["worker"], 6: ["blink"], 7: ["reboot"]}


@pytest.mark.timeout(180)
async def test_clients_of_several_workers_see_one_stream_to_its_end_despite_faults(tmp_path: Path) -> None:
    async with fleet(tmp_path, workers=(2,)) as there:
        for seed, troubles in SEEDS.items():
            outing = Outing(there, seed, troubles)
            wrong = await outing.run()
            assert not wrong, f"seed {seed}, {troubles}: {wrong[:5]}"
            assert outing.figures["applied"] > 10
        assert there.complaints == []
