"""Correlation ids: unique, but not secret."""

import random
import re

SAFE = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)


def new_correlation_id() -> str:
    # Not secret, and the system's random source can cost as much as an upstream call.
    return f"{random.getrandbits(128):032x}"


def correlation_id(given: str | None) -> str:
    """The caller's id, if it is safe to send on and to log; else a new one."""
    return given if given is not None and SAFE.fullmatch(given) else new_correlation_id()
