"""The one way to Redis, on a real server that is killed, frozen, restarted and lied about."""

import asyncio
import random
import ssl
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import trustme

from anabranch.domain.contracts import SystemClock
from anabranch.domain.errors import ConfigurationError
from anabranch.domain.signals import RedisCommandRefused, RedisStateChanged
from anabranch.redis.client import MAX_CONNECTIONS, Redis, RedisGone, RedisRefused, Reply
from anabranch.testing.fakes import Recorder
from support.valkey_server import Valkey, running_valkey, until

TIMEOUT_S = 0.2
# A machine that runs other things too may be this much late.
NOISE_S = 0.8
# For what is not about time.
LONG_S = 20.0

Open = Callable[..., Redis]


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Valkey]:
    with running_valkey(tmp_path) as server:
        yield server


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
async def connect(recorder: Recorder) -> AsyncIterator[Open]:
    opened: list[Redis] = []

    def made(url: str, timeout_s: float = TIMEOUT_S) -> Redis:
        opened.append(Redis(url, timeout_s=timeout_s, clock=SystemClock(), telemetry=recorder))
        return opened[-1]

    yield made
    for redis in opened:
        await redis.close()


def gone_and_back(recorder: Recorder) -> bool:
    """Once, or on a machine that is very busy more often, and there at the end."""
    moves = [signal.reachable for signal in recorder.signals if isinstance(signal, RedisStateChanged)]
    return len(moves) == len(recorder.signals) > 0 and moves == [False, True] * (len(moves) // 2)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def timed(redis: Redis, *command: str) -> tuple[float, Reply | RedisGone]:
    began = time.monotonic()
    reply: Reply | RedisGone
    try:
        reply = await redis.execute(*command)
    except RedisGone as gone:
        reply = gone
    return time.monotonic() - began, reply


async def test_replies_are_as_redis_sends_them(valkey: Valkey, connect: Open) -> None:
    redis = connect(valkey.url)
    assert await redis.execute("SET", b"\x00key", b"\xff\x00") == b"OK"
    assert await redis.execute("GET", b"\x00key") == b"\xff\x00"
    assert await redis.execute("GET", "missing") is None
    assert await redis.execute("INCRBY", "number", 41) == 41
    assert await redis.execute("INCRBYFLOAT", "number", 0.5) == b"41.5"
    assert await redis.execute("MGET", "number", "missing") == [b"41.5", None]
    assert await redis.execute("ECHO", "half a pair: \ud83d") == b"half a pair: \xed\xa0\xbd"


async def test_what_a_turn_collects_is_one_write_on_one_connection(valkey: Valkey, connect: Open) -> None:
    redis = connect(valkey.url)
    before = valkey.info("stats")
    idle = valkey.info("stats")
    echoes = [redis.execute("ECHO", number) for number in range(50)]
    scripts = [redis.execute("EVAL", "return tonumber(ARGV[1])", 0, number) for number in range(50)]
    replies = await asyncio.gather(*echoes, *scripts)
    assert replies == [str(number).encode() for number in range(50)] + list(range(50))
    after = valkey.info("stats")
    # To look costs a connection and its reads as well: the same again is what is left over for the hundred.
    for name in ("total_connections_received", "total_reads_processed"):
        looking = int(idle[name]) - int(before[name])
        assert int(after[name]) - int(idle[name]) - looking == 1, name


async def test_a_refused_command_is_nobody_elses_affair(valkey: Valkey, connect: Open, recorder: Recorder) -> None:
    redis = connect(valkey.url)
    first, wrong, last = await asyncio.gather(
        redis.execute("SET", "text", "x"),
        redis.execute("LPUSH", "text", "y"),
        redis.execute("GET", "text"),
        return_exceptions=True,
    )
    assert (first, last) == (b"OK", b"x")
    assert isinstance(wrong, RedisRefused)
    assert "WRONGTYPE" in wrong.message
    with pytest.raises(TypeError):
        await redis.execute("GET", None)  # type: ignore[arg-type]
    assert redis.reachable
    assert recorder.signals == [RedisCommandRefused(why="WRONGTYPE")]


async def test_whoever_stops_waiting_takes_nobody_elses_reply(
    valkey: Valkey, connect: Open, recorder: Recorder
) -> None:
    """redis-py once handed the reply of a cancelled command to the next caller (CVE-2023-28858, CVE-2023-28859)."""
    redis = connect(valkey.url, LONG_S)
    chance = random.Random(7)
    outcomes = {"answered": 0, "left": 0}

    async def caller(number: int) -> None:
        await turns(chance.randrange(30))
        wait_s = chance.choice([None, None, 0.0001, 0.002])
        asked = asyncio.create_task(redis.execute("ECHO", f"mine {number}", wait_s=wait_s))
        if chance.random() < 0.5:
            await turns(chance.randrange(8))
            asked.cancel()
        try:
            assert await asked == f"mine {number}".encode()
            outcomes["answered"] += 1
        except (asyncio.CancelledError, RedisGone):
            outcomes["left"] += 1

    for _ in range(5):
        await asyncio.gather(*(caller(number) for number in range(500)))
    assert min(outcomes.values()) > 100, outcomes
    assert recorder.signals == []


async def test_a_restart_between_two_commands_goes_unnoticed(valkey: Valkey, connect: Open, recorder: Recorder) -> None:
    redis = connect(valkey.url, LONG_S)
    await asyncio.gather(*(redis.execute("INCR", "n") for _ in range(3)))
    valkey.kill()
    valkey.start()
    assert await redis.execute("INCR", "n") == 1
    assert recorder.signals == []


async def test_killed_under_load_costs_nobody_the_time_out_twice(
    valkey: Valkey, connect: Open, recorder: Recorder
) -> None:
    redis = connect(valkey.url)
    took: list[float] = []
    ended = asyncio.Event()

    async def caller(number: int) -> None:
        while not ended.is_set():
            duration_s, reply = await timed(redis, "ECHO", str(number))
            took.append(duration_s)
            assert isinstance(reply, RedisGone) or reply == str(number).encode()
            await asyncio.sleep(0.002)

    callers = [asyncio.create_task(caller(number)) for number in range(50)]
    await until(lambda: len(took) > 200)
    valkey.kill()
    await until(lambda: not redis.reachable)
    seen = len(took)
    await until(lambda: len(took) > seen + 200)
    valkey.start()
    await until(lambda: redis.reachable)
    seen = len(took)
    await until(lambda: len(took) > seen + 200)
    ended.set()
    await asyncio.gather(*callers)
    assert max(took) < TIMEOUT_S + NOISE_S
    assert gone_and_back(recorder)


async def test_a_frozen_one_costs_one_time_out_and_its_late_replies_reach_nobody(
    valkey: Valkey, connect: Open, recorder: Recorder
) -> None:
    redis = connect(valkey.url)
    assert await redis.execute("ECHO", "before") == b"before"
    valkey.freeze()
    waiting = []
    for number in range(40):  # In many turns, so that they wait on many connections and for a free one.
        waiting.append(asyncio.create_task(timed(redis, "ECHO", f"old {number}")))
        await turns(2)
    for duration_s, reply in await asyncio.gather(*waiting):
        assert isinstance(reply, RedisGone)
        assert duration_s < TIMEOUT_S + NOISE_S
    assert not redis.reachable
    duration_s, reply = await timed(redis, "ECHO", "at once")
    assert isinstance(reply, RedisGone)
    assert duration_s < TIMEOUT_S / 4
    valkey.thaw()
    await until(lambda: redis.reachable)
    for turn in range(20):
        replies = await asyncio.gather(*(redis.execute("ECHO", f"new {turn} {number}") for number in range(20)))
        assert replies == [f"new {turn} {number}".encode() for number in range(20)]
    assert gone_and_back(recorder)


async def test_one_callers_patience_is_not_held_against_redis(
    valkey: Valkey, connect: Open, recorder: Recorder
) -> None:
    redis = connect(valkey.url, LONG_S)
    await redis.execute("PING")
    valkey.freeze()
    patient = asyncio.create_task(redis.execute("ECHO", "patient"))
    began = time.monotonic()
    with pytest.raises(RedisGone, match="in time"):
        await redis.execute("ECHO", "hasty", wait_s=0.02)
    assert time.monotonic() - began < 0.02 + NOISE_S
    assert redis.reachable
    valkey.thaw()
    assert await patient == b"patient"
    assert recorder.signals == []


async def test_a_loop_that_is_busy_itself_blames_nobody(valkey: Valkey, connect: Open, recorder: Recorder) -> None:
    redis = connect(valkey.url, 0.1)
    for before in range(6):  # The loop is held up before the command is written, after, and while connecting.
        asked = asyncio.create_task(redis.execute("ECHO", before))
        hasty = asyncio.create_task(redis.execute("ECHO", before, wait_s=0.05))
        await turns(before)
        time.sleep(0.15)  # noqa: ASYNC251  holding up the loop is the point
        assert await asked == await hasty == str(before).encode()
    assert recorder.signals == []


async def test_a_loop_that_is_busy_in_every_turn_blames_nobody(
    valkey: Valkey, connect: Open, recorder: Recorder
) -> None:
    # To connect takes several exchanges here, and each of them several turns.
    redis = connect(f"{valkey.url}/3?client_name=busy", 0.02)
    loop = asyncio.get_running_loop()

    def hold_up(times: int) -> None:
        time.sleep(0.02)
        if times:
            loop.call_soon(hold_up, times - 1)

    for number in range(2):
        hold_up(20)
        assert await redis.execute("ECHO", number) == str(number).encode()
    assert recorder.signals == []


async def test_a_connection_that_breaks_is_no_verdict_and_its_command_is_not_sent_again(
    connect: Open, recorder: Recorder
) -> None:
    """Redis may have run it and died before it could say so."""
    heard: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while command := await reader.read(1024):
            heard.append(command)
            if b"second" in command:
                break
            writer.write(b"+fine\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        redis = connect(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}", LONG_S)
        assert await redis.execute("first") == b"fine"
        with pytest.raises(RedisGone, match="closed the connection"):
            await redis.execute("second")
        assert redis.reachable
        assert await redis.execute("third") == b"fine"
        assert [command.split()[2] for command in heard] == [b"first", b"second", b"third"]
        await redis.close()
    assert recorder.signals == []


async def test_when_one_batch_finds_it_gone_the_others_are_told_at_once(valkey: Valkey, connect: Open) -> None:
    redis = connect(valkey.url)
    await redis.execute("PING")
    valkey.freeze()
    first = asyncio.create_task(redis.execute("ECHO", "first"))
    await asyncio.sleep(TIMEOUT_S / 2)
    later = asyncio.create_task(redis.execute("ECHO", "later"))
    with pytest.raises(RedisGone, match="in time"):
        await first
    await turns(5)
    assert later.done()
    with pytest.raises(RedisGone, match="cannot be reached"):
        await later


async def test_when_all_connections_are_busy_commands_wait_together(
    valkey: Valkey, connect: Open, recorder: Recorder
) -> None:
    redis = connect(valkey.url, LONG_S)
    await redis.execute("PING")
    valkey.freeze()
    waiting = []
    for number in range(3 * MAX_CONNECTIONS):
        waiting.append(asyncio.create_task(redis.execute("ECHO", number)))
        await turns(2)
    valkey.thaw()
    assert await asyncio.gather(*waiting) == [str(number).encode() for number in range(3 * MAX_CONNECTIONS)]
    assert int(valkey.info("clients")["connected_clients"]) <= MAX_CONNECTIONS + 1
    assert await asyncio.gather(*(redis.execute("ECHO", number) for number in range(2000))) == [
        str(number).encode() for number in range(2000)
    ]
    assert recorder.signals == []


async def test_nothing_connects_before_the_first_command_and_nothing_after_the_end(
    valkey: Valkey, connect: Open
) -> None:
    received = int(valkey.info("stats")["total_connections_received"])
    redis = connect(valkey.url, LONG_S)
    await turns(5)
    assert int(valkey.info("stats")["total_connections_received"]) == received + 1
    await redis.execute("PING")
    valkey.freeze()
    pending = asyncio.create_task(redis.execute("ECHO", "pending"))
    await turns(3)
    unsent = asyncio.create_task(redis.execute("ECHO", "unsent"))
    await turns(1)
    await redis.close()
    for asked in (pending, unsent, redis.execute("PING")):
        with pytest.raises(RedisGone, match="closed"):
            await asked
    assert not redis.reachable
    await redis.close()


async def test_wherever_a_command_is_when_it_ends_its_caller_is_told(valkey: Valkey, connect: Open) -> None:
    valkey.freeze()
    for way in range(8):
        redis = connect(valkey.url, LONG_S)
        asked = asyncio.create_task(redis.execute("PING"))
        await turns(way)
        await redis.close()
        async with asyncio.timeout(LONG_S):
            with pytest.raises(RedisGone, match="closed"):
                await asked


async def test_closing_while_it_is_gone_ends_the_looking(valkey: Valkey, connect: Open) -> None:
    redis = connect(valkey.url)
    valkey.kill()
    with pytest.raises(RedisGone):
        await redis.execute("PING")
    before = len(asyncio.all_tasks())
    await redis.close()
    assert len(asyncio.all_tasks()) == before - 1


async def test_unix_sockets_databases_and_options_of_the_address(tmp_path: Path, connect: Open) -> None:
    with tempfile.TemporaryDirectory() as short, running_valkey(tmp_path, "--unixsocket", f"{short}/s") as valkey:
        third = connect(f"unix://{short}/s?db=3")
        same = connect(f"{valkey.url}/3?decode_responses=true&socket_timeout=0.000001&protocol=3")
        other = connect(valkey.url)
        assert await third.execute("SET", "key", "value") == b"OK"
        assert await same.execute("GET", "key") == b"value"
        assert await other.execute("GET", "key") is None


async def test_over_tls_the_certificate_must_be_trusted(tmp_path: Path, connect: Open) -> None:
    """The server at hand cannot do TLS, so this one stands in for it; it says OK to everything."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while command := await reader.read(1024):
            writer.write(b"+OK\r\n" * command.count(b"*"))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context) as server:
        url = f"rediss://:hunter2@127.0.0.1:{server.sockets[0].getsockname()[1]}/2"
        trusting = connect(f"{url}?ssl_ca_certs={tmp_path / 'ca.pem'}", LONG_S)
        assert await asyncio.gather(*(trusting.execute("PING") for _ in range(2))) == [b"OK", b"OK"]
        wary = connect(url, LONG_S)
        with pytest.raises(RedisGone, match="cannot be reached"):
            await wary.execute("PING")
        await trusting.close()


def said(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)) + repr(error)


async def test_a_password_is_used_and_never_shown(tmp_path: Path, connect: Open) -> None:
    with running_valkey(tmp_path, "--requirepass", "hunter2") as valkey:
        known = connect(f"redis://:hunter2@127.0.0.1:{valkey.port}")
        assert await known.execute("PING") == b"PONG"
        wrong = connect(f"redis://:swordfish@127.0.0.1:{valkey.port}")
        with pytest.raises(RedisGone) as failed:
            await wrong.execute("PING")
    assert "swordfish" not in said(failed.value) + repr(wrong)
    assert "hunter2" not in repr(known)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:sword:fish@host:port/0",
        "redis://:swordfish@host:99999",
        "redis://:swordfish@[half",
        "redis://host?password=swordfish&nothing=known",
        "redis://host?db=swordfish",
        "http://:swordfish@host",
    ],
)
def test_a_wrong_address_is_a_sentence_without_the_address(url: str, recorder: Recorder) -> None:
    with pytest.raises(ConfigurationError, match="AGGREGATOR_REDIS_URL takes the address") as failed:
        Redis(url, timeout_s=TIMEOUT_S, clock=SystemClock(), telemetry=recorder)
    assert "fish" not in str(failed.value)
    assert failed.value.__suppress_context__


@pytest.mark.parametrize(
    "reply",
    [
        b"-ERR unknown command 'AUTH', with args beginning with: 'swordfish'\r\n",
        b"-ERR max number of clients reached\r\n",
        b"-LOADING the dataset\r\n",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"*-7\r\n",
        b"",
    ],
)
async def test_a_server_that_is_no_redis_is_gone(reply: bytes, connect: Open) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1024)
        writer.write(reply)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        redis = connect(f"redis://:swordfish@127.0.0.1:{port}")
        with pytest.raises(RedisGone) as failed:
            await redis.execute("PING")
        assert "swordfish" not in said(failed.value)
        assert not redis.reachable


def test_whoever_has_no_redis_does_not_load_its_driver() -> None:
    code = "import sys, anabranch.policies.rate_limits, anabranch.policies.cache; print('redis.asyncio' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
