"""The extractive generator: quotes, citations and abstention."""

import re
import time
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.domain.contracts import Generator
from anabranch.domain.model import Context, Delta, Passage, Place, Prompt, Scores
from anabranch.evidence.judge import SUPPORTED, Judge
from anabranch.models.evidence import OnnxEvidence
from anabranch.models.extractive import ABSTAINED, LEAD_IN, Extractive, quotes
from anabranch.models.factory import LocalEvidence
from anabranch.pipeline.cite import cite, cited
from anabranch.testing import FakeEvidence, Recorder
from anabranch.text.messages import message
from anabranch.text.support import Wording, signals, support
from support.examples import examples
from support.quoted_answers import RecordingEvidence, quoted

ABSTENTION = message("refusal_abstained")

RIVER = Passage(
    source="lee/rivers",
    title="Murray River",
    text=(
        "The Murray River is a river in south-eastern Australia. It is 2,508 km long and rises in the Australian Alps. "
        "Anabranches leave the main channel and rejoin it downstream. The Murray Cod lives in its deep pools."
    ),
    score=0.8,
    document_id="murray",
)
COD = Passage(
    source="lee/fish",
    title="Murray Cod",
    text="The Murray Cod is a large freshwater fish. It was described by Thomas Mitchell in 1838.",
    score=0.7,
    document_id="cod",
)
BREAD = Passage(
    source="lee/kitchen",
    title="Bread",
    text="Knead the dough for ten minutes. Let it rest under a cloth until it has doubled.",
    score=0.2,
    document_id="bread",
)


def near(passage: Passage, dense: float, start: int = 0, headers: tuple[str, ...] = ()) -> Passage:
    place = Place(
        chunk_id="1", collection="c", start=start, end=start, tokens=0, headers=headers, scores=Scores(dense=dense)
    )
    return Passage(
        source=passage.source,
        title=passage.title,
        text=passage.text,
        score=passage.score,
        document_id=passage.document_id,
        place=place,
    )


def text_of(text: str, title: str = "", document: str | None = None) -> Passage:
    return Passage(source="lee/notes", title=title, text=text, score=0.5, document_id=document)


def prompt(question: str, *passages: Passage) -> Prompt:
    return Prompt(question=question, messages=(), max_tokens=500, temperature=0, passages=passages, version="test")


def context() -> Context:
    return Context(correlation_id="c", deadline=time.monotonic() + 30)


async def deltas(question: str, *passages: Passage) -> list[Delta]:
    return [delta async for delta in Extractive().generate(prompt(question, *passages), context())]


async def answer(question: str, *passages: Passage) -> str:
    return "".join(delta.text for delta in await deltas(question, *passages))


def stated(text: str, count: int = 9) -> list[tuple[str, int]]:
    """Each stretch of words in an answer, and the number of a passage behind it."""
    parts = re.split(rf" \[({'|'.join(str(number) for number in range(1, count + 1))})\]", text)
    return [(words.strip(), int(number)) for words, number in zip(parts[::2], parts[1::2], strict=False)]


async def test_extractive_is_a_generator() -> None:
    generator: Generator = Extractive()
    found = [delta async for delta in generator.generate(prompt("How long is the Murray River?", RIVER), context())]
    assert "2,508 km" in "".join(delta.text for delta in found)
    assert [delta.usage for delta in found if delta.usage] != []
    assert found[-1].finish_reason == "stop"


async def test_an_extractive_answer_can_be_cancelled_in_the_middle() -> None:
    async with aclosing(Extractive().generate(prompt("How long is the Murray River?", RIVER, COD), context())) as said:
        async for delta in said:
            assert delta.text
            break


async def test_quoted_sentences_are_verbatim_and_cited() -> None:
    passages = (near(BREAD, 0.1), near(RIVER, 0.7), near(COD, 0.6))
    text = await answer("When was the fish of the Murray River described?", *passages)
    assert "It was described by Thomas Mitchell in 1838. [3]" in text
    for words, number in stated(text):
        assert words in passages[number - 1].text
    for citation, (words, number) in zip(cite(text, passages), stated(text), strict=True):
        assert citation.passage == number - 1
        assert citation.source == passages[number - 1].source
        assert passages[citation.passage].text[citation.passage_start : citation.passage_end] == words


