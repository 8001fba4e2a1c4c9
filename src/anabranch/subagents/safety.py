"""The safety adapter: its decision may end a step."""

from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from anabranch.domain.events import SafetyVerdict, SubagentStatus
from anabranch.domain.model import Context
from anabranch.domain.steps import Directive, Expected, Fragment
from anabranch.subagents.payloads import Object, closed, cut, input_as_result, joined, opened

MAX_REASON = 1_000
MAX_SHOWN = 100
MAX_CATEGORIES = 50
DECISIONS = ("decision", "verdict", "outcome")
REASONS = ("reason", "message", "rationale", "explanation")
VERDICTS: dict[str, SafetyVerdict] = {"allow": "allow", "warn": "warn", "block": "block"}


class SafetySubagent:
    """A Subagent that pushes its decision, is called at its URL, or has it in the envelope's `input`. Anything but
    allow and warn counts as block, also a missing decision. In an unfinished result only a block counts."""

    def taken(self, payload: bytes, status: SubagentStatus) -> Fragment:
        given = opened(payload)
        said = next((given[name] for name in DECISIONS if given.get(name) is not None), None)
        verdict, doubt = _verdict(said)
        reason = cut(" ".join(filter(None, (doubt, _reason(given)))), MAX_REASON)
        if status != "success" and (doubt or verdict != "block"):
            return Fragment(status=status, payload=closed(given), reason=_reason(given))
        others = {name: value for name, value in given.items() if name not in DECISIONS}
        card: Object = {
            "card": "safety_decision",
            "decision": verdict,
            "reason": reason,
            "categories": _categories(given.get("categories")),
        }
        return Fragment(status=status, payload=closed(joined(card, others)), verdict=verdict, reason=reason)

    def work(self, expected: Expected, directive: Directive, context: Context) -> AsyncGenerator[Fragment, None]:  # noqa: ARG002
        return input_as_result(self, expected)


def _verdict(said: Any) -> tuple[SafetyVerdict, str]:
    """The decision, and why it counts as block if it is unknown."""
    if said is None:
        return "block", "No decision was given, which counts as block."
    found = VERDICTS.get(said.strip().lower()) if isinstance(said, str) else None
    if found is not None:
        return found, ""
    shown = cut(said if isinstance(said, str) else msgspec.json.encode(said).decode(), MAX_SHOWN)
    return "block", f"The decision {shown!r} is not known, which counts as block."


def _reason(given: Object) -> str:
    return cut(next((given[name] for name in REASONS if isinstance(given.get(name), str)), ""), MAX_REASON)


def _categories(given: Any) -> list[str]:
    one_or_more = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    return [cut(name, MAX_SHOWN) for name in one_or_more[:MAX_CATEGORIES] if isinstance(name, str)]
