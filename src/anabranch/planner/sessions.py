"""Whose a planner's session is, for all workers that share a Redis."""

from anabranch.domain.errors import StreamUnavailable
from anabranch.eventlog.redis.scripts import CLAIM
from anabranch.redis.client import Redis, RedisGone


class RedisSessions:
    """Whose a session is cannot be said while Redis is gone, so then it is nobody's."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def claim(self, session: str, identity: str, ttl_s: float) -> bool:
        key = f"anabranch:session:{session}"
        try:
            held = await self._redis.execute("EVAL", CLAIM, 1, key, identity, max(1, round(ttl_s * 1000)))
        except RedisGone as gone:
            raise StreamUnavailable("The log that the workers share cannot be reached.") from gone
        return held == 1
