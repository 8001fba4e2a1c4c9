"""Prometheus metrics, and the server's Telemetry, which passes every event to log, metrics and traces."""

import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, disable_created_metrics, values
from prometheus_client.exposition import choose_encoder
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from anabranch.configuration.settings import Settings
from anabranch.domain.contracts import Clock, Span, SystemClock
from anabranch.domain.errors import AnabranchError, Cancelled, GenerationReason, Overloaded, RateLimited
from anabranch.domain.events import (
    Answered,
    AnswerEvent,
    Failed,
    FellBack,
    OutcomeStatus,
    RetrievalFinished,
    SourceReplied,
    StepStatus,
    Token,
)
from anabranch.domain.model import (
    COLLECTION_ADDRESS,
    Answer,
    Context,
    Ground,
    MarkKind,
    Question,
    Status,
    Support,
    WithheldReason,
)
from anabranch.domain.signals import (
    AddedSourcesUnreadable,
    AnswerRated,
    AnswerShared,
    BreadcrumbsDropped,
    BreakerStateChanged,
    CacheLookup,
    CacheName,
    EndpointCalled,
    EventIgnored,
    EvidenceJudged,
    EvidenceTask,
    EvidenceUnavailable,
    Hedged,
    Load,
    McpServerStateChanged,
    QuestionNotRecorded,
    RateLimitChecked,
    RecordingFailed,
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
from anabranch.telemetry.endpoint_history import EndpointHistory
from anabranch.telemetry.log import Log, LoggedEvents, NullSpan, label

if TYPE_CHECKING:  # OpenTelemetry loads only where there is a collector
    from anabranch.telemetry.otlp import Traces

MAX_NAMES = 100
OTHER = "other"


class Children(dict[str, Any]):
    """Metrics by label. Labels can come from requests, and each costs memory, also in Prometheus: the first MAX_NAMES
    get their own metric, all others share one. Known labels always have their own."""

    def __init__(self, make: Callable[[str], Any], known: Iterable[str]) -> None:
        super().__init__()
        self._make = make
        self._left = MAX_NAMES
        for name in known:
            self[label(name)] = make(label(name))

    def __missing__(self, name: str) -> Any:
        short = label(name)
        if short not in self and self._left <= 0:
            short = OTHER
        if short not in self:
            self._left -= 1
            self[short] = self._make(short)
        return self[short]


class AllWorkers(MultiProcessCollector):
    """The sum over the files of all workers. The counters of a worker that has ended stay, its gauges do not."""

    def collect(self) -> Iterable[Metric]:
        folder = Path(self._path)
        for pid in {int(path.stem.rpartition("_")[2]) for path in folder.glob("gauge_live*.db")}:
            if not _runs(pid):
                with suppress(FileNotFoundError):  # another worker has removed it
                    mark_process_dead(pid, self._path)  # type: ignore[no-untyped-call]
        merged: Iterable[Metric] = self.merge(  # type: ignore[no-untyped-call]
            [str(path) for path in folder.glob("*.db") if _has_data(path)]
        )
        return merged


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
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


RAG = "rag_stream"
ENDPOINTS = "endpoints"
SURFACES = (RAG, "chat", "query", "openai", ENDPOINTS, "library")
COLLECTIONS = "collections"
OUTCOMES = ("answered", "cached", "refused", "failed", "cancelled", "rejected")
ANSWERING = ("rewrite", "retrieve", "merge", "evidence", "conflicts", "prompt", "generate", "cite", "verify")
STAGES = ("question", *ANSWERING, "aggregation.wait", "aggregation.emit", "aggregation.retry")
GUARDED = (*(ground.value for ground in Ground if ground is not Ground.DOCUMENTS), *get_args(WithheldReason))
SUBAGENTS = ("documentation", "row_selection", "action", "voice", "safety")
BREAKER = {"closed": 0, "half_open": 1, "open": 2}
QUESTION_MS = (5, 10, 25, 50, 100, 250, 500, 1_000, 1_500, 2_000, 3_000, 5_000, 10_000, 30_000, 60_000, 180_000)
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99, 1.0)
PART_MS = (1, 5, 10, 25, 50, 100, 250, 500, 1_000, 2_000, 5_000, 10_000, 30_000, 120_000)

