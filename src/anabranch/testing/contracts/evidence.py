"""The tests of the contracts Evidence and ClaimChecker."""

import asyncio
import time

from anabranch.domain.evidence import ClaimChecker, Evidence, EvidencePage, ReadableUnit, Reading, Verdict

QUESTION = "Which university was founded in Uppsala?"
# Zero-width characters, surrogates, no spaces, only marks, special tokens, control characters, many scripts.
HOSTILE = (
    "",
    " \n\t ",
    "\u200b\u200d\ufeff",
    "half \ud83d of a pair \udc00",
    "a" * 1_000_000,
    "e" + "\u0301" * 5_000,
    "[SEP] [unused0] [CLS]",
    "\x00\x01\x1f",
    "東京は日本の首都です。" * 500,
    "ﷺ" * 2_000,
    "word " * 50_000,
)


def page(title: str, *units: str, before: str = "") -> EvidencePage:
    return EvidencePage(title=title, units=tuple(ReadableUnit(text=unit, before=before) for unit in units))


NEAR = page("Uppsala", "The university was founded in Uppsala.", "It is the oldest one in Sweden.")
FAR = page("Cod", "Dried fish keeps for years.", "Salt is not needed.")


def fits(reading: Reading | None, pages: tuple[EvidencePage, ...]) -> bool:
    """Whether all values of a reading belong to something in the pages."""
    if reading is None:
        return True
    units = [(len(scores), len(page.units)) for scores, page in zip(reading.units, pages, strict=False)]
    answer = reading.answer
    return (
        len(reading.units) <= len(pages)
        and all(scores <= there for scores, there in units)
        and (answer is None or 0 <= answer.start <= answer.end <= len(pages[answer.page].units[answer.unit].text))
    )


class EvidenceContract:
    """The fixture `evidence` gives an Evidence."""

    async def test_each_input_has_a_result_in_the_order_of_the_inputs(self, evidence: Evidence) -> None:
        inputs = [(FAR,), (NEAR,), (FAR, NEAR), (NEAR,)]
        readings = await evidence.read(QUESTION, inputs)
        assert [reading and [len(units) for units in reading.units] for reading in readings] == [[2], [2], [2, 2], [2]]
        assert readings[1] == readings[3] != readings[0]
        assert await evidence.read(QUESTION, []) == []

    async def test_a_page_about_the_subject_is_more_relevant(self, evidence: Evidence) -> None:
        far, near = await evidence.read(QUESTION, [(FAR,), (NEAR,)])
        assert far is not None
        assert near is not None
        assert near.relevance > far.relevance

    async def test_a_result_does_not_depend_on_other_inputs(self, evidence: Evidence) -> None:
        other = page("Other", *(f"Sentence {number} of a longer page about universities." for number in range(20)))
        together = await evidence.read(QUESTION, [(other,), (NEAR,), (FAR,)])
        alone = [*await evidence.read(QUESTION, [(NEAR,)]), *await evidence.read(QUESTION, [(FAR,)])]
        assert [*together][1:] == alone

    async def test_the_answer_is_in_the_text_of_a_unit(self, evidence: Evidence) -> None:
        inputs = [(NEAR,), (FAR,), (FAR, NEAR), (page("Ärger", "Ärger über Öl: naïve café, 東京.", before="Über"),)]
        for pages, reading in zip(inputs, await evidence.read("Where?", inputs), strict=True):
            assert reading is not None
            assert reading.answer is not None
            assert fits(reading, pages)
            text = pages[reading.answer.page].units[reading.answer.unit].text
            assert text[reading.answer.start : reading.answer.end].strip()

    async def test_any_text_is_read(self, evidence: Evidence) -> None:
        for text in HOSTILE:
            inputs = [(page(text, text, "Fish.", text, before=text),), (page(text),), (), (page(text, text),) * 3]
            for pages, reading in zip(inputs, await evidence.read(text, inputs), strict=True):
                assert fits(reading, pages), text[:20]

    async def test_of_many_units_the_first_are_read(self, evidence: Evidence) -> None:
        pages = (page("Many", *["Fish."] * 20_000),)
        [reading] = await evidence.read(QUESTION, [pages])
        assert reading is not None
        assert fits(reading, pages)
        assert reading.units[0]

    async def test_of_many_inputs_the_first_are_read(self, evidence: Evidence) -> None:
        readings = await evidence.read(QUESTION, [(page("", "Fish."),)] * 200)
        assert len(readings) == 200
        read = [reading is not None for reading in readings]
        assert read[0]
        assert not read[-1]
        assert read == sorted(read, reverse=True)

    async def test_after_its_time_nothing_is_read(self, evidence: Evidence) -> None:
        now = time.monotonic()
        assert await evidence.read(QUESTION, [(NEAR,), (FAR,)], until=now) == [None, None]
        assert None not in await evidence.read(QUESTION, [(NEAR,), (FAR,)], until=now + 600)

    async def test_calls_at_the_same_time_do_not_mix(self, evidence: Evidence) -> None:
        expected = await evidence.read(QUESTION, [(NEAR,), (FAR,)])
        found = await asyncio.gather(*(evidence.read(QUESTION, [(NEAR,), (FAR,)]) for _ in range(8)))
        assert all(readings == expected for readings in found)


class ClaimCheckerContract:
    """The fixture `checker` gives a ClaimChecker."""

    async def test_each_input_has_a_verdict_in_the_order_of_the_inputs(self, checker: ClaimChecker) -> None:
        verdicts = await checker.check("A university was founded in Uppsala.", [(FAR,), (NEAR,), (FAR, NEAR), (NEAR,)])
        assert verdicts[1] == verdicts[3] != verdicts[0]
        assert await checker.check(QUESTION, []) == []

    async def test_a_verdict_is_three_probabilities(self, checker: ClaimChecker) -> None:
        for verdict in await checker.check("Fish is dried.", [(NEAR,), (FAR,), (NEAR, FAR)]):
            assert verdict is not None
            shares = (verdict.supported, verdict.unknown, verdict.contradicted)
            assert all(0 <= share <= 1 for share in shares)
            assert abs(sum(shares) - 1) < 1e-6

    async def test_its_details_belong_to_the_claim_and_to_the_page(self, checker: ClaimChecker) -> None:
        for text in ("Fish is dried, naïvely, in 1990.", *HOSTILE):
            [verdict] = await checker.check(text, [(NEAR,)])
            assert verdict is not None
            assert len(verdict.units) <= len(NEAR.units)
            assert all(0 <= start <= end <= len(text) for start, end, _ in verdict.words)

    async def test_any_text_is_checked(self, checker: ClaimChecker) -> None:
        for text in HOSTILE:
            inputs = [(page(text, text, "Fish.", text, before=text),), (page(text),), (), (page(text, text),) * 3]
            assert all(isinstance(verdict, Verdict) for verdict in await checker.check(text, inputs))

    async def test_after_its_time_nothing_is_checked(self, checker: ClaimChecker) -> None:
        assert await checker.check(QUESTION, [(NEAR,)], until=time.monotonic()) == [None]
