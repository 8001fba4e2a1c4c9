"""Verification of answers: what is found about each sentence, which citations are right, and what is passed on."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence

import msgspec
import pytest

from anabranch.domain.contracts import Generator, SystemClock
from anabranch.domain.errors import AnabranchError, FailureKind, GenerationFailed
from anabranch.domain.events import Answered, FellBack, SentenceChecked, Token, fold, unfold
from anabranch.domain.evidence import ClaimChecker, EvidencePage, Verdict
from anabranch.domain.model import (
    QUERY,
    Context,
    Delta,
    Endpoint,
    Passage,
    Prompt,
    Question,
    QuotedSpan,
    SourceReply,
    Status,
)
from anabranch.models.extractive import Extractive
from anabranch.pipeline.answer import Limits, Pipeline
from anabranch.pipeline.cite import MAX_CITATIONS, Marks, cite
from anabranch.pipeline.run import Run
from anabranch.pipeline.verify import MAX_CHECKED, MAX_SENTENCES, Verifier
from anabranch.testing import FakeDirectory, FakeEvidence, FakeGenerator, FakeSource, ManualClock, Recorder
from anabranch.text.messages import message
from anabranch.text.safe_markdown import SafeMarkdown
from support.quoted_answers import passage
from support.verified_answers import verified

FERRY = passage("The Zanzibar ferry leaves every morning at 7. The crossing takes 2 hours.", "Ferry", "lee/ferry")
COD = passage("Murray cod grow slowly. The largest weighed 113 kg and was caught in 1902.", "Cod", "ann/fish")
PERCH = passage("The golden perch weighs up to 23 kg. It lives in warm rivers.", "Perch", "ann/fish")
PASSAGES = (FERRY, COD, PERCH)
SUPPORTED = "Every morning at 7 the Zanzibar ferry leaves."
UNSUPPORTED = "Elephants of northern Borneo swim across lakes."


class StubChecker:
    """Says of every claim what it is told to say; an exception is raised."""

    def __init__(self, said: Verdict | Exception | None) -> None:
        self.said = said
        self.calls = 0

    async def check(
        self, claim: str, inputs: Sequence[tuple[EvidencePage, ...]], *, until: float | None = None
    ) -> Sequence[Verdict | None]:
        self.calls += bool(inputs)
        if isinstance(self.said, Exception):
            raise self.said
        return [self.said for _ in inputs]


class SilentChecker:
    """Never replies, and says when it was asked and when it was cancelled."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def check(
        self, claim: str, inputs: Sequence[tuple[EvidencePage, ...]], *, until: float | None = None
    ) -> Sequence[Verdict | None]:
        self.asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()
        return []


YES = Verdict(supported=0.98, unknown=0.01, contradicted=0.01)
NO = Verdict(supported=0.01, unknown=0.98, contradicted=0.01)
OPPOSITE = Verdict(supported=0.01, unknown=0.01, contradicted=0.98)


# --- what is found


async def test_each_sentence_has_a_verdict_and_the_words_that_support_it() -> None:
    answer = await verified(f"{SUPPORTED} {UNSUPPORTED} The crossing takes 2 hours.", PASSAGES)
    assert answer.verdicts == ["supported", "unsupported", "supported"]
    assert answer.quotes(PASSAGES) == [
        ["The Zanzibar ferry leaves every morning at 7."],
        [],
        ["The crossing takes 2 hours."],
    ]
    assert answer.found.faithfulness == round(2 / 3, 4)


async def test_a_sentence_that_a_source_contradicts_is_quoted_with_what_it_says() -> None:
    answer = await verified("The largest cod weighed 250 kg and was caught in 1902.", PASSAGES)
    assert answer.verdicts == ["contradicted"]
    assert answer.quotes(PASSAGES) == [["The largest weighed 113 kg and was caught in 1902."]]
    assert answer.found.faithfulness == 0.0


@pytest.mark.parametrize(("mark", "cited", "removed"), [("", [], 0), (" [1]", [], 1), (" [2]", ["[2]"], 0)])
async def test_a_contradicted_sentence_gets_no_passage_as_its_source(mark: str, cited: list[str], removed: int) -> None:
    answer = await verified(f"The largest cod weighed 250 kg and was caught in 1902{mark}.", PASSAGES)
    assert answer.verdicts == ["contradicted"]
    assert [mark for mark, *_ in answer.citations(PASSAGES)] == cited
    assert answer.marks == (bool(mark), 0, removed, 0)


