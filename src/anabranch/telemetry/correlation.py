"""Correlation ids: unique enough to find a request in many logs, and nothing that anybody must not guess."""

import random
import re

SENSIBLE = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)


def new_correlation_id() -> str:
    # Not a secret, and the system's own randomness can cost as much as a whole upstream call.
    return f"{random.getrandbits(128):032x}"


def correlation_id(given: str | None) -> str:
    """The caller's own, if it can safely be sent on and logged; else a new one."""
    return given if given is not None and SENSIBLE.fullmatch(given) else new_correlation_id()
