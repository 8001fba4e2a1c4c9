"""Subagents of which we know nothing: any JSON object is their result."""

from collections.abc import AsyncGenerator

from anabranch.domain.events import SubagentStatus
from anabranch.domain.model import Context
from anabranch.domain.steps import Directive, Expected, Fragment
from anabranch.subagents.payloads import Object, fragment, handed_over


class Other:
    """What it sends goes on as it is. An `input` in the envelope is its result."""

    def taken(self, payload: bytes, status: SubagentStatus) -> Fragment:
        return fragment(payload, status, as_sent)

    def work(self, expected: Expected, directive: Directive, context: Context) -> AsyncGenerator[Fragment, None]:  # noqa: ARG002
        return handed_over(self, expected)


def as_sent(given: Object) -> Object:
    return given
