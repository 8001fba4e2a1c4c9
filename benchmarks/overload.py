"""python -m benchmarks.overload: ten times more questions than the bound allows, and what becomes of those admitted."""

import argparse
import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter

import msgspec
import uvloop

from benchmarks.servers import Server, on_terminate_as_on_interrupt, serving, upstream
from benchmarks.wire import Pool, Reply, connect, post, post_head

BOUND = 16
TIMES = 10
MODEL_DELAY_S = 0.1
PAUSE_S = 0.1
ARRIVALS_PER_S = TIMES * BOUND / MODEL_DELAY_S
RESULT = Path(__file__).parent / "results" / "overload.json"

# What must hold: answers a second beside the peak, the slowest of those admitted beside the slowest at capacity, and
# how long it takes to be turned away.
LEAST_GOODPUT = 0.9
MOST_P99 = 2.0
MOST_REJECTED_MS = 50.0


@dataclass(slots=True)
class Burst:
    """What the clients saw."""

    seconds: float = 0.0
    admitted_ms: list[float] = field(default_factory=list)
    rejected_ms: list[float] = field(default_factory=list)
    others: int = 0

    def saw(self, reply: Reply, took_ms: float) -> None:
        if reply.status == 200:
            self.admitted_ms.append(took_ms)
        elif reply.status == 503:
            self.rejected_ms.append(took_ms)
        else:
            self.others += 1


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One load: answers a second, percentiles of those admitted and of those turned away, and the server's CPU."""

    goodput_per_s: float
    admitted_p50_ms: float
    admitted_p99_ms: float
    rejected_per_s: float
    rejected_p99_ms: float
    other_statuses: int
    cpu_share: float


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """A load beyond the bound, beside the one at it; of several runs, the median."""

    goodput_ratio: float
    admitted_p99_ratio: float
    rejected_p99_ms: float
    other_statuses: int

    @property
    def holds(self) -> bool:
        return (
            self.goodput_ratio >= LEAST_GOODPUT
            and self.admitted_p99_ratio <= MOST_P99
            and self.rejected_p99_ms < MOST_REJECTED_MS
            and self.other_statuses == 0
        )


Load = Callable[[Server, bytes, float], Awaitable[Burst]]


def closed(clients: int, pause_s: float = 0.0) -> Load:
    """Everybody asks again as soon as they were answered; who was turned away, after a pause."""

    async def load(server: Server, request: bytes, seconds: float) -> Burst:
        connections = [await connect(server.authority, []) for _ in range(clients)]
        seen, began = Burst(), perf_counter()

        async def client(index: int) -> None:
            await asyncio.sleep(index * MODEL_DELAY_S / clients)  # nobody waits for anybody
            while (sent := perf_counter()) - began < seconds:
                reply = await connections[index].send(request)
                seen.saw(reply, (perf_counter() - sent) * 1000)
                if reply.status == 503:
                    await asyncio.sleep(pause_s)

        await asyncio.gather(*map(client, range(clients)))
        seen.seconds = perf_counter() - began
        for connection in connections:
            connection.close()
        return seen

    return load


def opened(arrivals_per_s: float) -> Load:
    """Questions come at their own pace, whatever became of those before."""

    async def load(server: Server, request: bytes, seconds: float) -> Burst:
        pool, seen, began = Pool(server.authority), Burst(), perf_counter()

        async def ask(due: float) -> None:
            reply = await (await pool.send(request))
            seen.saw(reply, (perf_counter() - due) * 1000)

        async with asyncio.TaskGroup() as group:
            for number in range(round(seconds * arrivals_per_s)):
                due = began + number / arrivals_per_s
                if (early := due - perf_counter()) > 0:
                    await asyncio.sleep(early)
                # Whoever asks late, because this process lags, is not the server's doing.
                group.create_task(ask(perf_counter()))
        seen.seconds = perf_counter() - began
        pool.close()
        return seen

    return load


AT_CAPACITY = closed(BOUND)
BEYOND: dict[str, Load] = {
    f"{TIMES * BOUND} clients, a pause of {PAUSE_S:g} s": closed(TIMES * BOUND, PAUSE_S),
    f"{TIMES * BOUND} clients, no pause": closed(TIMES * BOUND),
    f"{ARRIVALS_PER_S:,.0f} arrivals a second": opened(ARRIVALS_PER_S),
}


def measured(server: Server, request: bytes, load: Load, seconds: float) -> Figures:
    cpu_s = server.cpu_s()
    seen = uvloop.run(_awaited(load(server, request, seconds)))
    cpu_s = server.cpu_s() - cpu_s
    return Figures(
        goodput_per_s=round(len(seen.admitted_ms) / seen.seconds, 1),
        admitted_p50_ms=round(percentile(seen.admitted_ms, 0.5), 1),
        admitted_p99_ms=round(percentile(seen.admitted_ms, 0.99), 1),
        rejected_per_s=round(len(seen.rejected_ms) / seen.seconds, 1),
        rejected_p99_ms=round(percentile(seen.rejected_ms, 0.99), 1),
        other_statuses=seen.others,
        cpu_share=round(cpu_s / seen.seconds, 2),
    )


async def _awaited(load: Awaitable[Burst]) -> Burst:
    return await load


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def compared(pairs: list[tuple[Figures, Figures]]) -> Compared:
    return Compared(
        goodput_ratio=round(median(over.goodput_per_s / at.goodput_per_s for at, over in pairs), 3),
        admitted_p99_ratio=round(median(over.admitted_p99_ms / at.admitted_p99_ms for at, over in pairs), 3),
        rejected_p99_ms=median(over.rejected_p99_ms for _, over in pairs),
        other_statuses=sum(over.other_statuses for _, over in pairs),
    )


def runs(count: int, seconds: float) -> Iterator[dict[str, tuple[Figures, Figures]]]:
    """Each load beyond the bound, right after one at it: the machine may be another one a minute later."""
    with (
        upstream("--model-delay-ms", str(MODEL_DELAY_S * 1000)) as space,
        serving("anabranch", {"AGGREGATOR_MAX_RUNNING": str(BOUND)}) as server,
    ):
        model = {"url": space.url, "slug": "scribe", "name": "Scribe", "owner_username": "bench"}
        body = msgspec.json.encode({"prompt": "What is new?", "model": model, "data_sources": []})
        request = post(post_head(server.authority, "/api/v1/chat"), body)
        measured(server, request, AT_CAPACITY, 1.0)  # a rehearsal
        for _ in range(count):
            yield {
                name: (measured(server, request, AT_CAPACITY, seconds), measured(server, request, load, seconds))
                for name, load in BEYOND.items()
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--keep", action="store_true", help="write the figures to benchmarks/results")
    chosen = parser.parse_args()
    on_terminate_as_on_interrupt()
    taken: list[dict[str, tuple[Figures, Figures]]] = []
    for run in runs(chosen.runs, chosen.seconds):
        taken.append(run)
        for name, (at, over) in run.items():
            print(f"{name}\n  at capacity {at}\n  beyond      {over}", flush=True)
    result = {name: compared([run[name] for run in taken]) for name in BEYOND}
    for name, medians in result.items():
        print(f"{'ok' if medians.holds else 'MISSED'}: {name}: {medians}")
    print(f"load of the machine: {os.getloadavg()[0]:.1f}")
    if chosen.keep:
        kept = {"bound": BOUND, "model_delay_s": MODEL_DELAY_S, "medians": result, "runs": taken}
        RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(kept)) + b"\n")


if __name__ == "__main__":
    main()
