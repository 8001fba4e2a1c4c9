"""The action adapter: a proposed or executed action becomes a card that a person can confirm."""

from typing import Any, Literal, get_args

from anabranch.domain.errors import InvalidQuestion
from anabranch.domain.model import Value
from anabranch.subagents.payloads import (
    MAX_LABEL,
    Aliases,
    Object,
    cut,
    fitted,
    joined,
    label,
    missing,
)

State = Literal["proposed", "awaiting_confirmation", "confirmed", "executed", "rejected", "failed"]
STATES = get_args(State)
SYNONYMS: dict[str, State] = {
    "pending": "awaiting_confirmation",
    "pending_confirmation": "awaiting_confirmation",
    "needs_confirmation": "awaiting_confirmation",
    "approved": "confirmed",
    "completed": "executed",
    "done": "executed",
    "success": "executed",
    "cancelled": "rejected",
    "declined": "rejected",
    "denied": "rejected",
    "error": "failed",
}
ALIASES: Aliases = {
    "action": ("action_name", "name"),
    "title": ("label",),
    "state": ("action_state",),
    "requires_confirmation": ("confirmation_required", "needs_confirmation"),
    "parameters": ("params", "arguments", "args"),
    "message": ("summary", "description"),
}


class Proposal(Value):
    action: str | None = None
    title: str | None = None
    state: str | None = None
    requires_confirmation: bool | None = None
    parameters: dict[str, Any] | None = None
    message: str | None = None
    confirmation_id: str | int | None = None


def confirmation(given: Object) -> Object:
    """The card. Unless it says otherwise, an action needs a confirmation."""
    sent, others = fitted(given, Proposal, ALIASES)
    if not sent.action:
        raise missing("action", ALIASES)
    state = _state(sent.state) if sent.state is not None else None
    asks = sent.requires_confirmation
    if asks is None:
        asks = state in (None, "proposed", "awaiting_confirmation")
    card = {
        "card": "action_confirmation",
        "action": cut(sent.action, MAX_LABEL),
        "title": cut(sent.title, MAX_LABEL) if sent.title else label(sent.action),
        "state": state or ("awaiting_confirmation" if asks else "proposed"),
        "requires_confirmation": asks,
        "parameters": sent.parameters or {},
        "message": sent.message,
        "confirmation_id": sent.confirmation_id,
    }
    return joined(card, others)


def _state(word: str) -> State:
    plain = word.strip().lower()
    found: State | None = next((state for state in STATES if state == plain), SYNONYMS.get(plain))
    if found is None:
        raise InvalidQuestion(f"state must be one of {', '.join(STATES)}.")
    return found
