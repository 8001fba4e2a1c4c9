"""Who does what: each subagent's adapter by its key, as far as its kind is switched on."""

from collections.abc import Collection, Mapping
from typing import Literal, get_args

from anabranch.domain.contracts import Clock, Outbound, Subagent
from anabranch.domain.steps import Expected
from anabranch.subagents.action import Action
from anabranch.subagents.http import HttpSubagent
from anabranch.subagents.other import Other
from anabranch.subagents.row_selection import RowSelection
from anabranch.subagents.safety import Safety
from anabranch.subagents.voice import Voice

Kind = Literal["documentation", "row_selection", "action", "voice", "safety", "other"]
KINDS: tuple[Kind, ...] = get_args(Kind)
# As spec 2 also calls them.
SYNONYMS: Mapping[str, Kind] = {
    "documentation_qa": "documentation",
    "action_workflow": "action",
    "workflow": "action",
}


class Roster:
    """One that has a URL is asked there; its kind must be switched on all the same."""

    def __init__(
        self, *, documentation: Subagent, outbound: Outbound, clock: Clock, enabled: Collection[str] = KINDS
    ) -> None:
        every: dict[Kind, Subagent] = {
            "documentation": documentation,
            "row_selection": RowSelection(),
            "action": Action(),
            "voice": Voice(),
            "safety": Safety(),
            "other": Other(),
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
