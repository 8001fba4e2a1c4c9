"""What processes share through Redis: limits, answers, vectors; and what no caller ever gets of another's."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import pytest_asyncio

import redis
from support.load_clients import LIMIT, Crowd, crowd, is_exact
from support.valkey_server import Valkey, running_valkey, until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("rag-redis")]

EACH = 25
PEOPLE = 30
# Who asks in the other tests.
ASKED_BEFORE = ("person-0", "person-1", "person-2", "person-3")


class Shared(NamedTuple):
    """Two servers on one data folder and one Redis, the first of which has two workers."""

    crowd: Crowd
    kept: "redis.Redis"

    async def is_kept(self, pattern: str, count: int) -> None:
        """What is put into Redis gets there behind the answer's back."""
        await until(lambda: len(list(self.kept.scan_iter(pattern))) == count)


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    with running_valkey(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory, models_dir: Path, valkey: Valkey) -> AsyncIterator[Shared]:
    home = tmp_path_factory.mktemp("shared")
    with redis.Redis.from_url(valkey.url) as kept:
        # A slow machine must not make Redis look unreachable: each worker would then count alone.
        settings = {"redis_url": valkey.url, "redis_timeout": "10", "max_running": "10000"}
        async with crowd(home, models_dir, people=PEOPLE, workers=(2, 1), **settings) as opened:
            yield Shared(opened, kept)
            # What somebody else left in Redis may be of a kind that it will not read out.
            assert [line for line in opened.complaints() if "WRONGTYPE" not in line] == []


@pytest.fixture(autouse=True)
def nothing_kept(shared: Shared) -> None:
    shared.kept.flushall()


async def test_the_limit_is_one_for_all_processes(shared: Shared) -> None:
    asked = shared.crowd
    told = [await asked.ask(who="person-0", at=number % 2) for number in range(LIMIT)]
    assert [int(one.headers["RateLimit-Remaining"]) for one in told] == list(reversed(range(LIMIT)))
    assert [(await asked.ask(who="person-0", at=at)).status for at in (0, 1)] == [429, 429]
    assert (await asked.ask(who="person-1", at=1)).status == 200


async def test_workers_share_cached_answers_through_redis(shared: Shared) -> None:
    asked, query = shared.crowd, "How many days do refunds for printed books take?"
    hits = "rag_cache_hit_total"
    before = (await asked.metrics(at=1)).value(hits, cache="answer")
    first = await asked.ask(query, at=0)
    assert not first.end["cached"]
    await shared.is_kept("rag:qa:*", 1)
    other = await asked.ask(query, at=1, who="person-3")
    assert other.end["cached"]
    assert [other.end[name] for name in ("sources", "citations")] == [
        first.end[name] for name in ("sources", "citations")
    ]
    assert other.frames[:-1] == [{"type": "token", "data": "".join(one["data"] for one in first.frames[:-1])}]
    assert (await asked.metrics(at=1)).value(hits, cache="answer") == before + 1


async def test_the_same_words_are_embedded_once(shared: Shared) -> None:
    asked, query = shared.crowd, "On which day do parcels to Iceland leave?"
    before = (await asked.metrics(at=1)).value("rag_cache_hit_total", cache="embedding")
    await asked.ask(query, at=0)
    await shared.is_kept("embed:*", 1)
    other = await asked.ask(query, at=1, top_k=3)  # another answer from the same words
    assert not other.end["cached"]
    assert (await asked.metrics(at=1)).value("rag_cache_hit_total", cache="embedding") == before + 1


async def test_a_change_of_the_documents_is_seen_by_both(shared: Shared) -> None:
    asked, query = shared.crowd, "Which day do parcels to Iceland leave?"
    await asked.ask(query)
    await shared.is_kept("rag:qa:*", 1)
    assert [(await asked.ask(query, at=at)).end["cached"] for at in (0, 1)] == [True, True]
    await asked.ingest("shop", "Parcels to Iceland leave on Fridays from now on.", title="News", at=0)
    for at in (1, 0, 0):
        told = await asked.ask(query, at=at)
        assert "News" in {source["title"] for source in told.end["sources"]}


async def test_nobody_gets_what_was_found_for_somebody_with_other_rights(shared: Shared) -> None:
    asked, query = shared.crowd, "How long do refunds for signed books take?"
    private = {"name": "board", "settings": {"default_permissions": {"visibility": "private"}}}
    await asked.call("POST", "/v1/collections", private, who="person-3", at=0)
    await asked.ingest("board", "Refunds for signed books take 10 days.", title="Secret", who="person-3", at=0)
    for who, at in (("person-3", 0), ("person-2", 1), ("person-1", 0), ("person-3", 1), ("person-2", 0)):
        told = await asked.ask(query, who=who, at=at)
        assert ("Secret" in json.dumps(told.frames)) == (who == "person-3"), (who, at)
    await shared.is_kept("rag:qa:*", 2)
    for who in ("person-3", "person-1"):
        assert [(await asked.ask(query, who=who, at=at)).end["cached"] for at in (0, 1)] == [True, True]


async def test_what_somebody_else_left_in_redis_is_a_miss(shared: Shared) -> None:
    """Another version's bytes, another kind, nothing at all: an answer is found anew, and put in its place."""
    asked, query = shared.crowd, "Do refunds take 30 days?"
    first = await asked.ask(query, at=0)
    await shared.is_kept("rag:qa:*", 1)
    [key] = shared.kept.scan_iter("rag:qa:*")
    shared.kept.set(key, b"\xff{")
    told = await asked.ask(query, at=1)
    assert (told.end["cached"], told.frames[:-1]) == (False, first.frames[:-1])
    shared.kept.delete(key)
    shared.kept.lpush(key, "a list")
    assert (await asked.ask(query, at=0)).is_answered


async def test_rate_limit_is_exact_for_many_callers_of_two_workers(shared: Shared) -> None:
    for name, told in (await shared.crowd.burst(EACH)).items():
        # Each worker also counts by itself, and still counts what the other tests asked before Redis was emptied.
        if name not in ASKED_BEFORE:
            is_exact(told)


async def test_one_process_counts_exactly_without_redis(tmp_path: Path, models_dir: Path) -> None:
    async with crowd(tmp_path, models_dir, people=10) as asked:
        for told in (await asked.burst(EACH)).values():
            is_exact(told)
        read = await asked.metrics()
        assert read.value("anabranch_limiter_total", decision="refused") == 10 * (EACH - LIMIT)
        assert not read.all("anabranch_redis_reachable")
        assert asked.complaints() == []
