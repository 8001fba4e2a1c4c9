"""Shared by all adapters: decodes a payload, finds its fields under their aliases, and encodes the card."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from typing import Any, TypeVar

import msgspec

from anabranch.domain.errors import AnabranchError, InvalidQuestion
from anabranch.domain.eventlog import one_line
from anabranch.domain.events import SubagentStatus
from anabranch.domain.model import Context
from anabranch.domain.steps import Directive, Expected, Fragment
from anabranch.network.syft_wire import reason

MAX_BYTES = 512 * 1024
# Readers of the stream decode it too, and not every decoder allows deep nesting.
MAX_DEPTH = 64
MAX_URL = 4096
MAX_LABEL = 200
UNDECODABLE = (msgspec.MsgspecError, ValueError, RecursionError)

Object = dict[str, Any]
# Other names of a field, in order of preference.
Aliases = Mapping[str, tuple[str, ...]]
T = TypeVar("T")


class CardSubagent:
    """A Subagent that pushes its result, is called at its URL, or has it in the envelope's `input`. `card` converts its
    payload; the fields `unchecked` are removed from a payload that `card` cannot convert."""

    def __init__(self, card: Callable[[Object], Object] = dict, unchecked: Collection[str] = ()) -> None:
        self.card = card
        self._unchecked = unchecked

    def convert(self, payload: bytes, status: SubagentStatus) -> Fragment:
        return fragment(payload, status, self.card, self._unchecked)

    async def work(self, expected: Expected, directive: Directive, context: Context) -> AsyncGenerator[Fragment, None]:  # noqa: ARG002
        """The envelope's `input` is the result."""
        yield self.convert(input_of(expected), "success")


def fragment(
    payload: bytes, status: SubagentStatus, card: Callable[[Object], Object], unchecked: Collection[str]
) -> Fragment:
    """The payload as a card. An unfinished result may be incomplete: then it is passed on as it was sent, without the
    fields that a page would trust and that could not be checked."""
    given = decode(payload)
    try:
        converted = card(given)
    except InvalidQuestion:
        if status == "success":
            raise
        converted = {name: value for name, value in given.items() if name != "card" and name not in unchecked}
    return Fragment(status=status, payload=encode(converted), reason=reason(given) if status == "error" else "")


def input_of(expected: Expected) -> bytes:
    if expected.input is None:
        raise InvalidQuestion(f"{expected.key} has no input to work on here.")
    return bytes(expected.input)


def decode(payload: bytes) -> Object:
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


def encode(value: object) -> msgspec.Raw:
    """Compact JSON without line ends."""
    body = one_line(msgspec.json.encode(value))
    if len(body) > MAX_BYTES:
        raise InvalidQuestion(f"The payload is larger than {MAX_BYTES:,} bytes.")
    return msgspec.Raw(body)


def convert(given: Object, form: type[T], aliases: Aliases, at: str = "") -> tuple[T, Object]:
    """The fields of a form, and all other fields as they were sent. `at` is where the object is in the payload."""
    named = dict(given)
    for field, others in aliases.items():
        found = next((name for name in (field, *others) if given.get(name) is not None), field)
        if found != field:
            named[field] = named.pop(found)
    try:
        known = msgspec.convert(named, form)
    except msgspec.ValidationError as error:
        expected, _, path = str(error).partition(" - at `$")
        field = path.strip(".`")
        what = " or ".join((field, *aliases.get(field, ()))) if field else "The payload"
        raise InvalidQuestion(f"{at}{what} cannot be understood: {expected[:1].lower()}{expected[1:]}.") from None
    return known, {name: value for name, value in named.items() if name not in form.__struct_fields__}  # type: ignore[attr-defined]


def missing(field: str, aliases: Aliases) -> InvalidQuestion:
    also = f" (or {', '.join(aliases[field])})" if field in aliases else ""
    return InvalidQuestion(f"{field}{also} is missing.")


def merge(card: Object, others: Object) -> Object:
    """A card and the unknown fields; the card wins where names are equal."""
    return card | {name: value for name, value in others.items() if name not in card}


async def within(waited_for: Awaitable[T], seconds: float, late: AnabranchError) -> T:
    """The result, or the error `late` after so many seconds."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await waited_for
    except TimeoutError as error:
        if limit.expired():
            raise late from error
        raise


def cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def label(name: str) -> str:
    """A readable label: `unit_price` becomes `Unit price`."""
    words = " ".join(name.replace("_", " ").replace("-", " ").split())
    return cut(words[:1].upper() + words[1:], MAX_LABEL)


def web_address(url: str | None, field: str) -> str | None:
    """A URL that a page may link to: http or https, never a script."""
    if url is None:
        return None
    if len(url) > MAX_URL or not url.lower().startswith(("http://", "https://")) or not url.isprintable():
        raise InvalidQuestion(f"{field} must begin with http:// or https:// and have at most {MAX_URL:,} characters.")
    return url


def _deeper(value: object, most: int) -> bool:
    """Whether it is nested more than `most` deep; level by level, without recursion."""
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
