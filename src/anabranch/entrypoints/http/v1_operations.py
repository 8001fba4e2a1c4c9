"""What the operations under /v1 have in common: their errors, the parameters of their lists, the cursors of pages."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from anabranch.domain.errors import InvalidQuestion
from anabranch.domain.model import Value
from anabranch.domain.rights import Scope
from anabranch.entrypoints.http.decode_errors import explain
from anabranch.entrypoints.http.errors import KNOWLEDGE
from anabranch.entrypoints.http.openapi import integer, parameter
from anabranch.entrypoints.http.operations import Call, Handler, Operation
from anabranch.knowledge.records.cursors import Cursors

MAX_PAGE = 200
TEXT = {"type": "string", "maxLength": 500}
TIME = {"type": "string", "maxLength": 500, "examples": ["2024-12-31", "2024-12-31T09:00:00Z"]}
PAGE = (
    parameter("limit", integer(1, MAX_PAGE, default=50), "Page size"),
    parameter("after", TEXT, "`next` of the previous page"),
)
PERIOD = (
    parameter("since", TIME, "From this day (UTC) or time on"),
    parameter("until", TIME, "Up to and including this day (UTC), or before this time"),
)

Name = Annotated[str, Meta(max_length=500)]
T = TypeVar("T")


class LogParameters(Value):
    """The parameters of a page of a log, as they stand in the URL: `PAGE` and `PERIOD`."""

    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = 50
    after: Name | None = None
    since: Name | None = None
    until: Name | None = None


P = TypeVar("P", bound=LogParameters)


def operation(
    method: str,
    path: str,
    name: str,
    summary: str,
    handler: Handler[Any],
    response_type: type,
    *,
    scope: Scope | None,
    **more: Any,
) -> Operation[Any]:
    """An operation with spec 5's errors, and one type of response."""
    return Operation(
        *(method, path, name, summary, handler, KNOWLEDGE), response_types=(response_type,), scope=scope, **more
    )


def url_parameters(call: Call[None], kind: type[P]) -> P:
    """The parameters in the URL of a request, checked."""
    try:
        return msgspec.convert(dict(call.query), kind, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidQuestion(explain(str(error), kind)) from None


def opened(after: str | None, cursors: Cursors) -> int | None:
    """What the cursor of a page stands for; None without one."""
    position = None if after is None else cursors.opened(after)
    if after is not None and position is None:
        raise InvalidQuestion("after is not a cursor of this list; send `next` of the previous page.")
    return position


def page_of(
    found: Sequence[T], limit: int, position: Callable[[T], int], cursors: Cursors
) -> tuple[list[T], str | None]:
    """The first of the entries that were found, and the cursor of the next page if there are more than the limit."""
    page = list(found[:limit])
    return page, cursors.sealed(position(page[-1])) if len(found) > limit else None


def utc(moment: float) -> datetime:
    return datetime.fromtimestamp(round(moment), UTC)
