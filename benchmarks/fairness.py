"""python -m benchmarks.fairness: what one caller's attacks cost another caller, before and while they last."""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import msgspec
import psutil

from benchmarks.overload import percentile
from benchmarks.room import OVER
from benchmarks.servers import ROOT, Server, on_terminate_as_on_interrupt, serving, upstream

RESULT = Path(__file__).parent / "results" / "fairness.json"
PLOT = RESULT.with_suffix(".png")
# What must hold while an attack lasts: the other caller's p99 is at most twice that before it, or so much more.
MOST_TIMES = 2.0
MOST_MORE_MS = 100.0
WARMING = 90
# What a request or an upload counts as that fails, or takes longer.
FAILED_S = 60.0

ENV = {
    "AGGREGATOR_TRUSTED_PROXIES": '["127.0.0.1"]',
    "AGGREGATOR_RATE_LIMIT": "0",
    "AGGREGATOR_ENDPOINT_ALLOWLIST_PUBLIC": "true",
    "AGGREGATOR_LOG_LEVEL": "ERROR",
}
MB = 1_000_000
TEXT = "The bridge over the river Irwell was painted by Ada in the spring of 1851. "


class Attack:
    """A hostile client. Its requests come from an address of its own, with its own key if it has one."""

    def __init__(self, url: str, space: str, key: str) -> None:
        self.url = url
        self.space = space
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), headers=_headers(key, "203.0.113.7"), timeout=_no_timeout()
        )
        self.authority = url.removeprefix("http://")
        self._key = key
        self._tasks: set[asyncio.Task[Any]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def send(self, method: str, path: str, body: Any = None) -> int:
        with suppress(aiohttp.ClientError, OSError):
            async with self.session.request(method, self.url + path, json=body) as response:
                await response.read()
                return response.status
        return 0

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        async with self.session.request(method, self.url + path, json=body) as response:
            return await response.json()

    async def at_once(self, sending: Sequence[Awaitable[Any]], most: int = 64) -> list[Any]:
        free = asyncio.Semaphore(most)

        async def one(work: Awaitable[Any]) -> Any:
            async with free:
                return await work

        return list(await asyncio.gather(*map(one, sending)))

    def keep(self, work: Callable[[], Awaitable[Any]], times: int = 1) -> None:
        """So many clients that do this again and again, until the attack ends."""

        async def again() -> None:
            while True:
                if await work() not in (200, 201, 202):
                    await asyncio.sleep(0.05)

        for _ in range(times):
            self._tasks.add(asyncio.ensure_future(again()))

    async def raw(self, head: str, body: bytes = b"") -> None:
        """A request on a connection of its own, from which nothing is read."""
        host, port = self.authority.split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        named = "".join(f"{name}: {value}\r\n" for name, value in _headers(self._key, "203.0.113.7").items())
        writer.write(f"{head}\r\nHost: {host}\r\n{named}\r\n".encode() + body)
        self._writers.append(writer)
        self._readers = [*getattr(self, "_readers", []), reader]

    async def ingest(self, collection: str, *sources: dict[str, Any]) -> str:
        body = {"collection_id": collection, "documents": [{"source": source} for source in sources]}
        return str((await self.call("POST", "/v1/ingest", body)).get("job_id", ""))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for writer in self._writers:
            writer.close()
        await self.session.close()


# --- the attacks; each returns when it is at its height


async def steps(attack: Attack) -> None:
    """10,000 planner steps that nobody ends."""
    await attack.at_once([_step(attack, "many", number) for number in range(10_000)])


async def payloads(attack: Attack) -> None:
    """255 MB of payloads in planner steps."""
    text = "x" * 500_000
    await attack.at_once([_step(attack, "large", number) for number in range(510)])
    path = "/planner/sessions/large/steps/{}/subagents/notes/events"
    body = {"status": "partial", "revision": 1, "payload": {"text": text}}
    await attack.at_once([attack.send("POST", path.format(number), body) for number in range(510)], most=4)


async def dripping_urls(attack: Attack) -> None:
    """1,000 documents at addresses that send a byte a second."""
    port = await _dripping()
    sources = [{"type": "url", "content": f"http://127.0.0.1:{port}/{number}"} for number in range(1_000)]
    for start in range(0, 1_000, 100):
        await attack.ingest("theirs", *sources[start : start + 100])


async def slow_pdfs(attack: Attack) -> None:
    """PDFs of 2.5 KB, each of which takes a parser seconds."""
    for number in range(8):
        form = aiohttp.FormData({"collection_id": "theirs"})
        form.add_field("files", slow_pdf(number), filename=f"slow-{number}.pdf", content_type="application/pdf")
        async with attack.session.post(f"{attack.url}/v1/ingest", data=form) as response:
            await response.read()


async def long_questions(attack: Attack) -> None:
    """300 questions of 9,900 characters, all the time."""
    query = " ".join(f"Which{number} bridge" for number in range(2_000))[:9_900]
    number = count()
    attack.keep(lambda: attack.send("POST", "/v1/query", {"query": f"{next(number)} {query}"[:9_900]}), 300)
    await asyncio.sleep(2)


async def unfinished_uploads(attack: Attack) -> None:
    """20 uploads of 60 MB that stop after the half."""
    half = bytes(30 * MB)
    for _ in range(20):
        await attack.raw(f"POST /v1/ingest HTTP/1.1\r\nContent-Length: {60 * MB}", half)
    await asyncio.sleep(2)


async def large_documents(attack: Attack) -> None:
    """16 readers of a document of 19 MB, again and again."""
    page = await attack.call("GET", "/v1/documents?collection=theirs&limit=1000")
    large = max(page["documents"], key=lambda one: one["size_bytes"] if "size_bytes" in one else one.get("size", 0))
    attack.keep(lambda: attack.send("GET", f"/v1/documents/{large['id']}"), 16)
    await asyncio.sleep(2)


async def permission_changes(attack: Attack) -> None:
    """3,000 changes of permissions, and then more of them."""
    page = await attack.call("GET", "/v1/documents?collection=theirs&limit=1")
    path, number = f"/v1/documents/{page['documents'][0]['id']}", count()

    def change() -> Awaitable[int]:
        users = [f"user-{next(number)}"]
        return attack.send("PATCH", path, {"permissions": {"visibility": "private", "allowed_users": users}})

    await attack.at_once([change() for _ in range(3_000)], most=16)
    attack.keep(change, 4)


async def keyless_chats(attack: Attack) -> None:
    """Chats without a key, of many addresses, to a model that takes a minute."""
    url = f"http://127.0.0.1:{await _dripping()}"
    model = {"url": url, "slug": "sloth", "name": "Sloth", "owner_username": "bench"}
    body = {"prompt": "Why?", "model": model, "data_sources": []}

    async def chat(number: int) -> None:
        headers = {"X-Forwarded-For": f"198.51.{number // 250}.{number % 250}"}
        with suppress(aiohttp.ClientError, OSError):
            async with attack.session.post(f"{attack.url}/api/v1/chat", json=body, headers=headers) as response:
                await response.read()

    for number in range(600):
        attack._tasks.add(asyncio.ensure_future(chat(number)))
    await asyncio.sleep(3)


ATTACKS: dict[str, Callable[[Attack], Awaitable[None]]] = {
    "10,000 planner steps": steps,
    "255 MB of step payloads": payloads,
    "1,000 dripping URLs": dripping_urls,
    "PDFs of 2.5 KB that parse for seconds": slow_pdfs,
    "300 long questions": long_questions,
    "20 unfinished uploads": unfinished_uploads,
    "16 readers of a 19 MB document": large_documents,
    "3,000 permission changes": permission_changes,
    "600 chats without a key": keyless_chats,
}
WITHOUT_A_KEY = {"600 chats without a key"}


def slow_pdf(number: int, levels: int = 7, times: int = 9) -> bytes:
    """Forms that draw forms, nine times each."""
    draws, font = b"/X Do " * times, b"/Font << /F << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >>"
    drawn = [(draws, b"/XObject << /X %d 0 R >>" % (level + 6)) for level in range(levels)]
    forms = [_form(content, resources) for content, resources in (*drawn, (b"BT /F 9 Tf (x) Tj ET", font))]
    page = (
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 9 9] /Contents 4 0 R /Resources << /XObject << /X 5 0 R >> >> >>"
    )
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>", page]
    objects += [b"<< /Length %d >> stream\n%b\nendstream" % (len(draws), draws), *forms]
    body, table = b"%%PDF-1.4 %d\n" % number, b"0000000000 65535 f \n"
    for at, one in enumerate(objects, 1):
        table += b"%010d 00000 n \n" % len(body)
        body += b"%d 0 obj\n%b\nendobj\n" % (at, one)
    size = len(objects) + 1
    end = b"xref\n0 %d\n%btrailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF"
    return body + end % (size, table, size, len(body))


