"""Answers that are verified as a model writes them, without a pipeline around."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from anabranch.domain.contracts import Clock, SystemClock
from anabranch.domain.events import AnswerEvent, SentenceChecked, Token
from anabranch.domain.evidence import ClaimChecker
from anabranch.domain.model import Delta, Passage, UncheckedReason
from anabranch.pipeline.verify import Verified, Verifier
from anabranch.testing import FakeEvidence
from anabranch.text.safe_markdown import SafeMarkdown


class VerifiedAnswer(NamedTuple):
    """What was found, and the events in their order."""

    found: Verified
    events: list[AnswerEvent]

    @property
    def sentences(self) -> list[str]:
        return [self.found.text[one.start : one.end] for one in self.found.sentences]

    @property
    def verdicts(self) -> list[str]:
        return [one.reason or one.verdict for one in self.found.sentences]

    @property
    def tokens(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Token))

    @property
    def checked(self) -> list[SentenceChecked]:
        return [event for event in self.events if isinstance(event, SentenceChecked)]

    def quotes(self, passages: Sequence[Passage]) -> list[list[str]]:
        return [
            [passages[quote.passage].text[quote.start : quote.end] for quote in one.quotes]
            for one in self.found.sentences
        ]

    def citations(self, passages: Sequence[Passage]) -> list[tuple[str, int, str]]:
        """The mark, the number of the passage, and what is quoted of it."""
        return [
            (
                self.found.text[one.start : one.end],
                one.passage + 1,
                passages[one.passage].text[one.passage_start : one.passage_end],
            )
            for one in self.found.citations
        ]

    @property
    def marks(self) -> tuple[int, int, int, int]:
        """Written, corrected, removed, added."""
        sums = [(one.marks, one.corrected, one.removed, one.added) for one in self.found.sentences]
        return tuple(map(sum, zip(*sums, strict=True))) if sums else (0, 0, 0, 0)  # type: ignore[return-value]


async def verified(
    written: str | Sequence[str | Delta],
    passages: Sequence[Passage],
    checker: ClaimChecker | None = None,
    *,
    strict: bool = False,
    streaming: bool = True,
    minimum: float | None = None,
    reason: UncheckedReason = "unavailable",
    left_s: float = 60.0,
    language: str | None = None,
    clock: Clock | None = None,
    crashed: Callable[[Exception], None] = lambda _: None,
    markdown: SafeMarkdown | None = None,
) -> VerifiedAnswer:
    """An answer that comes in these parts; a text comes at once."""
    events: list[AnswerEvent] = []

    async def emit(event: AnswerEvent) -> None:
        events.append(event)

    clock = clock or SystemClock()
    verifier = Verifier(checker or FakeEvidence(), clock, minimum=minimum, reason=reason)
    verifying = verifier.verifying(
        passages,
        emit,
        strict=strict,
        streaming=streaming,
        deadline=clock.monotonic() + left_s,
        language=language,
        crashed=crashed,
        markdown=markdown,
    )
    async with verifying:
        for part in [written] if isinstance(written, str) else written:
            delta = part if isinstance(part, Delta) else Delta(text=part)
            verifying.learn(delta)
            await verifying.emit(Token(text=delta.text))
        return VerifiedAnswer(await verifying.finish(), events)
