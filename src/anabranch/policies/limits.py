"""The limits of the settings, each by its name."""

import math
import os
from functools import partial
from typing import Any

from anabranch.configuration.settings import PREFIX, Settings
from anabranch.domain.shares import Limit

# Of a limit on all callers, this share is only for those that are known: a public chat API must not fill the server.
RESERVED = 0.25
# Questions of one caller that start at once; more only while the process keeps up.
READY = 32
# Requests of one caller that wait for its earlier ones to hold fewer bytes.
WAITING = 64


def limits_of(settings: Settings) -> dict[str, Limit]:
    """What callers may hold while their requests run, of streams, and of the records, and what they may do within a
    time."""
    limits = (*_of_requests(settings), *_of_streams(settings), *_of_records(settings))
    return {limit.name: limit for limit in limits}


def connection_limit(settings: Settings, most_files: int) -> Limit:
    """What each address, and all together, may have of connections. Half of the files are left for what they cause,
    and half of the connections for other addresses."""
    total = settings.max_connections or most_files // 2
    half, each = max(1, total // 2), settings.caller_connections or math.inf
    is_capped = half < each < math.inf
    return Limit(
        name="connections",
        description="connections at once",
        each=half if is_capped else each,
        total=total,
        setting=f"half of {PREFIX}MAX_CONNECTIONS" if is_capped else f"{PREFIX}CALLER_CONNECTIONS",
        total_setting=f"{PREFIX}MAX_CONNECTIONS",
    )


def _limit(
    settings: Settings, name: str, description: str, *, each: str = "", total: str = "", zero: float = 0, **more: Any
) -> Limit:
    """The limit whose numbers are these settings, for each caller and for all together. `zero` is what 0 stands for."""
    if each:
        more = {**more, "each": getattr(settings, each) or zero, "setting": PREFIX + each.upper()}
    if total:
        more = {**more, "total": getattr(settings, total) or zero, "total_setting": PREFIX + total.upper()}
    return Limit(name=name, description=description, unit="bytes" if name.endswith("_bytes") else "", **more)


def _of_requests(settings: Settings) -> tuple[Limit, ...]:
    limit = partial(_limit, settings)
    return (
        limit(
            *("questions", "questions at once"),
            each="caller_running",
            total="max_running",
            waiting=settings.caller_waiting,
            queued=settings.max_waiting,
            reserved=int(settings.max_running * RESERVED),
            ready=READY,
        ),
        _computations(settings),
        Limit(name="embeddings", description="requests to embed texts at once", each=1, waiting=WAITING),
        limit("uploads", "uploads at once", each="caller_uploads", waiting=WAITING),
        limit(
            *("upload_bytes", "uploads at once"),
            each="caller_upload_bytes",
            total="max_upload_bytes",
            waiting=WAITING,
            queued=math.inf,
            reserved=settings.max_upload_bytes * RESERVED,
        ),
        limit(
            *("response_bytes", "large replies and responses at once"),
            each="caller_response_bytes",
            total="max_response_bytes",
            waiting=WAITING,
            queued=math.inf,
            reserved=settings.max_response_bytes * RESERVED,
        ),
        limit("steps", "planner steps in progress", each="caller_steps", total="planner_steps"),
        limit(
            *("changes", f"changes within {settings.rate_limit_window:g} seconds"),
            each="caller_changes",
            zero=math.inf,
            window_s=settings.rate_limit_window,
        ),
    )


def _computations(settings: Settings) -> Limit:
    """One caller has all threads but one: a short search of another need not wait until a long one has ended."""
    threads = settings.computing_threads or os.cpu_count() or 1
    setting = f"{PREFIX}COMPUTING_THREADS"
    return Limit(
        name="computations",
        description="searches, embeddings and readings at once",
        each=threads,
        total=threads + 1,
        waiting=math.inf,
        queued=math.inf,
        setting=setting,
        total_setting=setting,
    )


def _of_streams(settings: Settings) -> tuple[Limit, ...]:
    limit = partial(_limit, settings)
    return (
        limit("stream_bytes", "kept streams", each="caller_stream_memory"),
        limit("stream_readers", "streams that are read at once", each="caller_stream_readers"),
    )


def _of_records(settings: Settings) -> tuple[Limit, ...]:
    limit, pending, stored = partial(_limit, settings), "documents that are not processed yet", "stored documents"
    return (
        limit("pending_documents", pending, each="caller_pending_documents"),
        limit("pending_bytes", pending, each="caller_pending_bytes"),
        limit("collections", "collections", each="caller_collections"),
        limit("documents", stored, each="caller_documents"),
        limit("stored_bytes", stored, each="caller_stored_bytes"),
    )