async def test_of_two_passages_that_contradict_a_sentence_the_cited_one_is_quoted() -> None:
    twice = (*PASSAGES, passage(PASSAGES[1].text, "Copy"))
    for number in (2, 4):
        answer = await verified(f"The largest cod weighed 250 kg and was caught in 1902 [{number}].", twice)
        assert [quote.passage + 1 for quote in answer.found.sentences[0].quotes] == [number]
        assert answer.marks == (1, 0, 0, 0)


async def test_the_words_that_are_doubted_have_their_place_in_the_answer() -> None:
    claim = "The largest cod [2] weighed 250 kg and was caught in 1902."
    wrong = Verdict(
        supported=0.01, unknown=0.01, contradicted=0.98, words=((28, 31, 4.0), (32, 34, 3.0), (35, 38, -4.0))
    )
    answer = await verified(f"Hello! {claim}", PASSAGES, StubChecker(wrong))
    [_, sentence] = answer.found.sentences
    assert [answer.found.text[start:end] for start, end in sentence.doubted] == ["250 kg"]


async def test_a_copied_sentence_is_supported_without_a_model() -> None:
    checker = StubChecker(None)
    answer = await verified("However, the crossing takes 2 hours. [1]", PASSAGES, checker)
    assert answer.verdicts == ["supported"]
    assert checker.calls == 0
    assert answer.citations(PASSAGES) == [("[1]", 1, "The crossing takes 2 hours.")]


@pytest.mark.parametrize("marker", ["- ", "* ", "1. ", "23) ", "> ", "  - ", "**Duration:** "])
async def test_a_list_marker_is_no_part_of_a_claim(marker: str) -> None:
    answer = await verified(f"Of the ferry:\n\n{marker}**The crossing** takes 2 hours.", PASSAGES)
    assert answer.verdicts == ["no_claim", "supported"]
    assert answer.quotes(PASSAGES)[1] == ["The crossing takes 2 hours."]


async def test_what_claims_nothing_is_not_judged() -> None:
    answer = await verified(
        "Sure! Here is what I found:\n\n# Ferries\n\nIs it far? The crossing takes 2 hours.", PASSAGES
    )
    assert answer.verdicts == ["no_claim"] * 4 + ["supported"]
    assert answer.found.faithfulness == 1.0


async def test_a_heading_that_states_something_is_checked() -> None:
    answer = await verified("## How it works\n\n## The crossing takes 90 days\n\n## Prices and times", PASSAGES)
    assert answer.verdicts == ["no_claim", "unsupported", "no_claim"]


@pytest.mark.parametrize("written", [SUPPORTED, f"{SUPPORTED} The crossing takes"])
async def test_a_sentence_in_which_the_answer_was_cut_off_is_not_judged(written: str) -> None:
    answer = await verified([Delta(text=written, finish_reason="length")], PASSAGES)
    assert answer.verdicts == ["supported", "unfinished"][: 1 + (written != SUPPORTED)]
    assert answer.found.faithfulness == 1.0


async def test_a_mark_on_what_claims_nothing_is_removed() -> None:
    answer = await verified("Here is what I found [1]:\n\nThe crossing takes 2 hours [2].", PASSAGES)
    assert answer.verdicts == ["no_claim", "supported"]
    assert [(one.marks, one.removed) for one in answer.found.sentences] == [(1, 1), (1, 0)]
    assert answer.citations(PASSAGES) == [("[2]", 1, "The crossing takes 2 hours.")]


async def test_other_languages_are_not_judged_unless_they_are_copied() -> None:
    german = passage("Die Fähre fährt jeden Morgen um sieben Uhr ab und kommt am Abend zurück.")
    reworded = "Am Abend kommt die Fähre zurück, und sie fährt um sieben Uhr ab."
    answer = await verified(f"{german.text} {reworded} [1]", [german])
    assert answer.verdicts == ["supported", "not_english"]
    assert answer.found.faithfulness == 1.0
    assert [number for _, number, _ in answer.citations([german])] == [1, 1], "the mark keeps its citation"


async def test_without_passages_nothing_is_supported() -> None:
    answer = await verified(f"{SUPPORTED} [1]", ())
    assert answer.verdicts == ["unsupported"]
    assert answer.found.citations == ()
    assert answer.marks == (1, 0, 1, 0)


async def test_an_answer_without_words_has_no_faithfulness() -> None:
    for text in ("", " \n", "[1]", "Sure!"):
        answer = await verified(text, PASSAGES)
        assert answer.found.faithfulness is None
        assert answer.tokens == answer.found.text == text