# How a metric is constructed, its help text, and its labels with the values that are there from the start.
Definition = tuple[Callable[..., Counter | Gauge | Histogram], str, Mapping[str, Iterable[str]]]
QuestionTime = partial(Histogram, buckets=QUESTION_MS)
PartTime = partial(Histogram, buckets=PART_MS)
# Of several workers, what counts is the sum, the largest or the smallest value of those that run.
SumGauge = partial(Gauge, multiprocess_mode="livesum")
MaxGauge = partial(Gauge, multiprocess_mode="livemax")
MinGauge = partial(Gauge, multiprocess_mode="livemin")
METRICS: Mapping[str, Definition] = {
    "anabranch_questions": (Counter, "Questions, by outcome.", {"surface": SURFACES, "outcome": OUTCOMES}),
    "anabranch_question_latency_ms": (QuestionTime, "From question to end.", {"surface": SURFACES}),
    "anabranch_rejected": (
        Counter,
        "Rejected requests.",
        {"surface": SURFACES, "error_code": (RateLimited.code, Overloaded.code)},
    ),
    "anabranch_stage_latency_ms": (PartTime, "One stage of a question.", {"stage": STAGES}),
    "anabranch_questions_running": (SumGauge, "Questions that are answered now.", {}),
    "anabranch_questions_waiting": (SumGauge, "Questions that wait for admission.", {}),
    "anabranch_feedback": (
        Counter,
        "Answers that were rated, by their first rating.",
        {"rating": ("thumbs_up", "thumbs_down"), "surface": SURFACES},
    ),
    "anabranch_questions_joined": (Counter, "Questions that shared an answer.", {}),
    "anabranch_limiter": (
        Counter,
        "Decisions of the rate limiters.",
        {"surface": SURFACES[:-1], "decision": ("refused", "admitted")},
    ),
    "anabranch_spans_dropped": (Counter, "Spans that were not sent.", {}),
    "anabranch_redis_refused": (Counter, "Commands that Redis refused.", {}),
    "anabranch_stream_readers": (SumGauge, "Clients that read streams.", {}),
    "anabranch_breadcrumbs_lost": (Counter, "Lost breadcrumbs.", {}),
    "anabranch_evidence_latency_ms": (
        PartTime,
        "The evidence model on the passages of a question or claim.",
        {"task": get_args(EvidenceTask)},
    ),
    "anabranch_evidence_passages": (
        Counter,
        "Passages that the evidence model has read.",
        {"task": get_args(EvidenceTask)},
    ),
    "anabranch_sentences": (Counter, "Sentences of verified answers, by verdict.", {"verdict": get_args(Support)}),
    "anabranch_faithfulness": (
        partial(Histogram, buckets=SHARES),
        "The share of an answer's checked sentences that its sources support.",
        {},
    ),
    "anabranch_citation_marks": (
        Counter,
        "Citation marks that models wrote in verified answers, and those that were corrected, removed or added.",
        {"kind": get_args(MarkKind)},
    ),
    "rag_retrieval_latency_ms": (QuestionTime, "All sources of a question.", {"surface": SURFACES}),
    "rag_guardrail_triggered": (Counter, "Refused answers, by reason.", {"reason": GUARDED}),
    "rag_stream_requests": (Counter, "Requests to /rag/stream.", {}),
    "rag_stream_cancelled": (Counter, "Streams whose client disconnected.", {}),
    "rag_cache_hit": (Counter, "Found in a cache.", {"cache": get_args(CacheName)}),
    "rag_cache_miss": (Counter, "Not found in a cache.", {"cache": get_args(CacheName)}),
    "planner_steps": (Counter, "Planner steps, by outcome.", {"status": get_args(StepStatus)}),
    "planner_step_latency_ms": (QuestionTime, "From the start of a step to its end.", {}),
    "planner_subagents": (
        Counter,
        "Subagents, by outcome.",
        {"subagent": SUBAGENTS, "status": get_args(OutcomeStatus)},
    ),
    "planner_subagent_latency_ms": (PartTime, "From the start of a subagent to its end.", {"subagent": SUBAGENTS}),
    "planner_events_ignored": (
        Counter,
        "Events that a step recorded and did not deliver.",
        {"reason": get_args(Reason)},
    ),
    "planner_shadow": (Counter, "Steps compared with the legacy answer.", {"equal": ("true", "false")}),
}


