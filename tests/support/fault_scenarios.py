"""The fault scenarios: what each promises, and within which limits. What happens in them is in fault_actions.py.

Limits are written before anything is measured. One that is changed later says why beside it. Every scenario has these:
HTTP 200 only, no answer that ends with an error, and no error in the servers' logs; see support/fault_checker.py."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from support.fault_actions import (
    STORM_READERS,
    STORM_STREAMS,
    clients_gone,
    clock_stepped,
    disk_full,
    dying_model,
    flapping_source,
    lying_sources,
    reconnect_storm,
    redis_emptied,
    redis_evicting,
    redis_frozen,
    redis_killed,
    redis_late,
    sigterm,
    ten_times,
    with_sources,
    worker_killed,
    worker_paused,
)
from support.fault_world import cannot_compile, cannot_mount

Limits = dict[str, Any]


def _available() -> str | None:
    return None


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """`unavailable` says why it cannot be run here, if it cannot."""

    name: str
    promise: str
    run: Callable[[Path], Awaitable[None]]
    limits: Limits = field(default_factory=dict)
    unavailable: Callable[[], str | None] = _available

    @property
    def all_limits(self) -> Limits:
        facts = {"errors_in_the_log": [0, 0], **self.limits.get("facts", {})}
        return {"statuses": [200], "errors": [], **self.limits, "facts": facts}


GOOD: Limits = {"answered": {"all": 1.0}}
# While Redis is away, another server's streams answer 503 with Retry-After; never 404.
MOVED: Limits = {"statuses": [200, 503], "answered": {"all": 1.0}, "p99_s": {"victims": 1.0, "resumable": 1.5}}

SCENARIOS = (
    Scenario(
        name="source-hangs",
        promise="A source that never answers costs a question the retrieval timeout (2 s here) and nothing else: "
        "every question is answered from the other sources, and questions without that source notice "
        "nothing.",
        run=partial(with_sources, ["hang"]),
        limits={**GOOD, "p99_s": {"all": 3.0, "victims": 1.0}},
    ),
    Scenario(
        name="source-trickles",
        promise="A source that sends a byte now and then is cut off at the same timeout.",
        run=partial(with_sources, ["trickle"]),
        limits={**GOOD, "p99_s": {"all": 3.0, "victims": 1.0}},
    ),
    Scenario(
        name="source-resets",
        promise="A source that resets the connection, at once or in mid-reply, costs nothing.",
        run=partial(with_sources, ["reset", "cut"]),
        limits={**GOOD, "p99_s": {"all": 1.0, "victims": 1.0}},
    ),
    Scenario(
        name="source-lies",
        promise="Sources that send other forms, impossible scores, deep nesting, broken text or the names of others"
        " do not change what other sources have sent; every document and quote is from the source that it "
        "names.",
        run=lying_sources,
        limits={**GOOD, "p99_s": {"all": 3.0, "victims": 1.0}},
    ),
    Scenario(
        name="source-oversized",
        promise="Replies of 32 MB, and of 65 MB when unpacked, are cut off at AGGREGATOR_MAX_REPLY_BYTES (4 MB): "
        "memory grows by less than 100 MB with ten at once.",
        run=partial(with_sources, ["huge", "bomb"], count=20),
        limits={**GOOD, "p99_s": {"all": 5.0, "victims": 2.0}, "memory_mb": 100},
    ),
    Scenario(
        name="model-dies",
        promise="An answer whose model breaks off, reports an error or sends an endless line ends with the words "
        "that came and one `generation_failed`; other answers notice nothing.",
        run=dying_model,
        limits={
            "errors": ["generation_failed"],
            "texts": {"breaks off": "Two words ", "reports an error": "One ", "endless line": ""},
            "answered": {"victims": 1.0},
            "p99_s": {"all": 5.0, "victims": 1.5},
        },
    ),
    Scenario(
        name="client-gone",
        promise="When clients go away, their questions end and all their upstream calls are closed within 2 s.",
        run=clients_gone,
        limits={
            "answered": {"victims": 1.0},
            "p99_s": {"victims": 1.0},
            "memory_mb": 60,
            "facts": {"upstreams_free_after_s": [0, 2]},
        },
    ),
    Scenario(
        name="redis-killed",
        promise="Redis is killed for 3 s and comes back empty: questions notice nothing, running answers continue "
        "on their server, kept answers are there again, and no client is told that its stream does not "
        "exist.",
        run=redis_killed,
        limits=MOVED,
    ),
    Scenario(
        name="redis-frozen",
        promise="Redis does not answer for 3 s: questions that need no Redis notice nothing, those that prefer a "
        "resumable answer get an ordinary one within 1.5 s, and streams of other servers answer 503 until "
        "it is back.",
        run=redis_frozen,
        limits=MOVED,
    ),
    Scenario(
        name="redis-emptied",
        promise="Redis loses all keys without a lost connection: running answers go on, and kept ones can still be "
        "read from every server while the one that wrote them lives.",
        run=redis_emptied,
        limits=MOVED,
    ),
    Scenario(
        name="redis-evicts",
        promise="Redis evicts streams because its memory is full of other keys: as when it is emptied.",
        run=redis_evicting,
        limits={**MOVED, "facts": {"evicted_keys": [1, 1e9]}},
    ),
    Scenario(
        name="redis-late",
        promise="Redis replies to commands that were given up: no reply reaches another command, so no client sees "
        "words of another answer, and questions that need no Redis notice nothing.",
        run=redis_late,
        limits={
            **MOVED,
            "answered": dict.fromkeys(("before", "during", "moved", "after", "victims", "resumable"), 1.0),
        },
    ),
    Scenario(
        name="worker-killed",
        promise="A worker is killed: within the lease (2 s here) and 3 s its answers end with `worker_lost` for all"
        " who read them, the others go on, and a new worker is started.",
        run=worker_killed,
        limits={
            "statuses": [200, 503],
            "errors": ["worker_lost"],
            "answered": {"after": 1.0},
            "p99_s": {"after": 1.0},
            "facts": {"all_streams_ended_after_s": [0, 8], "streams_without_an_end": [0, 0]},
        },
    ),
    Scenario(
        name="worker-paused",
        promise="A server is stopped for longer than its lease: its answers end with `worker_lost`, and when it "
        "wakes, its own readers see the same end, and nothing after it. The other server notices nothing.",
        run=worker_paused,
        limits={
            "statuses": [200, 503],
            "errors": ["worker_lost"],
            "answered": {"victims": 1.0, "after": 1.0},
            "p99_s": {"victims": 1.0, "after": 1.0},
        },
    ),
    Scenario(
        name="clock-forward",
        promise="The clocks of servers and Redis are set an hour forward: running answers go on, and kept ones can "
        "still be read from every server while the one that wrote them lives, although Redis has expired "
        "them.",
        run=partial(clock_stepped, 3600),
        limits={**MOVED, "facts": {"redis_stepped_by_s": [3590, 3610], "server_stepped_by_s": [3590, 3610]}},
        unavailable=cannot_compile,
    ),
    Scenario(
        name="clock-back",
        promise="The clocks of servers and Redis are set an hour back: nobody notices.",
        run=partial(clock_stepped, -3600),
        limits={**MOVED, "facts": {"redis_stepped_by_s": [-3610, -3590], "server_stepped_by_s": [-3610, -3590]}},
        unavailable=cannot_compile,
    ),
    Scenario(
        name="disk-full",
        promise="While the disk of the data folder is full, questions are answered and not recorded, which is a "
        "warning in the log; when there is room again, they are recorded again.",
        run=disk_full,
        limits={
            **GOOD,
            "p99_s": {"full": 1.0},
            "facts": {"recorded_after": [20, 20], "warnings_question_not_recorded": [1, 1000]},
        },
        unavailable=cannot_mount,
    ),
    Scenario(
        name="load-10x",
        promise="Ten times as many questions come as the server can run: the excess is refused at once with 429 or 503 "
        "and Retry-After, and what is accepted is answered. If they come from one caller, all questions of others are "
        "answered within 1 s.",
        run=ten_times,
        limits={
            "statuses": [200, 429, 503],
            "answered": {"victims": 1.0, "after": 1.0, "one caller": 0.03, "many callers": 0.06},
            "p99_s": {"victims": 1.0, "one caller": 4.0, "many callers": 2.0},
            "memory_mb": 60,
            "facts": {"p99_refusal_s": [0, 0.5], "refusals_without_retry_after": [0, 0]},
        },
    ),
    Scenario(
        name="reconnect-storm",
        promise="5,000 readers of 100 running answers lose their connections and come back at once: all are served "
        "again within 10 s, none is refused, and each gets the rest of its answer.",
        run=reconnect_storm,
        limits={
            **GOOD,
            "facts": {"readers_before": [STORM_READERS, STORM_READERS + STORM_STREAMS], "all_back_after_s": [0, 10]},
        },
    ),
    Scenario(
        name="sigterm",
        promise="After SIGTERM in mid-stream, running answers are finished, those that take longer than the drain "
        "timeout (4 s here) end with `shutting_down`, and the process ends with status 0.",
        run=sigterm,
        limits={
            "errors": ["shutting_down"],
            "answered": {"all": 0.3, "resumable": 1.0},
            "facts": {"exit_status": [0, 0], "ended_after_s": [2, 8], "still_listening": [0, 0]},
        },
    ),
    Scenario(
        name="breaker-flaps",
        promise="A source that breaks and recovers every second costs no question its answer, is asked less than "
        "half as often while it is broken, and is asked again within a second of its last failure.",
        run=flapping_source,
        limits={
            **GOOD,
            "p99_s": {"all": 1.0},
            "facts": {"share_of_calls_to_a_broken_source": [0, 0.5], "closed_again_after_s": [0, 1.0]},
        },
    ),
)
