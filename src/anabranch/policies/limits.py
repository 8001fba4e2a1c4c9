"""The limits of the settings, each by its name."""

import math
import os

from anabranch.configuration.settings import PREFIX, Settings
from anabranch.domain.shares import Limit

# Of a limit on all callers, this share is only for those that are known: a public chat API must not fill the server.
RESERVED = 0.25
# Questions of one caller that start at once; more only while the process keeps up.
READY = 32


def limits_of(settings: Settings) -> dict[str, Limit]:
    """The limits on what requests hold while they run."""
    return {limit.name: limit for limit in _of_questions(settings)}


def _of_questions(settings: Settings) -> tuple[Limit, ...]:
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
    )