def _configured_metrics(settings: Settings) -> Mapping[str, Definition]:
    """Metrics with the names of the configured sources, models and servers as labels."""
    sources = [endpoint.path for endpoint in settings.sources.values()]
    written = settings.default_model
    models = {*(one.path for one in settings.models.values()), *([written.path] if written else [])}
    retried = set(models)
    if settings.embedding_url:
        retried.add(f"{settings.embedding_model} (embeddings)")
    if settings.reranker_url:
        retried.add(f"{settings.reranker_model or 'reranker'} (reranker)")
    if settings.verifier_url:
        retried.add(f"{settings.verifier_model or 'verifier'} (verifier)")
    upstreams = {*retried, *sources, *(f"{path} (alternate)" for path in sources)}
    searched = (COLLECTIONS, *sources)
    redis: Mapping[str, Definition] = {"anabranch_redis_reachable": (MinGauge, "1 if Redis answers.", {})}
    return {
        "anabranch_source_replies": (
            Counter,
            "Replies of sources.",
            {"source": searched, "status": (Status.SUCCESS, Status.ERROR, Status.TIMEOUT)},
        ),
        "anabranch_source_latency_ms": (PartTime, "One source's reply.", {"source": searched}),
        "llm_tokens_in": (Counter, "Prompt tokens, as models report them.", {"model": {"extractive", *models}}),
        "llm_tokens_out": (Counter, "Completion tokens, as models report them.", {"model": {"extractive", *models}}),
        "anabranch_model_fallbacks": (
            Counter,
            "Answers that quote the documents because the model failed, by reason.",
            {"model": models, "reason": get_args(GenerationReason)},
        ),
        "anabranch_breaker_state": (MaxGauge, "0 closed, 1 half open, 2 open.", {"upstream": upstreams}),
        "anabranch_breaker_opened": (Counter, "How often the circuit of an upstream opened.", {"upstream": upstreams}),
        "anabranch_retries": (Counter, "Retried calls.", {"upstream": retried}),
        "anabranch_hedges": (
            Counter,
            "Calls of alternates beside or instead of their source.",
            {
                "upstream": [endpoint.path for endpoint in settings.sources.values() if endpoint.alternate is not None],
                "won": ("false", "true"),
            },
        ),
        "anabranch_mcp_server_ready": (
            MinGauge,
            "1 if an MCP server is connected.",
            {"server": [name for name, server in settings.mcp_servers.items() if server.enabled]},
        ),
        "rag_stream_errors": (
            Counter,
            "Requests to /rag/stream that failed.",
            {"error_code": _codes() - {Cancelled.code}},
        ),
        "anabranch_build_info": (
            partial(Gauge, multiprocess_mode="max"),
            "The running version.",
            {"version": [version("anabranch")]},
        ),
        **(redis if settings.redis_url is not None else {}),
    }


def _update(metric: Counter | Gauge | Histogram, *known: Iterable[str], labels: tuple[str, ...] = ()) -> Any:
    """The method that updates a metric: `inc`, `set` or `observe`. That of a metric with labels is found by their
    values, as in `update[surface][outcome](1)`; the known ones are there from the start."""
    if known:
        return Children(lambda value: _update(metric, *known[1:], labels=(*labels, value)), known[0])
    child = metric.labels(*labels) if labels else metric
    return child.observe if isinstance(child, Histogram) else child.set if isinstance(child, Gauge) else child.inc


def _source_label(path: str, surface: str) -> str:
    """All collections together: whoever reads the metrics may not see each of them. The path of a published one is its
    name or id."""
    return COLLECTIONS if surface == ENDPOINTS or path.startswith(COLLECTION_ADDRESS) else path


