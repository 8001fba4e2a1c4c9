"""Timing of the event log in Redis."""

from anabranch.domain.model import Value


class RedisLogTiming(Value):
    """`repair_every_s`: how often the log checks Redis and restores its streams. `recheck_s` and `recheck_ended_s`: how
    often a replica reads without a notification, since one can get lost and a dead worker sends none. `restore_s`: how
    long owners have to restore their streams after a restart of Redis before a name can be opened again."""

    repair_every_s: float = 0.25
    recheck_s: float = 1.0
    recheck_ended_s: float = 15.0
    restore_s: float = 2.0
