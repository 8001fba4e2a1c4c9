"""Verified answers of a generator that says itself what it quotes."""

from anabranch.domain.events import AnswerEvent, Token
from anabranch.domain.model import Delta, Passage, QuotedSpan
from anabranch.pipeline.verify import Verifier
from anabranch.testing.fakes import FakeEvidence, ManualClock

FIRST = "He took images of celebrities like Rekha, Shabana Azmi etc."
SECOND = "The daughter of the poet studied in Pune."


async def test_a_sentence_that_runs_into_the_next_quotation_cites_both() -> None:
    """ "etc." does not end a sentence, so two quotations are one."""
    passages = [
        Passage(source="people", title=title, text=text, score=1.0)
        for title, text in (("Mali", FIRST), ("Azmi", SECOND))
    ]
    events: list[AnswerEvent] = []

    async def emit(event: AnswerEvent) -> None:
        events.append(event)

    verifier = Verifier(FakeEvidence(), ManualClock())
    async with verifier.verifying(
        passages, emit, strict=False, streaming=True, deadline=60.0, language=None
    ) as verifying:
        for number, text in enumerate((FIRST, SECOND)):
            quote = QuotedSpan(passage=number, start=0, end=len(text))
            mark = f"[{number + 1}]"
            verifying.learn(Delta(text=f"{text} {mark} ", quotes=(quote,), mark=mark))
            await verifying.emit(Token(text=f"{text} {mark} "))
        verified = await verifying.finish()
    (sentence,) = verified.sentences
    assert [quote.passage for quote in sentence.quotes] == [0, 1]
    assert (sentence.marks, sentence.corrected, sentence.removed, sentence.added) == (2, 0, 0, 0)
    assert [(verified.text[one.start : one.end], one.passage) for one in verified.citations] == [("[1]", 0), ("[2]", 1)]