class Metrics:
    """The metrics of this process, in a separate registry."""

    def __init__(self, settings: Settings) -> None:
        # They would double the exposition.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._update = update = {
            name: _update(kind(name, text, list(labels), registry=self._registry), *labels.values())
            for name, (kind, text, labels) in {**METRICS, **_configured_metrics(settings)}.items()
        }
        self.stages = update["anabranch_stage_latency_ms"]
        self.spans_dropped = update["anabranch_spans_dropped"]
        update["anabranch_build_info"][version("anabranch")](1)
        redis = update.get("anabranch_redis_reachable", lambda _: None)
        redis(1)  # until the first check, within a second
        self._signals: Mapping[type[Signal], Callable[[Any], None]] = {
            Load: self._load,
            TokensUsed: self._spent,
            Rejected: self._rejected,
            BreakerStateChanged: self._breaker_moved,
            McpServerStateChanged: self._server_moved,
            StepEnded: self._stepped,
            SubagentEnded: self._subagent_ended,
            CacheLookup: lambda signal: update["rag_cache_hit" if signal.hit else "rag_cache_miss"][signal.cache](1),
            EvidenceJudged: self._evidence_judged,
            EvidenceUnavailable: lambda _: None,
            RecordingFailed: lambda _: None,
            QuestionNotRecorded: lambda _: None,
            AddedSourcesUnreadable: lambda _: None,
            EndpointCalled: lambda _: None,  # its history is kept elsewhere
            RateLimitChecked: lambda signal: update["anabranch_limiter"][signal.surface][
                "admitted" if signal.admitted else "refused"
            ](1),
            AnswerRated: lambda signal: update["anabranch_feedback"][signal.rating][signal.surface](1),
            AnswerShared: lambda _: update["anabranch_questions_joined"](1),
            Retried: lambda signal: update["anabranch_retries"][signal.upstream](1),
            Hedged: lambda signal: update["anabranch_hedges"][signal.upstream]["true" if signal.won else "false"](1),
            RedisStateChanged: lambda signal: redis(signal.reachable),
            RedisCommandRefused: lambda _: update["anabranch_redis_refused"](1),
            EventIgnored: lambda signal: update["planner_events_ignored"][signal.reason](1),
            ShadowCompared: lambda signal: update["planner_shadow"]["true" if signal.equal else "false"](1),
            StreamClients: lambda signal: update["anabranch_stream_readers"](signal.clients),
            BreadcrumbsDropped: lambda signal: update["anabranch_breadcrumbs_lost"](signal.count),
        }

    def asked(self, surface: str) -> None:
        if surface == RAG:
            self._update["rag_stream_requests"](1)

    def happened(self, event: AnswerEvent, surface: str) -> None:
        update = self._update
        match event:
            case SourceReplied(reply=reply):
                source = _source_label(reply.path, surface)
                update["anabranch_source_replies"][source][reply.status](1)
                update["anabranch_source_latency_ms"][source](reply.latency_ms)
            case RetrievalFinished():
                update["rag_retrieval_latency_ms"][surface](event.time_ms)
            case FellBack(fallback=fallback):
                update["anabranch_model_fallbacks"][fallback.failed][fallback.reason](1)
            case Answered(answer=answer):
                outcome = "cached" if answer.cached else "refused" if answer.refused else "answered"
                update["anabranch_questions"][surface][outcome](1)
                update["anabranch_question_latency_ms"][surface](answer.timings.total_ms)
                if (reason := answer.refusal_reason) is not None:
                    update["rag_guardrail_triggered"][reason](1)
                if not answer.cached and (answer.sentences or answer.faithfulness is not None):
                    self._verified(answer)
            case Failed(code=Cancelled.code):
                update["anabranch_questions"][surface]["cancelled"](1)
                if surface == RAG:
                    update["rag_stream_cancelled"](1)
            case Failed():
                update["anabranch_questions"][surface]["failed"](1)
                update["anabranch_question_latency_ms"][surface](event.time_ms)
                if surface == RAG:
                    update["rag_stream_errors"][event.code](1)

    def _verified(self, answer: Answer) -> None:
        if answer.faithfulness is not None:
            self._update["anabranch_faithfulness"](answer.faithfulness)
        for verdict, count in answer.verdicts.items():
            self._update["anabranch_sentences"][verdict](count)
        for kind, count in answer.marks.items():
            self._update["anabranch_citation_marks"][kind](count)

    def noted(self, signal: Signal) -> None:
        self._signals[type(signal)](signal)

    def _load(self, signal: Load) -> None:
        self._update["anabranch_questions_running"](signal.running)
        self._update["anabranch_questions_waiting"](signal.waiting)

    def _spent(self, signal: TokensUsed) -> None:
        self._update["llm_tokens_in"][signal.model](signal.usage.prompt_tokens)
        self._update["llm_tokens_out"][signal.model](signal.usage.completion_tokens)

    def _evidence_judged(self, signal: EvidenceJudged) -> None:
        self._update["anabranch_evidence_latency_ms"][signal.task](signal.latency_ms)
        self._update["anabranch_evidence_passages"][signal.task](signal.passages)

    def _rejected(self, signal: Rejected) -> None:
        self._update["anabranch_questions"][signal.surface]["rejected"](1)
        self._update["anabranch_rejected"][signal.surface][signal.code](1)
        if signal.surface == RAG:
            self._update["rag_stream_requests"](1)
            self._update["rag_stream_errors"][signal.code](1)

    def _breaker_moved(self, signal: BreakerStateChanged) -> None:
        self._update["anabranch_breaker_state"][signal.upstream](BREAKER[signal.state])
        self._update["anabranch_breaker_opened"][signal.upstream](signal.state == "open")

    def _server_moved(self, signal: McpServerStateChanged) -> None:
        """NaN for a server that is not used any more: 0 would raise an alert."""
        ready = math.nan if signal.state in ("idle", "disabled") else signal.state == "ready"
        self._update["anabranch_mcp_server_ready"][signal.server](ready)

    def _stepped(self, signal: StepEnded) -> None:
        self._update["planner_steps"][signal.status](1)
        self._update["planner_step_latency_ms"](signal.latency_ms)

    def _subagent_ended(self, signal: SubagentEnded) -> None:
        self._update["planner_subagents"][signal.subagent][signal.status](1)
        self._update["planner_subagent_latency_ms"][signal.subagent](signal.latency_ms)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """The metrics of all workers and their media type, as the client accepts it, else plain text."""
        encode, media_type = choose_encoder(accept)
        registry = self._registry
        if values.ValueClass._multiprocess:  # `serve` has configured files that several workers share
            registry = CollectorRegistry()
            AllWorkers(registry)  # type: ignore[no-untyped-call]
        return encode(registry), media_type


