"""Replays a recording: the same pipeline and the same Run, with contracts that read from the recording."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple, TypeVar

import msgspec

from anabranch.app.wiring import build_pipeline, judge_for
from anabranch.configuration.config_file import Share, convert, convert_field
from anabranch.configuration.settings import PREFIX, Settings, converted
from anabranch.domain.contracts import Answerer, Emit, Generator, SystemClock
from anabranch.domain.errors import AnabranchError, ConfigurationError, RecordingError
from anabranch.domain.events import AnswerEvent, Failed
from anabranch.domain.evidence import ClaimChecker, Evidence, EvidencePage, Reading, Verdict
from anabranch.domain.model import Answer, Context, Endpoint, EvidenceUse, Profile, Prompt, Question
from anabranch.domain.playback import EventOrder, Interruption, RecordedClock, RecordedDirectory, RecordedEvidence
from anabranch.domain.recording import Recording
from anabranch.models.factory import check_evidence, claims_for, evidence_for
from anabranch.pipeline.run import Run
from anabranch.telemetry.log import SilentTelemetry
from anabranch.text.messages import LANGUAGES

T = TypeVar("T", Question, Profile)
# No replay takes longer: it waits for nothing but the stages.
MAX_S = 300.0
SILENT = SilentTelemetry()
# With the value `recompute`, the evidence model on this machine reads the passages again.
SCORES = "evidence_scores"
# What `--with` can change, by where it is. Everything else was decided by the sources or by the model.
OF_SETTINGS = (
    "max_context_tokens",
    "query_context_tokens",
    "context",
    "compact_tokens",
    "evidence",
    "evidence_passages",
    "min_faithfulness",
)
OF_QUESTION = (
    "top_k",
    "threshold",
    "refuse",
    "max_tokens",
    "temperature",
    "system_prompt",
    "language",
    "answer_in",
    "verify",
    "answer_policy",
)
OF_PROFILE = ("merge", "prompt", "marks", "near_duplicates", "defence")
# Similarities: a question takes them from settings and profiles, which have checked them.
SHARES = ("threshold", "near_duplicates")
CAN = f"Supported keys: {', '.join((*OF_QUESTION, *OF_PROFILE, *OF_SETTINGS, SCORES))}."
NAMES = {"guard_threshold": "threshold"}
# Why a setting cannot be replayed, by the beginning of its name.
RETRIEVAL = "it changes what the sources return, and the recording has only what they returned"
GENERATION = "it needs the model, and the recording has only what the model wrote for the recorded prompt"
FIXED = {
    "embedding": RETRIEVAL,
    "rerank": RETRIEVAL,
    "mmr_lambda": RETRIEVAL,
    "diversity": RETRIEVAL,
    "similarity_threshold": RETRIEVAL,
    "filters": RETRIEVAL,
    "sources": RETRIEVAL,
    "retrieval": RETRIEVAL,
    "query_rewriting": RETRIEVAL,
    "rewrite": RETRIEVAL,
    "model": GENERATION,
    "generation": GENERATION,
    "fallback": GENERATION,
    "verifier": "what it said is recorded; evidence_scores=recompute checks with the claim model of this package",
}


class Replayed(NamedTuple):
    """The events of a replay, encoded; the prompts that models were asked with; the number of texts that the evidence
    model had to judge and that the recording has no result for; and the question as it was asked."""

    events: tuple[bytes, ...]
    values: tuple[AnswerEvent, ...]
    prompts: tuple[tuple[Endpoint, Prompt], ...]
    unread: int
    question: Question

    def same_as(self, recording: Recording) -> bool:
        """Whether the events are the recorded ones. Fields that this release has added may have their default."""
        return self.events == tuple(map(bytes, recording.events)) or self.values == tuple(recording.decoded_events())


async def replay(
    recording: Recording,
    changes: Mapping[str, str] | None = None,
    models_dir: str | None = None,
    *,
    explain: bool = False,
) -> Replayed:
    """Run the recorded question again, with `changes` to what it was asked with. Without changes, every call of a model
    gets what it got; with changes, quotes are chosen again, and other models answer the recorded prompt only. The
    evidence model of `models_dir` is used only if the changes ask for it. With `explain`, the answer has an explanation
    also if the recorded one has none."""
    settings, question, given = _settings(recording), recording.question, dict(changes or {})
    recompute = _recomputes(given.pop(SCORES, "recorded"))
    if given:
        most = min((call.query.limit for call in recording.source_calls), default=question.top_k)
        settings, question = changed(settings, question, given, most)
    if explain:
        question = msgspec.structs.replace(question, explain=True)
    interruption = Interruption(recording.end)
    async with AsyncExitStack() as leaving:
        order = EventOrder() if not changes else None
        recorded = RecordedEvidence(recording, interruption, order)
        evidence: Evidence | None = recorded if settings.evidence != "off" else None
        claims: ClaimChecker = recorded
        if recompute:
            here = msgspec.structs.replace(settings, models_dir=models_dir or settings.models_dir)
            claims = await leaving.enter_async_context(_claims_here(here))
            evidence = evidence and await leaving.enter_async_context(_evidence_here(here))
        judge = judge_for(settings, evidence) if evidence is not None else None

        def otherwise(endpoint: Endpoint) -> Generator | None:
            if not changes or endpoint.kind != "extractive":
                return None
            from anabranch.models.extractive import Extractive  # noqa: PLC0415

            return Extractive(judge() if judge is not None else None)

        asked = (await replay(recording)).prompts if changes else None
        directory = RecordedDirectory(
            recording, asked=asked, otherwise=otherwise, interruption=interruption, order=order
        )
        telemetry = OrderTelemetry(order) if order is not None else SILENT
        pipeline = build_pipeline(settings, directory, RecordedClock(recording), telemetry, evidence, judge, claims)
        values = await _events(_run(recording, pipeline, question), interruption, recording.end)
    events = tuple(map(msgspec.json.encode, values))
    return Replayed(events, values, tuple(directory.prompts), recorded.unread, question)


def _run(recording: Recording, pipeline: Answerer, question: Question) -> Run:
    context, end = recording.context.context(), recording.end
    time_s = end.time_ms / 1000 if isinstance(end, Failed) else 0.0
    deadline = asyncio.get_running_loop().time() + MAX_S
    own = msgspec.structs.replace(context, deadline=deadline, boundary=recording.boundary)
    return Run(AtDeadline(pipeline, context.deadline), question, own, SILENT, clock=EndingClock(time_s))


def _recomputes(value: str) -> bool:
    if value not in ("recorded", "recompute"):
        raise ConfigurationError(f"{SCORES} takes recorded or recompute, not {value!r}.")
    return value == "recompute"


@asynccontextmanager
async def _evidence_here(settings: Settings) -> AsyncIterator[Evidence | None]:
    """The evidence model on this machine; ConfigurationError if it is not installed."""
    here = msgspec.structs.replace(settings, evidence="on")
    check_evidence(here)
    async with evidence_for(here, SystemClock(), SILENT) as evidence:
        yield UnhurriedEvidence(evidence) if evidence is not None else None


@asynccontextmanager
async def _claims_here(settings: Settings) -> AsyncIterator[ClaimChecker]:
    """The claim model on this machine."""
    async with claims_for(settings, SystemClock(), SILENT) as claims:
        yield UnhurriedClaims(claims)


class UnhurriedEvidence:
    """An Evidence without a deadline: that of the recording is a time of another clock."""

    def __init__(self, inner: Evidence) -> None:
        self._inner = inner

    async def read(
        self,
        question: str,
        inputs: Sequence[tuple[EvidencePage, ...]],
        *,
        until: float | None = None,  # noqa: ARG002
    ) -> Sequence[Reading | None]:
        return await self._inner.read(question, inputs)


class UnhurriedClaims:
    """A ClaimChecker without a deadline."""

    def __init__(self, inner: ClaimChecker) -> None:
        self._inner = inner

    async def check(
        self,
        claim: str,
        inputs: Sequence[tuple[EvidencePage, ...]],
        *,
        until: float | None = None,  # noqa: ARG002
    ) -> Sequence[Verdict | None]:
        return await self._inner.check(claim, inputs)


async def _events(run: Run, interruption: Interruption, end: AnswerEvent) -> tuple[AnswerEvent, ...]:
    async def stop() -> None:
        await interruption.reached.wait()
        if isinstance(end, Failed):
            run.stop(_error(end))

    stopping = asyncio.create_task(stop())
    try:
        async with run.start().listen() as listener:
            return tuple([event async for event in listener])
    finally:
        stopping.cancel()


def _error(end: Failed) -> AnabranchError:
    error = AnabranchError(end.message, **end.details)
    error.code = end.code
    return error


class OrderTelemetry(SilentTelemetry):
    """Says when an event is emitted."""

    def __init__(self, order: EventOrder) -> None:
        self._order = order

    def happened(self, event: AnswerEvent, context: Context) -> None:  # noqa: ARG002
        self._order.happened()


class AtDeadline:
    """Answers with the recorded deadline, which is a time of the recorded clock. The Run has its own."""

    def __init__(self, inner: Answerer, deadline: float) -> None:
        self._inner = inner
        self._deadline = deadline

    async def answer(self, question: Question, context: Context, emit: Emit) -> Answer:
        return await self._inner.answer(question, msgspec.structs.replace(context, deadline=self._deadline), emit)


class EndingClock:
    """The clock of a Run: it begins at 0 and ends when the recorded one did."""

    def __init__(self, end_s: float) -> None:
        self._readings = iter((0.0,))
        self._end_s = end_s

    def monotonic(self) -> float:
        return next(self._readings, self._end_s)


def _settings(recording: Recording) -> Settings:
    known = {name: value for name, value in recording.settings.items() if name in Settings.__struct_fields__}
    try:
        return msgspec.convert(known, Settings)
    except msgspec.ValidationError as error:
        raise RecordingError(f"The recording is damaged: its settings are not valid ({error}).") from None


def changed(settings: Settings, question: Question, changes: Mapping[str, str], most: int) -> tuple[Settings, Question]:
    """The settings and the question with these values; the sources were asked for `most` passages. ConfigurationError
    for what cannot be replayed."""
    for given, value in changes.items():
        name = given.upper().removeprefix(PREFIX).lower()
        name = NAMES.get(name, name)
        if name in OF_SETTINGS:
            settings = msgspec.structs.replace(settings, **{name: converted(name, value, given)})
        elif name in OF_QUESTION:
            question = _with(question, name, value, given)
        elif name in OF_PROFILE:
            question = msgspec.structs.replace(question, profile=_with(question.profile, name, value, given))
        else:
            raise ConfigurationError(f"{given} cannot be replayed: {_reason(name)}. {CAN}")
        if name == "evidence":
            question = msgspec.structs.replace(question, evidence=_use(settings, question))
        if name == "top_k" and not 1 <= question.top_k <= most:
            raise ConfigurationError(f"{given} takes a number from 1 to {most}: the sources were asked for {most}.")
    if question.answer_policy == "strict" and not question.verify:
        raise ConfigurationError("answer_policy=strict needs verify=on.")
    return settings, question


def _with(value: T, name: str, text: str, given: str) -> T:
    """The value with another field, converted from text; `none` is no value."""
    field = convert_field(type(value), name, text, given)
    if name in ("language", "answer_in") and field not in (None, *LANGUAGES):
        raise ConfigurationError(f"{given} takes one of {', '.join(LANGUAGES)}, not {text!r}.")
    if name in SHARES and field is not None:
        convert(text, Share, given)
    return msgspec.structs.replace(value, **{name: field})


def _use(settings: Settings, question: Question) -> EvidenceUse:
    """As a question without a request's own value has it."""
    quoted = question.model is not None and question.model.kind == "extractive"
    return "rank" if settings.evidence == "on" or (settings.evidence == "auto" and quoted) else "off"


def _reason(name: str) -> str:
    if name not in {*Settings.__struct_fields__, *Question.__struct_fields__}:
        return "it is not a setting"
    return next((why for begin, why in FIXED.items() if name.startswith(begin)), "it does not change a recorded answer")
