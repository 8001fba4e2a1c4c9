"""The state of a step, put together from its events."""

from collections.abc import Iterable, Mapping

from anabranch.client.events import PlannerEvent, Reset


class StepView:
    """Keeps the latest revision under every key, and so comes to the same state whether events came live, by replay,
    once or twice. A stream that goes on in the next step is held here too: keys carry their step."""

    def __init__(self, events: Iterable[PlannerEvent | Reset] = ()) -> None:
        self.sequence = 0
        self._latest: dict[tuple[str, str, str | None], PlannerEvent] = {}
        for event in events:
            self.apply(event)

    def apply(self, event: PlannerEvent | Reset) -> bool:
        """Whether it changed anything."""
        if isinstance(event, Reset):
            self.sequence = 0
            self._latest.clear()
            return True
        self.sequence = max(self.sequence, event.sequence)
        known = self._latest.get(event.key)
        if known is not None and known.content.revision >= event.content.revision:
            return False
        self._latest[event.key] = event
        return True

    @property
    def latest(self) -> Mapping[tuple[str, str, str | None], PlannerEvent]:
        """By step, type and result key."""
        return self._latest

    @property
    def results(self) -> dict[str, PlannerEvent]:
        """The latest result, or part of one, by result key; of a later step where two use the same."""
        return {
            event.content.result_key: event
            for event in sorted(self._latest.values(), key=lambda event: event.sequence)
            if event.type == "subagent_result" and event.content.result_key is not None
        }

    def status(self, plan_step_id: str) -> str | None:
        """How a step stands: `in_progress`, or how it ended; None if nothing has been heard of it."""
        if end := self._latest.get((plan_step_id, "plan_step_completed", None)):
            return end.content.status
        return "in_progress" if any(step == plan_step_id for step, _, _ in self._latest) else None