async def test_an_extractive_answer_is_at_most_a_short_paragraph() -> None:
    many = [near(text_of(f"The Murray River flows past town {n}. " * 20, "Murray River"), 0.8) for n in range(10)]
    text = await answer("Which town does the Murray River flow past?", *many)
    assert 1 <= len(stated(text)) <= 4
    assert len(text) < 650


async def test_the_same_sentence_is_quoted_once() -> None:
    twin = text_of(COD.text, "Murray Cod", "another")
    text = await answer("Who described the Murray Cod?", near(COD, 0.8), near(twin, 0.8))
    assert text.count("described by Thomas Mitchell") == 1


async def test_sentences_of_one_document_are_quoted_in_document_order() -> None:
    late = near(text_of("The Murray River ends at Lake Alexandrina.", "Murray River", "murray"), 0.8, start=900)
    early = near(text_of("The Murray River begins in the Alps.", "Murray River", "murray"), 0.7, start=100)
    text = await answer("Where does the Murray River begin, and at which Lake does it end?", late, early)
    assert stated(text) == [
        ("The Murray River begins in the Alps.", 2),
        ("The Murray River ends at Lake Alexandrina.", 1),
    ]


async def test_a_sentence_that_begins_with_it_is_quoted_with_the_one_before() -> None:
    text = await answer("Who described the Murray Cod in 1838?", near(COD, 0.8))
    assert [words for words, _ in stated(text)] == [
        "The Murray Cod is a large freshwater fish.",
        "It was described by Thomas Mitchell in 1838.",
    ]


async def test_a_document_named_in_a_quoted_sentence_is_quoted_too() -> None:
    film = text_of('Parts of "Dry Season" were filmed in Mildura.', "Mildura", "a")
    made = text_of("Dry Season is a film directed by Ann Moss.", "Dry Season", "b")
    text = await answer("Who directed the film that was shot in Mildura?", near(film, 0.7), near(made, 0.4))
    assert "directed by Ann Moss. [2]" in text


async def test_headings_and_questions_are_not_answers() -> None:
    faq = "Refund policy\n\nHow long does a refund take?\n\nWe pay within 14 days. Shipping costs are not paid back."
    text = await answer("How long does a refund take?", near(text_of(faq, "faq.md"), 0.7))
    assert stated(text)[0] == ("We pay within 14 days.", 1)
    assert "?" not in text


async def test_a_passage_of_one_bare_line_can_be_quoted() -> None:
    assert await answer("How long do refunds take?", near(text_of("Refunds take two weeks"), 0.8)) == (
        "Refunds take two weeks [1]"
    )


async def test_the_markers_of_a_block_quote_are_not_quoted() -> None:
    quoted = "> The heron said that rain falls\n> on Monday morning."
    said = await answer("When does rain fall?", near(text_of(quoted), 0.8))
    assert said == "The heron said that rain falls on Monday morning. [1]"


async def test_list_markers_are_not_quoted() -> None:
    items = "- Refunds take two weeks.\n- Exchanges take three weeks."
    assert await answer("How long do refunds take?", near(text_of(items), 0.8)) == "Refunds take two weeks. [1]"


@pytest.mark.parametrize(
    "question",
    ["Who won the World Cup in 1998?", "How is bread made?", "What is the capital of Iceland?", "", "what?", "?!"],
)
async def test_extractive_abstains_when_the_documents_are_about_something_else(question: str) -> None:
    [said] = await deltas(question, near(RIVER, 0.05), near(COD, 0.04))
    assert said.text.startswith(ABSTENTION)
    assert said.finish_reason == ABSTAINED
    assert cite(said.text, (RIVER, COD)) == ()


async def test_extractive_abstains_without_vectors() -> None:
    assert (await answer("Who won the World Cup in 1998?", RIVER, COD)).startswith(ABSTENTION)
    assert "Thomas Mitchell" in await answer("Who described the Murray Cod?", RIVER, COD)