async def test_code_is_supported_if_it_is_copied_and_else_not_judged() -> None:
    howto = passage("Run this:\n\n```\nferry --at 7\n```\n")
    answer = await verified("```\nferry --at 7\n```\n\n```\nx = ferries[1]\n```\n[1]", [howto])
    assert answer.verdicts == ["supported", "code"]
    assert answer.marks == (1, 0, 0, 1), "the index in the code is no mark, and the mark behind it is one"


# --- marks


@pytest.mark.parametrize(
    ("written", "citations", "marks"),
    [
        (f"{SUPPORTED} [1]", [("[1]", 1)], (1, 0, 0, 0)),
        (f"{SUPPORTED[:-1]} [1].", [("[1]", 1)], (1, 0, 0, 0)),
        (f"{SUPPORTED} [lee/ferry]", [("[lee/ferry]", 1)], (1, 0, 0, 0)),
        (SUPPORTED, [("", 1)], (0, 0, 0, 1)),
        (f"{SUPPORTED} [2]", [("[2]", 1)], (1, 1, 0, 0)),
        (f"{SUPPORTED} [ann/fish]", [("[ann/fish]", 1)], (1, 1, 0, 0)),
        (f"{SUPPORTED} [17]", [("[17]", 1)], (1, 1, 0, 0)),
        (f"{SUPPORTED} [1][2]", [("[1]", 1)], (2, 0, 1, 0)),
        (f"{SUPPORTED} [2, 1]", [("[2, 1]", 1)], (2, 0, 1, 0)),
        (f"{UNSUPPORTED} [1]", [], (1, 0, 1, 0)),
        (f"{SUPPORTED} [Note] [see below]", [("", 1)], (0, 0, 0, 1)),
        (f"{SUPPORTED[:-1]} with `rows[2]`.", [("", 1)], (0, 0, 0, 1)),
        (f"{SUPPORTED} [1](https://a.example)", [("[1]", 1)], (1, 0, 0, 0)),
        (f"{SUPPORTED} [[1]]", [("[1]", 1)], (1, 0, 0, 0)),
        (f"{SUPPORTED} [[[[1", [("", 1)], (0, 0, 0, 1)),
        (f"{SUPPORTED}[1][2]\nIs it so?", [("[1]", 1)], (2, 0, 1, 0)),
        (f"{SUPPORTED} [1-2]", [("[1-2]", 1)], (2, 0, 1, 0)),
        (f"{SUPPORTED} [1\u201399]", [("[1\u201399]", 1)], (3, 0, 2, 0)),
        (f"{SUPPORTED} [1 and 2]", [("[1 and 2]", 1)], (2, 0, 1, 0)),
        (f"{SUPPORTED} [2-1]", [("[2-1]", 1)], (1, 1, 0, 0)),
        (f"{SUPPORTED} [0]", [("[0]", 1)], (1, 1, 0, 0)),
        (f"{SUPPORTED} [Source 1]", [("[Source 1]", 1)], (1, 0, 0, 0)),
        (f"{SUPPORTED} [Sources: 2, 1]", [("[Sources: 2, 1]", 1)], (2, 0, 1, 0)),
        (f"{SUPPORTED} [passage 9]", [("[passage 9]", 1)], (1, 1, 0, 0)),
        (f"{SUPPORTED} [Document 1][^1]", [("[Document 1]", 1), ("[^1]", 1)], (2, 0, 0, 0)),
        (f"{SUPPORTED}\u30101\u3011", [("\u30101\u3011", 1)], (1, 0, 0, 0)),
        (f"{SUPPORTED[:-1]}[1].", [("[1]", 1)], (1, 0, 0, 0)),
        (f"{SUPPORTED[:-1]}[[1]][2].", [("[1]", 1)], (2, 0, 1, 0)),
    ],
)
async def test_wrong_marks_are_corrected_and_missing_ones_added(
    written: str, citations: list[tuple[str, int]], marks: tuple[int, int, int, int]
) -> None:
    answer = await verified(written, PASSAGES)
    assert [(mark, number) for mark, number, _ in answer.citations(PASSAGES)] == citations
    assert answer.marks == marks
    assert answer.found.text == written, "the text is as the model wrote it"


@pytest.mark.parametrize(
    ("text", "marks"),
    [
        ("The array a[1] is read", []),
        ("It is f(x[1]) or x[2][1] or y()[1] or argv[0]", []),
        ("Water is H[2]O", []),
        ("See [the guide][1] or [Source 2024] or [1990-1995]", []),
        ("It holds 20 l[1]", ["[1]"]),
        ("It was in 1902[1], of vitamin C[2] at 5 km/h[3]", ["[1]", "[2]", "[3]"]),
        ("It is below 72 dB(A)[1][2]", ["[1]", "[2]"]),
        ("They don't[1]", ["[1]"]),
        ("\u6771\u4eac[1]\u306f\u9996\u90fd", ["[1]"]),
    ],
)
def test_an_index_as_in_code_is_no_mark(text: str, marks: list[str]) -> None:
    assert [text[one.start : one.end] for one in Marks(PASSAGES).written(text)] == marks
    assert [text[one.start : one.end] for one in cite(text, PASSAGES)] == marks