def _form(content: bytes, resources: bytes) -> bytes:
    head = b"<< /Type /XObject /Subtype /Form /BBox [0 0 9 9] /Resources << %b >> /Length %d >>"
    return head % (resources, len(content)) + b" stream\n" + content + b"\nendstream"


async def _dripping() -> int:
    """The port of a server that sends a byte a second, whatever it is asked."""

    async def drip(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 100000\r\n\r\n")
        with suppress(OSError, asyncio.CancelledError):  # the task is nobody's: an error would be printed at the end
            while not writer.is_closing():
                writer.write(b"a")
                await writer.drain()
                await asyncio.sleep(1)

    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    port: int = server.sockets[0].getsockname()[1]
    return port


async def _step(attack: Attack, session: str, number: int) -> int:
    body = {"plan_step_id": str(number), "expected_subagents": [{"key": "notes", "deadline_ms": 86_400_000}]}
    return await attack.send("POST", f"/planner/sessions/{session}/steps", body)


# --- the other caller


class Other:
    """A caller that asks a model and its own small collection, and looks at its documents."""

    def __init__(self, url: str, space: str, key: str) -> None:
        self.url = url
        self._session = aiohttp.ClientSession(headers=_headers(key, "192.0.2.9"), timeout=_no_timeout())
        self.failed = 0
        model = {"url": space, "slug": "scribe", "name": "Scribe", "owner_username": "bench"}
        source = {"url": space, "slug": "source-1", "name": "Source", "owner_username": "bench"}
        chat = {"prompt": "What is new?", "model": model, "data_sources": [source]}
        query = {"query": "Who painted the bridge in the spring?", "collections": ["mine"]}
        chatting, asking = ("chat", "POST", "/api/v1/chat", chat), ("question", "POST", "/v1/query", query)
        listing = ("read", "GET", "/v1/documents?collection=mine&limit=1", None)
        looking = ("read", "GET", "/v1/collections/mine", None)
        self._requests: list[tuple[str, str, str, Any]] = [*[chatting, listing, chatting, looking] * 2, asking]

    async def took_ms(self, requests: int) -> dict[str, list[float]]:
        """The times of all requests, and of each kind."""
        found: dict[str, list[float]] = {"all": [], **{kind: [] for kind, *_ in self._requests}}
        for number in range(requests):
            kind, method, path, body = self._requests[number % len(self._requests)]
            took = await self._timed(self._answered(method, path, body))
            found["all"].append(took)
            found[kind].append(took)
        return found

    async def ingested_ms(self, number: int) -> float:
        """From the upload of a small document until it can be found."""
        return await self._timed(self._ingested(f"{TEXT} Note {number}, {time.perf_counter()}."))

    async def _timed(self, work: Awaitable[None]) -> float:
        began = time.perf_counter()
        try:
            async with asyncio.timeout(FAILED_S):
                await work
        except (aiohttp.ClientError, OSError, RuntimeError) as error:
            if not self.failed:
                print(f"[{error!r}]", file=sys.stderr)
            self.failed += 1
            return FAILED_S * 1000
        return (time.perf_counter() - began) * 1000

    async def _answered(self, method: str, path: str, body: Any) -> Any:
        headers = {"Cache-Control": "no-cache"}
        async with self._session.request(method, self.url + path, json=body, headers=headers) as response:
            if response.status not in (200, 202):
                raise RuntimeError(f"{method} {path}: {response.status} {await response.text()}")
            return await response.json()

    async def _ingested(self, text: str) -> None:
        body = {"collection_id": "mine", "documents": [{"source": {"type": "text", "content": text}}]}
        job = (await self._answered("POST", "/v1/ingest", body))["job_id"]
        while (await self._answered("GET", f"/v1/ingest/{job}", None))["status"] not in OVER:  # noqa: ASYNC110  from outside
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        await self._session.close()


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one attack, in ms."""

    requests: int
    attack_s: float
    failed: int
    before: dict[str, float]
    during: dict[str, float]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The medians of all runs: the p99 of all requests and of each kind, and the median until a document is found."""

    before: dict[str, float]
    during: dict[str, float]

    @property
    def holds(self) -> bool:
        return all(_holds(before, self.during[kind]) for kind, before in self.before.items())


def _holds(before: float, during: float) -> bool:
    return during <= max(MOST_TIMES * before, before + MOST_MORE_MS)


def _headers(key: str, address: str) -> dict[str, str]:
    sent = {"X-Forwarded-For": address}
    return {**sent, "Authorization": f"Bearer {key}"} if key else sent


def _no_timeout() -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=None)


