"""Three nodes on one PostgreSQL, with an index each or with three nodes of OpenSearch, while nodes, the database, Redis
and OpenSearch are killed and paused: nothing that was acknowledged is lost or stored twice, and nobody is shown what
others own. ANABRANCH_CLUSTER_S is how long that goes on."""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from anabranch.knowledge.records import keys
from anabranch.knowledge.records.postgres import PostgresDatabase
from support.embedding_server import model_server
from support.opensearch_server import OpenSearchCluster, running_opensearch, why_missing
from support.postgres_server import PostgresServer, running_postgres
from support.server_process import READY, Program, started
from support.settings_collections import embedding
from support.valkey_server import Valkey, running_valkey

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1_500)]

SECONDS = float(os.environ.get("ANABRANCH_CLUSTER_S", "60"))
NODES, PAUSE_S, EVERY_S = 3, 7.0, 4.0
OWNERS = ("ada", "bob")
PATIENCE_S = 90.0
# A paused node answers when it goes on, or its client gives up; then another node is asked.
LONGEST_GAP_S = 40.0
WORDS = ("heron", "otter", "stork", "swan", "crane", "gull", "newt", "toad")


class Cluster:
    """The nodes, and what their clients have seen."""

    def __init__(
        self,
        home: Path,
        postgres: PostgresServer,
        valkey: Valkey,
        index: OpenSearchCluster | None,
        variables: dict[str, str],
        stack: AsyncExitStack,
    ) -> None:
        self.home = home
        self.postgres = postgres
        self.valkey = valkey
        self.index = index
        self.variables = variables
        self._stack = stack
        self.nodes: dict[int, Program] = {}
        self.accepted: dict[str, list[str]] = {owner: [] for owner in OWNERS}
        self.secrets: dict[str, str] = {}
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.gaps: list[float] = []
        self.ended = False

    async def start(self, number: int) -> None:
        home = self.home / f"{number}"
        home.mkdir(exist_ok=True)
        program = await self._stack.enter_async_context(
            started("--host", "127.0.0.1", "--port", "0", home=home, variables=self.variables)
        )
        with suppress(AssertionError, TimeoutError):  # the database may be down: it is started again later
            await program.logged(READY)
            await program.listens()
            self.nodes[number] = program

    async def call(self, owner: str, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Through any node; (0, None) if it did not answer."""
        if not self.nodes:
            return 0, None
        program = random.choice(list(self.nodes.values()))
        headers = {"Authorization": f"Bearer {self.secrets[owner]}", "Cache-Control": "no-cache"}
        timeout = aiohttp.ClientTimeout(total=30)
        try:
            async with (
                aiohttp.ClientSession(headers=headers, timeout=timeout) as session,
                session.request(method, program.url + path, json=body) as response,
            ):
                return response.status, await response.json()
        except (aiohttp.ClientError, TimeoutError, OSError, StopIteration):
            return 0, None


@asynccontextmanager
async def running(home: Path, *, with_opensearch: bool) -> AsyncIterator[Cluster]:
    (home / "postgres").mkdir()
    (home / "valkey").mkdir()
    with (
        running_postgres(home / "postgres", durable=True) as postgres,
        running_valkey(home / "valkey") as valkey,
        running_opensearch(3) if with_opensearch else nullcontext() as index,
    ):
        url = postgres.create_database()
        database = PostgresDatabase.open(url)
        secrets = {owner: database.writing(partial(keys.create, user=owner))[1] for owner in OWNERS}
        database.close()
        async with model_server() as model, AsyncExitStack() as stack:
            variables = {f"AGGREGATOR_{name}": value for name, value in embedding(model).items()} | {
                "AGGREGATOR_DATABASE_URL": url,
                "AGGREGATOR_REDIS_URL": valkey.url,
                "AGGREGATOR_AUTH": "api_key",
                "AGGREGATOR_EVIDENCE": "off",
                "AGGREGATOR_RATE_LIMIT": "0",
                "AGGREGATOR_CALLER_CHANGES": "1000000",
                "AGGREGATOR_LOG_LEVEL": "INFO",
            }
            if index is not None:
                variables["AGGREGATOR_INDEX_URL"] = index.url("soak")
            cluster = Cluster(home, postgres, valkey, index, variables, stack)
            cluster.secrets = secrets
            await asyncio.gather(*map(cluster.start, range(NODES)))
            yield cluster


async def write(cluster: Cluster, owner: str) -> None:
    number = 0
    while not cluster.ended:
        number += 1
        words = " ".join(random.choices(WORDS, k=5))
        text = f"{owner.title()} has seen {words} number{number} of {owner}."
        body = {
            "collection_id": owner,
            "documents": [{"source": {"type": "text", "content": text}, "title": text[:60]}],
        }
        status, found = await cluster.call(owner, "POST", "/v1/ingest", body)
        cluster.counts[f"ingest {status}"] += 1
        assert status in (0, 200, 429, 502, 503), found
        if status == 200:
            cluster.accepted[owner].append(text)
        await asyncio.sleep(0.02)


async def ask(cluster: Cluster, owner: str) -> None:
    other = next(one for one in OWNERS if one != owner)
    answered_at = time.monotonic()
    while not cluster.ended:
        body = {"query": f"Who has seen the {random.choice(WORDS)}?", "top_k": 5}
        status, answer = await cluster.call(owner, "POST", "/v1/query", body)
        cluster.counts[f"query {status}"] += 1
        if status == 200:
            cluster.gaps.append(time.monotonic() - answered_at)
            answered_at = time.monotonic()
            if f"of {other}." in str(answer) or other.title() in str(answer):
                cluster.wrong.append(f"{owner} was shown what {other} owns: {answer}")
        await asyncio.sleep(0.02)


async def disturb(cluster: Cluster) -> None:
    """One disturbance after the other, each ended before the next one begins."""
    until = time.monotonic() + SECONDS
    faults = ["kill node", "pause node", "kill database", "pause database", "stop node", "kill Redis"]
    if cluster.index is not None:
        faults[2:2] = ["kill index", "pause index"]
    while time.monotonic() < until:
        fault = faults.pop(0)
        faults.append(fault)
        cluster.counts[fault] += 1
        await asyncio.sleep(EVERY_S)
        if fault == "kill database":
            await asyncio.to_thread(cluster.postgres.kill)
            await asyncio.sleep(1.0)
            await asyncio.to_thread(cluster.postgres.restart)
        elif fault == "pause database":
            await asyncio.to_thread(cluster.postgres.pause)
            await asyncio.sleep(2.0)
            await asyncio.to_thread(cluster.postgres.resume)
        elif fault == "kill Redis":
            await asyncio.to_thread(cluster.valkey.kill)
            await asyncio.sleep(1.0)
            await asyncio.to_thread(cluster.valkey.start)
        elif fault in ("kill index", "pause index"):
            await disturb_index(cluster, fault)
        else:
            await disturb_node(cluster, fault)
        for number in set(range(NODES)) - cluster.nodes.keys():
            await cluster.start(number)


async def disturb_index(cluster: Cluster, fault: str) -> None:
    """Each node in turn, so also the one that manages the others."""
    assert cluster.index is not None
    node = cluster.index.nodes[(cluster.counts[fault] - 1) % len(cluster.index.nodes)]
    if fault == "pause index":
        node.signal(signal.SIGSTOP)
        await asyncio.sleep(PAUSE_S)
        node.signal(signal.SIGCONT)
        return
    await asyncio.to_thread(node.kill)
    await asyncio.sleep(2.0)
    node.start()
    await asyncio.to_thread(cluster.index.wait_for, len(cluster.index.nodes))


async def disturb_node(cluster: Cluster, fault: str) -> None:
    number = random.choice(list(cluster.nodes))
    program = cluster.nodes[number]
    if fault == "pause node":
        family = program.family()
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        await asyncio.sleep(PAUSE_S)
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.resume()
        return
    del cluster.nodes[number]
    if fault == "stop node":
        program.send(signal.SIGTERM)
        await program.ended(within_s=60)
    else:
        for process in program.family():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        await program.ended()


async def listed(cluster: Cluster, owner: str) -> list[str]:
    titles, cursor = [], ""
    while True:
        status, page = await cluster.call(owner, "GET", f"/v1/documents?collection={owner}&limit=1000{cursor}")
        assert status == 200, page
        titles += [one["title"] for one in page["documents"]]
        if not page.get("next_cursor"):
            return titles
        cursor = f"&cursor={page['next_cursor']}"


SIZES = [
    pytest.param(False, id="replicated"),
    pytest.param(True, id="cluster", marks=pytest.mark.skipif(why_missing() is not None, reason=str(why_missing()))),
]


@pytest.mark.parametrize("with_opensearch", SIZES)
async def test_nothing_is_lost_while_everything_is_killed_in_turn(tmp_path: Path, with_opensearch: bool) -> None:
    async with running(tmp_path, with_opensearch=with_opensearch) as cluster:
        for owner in OWNERS:
            status, found = await cluster.call(owner, "POST", "/v1/collections", {"name": owner})
            assert status == 201, found
        tasks = [asyncio.create_task(work(cluster, owner)) for owner in OWNERS for work in (write, ask)]
        try:
            await disturb(cluster)
        finally:
            cluster.ended = True
            await asyncio.gather(*tasks)
        assert cluster.wrong == []
        for owner in OWNERS:
            await all_stored_once(cluster, owner)
            await all_found(cluster, owner)
        print(dict(cluster.counts))  # noqa: T201  pytest shows it with -s
        print(f"longest times between two answers: {[round(gap, 1) for gap in sorted(cluster.gaps)[-8:]]} s")  # noqa: T201
        assert max(cluster.gaps) < LONGEST_GAP_S


async def all_found(cluster: Cluster, owner: str) -> None:
    """A sample of what was acknowledged, each by its number."""
    accepted = cluster.accepted[owner]
    for text in random.sample(accepted, min(20, len(accepted))):
        deadline = time.monotonic() + PATIENCE_S
        while True:
            wanted = next(word for word in text.split() if word.startswith("number"))
            body = {"query": f"What is {wanted}?", "top_k": 20, "similarity_threshold": 0.0}
            status, answer = await cluster.call(owner, "POST", "/v1/query", body)
            if status == 200 and text[:60] in str(answer):
                break
            assert time.monotonic() < deadline, (text, status, str(answer)[:500])
            await asyncio.sleep(0.5)


async def all_stored_once(cluster: Cluster, owner: str) -> None:
    wanted = {text[:60] for text in cluster.accepted[owner]}
    assert len(wanted) > 20
    deadline = time.monotonic() + PATIENCE_S
    while True:
        titles = Counter(await listed(cluster, owner))
        missing = wanted - titles.keys()
        if not missing:
            break
        assert time.monotonic() < deadline, (len(missing), sorted(missing)[:3], len(wanted))
        await asyncio.sleep(0.5)
    assert [title for title, count in titles.items() if count > 1] == []