async def test_the_header_of_a_table_is_not_judged() -> None:
    answer = await verified("| fish | weight |\n|------|------:|\n| Murray cod | 113 kg |", PASSAGES)
    assert answer.verdicts[0] == "no_claim"
    assert len(answer.verdicts) == 2


async def test_a_footnote_mark_is_no_part_of_a_claim() -> None:
    answer = await verified(
        "The crossing takes 2 hours.\u00b9 Murray cod grow slowly.\u00b2", PASSAGES, StubChecker(NO)
    )
    assert answer.verdicts == ["supported", "supported"]


async def test_a_sentence_that_two_cited_passages_support_keeps_both_marks() -> None:
    other = passage("Every morning at 7 the ferry to Zanzibar leaves.", "Timetable")
    answer = await verified("The ferry of Zanzibar leaves at 7 every morning [1][2].", [FERRY, other])
    assert [(mark, number) for mark, number, _ in answer.citations([FERRY, other])] == [("[1]", 1), ("[2]", 2)]
    assert answer.marks == (2, 0, 0, 0)


async def test_one_passage_that_supports_is_enough_for_a_mark() -> None:
    checker = StubChecker(YES)
    other = passage("Every morning at 7 the ferry to Zanzibar leaves.", "Timetable")
    await verified("The ferry of Zanzibar leaves at 7 every morning [1].", [FERRY, other], checker)
    assert checker.calls == 1


async def test_marks_of_passages_that_are_not_read_are_no_error() -> None:
    many = [*PASSAGES, *(passage(f"Harbour {number} is small.", f"H{number}") for number in range(40))]
    answer = await verified(f"{SUPPORTED} [41] The crossing takes 2 hours. [42]", many)
    assert [(mark, number) for mark, number, _ in answer.citations(many)] == [("[41]", 1), ("[42]", 1)]


@pytest.mark.parametrize("sentence", [SUPPORTED, "Die Fähre ist nicht für mich, und der Hafen ist es auch nicht."])
async def test_citations_are_limited(sentence: str) -> None:
    answer = await verified(f"{sentence} {'[1]' * 10_000}\n\n{sentence} {'[2]' * 600}", PASSAGES)
    assert len(answer.found.citations) == MAX_CITATIONS
    assert answer.found.sentences[0].marks == 10_000


# --- what the generator says itself


async def test_a_generator_that_quotes_is_believed() -> None:
    quote = QuotedSpan(passage=1, start=0, end=23)
    checker = StubChecker(NO)
    parts = [Delta(text="Murray cod grow slowly. [2]\n", quotes=(quote,), mark="[2]"), Delta(text=UNSUPPORTED)]
    answer = await verified(parts, PASSAGES, checker)
    assert answer.verdicts == ["supported", "unsupported"]
    assert answer.citations(PASSAGES) == [("[2]", 2, "Murray cod grow slowly.")]


async def test_a_quoted_table_has_one_citation_at_its_mark() -> None:
    table = passage("| fish | kg |\n|---|---|\n| cod | 113 |\n| perch | 23 |")
    quote = QuotedSpan(passage=0, start=0, end=len(table.text))
    parts = [Delta(text=f"{table.text} [1]\n", quotes=(quote,), mark="[1]")]
    answer = await verified(parts, [table])
    assert answer.citations([table]) == [("[1]", 1, table.text)]
    assert answer.marks == (1, 0, 0, 0)


async def test_a_refusal_of_the_generator_is_passed_on_and_not_checked() -> None:
    refusal = Delta(text="The documents do not say it. The nearest is [1].", finish_reason="abstained", abstained=True)
    for strict, streaming in ((False, True), (True, True), (False, False)):
        answer = await verified([refusal], PASSAGES, strict=strict, streaming=streaming, minimum=0.5)
        assert answer.tokens == answer.found.text == refusal.text
        assert (answer.found.sentences, answer.found.citations, answer.found.faithfulness) == ((), (), None)


