"""Prometheus metrics: their definitions, their update by events and signals, and their exposition."""

import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Generic, TypeVar, assert_never, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, disable_created_metrics, values
from prometheus_client.exposition import choose_encoder
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from anabranch.configuration.settings import Settings
from anabranch.domain.errors import AnabranchError, Cancelled, Overloaded, RateLimited
from anabranch.domain.events import (
    Answered,
    AnswerEvent,
    Failed,
    OutcomeStatus,
    RetrievalFinished,
    SourceReplied,
    StepStatus,
)
from anabranch.domain.model import Answer, Ground, Status
from anabranch.domain.signals import (
    AnswerShared,
    BreadcrumbsDropped,
    BreakerStateChanged,
    CacheLookup,
    EventIgnored,
    Hedged,
    Load,
    McpServerStateChanged,
    RateLimitChecked,
    RedisCommandRefused,
    RedisStateChanged,
    Rejected,
    Retried,
    ShadowCompared,
    Signal,
    StepEnded,
    StreamClients,
    SubagentEnded,
    TokensUsed,
)
from anabranch.domain.steps import Ignored as Reason
from anabranch.telemetry.log import label

T = TypeVar("T")

MAX_NAMES = 100
OTHER = "other"


class Children(dict[str, T], Generic[T]):
    """Metrics by label. Labels can come from requests, and each costs memory, also in Prometheus: the first MAX_NAMES
    get their own metric, all others share one. Known labels always have their own."""

    def __init__(self, make: Callable[[str], T], known: Iterable[str] = ()) -> None:
        super().__init__()
        self._make = make
        self._left = MAX_NAMES
        self._others: T | None = None
        for name in known:
            self[label(name)] = make(label(name))

    def __missing__(self, name: str) -> T:
        short = label(name)
        if short != name:
            return self[short]
        if self._left:
            self._left -= 1
            self[name] = made = self._make(name)
            return made
        if self._others is None:
            self._others = self._make(OTHER)
        return self._others


class AllWorkers(MultiProcessCollector):
    """The sum over the files of all workers. The counters of a worker that has ended stay, its gauges do not."""

    def collect(self) -> Iterable[Metric]:
        folder = Path(self._path)
        for pid in {int(path.stem.rpartition("_")[2]) for path in folder.glob("gauge_live*.db")}:
            if not _runs(pid):
                with suppress(FileNotFoundError):  # another worker has removed it
                    mark_process_dead(pid, self._path)  # type: ignore[no-untyped-call]
        files = [str(path) for path in folder.glob("*.db") if _has_data(path)]
        merged: Iterable[Metric] = self.merge(files)  # type: ignore[no-untyped-call]
        return merged


def is_shared() -> bool:
    """Whether the metrics are in files shared by several workers, which `serve` configures."""
    return bool(values.ValueClass._multiprocess)


def _has_data(path: Path) -> bool:
    """Whether the file exists and a worker has written to it."""
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False


def _runs(pid: int) -> bool:
    if sys.platform == "win32":  # there, this call ends the process
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


RAG = "rag_stream"
SURFACES = (RAG, "chat", "query", "endpoints", "library")
OUTCOMES = ("answered", "cached", "refused", "failed", "cancelled", "rejected")
AGGREGATION = ("aggregation.wait", "aggregation.emit", "aggregation.retry")
STAGES = ("question", "rewrite", "retrieve", "merge", "prompt", "generate", "cite", *AGGREGATION)
ABSTAINED = "abstained"
COLLECTIONS = "collections"
EXTRACTIVE = "extractive"
ALTERNATE = " (alternate)"
GUARDED = (*(ground.value for ground in Ground if ground is not Ground.DOCUMENTS), ABSTAINED)
STEPS = get_args(StepStatus)
PARTS = get_args(OutcomeStatus)
SUBAGENTS = ("documentation", "row_selection", "action", "voice", "safety")
IGNORED = get_args(Reason)
BREAKER = {"closed": 0, "half_open": 1, "open": 2}
QUESTION_MS = (5, 10, 25, 50, 100, 250, 500, 1_000, 1_500, 2_000, 3_000, 5_000, 10_000, 30_000, 60_000, 180_000)
PART_MS = (1, 5, 10, 25, 50, 100, 250, 500, 1_000, 2_000, 5_000, 10_000, 30_000, 120_000)


