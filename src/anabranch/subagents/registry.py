"""Subagents of which we know nothing: any JSON object is their result."""

from collections.abc import AsyncGenerator, Collection, Mapping
from typing import Literal, get_args

from anabranch.domain.contracts import Clock, Outbound, Subagent
from anabranch.domain.events import SubagentStatus
from anabranch.domain.model import Context
from anabranch.domain.steps import Directive, Expected, Fragment
from anabranch.subagents.action import ActionSubagent
from anabranch.subagents.http import HttpSubagent
from anabranch.subagents.payloads import Object, fragment, handed_over
from anabranch.subagents.row_selection import RowSelectionSubagent
from anabranch.subagents.safety import SafetySubagent
from anabranch.subagents.voice import VoiceSubagent


class GenericSubagent:
    """What it sends goes on as it is. An `input` in the envelope is its result."""

    def taken(self, payload: bytes, status: SubagentStatus) -> Fragment:
        return fragment(payload, status, as_sent)

    def work(self, expected: Expected, directive: Directive, context: Context) -> AsyncGenerator[Fragment, None]:  # noqa: ARG002
        return handed_over(self, expected)


def as_sent(given: Object) -> Object:
    return given


Kind = Literal["documentation", "row_selection", "action", "voice", "safety", "other"]
KINDS: tuple[Kind, ...] = get_args(Kind)
# As spec 2 also calls them.
SYNONYMS: Mapping[str, Kind] = {
    "documentation_qa": "documentation",
    "action_workflow": "action",
    "workflow": "action",
}


class SubagentRegistry:
    """One that has a URL is asked there; its kind must be switched on all the same."""

    def __init__(
        self, *, documentation: Subagent, outbound: Outbound, clock: Clock, enabled: Collection[str] = KINDS
    ) -> None:
        every: dict[Kind, Subagent] = {
            "documentation": documentation,
            "row_selection": RowSelectionSubagent(),
            "action": ActionSubagent(),
            "voice": VoiceSubagent(),
            "safety": SafetySubagent(),
            "other": GenericSubagent(),
        }
        self._here = {kind: subagent for kind, subagent in every.items() if kind in enabled}
        self._elsewhere = {kind: HttpSubagent(one, outbound, clock) for kind, one in self._here.items()}

    def find(self, expected: Expected) -> Subagent | None:
        known = self._here if expected.url is None else self._elsewhere
        return known.get(kind_of(expected.key))


def kind_of(key: str) -> Kind:
    """What a key stands for; one that we do not know is another."""
    plain = key.strip().lower().replace("-", "_").replace(" ", "_")
    return next((kind for kind in KINDS if kind == plain), SYNONYMS.get(plain, "other"))
