"""What every adapter does with a payload: opens it, finds its fields under their names, writes it on one line."""

from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from typing import Any, TypeVar

import msgspec

from anabranch.domain.contracts import Subagent
from anabranch.domain.errors import InvalidQuestion
from anabranch.domain.eventlog import one_line
from anabranch.domain.events import SubagentStatus
from anabranch.domain.steps import Expected, Fragment
from anabranch.network.syft_wire import reason

MAX_BYTES = 512 * 1024
# Whoever reads the stream later walks down there too, and not every reader's stack is deep.
MAX_DEPTH = 64
MAX_URL = 4096
MAX_LABEL = 200
UNDECODABLE = (msgspec.MsgspecError, ValueError, RecursionError)

Object = dict[str, Any]
# Other names under which a field may be sent, the better ones first.
Aliases = Mapping[str, tuple[str, ...]]
T = TypeVar("T")

encode = msgspec.json.Encoder().encode


def fragment(
    payload: bytes, status: SubagentStatus, card: Callable[[Object], Object], unchecked: Collection[str] = ()
) -> Fragment:
    """The payload in its adapter's form. What is not finished need not be complete: then it goes on as it was sent, but
    for the fields that a page would trust, which could not be checked."""
    given = opened(payload)
    try:
        made = card(given)
    except InvalidQuestion:
        if status == "success":
            raise
        made = {name: value for name, value in given.items() if name != "card" and name not in unchecked}
    return Fragment(status=status, payload=closed(made), reason=reason(given) if status == "error" else "")


async def handed_over(subagent: Subagent, expected: Expected) -> AsyncGenerator[Fragment, None]:
    """The work of those who do none here: what stands in the envelope is their result."""
    yield subagent.taken(input_of(expected), "success")


def input_of(expected: Expected) -> bytes:
    if expected.input is None:
        raise InvalidQuestion(f"{expected.key} has no input to work on here.")
    return bytes(expected.input)


def opened(payload: bytes) -> Object:
    if len(payload) > MAX_BYTES:
        raise InvalidQuestion(f"The payload is larger than {MAX_BYTES:,} bytes.")
    try:
        given = msgspec.json.decode(payload)
    except RecursionError:
        raise InvalidQuestion(f"The payload is nested more than {MAX_DEPTH} deep.") from None
    except UNDECODABLE:
        raise InvalidQuestion("The payload is not JSON.") from None
    if not isinstance(given, dict):
        raise InvalidQuestion("The payload must be a JSON object.")
    if payload.count(b"[") + payload.count(b"{") > MAX_DEPTH and _deeper(given, MAX_DEPTH):
        raise InvalidQuestion(f"The payload is nested more than {MAX_DEPTH} deep.")
    return given


def closed(value: object) -> msgspec.Raw:
    """JSON of our own writing: compact, and nothing in it ends a line."""
    body = one_line(encode(value))
    if len(body) > MAX_BYTES:
        raise InvalidQuestion(f"The payload is larger than {MAX_BYTES:,} bytes.")
    return msgspec.Raw(body)


def fitted(given: Object, form: type[T], aliases: Aliases) -> tuple[T, Object]:
    """The fields that a form knows, and all the others, as they were sent."""
    named = dict(given)
    for field, others in aliases.items():
        found = next((name for name in (field, *others) if given.get(name) is not None), None)
        if found is not None and found != field:
            named[field] = named.pop(found)
    try:
        known = msgspec.convert(named, form)
    except msgspec.ValidationError as error:
        expected, _, path = str(error).partition(" - at `$")
        field = path.strip(".`")
        others = aliases.get(field, ())
        what = " or ".join((field, *others)) if field else "The payload"
        raise InvalidQuestion(f"{what} cannot be understood: {expected[:1].lower()}{expected[1:]}.") from None
    return known, {name: value for name, value in named.items() if name not in form.__struct_fields__}  # type: ignore[attr-defined]


def missing(field: str, aliases: Aliases) -> InvalidQuestion:
    others = aliases.get(field, ())
    also = f" (or {', '.join(others)})" if others else ""
    return InvalidQuestion(f"{field}{also} is missing.")


def joined(card: Object, others: Object) -> Object:
    """A card, and with it what its adapter does not know; where they have the same name, the card's counts."""
    return card | {name: value for name, value in others.items() if name not in card}


def cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def label(name: str) -> str:
    """A name as a person would write it: `unit_price` is a unit price."""
    words = " ".join(name.replace("_", " ").replace("-", " ").split())
    return cut(words[:1].upper() + words[1:], MAX_LABEL)


def web_address(url: str | None, field: str) -> str | None:
    """An address that a page may follow: one that runs a script is none."""
    if url is None:
        return None
    if len(url) > MAX_URL or not url.lower().startswith(("http://", "https://")) or not url.isprintable():
        raise InvalidQuestion(f"{field} must begin with http:// or https:// and have at most {MAX_URL:,} characters.")
    return url


def _deeper(value: object, most: int) -> bool:
    """Whether it is nested more than so deep; level by level, since a stack would have to be as deep."""
    level: list[Any] = [value]
    for _ in range(most):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True