class Metrics:
    """The metrics of this process, in a registry of their own."""

    def __init__(self, settings: Settings) -> None:
        # They would double the exposition.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._count_questions()
        self._count_stream()
        self._count_upstreams(settings)
        self._count_policies(redis=settings.redis_url is not None)
        self._count_steps()
        build = self._gauge("anabranch_build_info", "Which version runs.", "max", "version")
        build.labels(version("anabranch")).set(1)

    def _count_questions(self) -> None:
        total = self._counter("anabranch_questions", "Questions, by how they ended.", "surface", "outcome")
        latency = self._histogram("anabranch_question_latency_ms", "From question to end.", QUESTION_MS, "surface")
        retrieval = self._histogram("rag_retrieval_latency_ms", "All sources of a question.", QUESTION_MS, "surface")
        rejected = self._counter("anabranch_rejected", "Requests turned away.", "surface", "error_code")
        self._outcomes = Children(
            lambda surface: {outcome: total.labels(surface, outcome).inc for outcome in OUTCOMES}, SURFACES
        )
        self._latency = Children(lambda surface: latency.labels(surface).observe, SURFACES)
        self._retrieval = Children(lambda surface: retrieval.labels(surface).observe, SURFACES)
        seen = (RateLimited.code, Overloaded.code)
        self._rejected = Children(
            lambda surface: Children(lambda code: rejected.labels(surface, code).inc, seen), SURFACES
        )
        guarded = self._counter("rag_guardrail_triggered", "Answers refused, by why.", "reason")
        self._guarded = Children(lambda reason: guarded.labels(reason).inc, GUARDED)
        stages = self._histogram("anabranch_stage_latency_ms", "One stage of a question.", PART_MS, "stage")
        self.stages = Children(lambda stage: stages.labels(stage).observe, STAGES)

    def _count_stream(self) -> None:
        """The counters of /rag/stream (spec 4)."""
        errors = self._counter("rag_stream_errors", "Requests to /rag/stream that failed.", "error_code")
        self._stream_requests = self._counter("rag_stream_requests", "Requests to /rag/stream.").inc
        self._stream_errors = Children(lambda code: errors.labels(code).inc, _codes() - {Cancelled.code})
        self._stream_cancelled = self._counter("rag_stream_cancelled", "Streams that their reader left.").inc

    def _count_upstreams(self, settings: Settings) -> None:
        replies = self._counter("anabranch_source_replies", "Replies of sources.", "source", "status")
        latency = self._histogram("anabranch_source_latency_ms", "One source's reply.", PART_MS, "source")
        usual = (Status.SUCCESS, Status.ERROR, Status.TIMEOUT)
        self._sources = Children(
            lambda source: (
                Children(lambda status: replies.labels(source, status).inc, usual),
                latency.labels(source).observe,
            ),
            (COLLECTIONS, *(endpoint.path for endpoint in settings.sources.values())),
        )
        tokens_in = self._counter("llm_tokens_in", "Tokens that models were sent.", "model")
        tokens_out = self._counter("llm_tokens_out", "Tokens that models wrote.", "model")
        written = settings.default_model
        models = {*(one.path for one in settings.models.values()), *([written.path] if written else [])}
        helpers = {f"{settings.embedding_model} (embeddings)"} if settings.embedding_url else set()
        helpers |= {f"{settings.reranker_model or 'reranker'} (reranker)"} if settings.reranker_url else set()
        ours = {
            *models,
            *helpers,
            *(path + end for path in self._sources for end in ("", ALTERNATE) if path != COLLECTIONS),
        }
        self._tokens = Children(
            lambda model: (tokens_in.labels(model).inc, tokens_out.labels(model).inc), {EXTRACTIVE, *models}
        )
        state = self._gauge("anabranch_breaker_state", "0 closed, 1 half open, 2 open.", "livemax", "upstream")
        opened = self._counter("anabranch_breaker_opened", "How often an upstream was given up.", "upstream")
        retries = self._counter("anabranch_retries", "Calls made again.", "upstream")
        hedges = self._counter("anabranch_hedges", "Alternates asked too.", "upstream", "won")
        hedged = [endpoint.path for endpoint in settings.sources.values() if endpoint.alternate is not None]
        self._breakers = Children(lambda name: (state.labels(name).set, opened.labels(name).inc), ours)
        self._retries = Children(lambda name: retries.labels(name).inc, {*models, *helpers})
        ready = self._gauge("anabranch_mcp_server_ready", "1 if an MCP server is connected.", "livemin", "server")
        expected = [name for name, server in settings.mcp_servers.items() if server.enabled]
        self._servers = Children(lambda name: ready.labels(name).set, expected)
        self._hedges = Children(
            lambda name: (hedges.labels(name, "false").inc, hedges.labels(name, "true").inc), hedged
        )

    def _count_policies(self, *, redis: bool) -> None:
        hits = self._counter("rag_cache_hit", "Found in a cache.", "cache")
        misses = self._counter("rag_cache_miss", "Not found in a cache.", "cache")
        self._looked = {name: (misses.labels(name).inc, hits.labels(name).inc) for name in ("answer", "embedding")}
        limiter = self._counter("anabranch_limiter", "What limiters decided.", "surface", "decision")
        self._metered = Children(
            lambda surface: (limiter.labels(surface, "refused").inc, limiter.labels(surface, "admitted").inc),
            SURFACES[:-1],
        )
        self._running = self._gauge("anabranch_questions_running", "Questions being answered.", "livesum").set
        self._waiting = self._gauge("anabranch_questions_waiting", "Questions that wait.", "livesum").set
        self._joined = self._counter("anabranch_questions_joined", "Questions that shared an answer.").inc
        self.spans_dropped = self._counter("anabranch_spans_dropped", "Spans that no collector got.").inc
        self._redis_refused = self._counter("anabranch_redis_refused", "Commands that Redis refused.").inc
        self._redis: Callable[[float], None] = lambda _: None
        if redis:  # reachable until the first check, within a second
            self._redis = self._gauge("anabranch_redis_reachable", "1 if Redis answers.", "livemin").set
            self._redis(1)

    def _count_steps(self) -> None:
        """Planner steps (spec 2), their subagents and readers."""
        steps = self._counter("planner_steps", "Planner steps, by how they ended.", "status")
        step_ms = self._histogram("planner_step_latency_ms", "From a step's beginning to its end.", QUESTION_MS)
        parts = self._counter("planner_subagents", "Subagents' parts, by how they ended.", "subagent", "status")
        part_ms = self._histogram("planner_subagent_latency_ms", "One subagent's part.", PART_MS, "subagent")
        ignored = self._counter("planner_events_ignored", "Sent to a step, recorded, not delivered.", "reason")
        self._steps = Children(lambda status: steps.labels(status).inc, STEPS)
        self._step_ms = step_ms.observe
        self._parts = Children(
            lambda subagent: (
                Children(lambda status: parts.labels(subagent, status).inc, PARTS),
                part_ms.labels(subagent).observe,
            ),
            SUBAGENTS,
        )
        self._ignored = Children(lambda reason: ignored.labels(reason).inc, IGNORED)
        shadow = self._counter("planner_shadow", "Steps compared with the old way's answer.", "equal")
        self._compared = {equal: shadow.labels(str(equal).lower()).inc for equal in (True, False)}
        self._reading = self._gauge("anabranch_stream_readers", "Clients that read streams.", "livesum").set
        self._crumbs_lost = self._counter("anabranch_breadcrumbs_lost", "Breadcrumbs that no sink took.").inc

    def asked(self, surface: str) -> None:
        if surface == RAG:
            self._stream_requests()

    def happened(self, event: AnswerEvent, surface: str) -> None:
        match event:
            case SourceReplied(reply=reply):
                count, observe = self._sources[reply.path]
                count[reply.status](1)
                observe(reply.latency_ms)
            case RetrievalFinished():
                self._retrieval[surface](event.time_ms)
            case Answered(answer=answer):
                self._answered(answer, surface)
            case Failed():
                self._failed(event.code, event.time_ms, surface)
            case _:
                pass

    def _answered(self, answer: Answer, surface: str) -> None:
        outcome = "cached" if answer.cached else "refused" if answer.refused else "answered"
        self._outcomes[surface][outcome](1)
        self._latency[surface](answer.timings.total_ms)
        if answer.refused:
            self._guarded[refusal(answer)](1)

    def _failed(self, code: str, time_ms: int, surface: str) -> None:
        cancelled = code == Cancelled.code
        self._outcomes[surface]["cancelled" if cancelled else "failed"](1)
        if not cancelled:
            self._latency[surface](time_ms)
        if surface == RAG and cancelled:
            self._stream_cancelled()
        elif surface == RAG:
            self._stream_errors[code](1)

    def noted(self, signal: Signal) -> None:
        match signal:
            case Load():
                self._running(signal.running)
                self._waiting(signal.waiting)
            case TokensUsed():
                sent, written = self._tokens[signal.model]
                sent(signal.usage.prompt_tokens)
                written(signal.usage.completion_tokens)
            case RedisCommandRefused():
                self._redis_refused()
            case CacheLookup():
                self._looked[signal.cache][signal.hit](1)
            case AnswerShared():
                self._joined()
            case RateLimitChecked():
                self._metered[signal.surface][signal.admitted](1)
            case Rejected():
                self._request_rejected(signal)
            case BreakerStateChanged():
                move, opened = self._breakers[signal.upstream]
                move(BREAKER[signal.state])
                opened(1 if signal.state == "open" else 0)
            case Retried():
                self._retries[signal.upstream](1)
            case Hedged():
                self._hedges[signal.upstream][signal.won](1)
            case RedisStateChanged():
                self._redis(signal.reachable)
            case _:
                self._noted_of_streams_and_servers(signal)

    def _noted_of_streams_and_servers(
        self,
        signal: StepEnded
        | SubagentEnded
        | EventIgnored
        | ShadowCompared
        | StreamClients
        | BreadcrumbsDropped
        | McpServerStateChanged,
    ) -> None:
        match signal:
            case McpServerStateChanged():
                # NaN for a server that is not used any more: 0 would raise an alert.
                wanted = signal.state not in ("idle", "disabled")
                self._servers[signal.server](signal.state == "ready" if wanted else float("nan"))
            case StepEnded():
                self._steps[signal.status](1)
                self._step_ms(signal.latency_ms)
            case SubagentEnded():
                count, observe = self._parts[signal.subagent]
                count[signal.status](1)
                observe(signal.latency_ms)
            case EventIgnored():
                self._ignored[signal.reason](1)
            case ShadowCompared():
                self._compared[signal.equal](1)
            case StreamClients():
                self._reading(signal.clients)
            case BreadcrumbsDropped():
                self._crumbs_lost(signal.count)
            case _:
                assert_never(signal)

    def _request_rejected(self, signal: Rejected) -> None:
        self._outcomes[signal.surface]["rejected"](1)
        self._rejected[signal.surface][signal.code](1)
        if signal.surface == RAG:
            self._stream_requests()
            self._stream_errors[signal.code](1)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """The metrics of all workers and their media type, as the client accepts it, else plain text."""
        encode, media_type = choose_encoder(accept)
        registry = CollectorRegistry() if is_shared() else self._registry
        if registry is not self._registry:
            AllWorkers(registry)  # type: ignore[no-untyped-call]
        return encode(registry), media_type

    def _counter(self, name: str, says: str, *labels: str) -> Counter:
        return Counter(name, says, labels, registry=self._registry)

    def _gauge(self, name: str, says: str, of_workers: str, *labels: str) -> Gauge:
        return Gauge(name, says, labels, registry=self._registry, multiprocess_mode=of_workers)  # type: ignore[arg-type]

    def _histogram(self, name: str, says: str, bounds: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(name, says, labels, registry=self._registry, buckets=bounds)


def refusal(answer: Answer) -> str:
    """Why an answer was refused: no evidence, or the model itself."""
    return ABSTAINED if answer.ground is Ground.DOCUMENTS else answer.ground.value


def _codes(kind: type[AnabranchError] = AnabranchError) -> set[str]:
    return {kind.code}.union(*(_codes(one) for one in kind.__subclasses__()))