@pytest.mark.parametrize("strict", [False, True])
async def test_a_remote_model_that_says_it_abstained_is_checked_all_the_same(strict: bool) -> None:
    parts = [Delta(text=f"{SUPPORTED} "), Delta(text=f" {UNSUPPORTED}", finish_reason="abstained")]
    answer = await verified(parts, PASSAGES, strict=strict)
    assert answer.verdicts == ["supported"] if strict else ["supported", "unsupported"]
    assert SUPPORTED in answer.found.text
    assert (UNSUPPORTED in answer.found.text) is not strict


# --- while the model writes


async def test_a_sentence_is_checked_while_the_model_is_still_writing() -> None:
    events: list[str] = []
    seen = asyncio.Event()

    async def emit(event: object) -> None:
        events.append(type(event).__name__)
        if isinstance(event, SentenceChecked):
            seen.set()

    verifying = Verifier(FakeEvidence(), SystemClock()).verifying(
        PASSAGES, emit, strict=False, streaming=True, deadline=time.monotonic() + 60, language=None
    )
    async with verifying:
        await verifying.emit(Token(text=f"{SUPPORTED} The crossing "))
        await asyncio.wait_for(seen.wait(), 30)
        await verifying.emit(Token(text="takes 2 hours."))
        found = await verifying.finish()
    assert events == ["Token", "SentenceChecked", "Token", "SentenceChecked"]
    assert len(found.sentences) == 2


@pytest.mark.parametrize("size", [1, 2, 5, 17])
@pytest.mark.parametrize("strict", [False, True])
async def test_the_result_is_the_same_however_the_answer_is_cut(size: int, strict: bool) -> None:
    text = f"Sure!\n\n- {SUPPORTED} [2]\n- {UNSUPPORTED} [1]\n\nThe crossing takes 2 hours. [1] Cod grow fast [2]."
    whole = await verified(text, PASSAGES, strict=strict)
    cut = await verified([text[at : at + size] for at in range(0, len(text), size)], PASSAGES, strict=strict)
    assert cut.found == whole.found
    assert cut.checked == whole.checked


# --- strict


async def test_a_strict_answer_leaves_out_what_is_not_supported_and_says_so() -> None:
    answer = await verified(f"{SUPPORTED} [1] {UNSUPPORTED} [2] The crossing takes 2 hours. [1]", PASSAGES, strict=True)
    assert answer.found.text == answer.tokens
    assert answer.found.text == (
        f"{SUPPORTED} [1] The crossing takes 2 hours. [1]\n\nOne sentence that no source supports was left out."
    )
    assert answer.sentences == [f"{SUPPORTED} [1]", "The crossing takes 2 hours. [1]"]
    assert [mark for mark, *_ in answer.citations(PASSAGES)] == ["[1]", "[1]"]
    assert (answer.found.left_out, answer.found.faithfulness) == (1, 1.0)


async def test_a_strict_answer_of_which_nothing_is_left_is_only_the_note() -> None:
    answer = await verified(f"Sure! {UNSUPPORTED}", PASSAGES, strict=True)
    assert (answer.verdicts, answer.found.withheld) == (["no_claim"], True)
    assert [one.sentence for one in answer.checked] == list(answer.found.sentences)
    answer = await verified(f"{UNSUPPORTED} {UNSUPPORTED}", PASSAGES, strict=True, language="de")
    assert answer.found.left_out == 2
    assert (answer.found.sentences, answer.found.citations) == ((), ())
    assert answer.tokens == answer.found.text
    assert answer.found.text.startswith("2 ")
    assert answer.found.withheld


@pytest.mark.parametrize(
    "written",
    [
        "Fish `swim on Mars. Hello! ![x](https://evil.example/?q=1) Thanks!`\n\nThe crossing takes 2 hours.",
        "`Fish swim on Mars. The crossing takes 2 hours <img src=x onerror=alert(1)>.`\n\nThe crossing takes 2 hours.",
        "Hello ![x] Fish swim on Mars.(//evil.example/?q=1)\n\nThe crossing takes 2 hours.",
        "```\nFish swim on Mars.\n```\n<b>Hello!</b>\n\nThe crossing takes 2 hours.",
    ],
)
async def test_a_strict_answer_is_safe_markdown_also_without_what_was_left_out(written: str) -> None:
    checked = SafeMarkdown(str)
    safe = checked.feed(written) + checked.end()
    answer = await verified(safe, PASSAGES, strict=True, markdown=SafeMarkdown(str))
    again = SafeMarkdown(str)
    assert again.feed(answer.found.text) + again.end() == answer.found.text
    assert "](http" not in answer.found.text
    assert "<img" not in answer.found.text
    assert "The crossing takes 2 hours." in answer.found.text
    assert answer.sentences[-1].endswith("The crossing takes 2 hours.")