async def test_a_name_that_no_passage_has_lowers_the_support() -> None:
    assert (await answer("How long is the Zambezi River?", near(RIVER, 0.55), near(COD, 0.3))).startswith(ABSTENTION)
    assert not (await answer("How long is the Murray River?", near(RIVER, 0.55), near(COD, 0.3))).startswith(ABSTENTION)


async def test_support_of_a_question_without_names_depends_on_similarity() -> None:
    policy = text_of("Goods may be sent back within 30 days of delivery.")
    assert not (await answer("how can i return something", near(policy, 0.6))).startswith(ABSTENTION)
    assert (await answer("how can i return something", near(policy, 0.2))).startswith(ABSTENTION)


def test_stronger_signals_never_lower_the_support() -> None:
    question = "How long is the Murray River?"
    closer = [support(question, [near(RIVER, dense)]) for dense in (-1.0, 0.0, 0.3, 0.6, 1.0)]
    assert closer == sorted(closer)
    assert support(question, [near(RIVER, 0.5), near(COD, 0.5)]) >= support(question, [near(COD, 0.5)])
    assert support(question, []) == 0.0
    assert support(question, [near(RIVER, float("nan"))]) == support(question, [RIVER])


def test_capitalized_words_and_numbers_are_names() -> None:
    def names(question: str, text: str) -> float:
        return signals(Wording(question), [text_of(text)]).names

    assert names("Was Kate Ramsay born in 1952?", "kate ramsay, 1952") == 1.0
    assert names("Was Kate Ramsay born in 1952?", "Sophie Ramsay, 1952") == 0.5
    assert names("which river is longest", "nothing of the kind") == 1.0
    assert names("Was Gaël Monfils there?", "Gael Monfils") == 1.0


async def test_extractive_abstains_when_no_sentence_can_be_quoted() -> None:
    assert (await answer("How long is the Murray River?")).startswith(ABSTENTION)
    for empty in ("", " \n\t ", "...", "?", "[1]"):
        assert (await answer("How long is the Murray River?", near(text_of(empty, "Murray River"), 0.9))).startswith(
            ABSTENTION
        )


async def test_references_inside_a_document_do_not_become_citations() -> None:
    cited = text_of("Murray Cod grow old[1][2] and large [1, 3]. They eat fish [sic]. [2]", "Murray Cod")
    text = await answer("How large do Murray Cod grow?", near(BREAD, 0.1), near(cited, 0.8), near(COD, 0.5))
    assert "Murray Cod grow old [2] and large [2]. [2]" in text
    assert {citation.passage for citation in cite(text, (BREAD, cited, COD))} <= {1, 2}
    for words, number in stated(text):
        assert words in (BREAD, cited, COD)[number - 1].text


async def test_a_source_named_inside_a_document_does_not_become_a_citation() -> None:
    sly = text_of("The Murray Cod can grow to 100 kg [lee/kitchen].", "Murray Cod")
    text = await answer("How large can the Murray Cod grow?", near(sly, 0.8), near(BREAD, 0.1))
    assert text == "The Murray Cod can grow to 100 kg [1]. [1]"


async def test_control_characters_do_not_change_the_quotes() -> None:
    odd = text_of("The \x1b[31mMurray\x00 Cod\u202e can\ud800 grow to 100 kg.", "Murray\x00 Cod")
    for words, _ in stated(await answer("How large can the Murray Cod grow?", near(odd, 0.8))):
        assert words in odd.text


HUGE = {
    "one sentence": "murray cod " * 100_000,
    "no words": "." * 1_000_000,
    "many sentences": "Cod. " * 200_000,
    "one word": "é" * 1_000_000,
    "brackets": "[1] [" * 200_000,
    "lines": "Murray Cod\n\n" * 80_000,
    "white space": "Murray Cod grows." + " " * 1_000_000,
}


