"""The extractive generator: quotes, citations and abstention."""

import re
import time
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.domain.contracts import Generator
from anabranch.domain.model import Context, Delta, Passage, Place, Prompt, Scores
from anabranch.models.extractive import ABSTAINED, Extractive, quotes
from anabranch.pipeline.cite import cite
from anabranch.text.messages import message
from anabranch.text.support import Wording, signals, support
from support.examples import examples

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
