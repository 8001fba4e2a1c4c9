"""UUIDs of version 7, which sort by creation time."""

import os
import time
import uuid


def made_at(identifier: str) -> float:
    """The creation time of an identifier in seconds since 1970; 0 if it is not a version 7 UUID."""
    try:
        made = uuid.UUID(identifier)
    except ValueError:
        return 0.0
    return (made.int >> 80) / 1000 if made.version == 7 else 0.0


def new_id() -> str:
    moment = time.time_ns() // 1_000_000
    chance = int.from_bytes(os.urandom(10), "big")
    number = (moment & ((1 << 48) - 1)) << 80 | 0x7 << 76 | (chance >> 68 & 0xFFF) << 64 | 0b10 << 62
    return str(uuid.UUID(int=number | chance & ((1 << 62) - 1)))