@pytest.mark.parametrize("kind", HUGE)
@pytest.mark.parametrize(("count", "limit_s"), [(1, 0.05), (30, 0.15)])
def test_a_huge_passage_is_quoted_in_little_time(kind: str, count: int, limit_s: float) -> None:
    passage = near(text_of(HUGE[kind], "Murray Cod " * 10_000), 0.9)
    for question in ("How large does the Murray Cod grow?", "How large does the Murray Cod grow? " * 1_000):
        began = time.process_time()
        chosen = quotes(question, [passage] * count)
        assert time.process_time() - began < limit_s
        assert all(quote.end - quote.start <= 1_000 for quote in chosen)


WORDS = st.sampled_from(
    ["Murray", "cod", "river", "is", "It", "long", "1838", "[1]", "[2]", "a", "\n\n", "- ", "#", "e.g."]
)
PROSE = st.lists(st.tuples(WORDS, st.sampled_from([" ", ". ", "? ", "\n", "; ", ".[1] "]))).map(
    lambda pairs: "".join(word + gap for word, gap in pairs)
)
PASSAGES = st.lists(
    st.builds(
        lambda text, title, dense: near(text_of(text, title), dense) if dense is not None else text_of(text, title),
        PROSE | st.text(max_size=200),
        st.sampled_from(["", "Murray", "Murray Cod", "notes.txt", "[1]"]),
        st.none() | st.floats(),
    ),
    max_size=6,
)


@settings(max_examples=examples(300), deadline=None)
@given(question=PROSE | st.text(max_size=100), passages=PASSAGES)
def test_any_text_is_quoted_or_the_answer_abstains(question: str, passages: list[Passage]) -> None:
    assert 0.0 <= support(question, passages) <= 1.0
    chosen = quotes(question, passages)
    assert len(chosen) <= 4
    assert len({(quote.passage, quote.start) for quote in chosen}) == len(chosen)
    assert len(chosen) <= 1 or sum(quote.end - quote.start for quote in chosen) <= 600
    for quote in chosen:
        assert passages[quote.passage].text[quote.start : quote.end].strip()


@settings(max_examples=examples(200), deadline=None)
@given(question=PROSE, passages=PASSAGES)
async def test_every_citation_is_the_number_of_the_passage_with_the_quote(
    question: str, passages: list[Passage]
) -> None:
    text = await answer(question, *passages)
    if text.startswith(ABSTENTION):
        return
    chosen = quotes(question, passages)
    numbers = {quote.passage for quote in chosen}
    assert {citation.passage for citation in cite(text, passages)} == numbers
    for words, number in stated(text, len(passages)):
        assert words in " ".join(passages[number - 1].text.split())


# --- with a judge

TABLE = "| Fish | Weight |\n|---|---|\n| Murray Cod | 100 kg |\n| Golden Perch | 20 kg |\n"


async def test_each_quotation_has_its_mark_and_the_spans_that_it_quotes() -> None:
    said = await quoted(FakeEvidence(), "Who described the Murray Cod in 1838?", near(RIVER, 0.5), near(COD, 0.8))
    assert [delta.mark for delta in said.deltas] == [
        f"[{delta.quotes[0].passage + 1}]" for delta in said.deltas if delta.quotes
    ]
    assert said.quotations[0] == [
        "The Murray Cod is a large freshwater fish.",
        "It was described by Thomas Mitchell in 1838.",
    ]
    for delta, quotation in zip(said.deltas, said.quotations, strict=True):
        assert delta.text.split() == f"{' '.join(quotation)} {delta.mark}".split(), "verbatim, white space aside"
    assert said.deltas[-1].finish_reason == "stop"
    assert [delta.usage is not None for delta in said.deltas] == [False] * (len(said.deltas) - 1) + [True]
    assert [delta.support is not None for delta in said.deltas] == [True] + [False] * (len(said.deltas) - 1)


async def test_a_judged_row_is_cited_at_its_header_and_at_the_row() -> None:
    table = near(text_of(TABLE, "Fish"), 0.8)
    said = await quoted(FakeEvidence(), "What is the weight of the Golden Perch fish?", table)
    citations = [*cited(said.deltas[0], 0, (table,))]
    assert [table.text[one.passage_start : one.passage_end] for one in citations] == [
        "| Fish | Weight |\n|---|---|",
        "| Golden Perch | 20 kg |",
    ]
    assert {said.text[one.start : one.end] for one in citations} == {"[1]"}


