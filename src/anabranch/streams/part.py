"""One subagent's part of a step: where it stands, and what that makes of the step."""

from collections.abc import Collection
from typing import Literal, get_args

from anabranch.domain.events import Outcome, OutcomeStatus, StepStatus
from anabranch.domain.model import Value
from anabranch.domain.steps import Expected

Open = Literal["waiting", "running"]
State = Open | OutcomeStatus
OPEN: tuple[Open, ...] = ("waiting", "running")
CLOSED: dict[str, OutcomeStatus] = {status: status for status in get_args(OutcomeStatus)}


class Part(Value):
    """Where one subagent stands. Of its `attempt`, revisions count from `base`; `heard` says that it has brought one
    with a number. `deadline` is when its time is over, however it is tried in between."""

    expected: Expected
    deadline: float
    deadline_ms: int
    state: State = "waiting"
    attempt: int = 0
    base: int = 0
    revision: int = 0
    heard: bool = False
    delivered: bool = False
    latency_ms: int | None = None
    error: str | None = None

    @property
    def open(self) -> bool:
        return self.state in OPEN

    @property
    def outcome(self) -> Outcome:
        return Outcome(
            subagent=self.expected.key,
            status=CLOSED.get(self.state, "cancelled"),
            revision=self.revision,
            attempts=self.attempt,
            latency_ms=self.latency_ms,
            error=self.error,
        )

    def meant(self, revision: int | None) -> int:
        """Which attempt one belongs to that does not say: after an error it is the next, unless it is an old one."""
        attempt = max(1, self.attempt)
        again = self.state == "error" and (revision is None or self.placed(attempt, revision)[1] > self.revision)
        return attempt + again

    def placed(self, attempt: int, revision: int | None) -> tuple[int, int]:
        """From where an attempt's revisions count, and where this one stands among all of this result's."""
        fresh = attempt != self.attempt
        base = self.revision if fresh else self.base
        if revision is None:
            return base + 1, self.revision + 1  # numbered ones go on counting behind it
        if revision < 1 and (fresh or not self.heard):  # whoever counts from zero
            base = self.revision + 1 - revision
        return base, base + revision


def natural(parts: Collection[Part]) -> StepStatus:
    """How a step ended that nobody ended."""
    missed = [part for part in parts if part.state != "success"]
    if not missed:
        return "success"
    if any(part.expected.required for part in missed) or not any(part.delivered for part in parts):
        return "failed"
    return "partial_failure"
