"""The limits of the settings, each by its name."""

import math
import os

from anabranch.configuration.settings import PREFIX, Settings
from anabranch.domain.shares import Limit

# Of a limit on all callers, this share is only for those that are known: a public chat API must not fill the server.
RESERVED = 0.25
# Questions of one caller that start at once; more only while the process keeps up.
READY = 32
# Requests of one caller that wait for its earlier ones to hold fewer bytes.
WAITING = 64


def limits_of(settings: Settings) -> dict[str, Limit]:
    """What callers may hold while their requests run, of kept streams, and of the records."""
    limits = (*_of_requests(settings), *_of_streams(settings), *_of_pending(settings), *_of_stored(settings))
    return {limit.name: limit for limit in limits}


def _of_requests(settings: Settings) -> tuple[Limit, ...]:
    return (
        Limit(
            name="questions",
            description="questions at once",
            each=settings.caller_running,
            total=settings.max_running,
            waiting=settings.caller_waiting,
            queued=settings.max_waiting,
            reserved=int(settings.max_running * RESERVED),
            ready=READY,
            setting=f"{PREFIX}CALLER_RUNNING",
            total_setting=f"{PREFIX}MAX_RUNNING",
        ),
        Limit(
            name="computations",
            description="searches, embeddings and readings of evidence at once",
            total=settings.computing_threads or os.cpu_count() or 1,
            queued=math.inf,
            total_setting=f"{PREFIX}COMPUTING_THREADS",
        ),
        Limit(
            name="uploads",
            description="uploads at once",
            each=settings.caller_uploads,
            waiting=WAITING,
            setting=f"{PREFIX}CALLER_UPLOADS",
        ),
        Limit(
            name="upload_bytes",
            description="uploads at once",
            unit="bytes",
            each=settings.caller_upload_bytes,
            total=settings.max_upload_bytes,
            waiting=WAITING,
            queued=math.inf,
            reserved=settings.max_upload_bytes * RESERVED,
            setting=f"{PREFIX}CALLER_UPLOAD_BYTES",
            total_setting=f"{PREFIX}MAX_UPLOAD_BYTES",
        ),
        Limit(
            name="response_bytes",
            description="documents that are sent at once",
            unit="bytes",
            each=settings.caller_response_bytes,
            total=settings.max_response_bytes,
            waiting=WAITING,
            queued=math.inf,
            reserved=settings.max_response_bytes * RESERVED,
            setting=f"{PREFIX}CALLER_RESPONSE_BYTES",
            total_setting=f"{PREFIX}MAX_RESPONSE_BYTES",
        ),
        Limit(
            name="steps",
            description="planner steps in progress",
            each=settings.caller_steps,
            total=settings.planner_steps,
            setting=f"{PREFIX}CALLER_STEPS",
            total_setting=f"{PREFIX}PLANNER_STEPS",
        ),
    )


def _of_streams(settings: Settings) -> tuple[Limit, ...]:
    return (
        Limit(
            name="stream_bytes",
            description="kept streams",
            unit="bytes",
            each=settings.caller_stream_memory,
            setting=f"{PREFIX}CALLER_STREAM_MEMORY",
        ),
    )


def _of_pending(settings: Settings) -> tuple[Limit, ...]:
    return (
        Limit(
            name="pending_documents",
            description="documents that are not processed yet",
            each=settings.caller_pending_documents,
            setting=f"{PREFIX}CALLER_PENDING_DOCUMENTS",
        ),
        Limit(
            name="pending_bytes",
            description="documents that are not processed yet",
            unit="bytes",
            each=settings.caller_pending_bytes,
            setting=f"{PREFIX}CALLER_PENDING_BYTES",
        ),
    )


def _of_stored(settings: Settings) -> tuple[Limit, ...]:
    return (
        Limit(
            name="collections",
            description="collections",
            each=settings.caller_collections,
            setting=f"{PREFIX}CALLER_COLLECTIONS",
        ),
        Limit(
            name="documents",
            description="stored documents",
            each=settings.caller_documents,
            setting=f"{PREFIX}CALLER_DOCUMENTS",
        ),
        Limit(
            name="stored_bytes",
            description="stored documents",
            unit="bytes",
            each=settings.caller_stored_bytes,
            setting=f"{PREFIX}CALLER_STORED_BYTES",
        ),
    )
