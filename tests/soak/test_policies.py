"""Long runs of the policies: a whole crowd at the limiter, Redis that comes and goes, readers that leave, overload."""

import asyncio
import random
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from anabranch.testing import Space
from support.load_clients import LIMIT, Load, crowd, is_exact
from support.valkey_server import running_valkey

ROOT = Path(__file__).parent.parent.parent
pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

PEOPLE = 200
REACHABLE = "anabranch_redis_reachable"
LOST_S = 0.3
NOISE_S = 0.15


@pytest.mark.parametrize("each", [25, 40])
@pytest.mark.parametrize("workers", [1, 2])
async def test_two_hundred_callers_at_once_are_counted_exactly(
    tmp_path: Path, models_dir: Path, workers: int, each: int
) -> None:
    """One worker counts by itself, two in Redis. Nobody is turned away for want of room: that is another matter."""
    with running_valkey(tmp_path) as valkey:
        settings = {"max_running": "10000", **({"redis_url": valkey.url} if workers > 1 else {})}
        async with crowd(tmp_path, models_dir, people=PEOPLE, workers=(workers,), **settings) as asked:
            for told in (await asked.burst(each)).values():
                is_exact(told)
            read = await asked.metrics()
            assert read.value("anabranch_limiter_total", decision="refused") == PEOPLE * (each - LIMIT)
            assert (asked.complaints(), asked.torn()) == ([], [])


async def test_redis_comes_and_goes(tmp_path: Path, models_dir: Path) -> None:
    """Killed, frozen, and frozen for less than its time, again and again, under two workers that are busy."""
    chance = random.Random(4)
    with running_valkey(tmp_path) as valkey:
        async with crowd(tmp_path, models_dir, people=PEOPLE, workers=(2,), redis_url=valkey.url) as asked:
            load = Load(asked, iter(asked.secrets), every_s=0.012)
            before = await load.send(400)
            async with asked.pulse() as pulse:
                sending = asyncio.create_task(load.send(2_000))
                while not sending.done():
                    if chance.random() < 0.3:
                        valkey.kill()
                        await asyncio.sleep(chance.uniform(0.1, 2))
                        await asyncio.to_thread(valkey.start)
                    else:
                        valkey.freeze()
                        await asyncio.sleep(chance.choice((0.02, 0.1, 0.18, 0.25, 1.5)))
                        valkey.thaw()
                    await asyncio.sleep(chance.choice((0.05, 0.3, 1)))
                told = await sending
            await asked.reads(REACHABLE, 1)
            assert asked.complaints() == []
    # By then a caller may have asked more often than the limit: each process keeps it by itself.
    assert [one for one in (*before, *told) if not one.is_answered and one.status != 429] == []
    usual_s = max(one.took_s for one in before)
    assert max(one.took_s for one in told) < usual_s + max(pulse) + LOST_S + NOISE_S


@pytest.mark.parametrize("mended", ["started", "thawed"])
async def test_no_process_admits_more_than_the_limit_whatever_redis_does(
    tmp_path: Path, models_dir: Path, mended: str
) -> None:
    people = 10
    admitted: Counter[tuple[str, int]] = Counter()
    with running_valkey(tmp_path) as valkey:
        async with crowd(tmp_path, models_dir, people=people, workers=(1, 1), redis_url=valkey.url) as asked:
            ending = time.monotonic() + 15

            async def insist(who: str, at: int) -> None:
                while time.monotonic() < ending:
                    answer = await asked.ask(who=who, at=at)
                    assert answer.status in (200, 429)
                    admitted[who, at] += answer.status == 200
                    await asyncio.sleep(0.1)

            insisting = asyncio.gather(*(insist(who, at) for who in asked.secrets for at in (0, 1)))
            while time.monotonic() < ending - 1:
                (valkey.kill if mended == "started" else valkey.freeze)()
                await asyncio.sleep(0.8)
                await asyncio.to_thread(valkey.start if mended == "started" else valkey.thaw)
                await asyncio.sleep(1.2)
            await insisting
            assert asked.complaints() == []
    assert max(admitted.values()) <= LIMIT
    assert all(sum(admitted[who, at] for at in (0, 1)) >= LIMIT for who in (f"person-{one}" for one in range(people)))


@pytest.mark.parametrize("seed", range(3))
async def test_readers_that_leave_at_any_moment_leave_nothing_behind(
    tmp_path: Path, models_dir: Path, seed: int
) -> None:
    """Many ask the same, so that some leave an answer that others wait for."""
    chance = random.Random(seed)
    async with Space() as space:
        space.model("writer", reply="Refunds take 30 days [1]. " + "word " * 40, chunk_delay_s=0.005)
        settings: Any = {"model_url": space.url, "model_name": "writer", "query_rewriting": "false", "rate_limit": "0"}
        bounds: Any = {"max_running": "30", "max_waiting": "30"}
        async with crowd(tmp_path, models_dir, **settings, **bounds) as asked:

            async def visit() -> int:
                with suppress(TimeoutError, aiohttp.ClientError):
                    async with asyncio.timeout(chance.random() * 0.6):
                        told = await asked.ask(max_tokens=chance.randrange(1, 12), top_k=chance.randrange(1, 4))
                        assert told.is_answered or told.status == 503, told
                        return told.status
                return 0

            ends: Counter[int] = Counter()
            for _ in range(15):
                ends.update(await asyncio.gather(*(visit() for _ in range(50))))
            assert ends[0] > 50
            assert ends[200] > 50
            for gauge in ("anabranch_questions_running", "anabranch_questions_waiting"):
                await asked.reads(gauge, 0)
            await space.wait_for(lambda: all(one.finished or one.disconnected for one in space.requests))
            read = await asked.metrics()
            assert read.value("rag_stream_cancelled_total") > 0
            assert {one.labels["error_code"] for one in read.all("rag_stream_errors_total") if one.value} <= {
                "overloaded"
            }
            assert asked.complaints() == []


@pytest.mark.parametrize("benchmark", ["overload", "cached"])
def test_what_the_benchmarks_promise(benchmark: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{benchmark}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "ok: " in done.stdout
    assert "MISSED" not in done.stdout, done.stdout
