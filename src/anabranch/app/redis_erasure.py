"""Erases from the Redis that all workers share. Every kind of key is listed here, by what it can hold."""

from collections.abc import AsyncIterator

from anabranch.eventlog.redis.store import FORGOTTEN, forget_before, forget_ended
from anabranch.knowledge.model import Erased
from anabranch.policies.answer_cache import KEYS as ANSWERS
from anabranch.policies.cache import EMBEDDING_KEYS
from anabranch.redis.client import Redis, RedisGone

STREAMS = "anabranch:{*}:stream"
# The keys that can hold what is erased, as patterns: text, or the name of a user.
KEYS = {
    ANSWERS: True,
    EMBEDDING_KEYS: True,
    STREAMS: True,
    "anabranch:{*}:entries": True,  # deleted with their stream
    "anabranch:{*}:staged:*": True,  # gone within a minute
    "anabranch:session:*": True,
    "rl:*": True,
    "breaker:*": False,
    "anabranch:shares": False,  # names, for as long as their requests run
    "trace:*": False,
    FORGOTTEN: False,
}
COUNT = 1_000


async def erase(redis: Redis, erased: Erased, stream_ttl_s: float, ended_for_s: float) -> int:
    """Delete the cached answers and embeddings, the streams that ended at least that long ago, and the sessions and
    rate limits of users; returns how many keys that were. RedisGone if Redis cannot be reached."""
    removed = 0
    for pattern in (ANSWERS, EMBEDDING_KEYS):
        async for key in _keys(redis, pattern):
            removed += _number(await redis.execute("DEL", key))
    await forget_before(redis, ended_for_s)
    async for key in _keys(redis, STREAMS):
        removed += await forget_ended(redis, key, stream_ttl_s, ended_for_s)
    owners = {f"user:{user}".encode() for user in erased.users}
    async for key in _keys(redis, "anabranch:session:*"):
        if owners and await redis.execute("GET", key) in owners:
            removed += _number(await redis.execute("DEL", key))
    async for key in _keys(redis, "rl:*"):
        if key.decode(errors="replace").split(":", 2)[-1].removeprefix("user:") in erased.users:
            removed += _number(await redis.execute("DEL", key))
    return removed


async def _keys(redis: Redis, pattern: str) -> AsyncIterator[bytes]:
    cursor: bytes = b"0"
    while True:
        match await redis.execute("SCAN", cursor, "MATCH", pattern, "COUNT", COUNT):
            case [bytes(following), list(keys)]:
                for key in keys:
                    if isinstance(key, bytes):
                        yield key
                cursor = following
            case _:
                raise RedisGone("Redis sent a reply that the erasure does not know.")
        if cursor == b"0":
            return


def _number(reply: object) -> int:
    return reply if isinstance(reply, int) else 0
