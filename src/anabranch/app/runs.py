"""The Runs of this process: admission, rate limits, the query log, and the end of all of them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from anabranch.app.policies import Policies
from anabranch.app.query_log import LogEntry, QueryLog
from anabranch.app.recording_folder import RecordingFolder
from anabranch.app.revocations import Revocations
from anabranch.configuration.settings import Settings
from anabranch.domain.contracts import Answerer, Telemetry
from anabranch.domain.errors import InvalidQuestion, Overloaded, RateLimited, ShuttingDown
from anabranch.domain.model import Allowance, Context, Endpoint, Question
from anabranch.domain.shares import claimant, reply_memory
from anabranch.domain.signals import Rejected
from anabranch.knowledge.key_requests import REQUESTS
from anabranch.knowledge.model import Caller
from anabranch.network import redaction
from anabranch.pipeline.run import Run
from anabranch.policies.admission import admitted
from anabranch.policies.shares import Held

CLOSING = "The server is shutting down; ask again in a moment."


class StartedRun(NamedTuple):
    """A Run, and what its caller may still ask, where that is limited."""

    run: Run
    allowance: Allowance | None


def _is_configured(source: Endpoint) -> bool:
    return source.kind == "mcp" or (source.operator and bool(source.name))


class Runs:
    """Starts Runs within the limits of the settings, and ends them when the process shuts down."""

    def __init__(
        self,
        settings: Settings,
        answerer: Answerer,
        policies: Policies,
        query_log: QueryLog,
        revocations: Revocations,
        telemetry: Telemetry,
        recordings: RecordingFolder | None = None,
    ) -> None:
        self._recordings = recordings
        self.draining = False
        self._settings = settings
        self._answerer = answerer
        self._policies = policies
        self._query_log = query_log
        self._revocations = revocations
        self._telemetry = telemetry
        self._running: set[Run] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    async def check(self, surface: str) -> None:
        """Refuse a request before its body is read, if its question could not be admitted now."""
        if self.draining:
            raise ShuttingDown(CLOSING)
        await self._policies.gate.check(surface)

    def report_load(self) -> None:
        """Bring the metrics about running questions up to date."""
        self._policies.gate.report_load()

    def rejected(self, surface: str, code: str) -> None:
        """Count a request that was refused before it became a question. Rate limits and overload are counted where they
        are found."""
        if code not in (RateLimited.code, Overloaded.code):
            self._telemetry.noted(Rejected(surface=surface, code=code))

    async def admit_key(self, caller: Caller, surface: str) -> Allowance | None:
        """Count a request against the limit of its API key, where that has one."""
        limit = caller.rights.limits.get(REQUESTS)
        if limit is None:
            return None
        return await self._policies.rate_limits.admit_key(caller.key or "", int(limit), surface)

    async def admit_change(self) -> Allowance | None:
        """Count a change of what is stored against the limit of the caller of this request."""
        return await self._policies.rate_limits.admit_change(claimant.get())

    @asynccontextmanager
    async def admitted(self, context: Context) -> AsyncIterator[Allowance | None]:
        """A request that is no question, but takes its place: it waits for its turn, and counts against its caller's
        rate limit."""
        slot = self._slot(context)
        try:
            allowance = await self._policies.rate_limits.admit(context)
            await slot.turn()
            yield allowance
        finally:
            slot.leave()

    async def begin(
        self,
        question: Question,
        context: Context,
        answerer: Answerer | None = None,
        entry: LogEntry | None = None,
    ) -> StartedRun:
        """Start a Run that counts against its caller's rate limit and ends if its caller's key is revoked. Attach to it
        before the loop turns again."""
        self._validate(question)
        slot = self._slot(context)
        try:
            allowance = await self._policies.rate_limits.admit(context)
            if self.draining:  # it began meanwhile, and no longer waits for new Runs
                raise ShuttingDown(CLOSING)
        except BaseException:
            slot.leave()
            raise
        return StartedRun(self._start(question, context, answerer, entry, slot, context.credential), allowance)

    def start(
        self,
        question: Question,
        context: Context,
        answerer: Answerer | None = None,
        entry: LogEntry | None = None,
        telemetry: Telemetry | None = None,
    ) -> Run:
        """Start a Run, which reports to `telemetry` if it is given. Attach to it (`listen`, `value`) before the loop
        turns again."""
        self._validate(question)
        return self._start(question, context, answerer, entry, self._slot(context), telemetry=telemetry)

    async def drain(self, grace_s: float) -> None:
        """Start no new Run, give the running ones `grace_s`, then end the rest with ShuttingDown."""
        self.draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            for run in tuple(self._running):
                run.stop(ShuttingDown(CLOSING))
        await self._idle.wait()
        if self._recordings is not None:
            await self._recordings.settled()

    def _slot(self, context: Context) -> Held:
        if self.draining:
            raise ShuttingDown(CLOSING)
        return self._policies.gate.enter(context.surface)

    def _start(
        self,
        question: Question,
        context: Context,
        answerer: Answerer | None,
        entry: LogEntry | None,
        slot: Held,
        key: str | None = None,
        telemetry: Telemetry | None = None,
    ) -> Run:
        memory = reply_memory.get()
        if memory is not None:
            memory.join()
        recording = self._recordings.begin() if self._recordings is not None and answerer is None else None
        if recording is not None:
            answerer, telemetry = recording.answerer, recording.telemetry

        def ended(run: Run) -> None:
            if recording is not None and self._recordings is not None:
                self._recordings.keep(recording.recorder)
            slot.leave()
            if memory is not None:
                memory.leave()
            self._running.discard(run)
            if not self._running:
                self._idle.set()
            if key is not None:
                self._revocations.discard(key, run.stop)

        logged = self._query_log.logged(answerer or self._answerer, question, entry)
        run = Run(admitted(logged, slot), question, context, telemetry or self._telemetry, ended=ended)
        if key is not None:
            self._revocations.add(key, run.stop)
        self._running.add(run)
        self._idle.clear()
        redaction.learn_tokens(question, context)
        return run.start()

    def _validate(self, question: Question) -> None:
        """The limits, the same for every surface."""
        if not question.text.strip():
            raise InvalidQuestion("The prompt is empty: ask something.")
        # The operator decides how many configured sources there are, and `aggregate` has its own limit on results.
        asked, most = sum(not _is_configured(one) for one in question.sources), self._settings.max_data_sources
        if asked > most:
            raise InvalidQuestion(
                f"The question names {asked} sources; at most {most} can be asked at once "
                "(AGGREGATOR_MAX_DATA_SOURCES)."
            )
        if not 1 <= question.top_k <= self._settings.max_top_k and question.ranking is None:
            raise InvalidQuestion(
                f"top_k is {question.top_k}; it must be from 1 to {self._settings.max_top_k} (AGGREGATOR_MAX_TOP_K)."
            )