async def test_a_plain_strict_answer_below_the_minimum_is_withheld() -> None:
    half = StubChecker(Verdict(supported=0.3, unknown=0.7, contradicted=0.0))
    written = "The Zanzibar ferry leaves every morning at 7, as the blue parrots of Mars have wanted it to."
    for streaming in (False, True):
        answer = await verified(written, PASSAGES, half, strict=True, streaming=streaming, minimum=0.9)
        assert answer.found.unfaithful
        assert answer.found.withheld is not streaming
        assert ("ferry" in answer.tokens) is streaming
    kept = await verified("The crossing takes 2 hours.", PASSAGES, strict=True, streaming=False, minimum=0.9)
    assert kept.tokens == kept.found.text == "The crossing takes 2 hours."


async def test_a_strict_answer_passes_on_what_was_not_checked() -> None:
    answer = await verified(f"Sure! {SUPPORTED}", PASSAGES, StubChecker(None), strict=True)
    assert answer.found.text == f"Sure! {SUPPORTED}\n\nOne sentence could not be checked."
    assert answer.verdicts == ["no_claim", "unavailable"]


# --- a minimum of faithfulness


async def test_a_plain_answer_below_the_minimum_is_withheld() -> None:
    answer = await verified(f"{SUPPORTED} {UNSUPPORTED}", PASSAGES, streaming=False, minimum=0.6)
    assert (
        answer.found.text
        == answer.tokens
        == ("The answer was withheld: the sources support only 50% of its sentences.")
    )
    assert (answer.found.withheld, answer.found.unfaithful, answer.found.faithfulness) == (True, True, 0.5)
    assert (answer.found.sentences, answer.found.citations) == ((), ())
    assert answer.checked == []


async def test_a_streamed_answer_below_the_minimum_is_flagged() -> None:
    answer = await verified(f"{SUPPORTED} {UNSUPPORTED}", PASSAGES, minimum=0.6)
    assert answer.found.text == f"{SUPPORTED} {UNSUPPORTED}"
    assert (answer.found.withheld, answer.found.unfaithful) == (False, True)


@pytest.mark.parametrize("text", [f"{SUPPORTED} {UNSUPPORTED}", "Sure!"])
async def test_a_plain_answer_that_reaches_the_minimum_or_was_not_judged_is_released(text: str) -> None:
    answer = await verified(text, PASSAGES, streaming=False, minimum=0.5)
    assert answer.found.text == answer.tokens == text
    assert not answer.found.unfaithful
    assert [event.sentence for event in answer.checked] == list(answer.found.sentences)
    assert isinstance(answer.events[0], Token), "nothing comes before the text"


# --- checkers that fail, and limits


@pytest.mark.parametrize("reason", ["off", "unavailable"])
async def test_without_a_model_only_copied_sentences_are_judged(reason: str) -> None:
    text = f"{SUPPORTED} The crossing takes 2 hours."
    answer = await verified(text, PASSAGES, StubChecker(None), reason=reason)  # type: ignore[arg-type]
    assert answer.verdicts == [reason, "supported"]
    assert answer.found.faithfulness == 1.0


async def test_where_verification_is_off_nothing_is_called_unsupported() -> None:
    answer = await verified(f"{UNSUPPORTED} [1]", PASSAGES, StubChecker(None), reason="off")
    assert answer.verdicts == ["off"]
    assert [mark for mark, *_ in answer.citations(PASSAGES)] == ["[1]"]


async def test_after_its_time_a_sentence_is_over_budget() -> None:
    clock = ManualClock()
    answer = await verified(SUPPORTED, PASSAGES, FakeEvidence(now=clock.monotonic), clock=clock, left_s=0.0)
    assert answer.verdicts == ["over_budget"]


async def test_a_checker_that_breaks_does_not_fail_the_answer_and_is_reported_once() -> None:
    crashes: list[Exception] = []
    text = f"{SUPPORTED} [1] The crossing takes 2 hours. {SUPPORTED}"
    answer = await verified(text, PASSAGES, StubChecker(RuntimeError("broken")), crashed=crashes.append)
    assert answer.verdicts == ["unavailable", "unavailable", "unavailable"]
    assert [str(crash) for crash in crashes] == ["broken"]
    assert [mark for mark, *_ in answer.citations(PASSAGES)] == ["[1]"]


async def test_a_model_that_is_required_but_missing_fails_the_answer() -> None:
    with pytest.raises(AnabranchError, match="not installed"):
        await verified(SUPPORTED, PASSAGES, StubChecker(AnabranchError("It is not installed.")))


