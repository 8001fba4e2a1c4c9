"""The registry of subagents: which adapter handles which key."""

from collections.abc import Collection, Mapping
from typing import Literal, get_args

from anabranch.domain.contracts import Clock, Outbound, Subagent
from anabranch.domain.steps import Expected
from anabranch.subagents.action import confirmation
from anabranch.subagents.http import HttpSubagent
from anabranch.subagents.payloads import CardSubagent
from anabranch.subagents.row_selection import preview
from anabranch.subagents.safety import SafetySubagent
from anabranch.subagents.voice import UNCHECKED, transcript

Kind = Literal["documentation", "row_selection", "action", "voice", "safety", "other"]
KINDS: tuple[Kind, ...] = get_args(Kind)
# Other names in spec 2.
SYNONYMS: Mapping[str, Kind] = {
    "documentation_qa": "documentation",
    "action_workflow": "action",
    "workflow": "action",
}


class SubagentRegistry:
    """A subagent with a URL is called there; its kind must be enabled, too."""

    def __init__(
        self, *, documentation: Subagent, outbound: Outbound, clock: Clock, enabled: Collection[str] = KINDS
    ) -> None:
        every: dict[Kind, Subagent] = {
            "documentation": documentation,
            "row_selection": CardSubagent(preview),
            "action": CardSubagent(confirmation),
            "voice": CardSubagent(transcript, UNCHECKED),
            "safety": SafetySubagent(),
            "other": CardSubagent(),
        }
        self._here = {kind: subagent for kind, subagent in every.items() if kind in enabled}
        self._elsewhere = {kind: HttpSubagent(one, outbound, clock) for kind, one in self._here.items()}

    def find(self, expected: Expected) -> Subagent | None:
        known = self._here if expected.url is None else self._elsewhere
        return known.get(kind_of(expected.key))


def kind_of(key: str) -> Kind:
    """The kind of a key; `other` if it is unknown."""
    plain = key.strip().lower().replace("-", "_").replace(" ", "_")
    return next((kind for kind in KINDS if kind == plain), SYNONYMS.get(plain, "other"))
