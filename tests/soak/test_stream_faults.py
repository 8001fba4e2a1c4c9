"""Planner steps on real servers while Redis is frozen, killed and restarted, workers are killed, and lines are cut.

To see a run again: its seed stands in what it complains of; all that a run does is drawn from it, but not when."""

import random
import sys
from collections import Counter
from pathlib import Path

import pytest

from support.fault_run import LOSING, Outing
from support.worker_fleet import Fleet, fleet

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

KINDS = ("freeze", "freeze", "restart", "restart", "cut", "stall", "pause", "worker", "worker")


def troubles(seed: int, kinds: tuple[str, ...], *, on_disk: bool) -> list[str]:
    """A Redis that forgets everything when nobody else has it either is the end of it: that is for another test."""
    chance = random.Random(-seed)
    drawn = [chance.choice(kinds) for _ in range(chance.choice((1, 2, 3)))]
    return drawn if on_disk else sorted(drawn, key=LOSING.__contains__)


async def gone_through(there: Fleet, seeds: range, kinds: tuple[str, ...]) -> None:
    figures: Counter[str] = Counter()
    for seed in seeds:
        outing = Outing(there, seed, troubles(seed, kinds, on_disk=there.on_disk))
        wrong = await outing.run()
        assert not wrong, f"seed {seed}, {outing.troubles}: {wrong[:5]}"
        figures.update(outing.figures)
    figures.update(there.figures)
    figures["connections"] = sum(proxy.accepted for proxy in there.proxies)
    sys.stderr.write(f"\n{len(seeds)} runs: {dict(sorted(figures.items()))}\n")
    assert there.complaints == []


async def test_two_workers_of_one_server(tmp_path: Path) -> None:
    async with fleet(tmp_path, workers=(2,)) as there:
        await gone_through(there, range(20), KINDS)


async def test_two_servers(tmp_path: Path) -> None:
    async with fleet(tmp_path, workers=(1, 1)) as there:
        await gone_through(there, range(20, 35), KINDS[:-2])


async def test_a_redis_that_keeps_what_it_had(tmp_path: Path) -> None:
    async with fleet(tmp_path, workers=(2,), on_disk=True) as there:
        await gone_through(there, range(35, 50), KINDS)
