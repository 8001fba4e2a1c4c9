"""The measures of an answer: ALCE's citation recall and precision, gold sentences, faithfulness, refusals."""

from collections.abc import Sequence

import msgspec

from anabranch.app.answer_evaluation import AnswerEvaluation, EvaluatedQuestion, GoldSentence, MeasuredAnswer
from anabranch.domain.model import Answer, CheckedSentence, Citation, Ground, Passage
from anabranch.testing.fakes import FakeEvidence

REFUNDS = "Refunds for printed books arrive within 30 days. Vouchers never expire."
KILN = "The kiln reaches 1280 degrees. Marta Olsen built it."
PASSAGES = (
    Passage(source="shop", title="Returns", text=REFUNDS, score=0.9, document_id="d1"),
    Passage(source="shop", title="Workshop", text=KILN, score=0.8, document_id="d2"),
)
ASKED = EvaluatedQuestion(question="How long do refunds take?", answers=("30 days",))


def answer(
    text: str, *cited: tuple[int, str], sentences: Sequence[CheckedSentence] = (), refused: bool = False
) -> Answer:
    """An answer whose marks, in their order, cite these words."""
    found, at = [], 0
    for passage, words in cited:
        at = text.index(f"[{passage + 1}]", at)
        start = PASSAGES[passage].text.index(words)
        found.append(
            Citation(
                start=at,
                end=at + 3,
                source="shop",
                passage=passage,
                passage_start=start,
                passage_end=start + len(words),
            )
        )
        at += 3
    return Answer(
        text=text,
        ground=Ground.DOCUMENTS,
        passages=PASSAGES,
        citations=tuple(found),
        sentences=tuple(sentences),
        refused=refused,
        faithfulness=0.25 if sentences else None,
    )


async def measured(given: Answer, asked: EvaluatedQuestion = ASKED) -> MeasuredAnswer:
    return await AnswerEvaluation(FakeEvidence(), {"returns.md": "d1", "kiln.md": "d2"}).measure(asked, given, 12.34)


PAID = "Refunds for printed books arrive within 30 days."
BUILT = "Marta Olsen built it."


async def test_a_sentence_with_the_words_that_support_it_is_cited_right() -> None:
    found = await measured(answer(f"{PAID} [1]", (0, PAID)))
    assert (found.citation_recall, found.citation_precision, found.faithfulness) == (1.0, 1.0, 1.0)
    assert (found.containment, found.sentences, found.citations, found.latency_ms) == (1.0, 1, 1, 12.3)


async def test_a_sentence_whose_mark_names_other_words_lowers_recall_and_precision_but_not_faithfulness() -> None:
    found = await measured(answer(f"{PAID} [2]", (1, BUILT)))
    assert (found.citation_recall, found.citation_precision, found.faithfulness) == (0.0, 0.0, 1.0)


async def test_a_sentence_without_a_mark_lowers_recall_only() -> None:
    found = await measured(answer(f"{PAID} [1] Vouchers never expire.", (0, PAID)))
    assert (found.citation_recall, found.citation_precision) == (0.5, 1.0)


async def test_of_two_citations_one_that_is_not_needed_lowers_precision() -> None:
    found = await measured(answer(f"{PAID} [1][2]", (0, PAID), (1, BUILT)))
    assert (found.citation_recall, found.citation_precision, found.citations) == (1.0, 0.5, 2)


async def test_two_citations_that_support_a_sentence_only_together_are_both_precise() -> None:
    text = "Refunds for printed books arrive within 30 days. The kiln reaches 1280 degrees."
    found = await measured(answer(text.replace(". The", " and the")[:-1] + " [1][2].", (0, PAID), (1, KILN[:30])))
    assert (found.citation_recall, found.citation_precision, found.citations) == (1.0, 1.0, 2)


async def test_two_spans_of_one_passage_are_one_citation() -> None:
    found = await measured(answer(f"{PAID[:-1]} [1] [1].", (0, "Vouchers never expire."), (0, PAID)))
    assert (found.citation_recall, found.citation_precision, found.citations) == (1.0, 1.0, 1)


async def test_an_invented_sentence_is_not_faithful() -> None:
    found = await measured(answer("Elephants sleep under bridges near Lisbon. [1]", (0, PAID)))
    assert (found.citation_recall, found.faithfulness, found.containment, found.token_f1) == (0.0, 0.0, 0.0, 0.0)


async def test_a_verified_answer_keeps_its_own_faithfulness() -> None:
    checked = [CheckedSentence(start=0, end=len(PAID), verdict="supported")]
    assert (await measured(answer(f"{PAID} [1]", (0, PAID), sentences=checked))).faithfulness == 0.25


async def test_sentences_that_cannot_be_checked_are_counted_and_not_measured() -> None:
    german = "Die Erstattung für gedruckte Bücher dauert nicht länger als dreißig Tage nach der Rücksendung. [1]"
    found = await measured(answer(german, (0, PAID)))
    assert (found.citation_recall, found.citation_precision, found.faithfulness) == (None, None, None)
    assert (found.sentences, found.unchecked) == (1, 1)


async def test_gold_sentences_are_compared_by_document_and_words() -> None:
    gold = (
        GoldSentence(document="returns.md", text="refunds for printed books arrive within 30 days"),
        GoldSentence(document="kiln.md", text="Marta Olsen built it."),
    )
    asked = EvaluatedQuestion(question="?", evidence=gold)
    found = await measured(
        answer(f"{PAID} [1] Vouchers never expire. [1]", (0, PAID), (0, "Vouchers never expire.")), asked
    )
    assert (found.gold_recall, found.gold_precision) == (0.5, 0.5)
    elsewhere = EvaluatedQuestion(question="?", evidence=(GoldSentence(document="kiln.md", text=PAID),))
    found = await measured(answer(f"{PAID} [1]", (0, PAID)), elsewhere)
    assert (found.gold_recall, found.gold_precision) == (0.0, 0.0)
    assert (await measured(answer(f"{PAID} [1]", (0, PAID)))).gold_recall is None


async def test_a_refusal_and_an_answer_that_says_nothing_was_found_abstain() -> None:
    refused = await measured(answer("Nothing was found.", refused=True))
    said = await measured(answer("The documents do not mention refunds at all."))
    for found in (refused, said):
        assert (found.abstained, found.containment, found.citation_recall) == (True, 0.0, None)
    short = await measured(answer("30 days."))
    assert (short.abstained, short.containment) == (False, 1.0)


async def test_an_unanswerable_question_has_no_right_answer() -> None:
    asked = EvaluatedQuestion(question="?", answers=("30 days",), answerable=False)
    found = await measured(answer(f"{PAID} [1]", (0, PAID)), asked)
    assert (found.abstained, found.containment, found.citation_recall) == (False, None, 1.0)


async def test_the_note_of_a_strict_answer_is_no_claim() -> None:
    checked = [CheckedSentence(start=0, end=len(f"{PAID} [1]"), verdict="supported")]
    kept = answer(f"{PAID} [1]\n\nOne sentence was left out: no source supports it.", (0, PAID), sentences=checked)
    found = await measured(msgspec.structs.replace(kept, left_out=1))
    assert (found.sentences, found.citation_recall, found.abstained) == (1, 1.0, False)
    nothing = msgspec.structs.replace(answer("Two sentences were left out: no source supports them."), left_out=2)
    assert (await measured(nothing)).abstained


async def test_code_is_not_measured() -> None:
    found = await measured(answer(f"{PAID} [1]\n\n```\nrefund --days 30 --now please\n```\n", (0, PAID)))
    assert (found.sentences, found.citation_recall) == (1, 1.0)