async def test_a_judged_answer_names_sources_in_its_marks_if_the_prompt_asks_for_it() -> None:
    asked = msgspec.structs.replace(prompt("Who described the Murray Cod?", near(COD, 0.8)), marks="sources")
    said = [delta async for delta in Extractive(Judge(FakeEvidence(), 8)).generate(asked, context())]
    assert said[0].mark == "[lee/fish]"
    assert said[0].text.rstrip().endswith("[lee/fish]")


@pytest.mark.parametrize("language", [None, "de", "fr", "zh"])
async def test_a_judged_refusal_names_what_was_searched_and_the_nearest_thing(
    shipped_evidence: OnnxEvidence, language: str | None
) -> None:
    passages = (near(BREAD, 0.0), near(RIVER, 0.05, headers=("Australia", "Length")), near(COD, 0.04))
    said = await quoted(shipped_evidence, "Who won the World Cup in 1998?", *passages, language=language)
    searched = "lee/kitchen, lee/rivers, lee/fish"
    nearest = message("refusal_nearest", language, searched=searched, nearest="Murray River > Length")
    assert said.text == f"{message('refusal_abstained', language)} {nearest}"
    assert said.refused
    assert 0 <= said.support < SUPPORTED
    assert said.quotations == []


async def test_a_refusal_names_at_most_three_sources_and_a_long_title_is_cut() -> None:
    passages = [near(msgspec.structs.replace(BREAD, source=f"lee/s{n}", title="T" * 10_000), 0.0) for n in range(20)]
    said = await quoted(FakeEvidence(), "Who won the World Cup in 1998?", *passages)
    assert said.refused
    assert "lee/s0, lee/s1, lee/s2 …" in said.text
    assert "lee/s3" not in said.text
    assert len(said.text) < 600


async def test_support_is_a_probability_that_decides(shipped_evidence: OnnxEvidence) -> None:
    for question, answers in (
        ("How long is the Murray River?", True),
        ("Who described the Murray Cod?", True),
        ("When was the Zambezi River described by Thomas Mitchell?", False),
        ("How is coffee roasted?", False),
    ):
        said = await quoted(shipped_evidence, question, near(RIVER, 0.5), near(COD, 0.45))
        assert 0 <= said.support <= 1
        assert (said.support >= SUPPORTED, said.refused) == (answers, not answers), question


GERMAN = text_of("Die Erstattung dauert zwei Wochen. Der Versand wird nicht erstattet.", "Erstattung")
CHINESE = text_of("退款需要两周。运费不退。", "退款")
ENGLISH = text_of("The shop opened in 1950 and is the oldest in town. It sells globes.", "Shop")
REFUND = text_of("A refund takes two weeks. Postage is not paid back.", "Refunds")


@pytest.mark.parametrize(
    ("question", "passages", "words"),
    [
        ("Wie lange dauert eine Erstattung?", (GERMAN,), "Die Erstattung dauert zwei Wochen. [1]"),
        ("退款需要多长时间\uff1f", (CHINESE,), "退款需要两周。 [1]"),
        ("Wie lange dauert eine Erstattung?", (GERMAN, ENGLISH, REFUND), "Die Erstattung dauert zwei Wochen. [1]"),
        ("退款需要多长时间\uff1f", (CHINESE, ENGLISH, REFUND), "退款需要两周。 [1]"),
        ("How long does a refund take?", (GERMAN,), "Die Erstattung dauert zwei Wochen. [1]"),
        ("How long does a refund take?", (GERMAN, REFUND), "A refund takes two weeks. [2]"),
        ("How long does a refund take?", (CHINESE, REFUND), "A refund takes two weeks. [2]"),
    ],
)
async def test_german_and_chinese_are_answered_by_the_rules_and_not_refused_by_the_model(
    shipped_evidence: OnnxEvidence, question: str, passages: tuple[Passage, ...], words: str
) -> None:
    closeness = (0.8, 0.2, 0.2) if passages[0] is not passages[-1] and len(passages) == 3 else (0.8, 0.8)
    given_ones = [near(one, dense) for one, dense in zip(passages, closeness, strict=False)]
    said = await quoted(shipped_evidence, question, *given_ones)
    by_rules = await quoted(None, question, *given_ones)
    assert said.text == by_rules.text
    assert words in said.text
    assert said.support == by_rules.support


