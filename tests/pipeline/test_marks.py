"""The text of a verified answer with the right citation marks."""

import re
import time
from random import Random

import msgspec
import pytest

from anabranch.domain.contracts import SystemClock
from anabranch.domain.events import AnswerEvent
from anabranch.domain.model import (
    QUERY,
    Answer,
    CheckedSentence,
    Citation,
    Context,
    Endpoint,
    Ground,
    Passage,
    Question,
    SourceReply,
    Status,
    Support,
)
from anabranch.pipeline.answer import Limits, Pipeline
from anabranch.pipeline.cite import Marks
from anabranch.pipeline.marks import with_marks
from anabranch.pipeline.verify import Verifier
from anabranch.testing import FakeDirectory, FakeEvidence, FakeGenerator, FakeSource, Recorder
from support.examples import examples

PASSAGES = tuple(
    Passage(source=source, title=title, text=f"{title}.", score=0.9)
    for source, title in (("a/one", "Pumps"), ("a/two", "Tanks"), ("b, c", "Filters"))
)
# A sentence as it is written, the passages that its marks are for (in their order), and those that had no mark.
Said = tuple[str, list[list[int]], list[int]]


def verified(*said: Said, verdict: Support = "supported") -> Answer:
    text, sentences, citations = "", [], []
    for words, marked, missing in said:
        start = len(text) + bool(text)
        text = f"{text} {words}" if text else words
        marks = [found.span() for found in re.finditer(r"[\[\u3010][^\]\u3011]*[\]\u3011]", words)]
        for (first, last), passages in zip(marks, marked, strict=True):
            citations += [citation(start + first, start + last, one) for one in passages]
        citations += [citation(len(text), len(text), one) for one in missing]
        found = sum(map(bool, marked))
        sentences.append(
            CheckedSentence(
                start=start,
                end=len(text),
                verdict=verdict,
                marks=len(marks),
                corrected=found,
                removed=0 if found else len(marks),
                added=len(missing),
            )
        )
    return Answer(
        text=text,
        ground=Ground.DOCUMENTS,
        passages=PASSAGES,
        citations=tuple(citations),
        sentences=tuple(sentences),
    )


def citation(start: int, end: int, passage: int) -> Citation:
    source = PASSAGES[passage].source
    return Citation(start=start, end=end, source=source, passage=passage, passage_start=0, passage_end=4)


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (("Pumps run [1].", [[0]], []), "Pumps run [1]."),
        (("Tanks leak [1].", [[1]], []), "Tanks leak [2]."),
        (("Tanks leak.", [], [1]), "Tanks leak. [2]"),
        (("Tanks leak [7].", [[1]], []), "Tanks leak [2]."),
        (("Tanks [sic] leak [7].", [[], []], []), "Tanks [sic] leak."),
        (("Tanks leak and pumps run.", [], [1, 0]), "Tanks leak and pumps run. [2, 1]"),
        (("Nobody knows [1].", [[]], []), "Nobody knows."),
        (("Nobody [1] knows [2].", [[], []], []), "Nobody knows."),
        (("Tanks [1] leak [2].", [[], [1]], []), "Tanks [1] leak [2]."),
        (("Read `tank[1]` first.", [[1]], []), "Read `tank[1]` first."),
        (("```\ntank[1]\n```", [[]], []), "```\ntank[1]\n```"),
        (("Tanks leak [1, 3].", [[0]], []), "Tanks leak [1]."),
        (("Tanks leak [a/one].", [[1]], []), "Tanks leak [a/two]."),
        (("Filters clog [a/one].", [[2]], []), "Filters clog [3]."),
        (("Tanks leak [Source 1].", [[1]], []), "Tanks leak [2]."),
        (("Tanks leak.[1-3]", [[1]], []), "Tanks leak.[2]"),
        (("Tanks leak.[1-3]", [[0, 1, 2]], []), "Tanks leak.[1-3]"),
        (("Tanks leak.[0]", [[]], []), "Tanks leak."),
        (("Tanks leak [8][9] [7].", [[], [], []], []), "Tanks leak."),
        (("Tanks <[9]img src=x>.", [[]], []), "Tanks < img src=x>."),
        (("Tanks http\u30109\u3011s://evil.example/ leak.", [[]], []), "Tanks http s://evil.example/ leak."),
        (("Tanks ![x] [9](//evil.example).", [[], []], []), "Tanks ![x] (//evil.example)."),
        (("Tanks [1](//evil.example) leak.", [[1]], []), "Tanks [2] (//evil.example) leak."),
        (("| Tanks | leak |", [], [1]), "| Tanks | leak [2] |"),
        (("```\ntank\n```", [], [1]), "```\ntank\n```\n[2]"),
    ],
)
def test_marks_name_the_passages_that_support_the_sentence(said: Said, text: str) -> None:
    assert with_marks(verified(said)).text == text