async def test_a_checker_that_never_replies_is_not_waited_for() -> None:
    checker = SilentChecker()
    answer = await verified(f"{SUPPORTED} [1] {UNSUPPORTED}", PASSAGES, checker, left_s=0.02)
    assert answer.verdicts == ["over_budget", "over_budget"]
    assert checker.cancelled.is_set()
    assert [mark for mark, *_ in answer.citations(PASSAGES)] == ["[1]"]


async def test_many_sentences_are_compared_up_to_a_limit() -> None:
    checker = StubChecker(NO)
    text = " ".join(f"The ferry number {number} leaves early today." for number in range(MAX_SENTENCES + 200))
    answer = await verified(text, PASSAGES, checker)
    assert checker.calls == MAX_CHECKED
    assert len(answer.found.sentences) == MAX_SENTENCES + 1
    assert answer.verdicts[-1] == "over_budget", "the rest is one"
    assert answer.found.sentences[-1].end == len(text)


async def test_other_tasks_get_a_turn_while_a_long_answer_is_read() -> None:
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    text = "[1]. " * 40_000
    await verified([text[at : at + 4_000] for at in range(0, len(text), 4_000)], PASSAGES)
    counting.cancel()
    assert turns > len(text) // 20_000


async def test_what_is_not_found_in_passages_that_were_read_in_part_is_not_unsupported() -> None:
    long = passage("Filler text about nothing special here. " * 6_000)
    assert (await verified("Elephants swim across lakes.", [long])).verdicts == ["over_budget"]
    assert (await verified("Elephants swim across lakes.", PASSAGES)).verdicts == ["unsupported"]


async def test_a_sentence_whose_words_are_in_a_passage_of_another_language_is_not_checked() -> None:
    german = passage("Die Rückgabe kostet in Österreich sieben Euro, und die Frist ist lang.", "Rückgabe")
    assert (await verified("Rückgabe Österreich: sieben Euro.", [german, COD])).verdicts == ["not_english"]


@pytest.mark.parametrize(
    "unit", ["[1]", "[1] ", "a. [1] ", "`a` [1] ", "[[", "A. ", f"{SUPPORTED} [2]\n", "| a ferry is 7 | [1] |\n"]
)
async def test_the_time_for_a_hostile_answer_is_bounded(unit: str) -> None:
    hostile = [passage(("a. " * 8_000)[:8_000], f"T{number}") for number in range(10)]
    text = (unit * 80_000)[:80_000]
    began = time.process_time()
    answer = await verified([text[at : at + 2_000] for at in range(0, len(text), 2_000)], hostile)
    assert time.process_time() - began < 6.0
    assert len(answer.found.citations) <= MAX_CITATIONS
    assert answer.tokens == text


# --- in the pipeline

WRITER = Endpoint(slug="writer", kind="openai", operator=True)
QUOTES = Endpoint(slug="extractive", kind="extractive", operator=True)
QUESTION = Question(
    text="When does the Zanzibar ferry leave?",
    sources=(Endpoint(slug="docs"),),
    model=WRITER,
    fallback=QUOTES,
    profile=QUERY,
    verify=True,
)


class WaitingGenerator:
    """Writes a text, and then waits until it is cancelled."""

    def __init__(self, text: str) -> None:
        self._text = text

    async def generate(self, prompt: Prompt, context: Context) -> AsyncGenerator[Delta, None]:
        yield Delta(text=self._text)
        await asyncio.Event().wait()


class FailingGenerator:
    """Fails after a text, if it has one."""

    def __init__(self, text: str = "") -> None:
        self._text = text

    async def generate(self, prompt: Prompt, context: Context) -> AsyncGenerator[Delta, None]:
        if self._text:
            yield Delta(text=self._text)
            await asyncio.sleep(0)
        raise GenerationFailed("No connection.", FailureKind.DOWN)


def started(
    generator: Generator, checker: ClaimChecker, passages: Sequence[Passage] = PASSAGES, *, strict: bool = False
) -> tuple[Run, Recorder]:
    recorder = Recorder()
    reply = SourceReply(path="docs", status=Status.SUCCESS, passages=tuple(passages))
    pipeline = Pipeline(
        directory=FakeDirectory({"docs": FakeSource(reply)}, {"writer": generator, "extractive": Extractive()}),
        clock=SystemClock(),
        telemetry=recorder,
        limits=Limits(retrieval_timeout_s=5, generation_timeout_s=5, context_tokens=1000),
        verifier=lambda: Verifier(checker, SystemClock(), reason="unavailable"),
    )
    context = Context(correlation_id="c", deadline=time.monotonic() + 30)
    question = msgspec.structs.replace(QUESTION, answer_policy="strict" if strict else "all")
    return Run(pipeline, question, context, recorder).start(), recorder


