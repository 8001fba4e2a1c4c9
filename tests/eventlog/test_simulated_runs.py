"""Runs that are drawn by lot, within one process: nothing that clients see or producers are told contradicts another.

To see a run again: `simulated(seed)` of simulation.py."""

import sys
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import pytest

from anabranch.domain.eventlog import Entry, Page
from anabranch.eventlog.memory import MemoryLog
from anabranch.eventlog.reader import StreamReader
from support.manual_time import Stuck
from support.stream_simulation import simulated

RUNS = 100
SHARE = 10
SOAK_RUNS = 1_000
# What must have happened for a run to prove anything.
HAPPENED = (
    *("cuts", "pauses", "restarts", "resets", "let go", "left out", "heartbeats"),
    *("push duplicate", "push superseded", "push late", "push completed", "push 413", "push 503"),
)


def played(seeds: Iterable[int]) -> Counter[str]:
    """What happened in all of them; a fault names its seed."""
    figures: Counter[str] = Counter()
    for seed in seeds:
        try:
            outcome = simulated(seed)
        except Stuck:
            pytest.fail(f"seed {seed}: somebody waits for ever")
        assert not outcome.faults, f"seed {seed}: {outcome.faults[:5]}"
        figures.update(outcome.figures)
    return figures


@pytest.mark.parametrize("share", range(RUNS // SHARE))
def test_simulated_runs_have_consistent_histories(share: int) -> None:
    figures = played(range(share * SHARE, (share + 1) * SHARE))
    assert figures["events"] > 100
    assert figures["cuts"] > 5
    assert figures["push 202"] > 50


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_thousand_simulated_runs_have_consistent_histories() -> None:
    figures = played(range(1_000, 1_000 + SOAK_RUNS))
    sys.stderr.write(f"\n{SOAK_RUNS} runs: {dict(sorted(figures.items()))}\n")
    assert all(figures[what] >= SOAK_RUNS / 20 for what in HAPPENED), figures


def test_the_simulation_finds_a_reader_that_skips_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = StreamReader._next_batch

    async def skipping(reader: StreamReader) -> Page | None:
        batch = await taken(reader)
        if batch is not None and len(batch.entries) > 7:
            return msgspec.structs.replace(batch, entries=(*batch.entries[:3], *batch.entries[4:]))
        return batch

    monkeypatch.setattr(StreamReader, "_next_batch", skipping)
    assert any("was never delivered" in fault for seed in range(SHARE) for fault in simulated(seed).faults)


def test_the_simulation_finds_acknowledged_entries_that_were_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    append = MemoryLog.append

    async def forgetting(log: MemoryLog, stream: str, token: str, entries: Sequence[Entry]) -> Sequence[int]:
        kept = [entry for entry in entries if entry.partial or not entry.key.startswith("subagent_result")]
        places = iter(await append(log, stream, token, kept))
        return [next(places) if entry in kept else 1_000_000 for entry in entries]

    monkeypatch.setattr(MemoryLog, "append", forgetting)
    assert any("is lost" in fault for seed in range(SHARE) for fault in simulated(seed).faults)


def test_a_simulation_is_reproducible_from_its_seed() -> None:
    assert simulated(7) == simulated(7)