async def test_a_german_document_among_english_ones_is_not_refused_by_the_model(
    shipped_evidence: OnnxEvidence,
) -> None:
    passages = (near(GERMAN, 0.8), near(ENGLISH, 0.1), near(RIVER, 0.1))
    assert not (await quoted(None, "How long does a refund take?", *passages)).refused
    assert not (await quoted(shipped_evidence, "How long does a refund take?", *passages)).refused


async def test_without_the_model_files_the_rules_answer(tmp_path: Path) -> None:
    missing = LocalEvidence(tmp_path, 1, Recorder(), required=False)
    for question in ("How long is the Murray River?", "Who won the World Cup in 1998?"):
        passages = (near(RIVER, 0.6), near(COD, 0.3))
        assert (await quoted(missing, question, *passages)).text == await answer(question, *passages)


async def test_without_time_the_rules_answer() -> None:
    passages = (near(RIVER, 0.6), near(COD, 0.3))
    late = RecordingEvidence()
    said = await quoted(late, "Who described the Murray Cod?", *passages, deadline_s=-1.0)
    assert said.text == await answer("Who described the Murray Cod?", *passages)


@pytest.mark.parametrize("text", ["```\n" * 50, "| | |\n" * 50, "\u200b" * 50])
async def test_a_refusal_is_never_supported(text: str) -> None:
    said = await quoted(FakeEvidence(), "How large is it?", near(text_of(text), 0.9))
    assert said.refused
    assert said.support < SUPPORTED


@pytest.mark.parametrize("question", ["", "?!", " "])
async def test_a_question_without_words_is_left_to_the_rules(shipped_evidence: OnnxEvidence, question: str) -> None:
    passages = [near(text_of("You can return goods within 30 days."), 0.1)]
    said = await quoted(shipped_evidence, question, *passages)
    assert said.refused
    assert said.text == await answer(question, *passages)


async def test_passages_of_one_megabyte_do_not_hold_up_a_judged_answer(shipped_evidence: OnnxEvidence) -> None:
    """The model reads for at most half of the time that is left."""
    text = "".join(f"Murray Cod number {number} grows to {number} kg in the river. " for number in range(18_000))
    passages = [near(text_of(text, "T" * 10_000), 0.3)] * 25
    began = time.monotonic()
    said = await quoted(shipped_evidence, "Who painted the Zander?", *passages, limit=25, deadline_s=1.0)
    assert time.monotonic() - began < 5.0
    assert said.refused


JUDGED = st.lists(
    st.builds(
        lambda text, title, dense, source: msgspec.structs.replace(near(text_of(text, title), dense), source=source),
        PROSE | st.text(max_size=200),
        st.sampled_from(["", "Murray", "Murray Cod", "notes.txt", "[1]"]),
        st.floats(),
        st.sampled_from(["lee/notes", "lee/fish", "a,b", "[2]", "1"]),
    ),
    max_size=6,
)


def letters(text: str) -> str:
    """Without references in brackets, which the mark replaces, and white space."""
    return re.sub(r"\[[^\[\]\n]*\]|\W", "", text)


@settings(max_examples=examples(200), deadline=None)
@given(question=PROSE, passages=JUDGED)
async def test_any_text_is_quoted_verbatim_or_the_judged_answer_abstains(
    question: str, passages: list[Passage]
) -> None:
    said = await quoted(FakeEvidence(), question, *passages)
    assert 0 <= said.support <= 1
    assert said.text
    if said.refused:
        assert said.quotations == []
        return
    assert 1 <= len(said.deltas) <= 4
    for delta, parts in zip(said.deltas, said.quotations, strict=True):
        assert delta.text.rstrip().endswith(delta.mark)
        for part in parts:
            lead_in = LEAD_IN.match(part)
            assert letters(part[lead_in.end() :] if lead_in else part) in letters(delta.text)