def _codes(kind: type[AnabranchError] = AnabranchError) -> set[str]:
    return {kind.code}.union(*(_codes(one) for one in kind.__subclasses__()))


class TimedSpan(NullSpan):
    """A span that is measured for the metrics."""

    observe: Callable[[float], None]
    now: Callable[[], float]
    began: float

    def __exit__(self, *_: object) -> None:
        self.observe((self.now() - self.began) * 1000)


class CombinedTelemetry(LoggedEvents):
    """Passes every event to log, metrics and traces, and every call of an endpoint to its history. An error in them is
    logged once and fails no question."""

    def __init__(
        self,
        log: Log,
        metrics: Metrics,
        settings: Settings,
        traces: "Traces | None" = None,
        clock: Clock | None = None,
        history: EndpointHistory | None = None,
    ) -> None:
        super().__init__(log, queries=settings.log_queries, clock=clock or SystemClock())
        self._metrics = metrics
        self._traces = traces
        self._history = history
        self._failure_logged = False
        self._now = self._clock.monotonic

    def asked(self, question: Question, context: Context) -> None:
        try:
            self._metrics.asked(context.surface)
            super().asked(question, context)
        except Exception as error:  # noqa: BLE001  the contract: telemetry never fails what it watches
            self._log_failure(error)

    def happened(self, event: AnswerEvent, context: Context) -> None:
        if isinstance(event, Token):
            return
        try:
            self._metrics.happened(event, context.surface)
            super().happened(event, context)
        except Exception as error:  # noqa: BLE001
            self._log_failure(error)

    def noted(self, signal: Signal) -> None:
        try:
            if isinstance(signal, EndpointCalled):
                if self._history is not None:
                    self._history.called(signal)
                return
            self._metrics.noted(signal)
            super().noted(signal)
        except Exception as error:  # noqa: BLE001
            self._log_failure(error)

    def span(self, name: str, context: Context, **attributes: str | int | float) -> AbstractContextManager[Span]:
        try:
            span = NullSpan(context)
            if name != "upstream":  # calls to upstreams have other metrics
                span = TimedSpan(context, self._metrics.stages[name], self._now, self._now())
            return span if self._traces is None else self._traces.span(name, context, attributes, span.__exit__)
        except Exception as error:  # noqa: BLE001
            self._log_failure(error)
            return NullSpan(context)

    def _log_failure(self, error: Exception) -> None:
        if not self._failure_logged:
            self._failure_logged = True
            self._log.error("telemetry_failed", exc_info=error)
