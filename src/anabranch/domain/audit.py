"""Who does what, as the audit log records it."""

import os
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import cache
from typing import Any, Literal

from anabranch.domain.model import Value

AuditOutcome = Literal["done", "failed", "refused"]
USER, GROUP, OPERATOR, GUEST, SERVER = "user:", "group:", "operator", "guest", "server"


class Actor(Value):
    """Who acts, and from where. `name` is `user:NAME`, `operator`, `guest` or `server`; `key` is the id of the API key,
    `request` a correlation id, or the id of the ingest job."""

    name: str
    address: str
    surface: str
    key: str = ""
    request: str = ""


class AuditEntry(Value):
    """What is done. `object` is its kind and id, `name` what people call it, `granted` its users and groups, as
    `user:NAME` and `group:NAME`: those that may see it, or those of a key. Names can be forgotten later, so `details`
    must hold none."""

    action: str
    object: str = ""
    name: str = ""
    granted: tuple[str, ...] = ()
    details: Mapping[str, Any] = {}
    outcome: AuditOutcome = "done"


class AuditRecord(Value):
    """Who did what, when, from where, and with what outcome. A name that was forgotten is null. `actor` is `user:NAME`,
    `operator`, `guest`, `server` or `several`; `key` the id of the API key; `request` the correlation id, or the ingest
    job. `hash` covers this record and all before it."""

    seq: int
    at: datetime
    action: str
    outcome: AuditOutcome
    actor: str | None
    address: str | None
    surface: str
    key: str
    request: str
    object: str
    name: str | None
    granted: tuple[str | None, ...]
    details: Mapping[str, Any]
    hash: str


class AuditFilter(Value):
    """Which records to read. `action` is a whole action, or what is before its dot; `actor` a user, or the name of an
    Actor."""

    since: float | None = None
    until: float | None = None
    actor: str | None = None
    action: str | None = None


@cache
def _login() -> str:
    """The account that this process runs as. Not from the environment, where anybody could write another name."""
    try:
        from pwd import getpwuid  # noqa: PLC0415  not on Windows

        return getpwuid(os.getuid()).pw_name
    except (ImportError, KeyError):
        return ""


def on_this_machine(surface: str, name: str = OPERATOR) -> Actor:
    """Who runs a command or uses the library here: the operator, whatever account it is."""
    return Actor(name=name, address=f"{_login()}@localhost", surface=surface)


def _in_a_program() -> Actor:
    return on_this_machine("library")


# Who acts now. A function, because most requests change nothing, and finding out costs time.
acting: ContextVar[Callable[[], Actor]] = ContextVar("acting", default=_in_a_program)