async def test_the_verified_answer_is_the_fold_of_its_events() -> None:
    run, recorder = started(FakeGenerator([f"{SUPPORTED} [2] ", "The crossing takes 2 hours."]), FakeEvidence())
    async with run.listen() as listener:
        events = [event async for event in listener]
    answer = await run.value()
    assert fold(events) == answer
    assert [event.sentence for event in events if isinstance(event, SentenceChecked)] == list(answer.sentences)
    assert isinstance(events[-1], Answered)
    assert SentenceChecked in {type(event) for event in unfold(answer)}
    assert (answer.faithfulness, answer.left_out, answer.unfaithful) == (1.0, 0, False)
    assert not recorder.crashes


async def test_the_answer_of_a_fallback_model_is_verified() -> None:
    run, recorder = started(FailingGenerator(), FakeEvidence())
    answer = await run.value()
    assert answer.model == "extractive"
    assert [one.verdict for one in answer.sentences] == ["supported"]
    assert any(isinstance(event, FellBack) for event in recorder.events)


async def test_a_strict_answer_with_nothing_left_is_a_refusal() -> None:
    run, _ = started(FakeGenerator([UNSUPPORTED]), FakeEvidence(), strict=True)
    assert (await run.value()).refused


async def test_an_answer_of_white_space_is_empty() -> None:
    run, recorder = started(FakeGenerator([" ", "\n", "  "]), FakeEvidence())
    answer = await run.value()
    assert answer.fallback is not None
    assert answer.fallback.reason == "empty"
    assert answer.text == "".join(event.text for event in recorder.events if isinstance(event, Token))


async def test_white_space_before_an_answer_is_a_part_of_it() -> None:
    run, recorder = started(FakeGenerator(["\n", " ", SUPPORTED]), FakeEvidence())
    answer = await run.value()
    assert answer.text == f"\n {SUPPORTED}"
    assert [event.text for event in recorder.events if isinstance(event, Token)] == [answer.text]


async def test_a_cancelled_question_ends_its_checks() -> None:
    checker = SilentChecker()
    run, _ = started(WaitingGenerator(f"{SUPPORTED} The crossing takes "), checker)
    async with run.listen() as listener:
        async for event in listener:
            if isinstance(event, Token):
                break
        await asyncio.wait_for(checker.asked.wait(), 30)
    with pytest.raises(AnabranchError, match=r".+"):
        await run.value()
    assert checker.cancelled.is_set()


async def test_a_model_that_breaks_off_fails_the_answer_even_if_a_check_has_failed() -> None:
    failing = StubChecker(AnabranchError("It is not installed."))
    run, recorder = started(FailingGenerator(f"{SUPPORTED} The crossing takes "), failing)
    with pytest.raises(GenerationFailed, match="No connection"):
        await run.value()
    assert not recorder.crashes


async def test_a_broken_checker_is_reported_to_telemetry() -> None:
    run, recorder = started(FakeGenerator([SUPPORTED]), StubChecker(RuntimeError("broken")))
    answer = await run.value()
    assert [one.reason for one in answer.sentences] == ["unavailable"]
    assert [str(crash) for crash in recorder.crashes] == ["broken"]


@pytest.mark.soak
async def test_comparing_many_sentences_with_many_units_is_bounded() -> None:
    text = "".join(f"- {word} {other}.\n" for word in ("Ant", "Bee", "Cat", "Dog", "Elk") for other in range(360))
    passages = [Passage(source="docs", title="List", text=text, score=0.9) for _ in range(10)]
    began = time.process_time()
    answer = await verified("The harbour of the old town was closed for repairs. " * 200, passages, left_s=600)
    assert Counter(answer.verdicts).keys() == {"unsupported", "over_budget"}
    assert time.process_time() - began < 10


@pytest.mark.parametrize("written", ["No.", "Yes, of course.", "The documents do not say."])
async def test_a_strict_answer_in_which_nothing_is_claimed_is_a_refusal(written: str) -> None:
    answer = await verified(written, PASSAGES, strict=True)
    assert (answer.found.text, answer.found.withheld) == (written, True)


async def test_a_strict_answer_says_that_code_was_not_checked() -> None:
    answer = await verified(f"{SUPPORTED}\n\n```\nRefunds take 90 days.\n```", PASSAGES, strict=True)
    assert answer.verdicts == ["supported", "code"]
    assert answer.found.text.endswith(message("not_checked_one", None))