def test_offsets_are_those_of_the_new_text() -> None:
    marked = with_marks(
        verified(("Nobody knows [1].", [[]], []), ("Tanks leak.", [], [1]), ("Pumps run [2].", [[0]], []))
    )
    assert marked.text == "Nobody knows. Tanks leak. [2] Pumps run [1]."
    assert [marked.text[one.start : one.end] for one in marked.sentences] == [
        "Nobody knows.",
        "Tanks leak. [2]",
        "Pumps run [1].",
    ]
    assert [marked.text[one.start : one.end] for one in marked.citations] == ["[2]", "[1]"]


def test_doubted_words_stay_the_same_words() -> None:
    answer = verified(("Nobody knows [1].", [[]], []), ("Tanks leak today", [], [1]))
    first, second = answer.sentences
    doubted = CheckedSentence(
        start=second.start, end=second.end, verdict="partly", added=1, doubted=((second.end - 5, second.end),)
    )
    marked = with_marks(
        Answer(
            text=answer.text,
            ground=answer.ground,
            passages=PASSAGES,
            citations=answer.citations,
            sentences=(first, doubted),
        )
    )
    ((start, end),) = marked.sentences[1].doubted
    assert marked.text[start:end] == "today"


def test_sentences_that_were_not_checked_keep_their_marks() -> None:
    answer = verified(("Quizás [1].", [[0]], []), verdict="unchecked")
    assert with_marks(answer) is answer


def test_brackets_around_a_removed_mark_are_removed() -> None:
    answer = verified(("Elephants swim [2].", [[]], []), verdict="unsupported")
    doubled = msgspec.structs.replace(
        answer, text="Elephants swim [[2]].", sentences=(msgspec.structs.replace(answer.sentences[0], end=21),)
    )
    assert with_marks(doubled).text == "Elephants swim."


def test_sentences_that_claim_nothing_lose_their_marks() -> None:
    answer = verified(("This is what I found [1].", [[]], []), verdict="unchecked")
    assert with_marks(answer).text == "This is what I found."


FACTS = ("The pump runs at 4 bar.", "The tank holds 20 litres.", "Filters are kept in building seven.")
NUMBERED = tuple(Passage(source="notes", title="Notes", text=fact, score=0.9) for fact in FACTS)
MARKS = (
    "",
    "[1]",
    "[1-2]",
    " [Source 2]",
    " \u30101\u3011",
    " [0]",
    " [1]",
    " [2]",
    " [3]",
    " [1, 2]",
    " [9]",
    " [1][2]",
    " [notes]",
    " [see below]",
)
WORD = re.compile(r"\w+")


def written(random: Random) -> str:
    """Sentences of the passages and others, with marks that are right, wrong or missing."""
    sentences = (*FACTS, "Penguins swim very well.", "Here is `tank[1]`, as code.", "| pump | 4 bar |", "Is it so?")
    chosen = (random.choice(sentences) for _ in range(random.randint(1, 6)))
    marked = (
        one + random.choice(MARKS)
        if random.random() < 0.3 or not one.endswith(".")
        else f"{one[:-1]}{random.choice(MARKS)}."
        for one in chosen
    )
    return random.choice((" ", "\n", "\n\n")).join(marked)


async def test_after_marking_every_citation_has_a_mark_that_names_its_passage() -> None:
    random = Random(16)
    source = FakeSource(SourceReply(path="notes", status=Status.SUCCESS, passages=NUMBERED))
    question = Question(
        text="What?", sources=(Endpoint(slug="notes"),), model=Endpoint(slug="writer"), profile=QUERY, verify=True
    )
    for _ in range(examples(300)):
        text = written(random)
        pipeline = Pipeline(
            directory=FakeDirectory({"notes": source}, {"writer": FakeGenerator((text,))}),
            clock=SystemClock(),
            telemetry=Recorder(),
            limits=Limits(retrieval_timeout_s=10, generation_timeout_s=10, context_tokens=8_000),
            verifier=lambda: Verifier(FakeEvidence(), SystemClock()),
        )
        answer = await pipeline.answer(question, Context(correlation_id="c", deadline=time.monotonic() + 60), ignored)
        marked = with_marks(answer)
        names = Marks(marked.passages)
        for one in marked.citations:
            mark = marked.text[one.start : one.end]
            assert any(one.passage in named for named in names.named(mark[1:-1])), (text, marked.text)
        assert _words(marked.text) == _words(text)
        assert len(marked.sentences) == len(answer.sentences)
        for before, after in zip(answer.sentences, marked.sentences, strict=True):
            assert _words(marked.text[after.start : after.end]) == _words(text[before.start : before.end])
        assert with_marks(marked).text == marked.text


async def ignored(event: AnswerEvent) -> None:
    pass


def _words(text: str) -> list[str]:
    return WORD.findall(re.sub(r"\[(?:Source )?[\d, -]+\]|\u3010\d\u3011|\[notes\]", "", text))