@asynccontextmanager
async def attacked(name: str, url: str, space: str, key: str) -> AsyncIterator[float]:
    """An attack in a process of its own; yields once it is at its height, after so many seconds."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.fairness", "--attack", name]
    env = {**os.environ, "FAIRNESS": json.dumps([url, space, "" if name in WITHOUT_A_KEY else key])}
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=env, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(300):
            if not await process.stdout.readline():
                raise RuntimeError(f"The attack {name!r} failed.")
        yield time.perf_counter() - began
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        await process.wait()


async def _attack(name: str) -> None:
    url, space, key = json.loads(os.environ["FAIRNESS"])
    attack, ended = Attack(url, space, key), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    try:
        await ATTACKS[name](attack)
        print("ready", flush=True)
        await ended.wait()
    finally:
        await attack.close()


async def measured(
    name: str, server: Server, space: str, keys: tuple[str, str], requests: int, ingests: int
) -> Figures:
    other = Other(server.url, space, keys[0])
    try:
        await other.took_ms(WARMING)
        before = await other.took_ms(requests)
        before_ingest = [await other.ingested_ms(number) for number in range(ingests)]
        async with attacked(name, server.url, space, keys[1]) as attack_s:
            during = await other.took_ms(requests)
            during_ingest = [await other.ingested_ms(ingests + number) for number in range(ingests)]
    finally:
        await other.close()
    return Figures(
        requests=requests,
        attack_s=round(attack_s, 1),
        failed=other.failed,
        before=_figures(before, before_ingest),
        during=_figures(during, during_ingest),
    )


def _figures(took: dict[str, list[float]], ingests: list[float]) -> dict[str, float]:
    p99 = {kind: round(percentile(times, 0.99), 1) for kind, times in took.items()}
    return {**p99, "ingest": round(median(ingests), 1)}


@contextmanager
def ready(executable: Path | None) -> Iterator[tuple[Server, str, tuple[str, str]]]:
    """A fresh server with two keys, and a collection of each."""
    with TemporaryDirectory(prefix="anabranch-fair-") as folder, upstream() as space:
        program = str(executable or Path(sys.executable).parent / "anabranch")
        env = {**ENV, "AGGREGATOR_DATA_DIR": folder}
        keys = (_key(program, env, "ada"), _key(program, env, "mallory"))
        with serving("anabranch", env, executable) as server:
            asyncio.run(_fill(server, keys))
            yield server, space.url, keys


def _key(program: str, env: dict[str, str], user: str) -> str:
    command = [program, "keys", "create", "--user", user, "--json"]
    made = subprocess.run(command, env={**os.environ, **env}, capture_output=True, check=True)
    return str(json.loads(made.stdout)["secret"])


async def _fill(server: Server, keys: tuple[str, str]) -> None:
    for key, name in zip(keys, ("mine", "theirs"), strict=True):
        filling = Attack(server.url, "", key)
        await filling.call("POST", "/v1/collections", {"name": name})
        texts = [{"type": "text", "content": TEXT * 3}]
        if name == "theirs":
            texts.append({"type": "text", "content": TEXT + " " * (19 * MB) + TEXT})
        job = await filling.ingest(name, *texts)
        while (await filling.call("GET", f"/v1/ingest/{job}"))["status"] not in OVER:  # noqa: ASYNC110  from outside
            await asyncio.sleep(0.05)
        await filling.close()


def draw(findings: dict[str, Finding], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 0.6 * len(findings) + 1.5), layout="constrained")
    names = list(findings)[::-1]
    for shift, label in ((0.2, "before"), (-0.2, "during")):
        values = [getattr(findings[name], label)["all"] for name in names]
        bars = axes.barh([at + shift for at in range(len(names))], values, 0.38, label=f"{label} the attack")
        axes.bar_label(bars, fmt="%.0f", padding=2)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("p99 of another caller's requests, ms")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--ingests", type=int, default=3)
    parser.add_argument("--only", help="the attacks whose name has this text")
    parser.add_argument("--before", type=Path, help="the anabranch of another checkout, instead of this one")
    parser.add_argument("--keep", action="store_true", help="write the figures to benchmarks/results")
    parser.add_argument("--attack", choices=ATTACKS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.attack:
        asyncio.run(_attack(chosen.attack))
        return
    on_terminate_as_on_interrupt()
    names = [name for name in ATTACKS if (chosen.only or "") in name]
    taken: dict[str, list[Figures]] = {name: [] for name in names}
    findings: dict[str, Finding] = {}
    for _ in range(chosen.runs):
        for name in names:
            with ready(chosen.before) as (server, space, keys):
                found = asyncio.run(measured(name, server, space, keys, chosen.requests, chosen.ingests))
            taken[name].append(found)
            print(f"{name}: {found}", flush=True)
        findings = {name: _median(figures) for name, figures in taken.items()}
        if chosen.keep:
            kept = {"medians": findings, "runs": taken}
            RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(kept)) + b"\n")
            draw(findings, PLOT)
    for name, finding in findings.items():
        print(f"{'ok' if finding.holds else 'MISSED'}: {name}: {finding}")
    print(f"load of the machine: {psutil.getloadavg()[0]:.1f}")


def _median(figures: Sequence[Figures]) -> Finding:
    def of(found: Sequence[dict[str, float]]) -> dict[str, float]:
        return {kind: median(one[kind] for one in found) for kind in found[0]}

    return Finding(before=of([one.before for one in figures]), during=of([one.during for one in figures]))


if __name__ == "__main__":
    main()
