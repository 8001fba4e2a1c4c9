"""What an answer quotes: units that answer, in a form that can be read by itself."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.domain.contracts import SystemClock
from anabranch.domain.model import Passage
from anabranch.evidence.judge import Judge, JudgedUnit
from anabranch.evidence.quotations import MAX_LIST, MOST, quotations
from anabranch.models.evidence import OnnxEvidence
from anabranch.policies.cache import CachedEvidence
from anabranch.testing import FakeEvidence, Recorder
from support.examples import examples
from support.quoted_answers import passage, quoted

SETTINGS = """\
# Settings

Everything is set by environment variables.

| Setting | Default | Meaning |
|---|---|---|
| `PORT` | 8000 | The port that the server listens on |
| `WORKERS` | 2 | Processes that serve requests |
| `TIMEOUT_S` | 30 | Seconds after which a request ends |
| `LOG_LEVEL` | info | How much is logged |
"""
HEADER = "| Setting | Default | Meaning |\n|---|---|---|"
PORT = "| `PORT` | 8000 | The port that the server listens on |"
FORMATS = """\
# Ingestion

Documents are read from a folder. The following formats can be ingested:

- PDF files
- Word documents
- Markdown and plain text
- HTML pages

Other files are skipped with a warning.
"""
KEYS = """\
# Keys

Every caller needs a key. To create an API key, run this command:

```
anabranch keys create --user NAME
```

It is shown once. A key is valid for 90 days.
"""
HOTELS = "name,city,price,rooms\nHotel Adler,Bern,120,30\nHotel Krone,Basel,95,12\nHotel Sonne,Zug,210,55\n"
MURRAY = (
    "The Murray River is a river in south-eastern Australia. It is 2,508 km long. Anabranches leave the main channel "
    "and rejoin it downstream. Many towns take their water from it."
)
OPERATIONS = """\
# Backups

A copy is written every night at 3.

# Logs

A file is started every hour.
"""
DOCUMENTATION = (
    passage(SETTINGS, "settings.md"),
    passage(FORMATS, "ingestion.md"),
    passage(KEYS, "keys.md"),
    passage(MURRAY, "Murray River"),
    passage(OPERATIONS, "operations.md"),
)


def documents(*titles: str) -> tuple[Passage, ...]:
    return tuple(one for one in DOCUMENTATION if one.title in titles)


# --- the direct answer


@pytest.mark.parametrize(
    ("question", "first"),
    [
        ("How long is the Murray River?", "2,508 km long."),
        ("How long is a key valid?", "A key is valid for 90 days."),
        ("Are other files skipped?", "Other files are skipped with a warning."),
        ("What leaves the main channel of the river?", "Anabranches leave the main channel and rejoin it downstream."),
    ],
)
async def test_a_direct_answer_comes_first(shipped_evidence: OnnxEvidence, question: str, first: str) -> None:
    said = await quoted(shipped_evidence, question, *DOCUMENTATION)
    assert first in " ".join(said.quotations[0])
    assert said.quotations[0][-1].endswith(first), "it is the last part of the quotation, after what it refers to"
    assert 1 <= len(said.quotations) <= MOST
    assert len(said.text) < 500


async def test_yes_or_no_is_answered_with_the_sentence_that_decides(shipped_evidence: OnnxEvidence) -> None:
    text = "Books can be sent back. Opened globes cannot be returned. The shop is closed on Sundays."
    said = await quoted(shipped_evidence, "Can I return an opened globe?", passage(text, "Returns"))
    assert said.quotations[0] == ["Opened globes cannot be returned."]


# --- tables


async def test_a_table_row_is_quoted_as_the_header_and_that_row(shipped_evidence: OnnxEvidence) -> None:
    said = await quoted(shipped_evidence, "What is the default port?", *DOCUMENTATION)
    assert said.quotations == [[HEADER, PORT]]
    assert said.text == f"{HEADER}\n{PORT}\n[1]", "lines of a table stay lines"


async def test_a_csv_question_is_answered_with_the_row_that_matches(shipped_evidence: OnnxEvidence) -> None:
    table = passage(HOTELS, "hotels.csv")
    for question, row in (
        ("What is the price of Hotel Krone?", "Hotel Krone,Basel,95,12"),
        ("Which city is Hotel Sonne in?", "Hotel Sonne,Zug,210,55"),
    ):
        said = await quoted(shipped_evidence, question, table)
        assert said.quotations == [["name,city,price,rooms", row]]


async def test_a_question_about_one_setting_is_not_answered_with_the_whole_table(
    shipped_evidence: OnnxEvidence,
) -> None:
    said = await quoted(shipped_evidence, "Which setting controls how much is logged?", *DOCUMENTATION)
    assert said.quotations[0] == [HEADER, "| `LOG_LEVEL` | info | How much is logged |"]


# --- code


async def test_code_is_quoted_as_code_with_the_sentence_that_introduces_it(shipped_evidence: OnnxEvidence) -> None:
    said = await quoted(shipped_evidence, "How do I create an API key?", *DOCUMENTATION)
    code = "To create an API key, run this command:\n\n```\nanabranch keys create --user NAME\n```"
    assert "\n".join(said.quotations[0]) == code
    assert said.text.startswith(f"{code}\n[3]")


async def test_an_index_in_code_is_not_a_citation_mark() -> None:
    code = "To print the first argument, run this:\n\n```\nprint(sys.argv[1], rows[2], names[0])\n```\n"
    said = await quoted(FakeEvidence(), "How do I print the first argument?", passage(code), passage(MURRAY))
    assert "print(sys.argv[1], rows[2], names[0])" in said.text


async def test_code_that_a_sentence_refers_to_stays_code(shipped_evidence: OnnxEvidence) -> None:
    said = await quoted(shipped_evidence, "Is the key shown again?", *DOCUMENTATION)
    assert "It is shown once." in said.text
    assert "``` anabranch" not in said.text


# --- lists


async def test_a_list_question_gathers_the_items_with_their_lead_in(shipped_evidence: OnnxEvidence) -> None:
    said = await quoted(shipped_evidence, "Which formats can be ingested?", *DOCUMENTATION)
    items = ["PDF files", "Word documents", "Markdown and plain text", "HTML pages"]
    assert said.quotations[0] == ["The following formats can be ingested:", *items]
    assert said.text.startswith("The following formats can be ingested:\nPDF files\nWord documents\n")


async def test_a_question_about_one_item_is_answered_with_the_item_and_its_lead_in() -> None:
    text = "You can pay with:\n\n- a card of your bank\n- a voucher of the shop\n- cash on delivery\n"
    said = await quoted(FakeEvidence(), "Is a voucher of the shop valid?", passage(text, "Paying"))
    assert said.quotations[0] == ["You can pay with:", "a voucher of the shop"]
    assert said.text.startswith("You can pay with: a voucher of the shop [1]")


async def test_a_list_of_one_item_does_not_take_in_the_next_list() -> None:
    text = "# Colors\n\n- Red and blue colors.\n\n# Sizes\n\n- Small\n- Large\n"
    said = await quoted(FakeEvidence(), "Which colors are there, red and blue?", passage(text, "Shop"))
    assert said.quotations[0] == ["Red and blue colors."]


async def test_a_long_list_is_quoted_up_to_a_length() -> None:
    items = "".join(f"- The river station number {number} measures levels.\n" for number in range(200))
    text = f"These river stations measure levels:\n\n{items}"
    said = await quoted(FakeEvidence(), "Which river stations measure levels?", passage(text, "Stations"))
    [*_, last] = said.quotations[0]
    assert last.startswith("The river station number")
    assert sum(map(len, said.quotations[0])) <= MAX_LIST + 100
    assert len(said.quotations[0]) > 10


async def test_an_item_far_down_a_long_list_is_quoted_without_the_others() -> None:
    items = "".join(f"- Station {number}, open since the year {1900 + number}\n" for number in range(80))
    text = f"There are many of them:\n\n{items}"
    said = await quoted(FakeEvidence(), "Which stations are open since the year 1955?", passage(text, "Stations"))
    assert said.quotations[0] == ["There are many of them:", "Station 55, open since the year 1955"]


async def test_a_row_far_down_a_long_table_is_quoted_without_the_others() -> None:
    rows = "".join(f"| Station {number} | open since the year {1900 + number} |\n" for number in range(80))
    text = f"| Station | Open |\n|---|---|\n{rows}"
    said = await quoted(FakeEvidence(), "Which stations are open since the year 1955?", passage(text, "Stations"))
    assert said.quotations[0] == ["| Station | Open |\n|---|---|", "| Station 55 | open since the year 1955 |"]


# --- what a quotation needs to be understood


@pytest.mark.parametrize(
    ("before", "sentence", "question"),
    [
        ("The Murray Cod is a large fish.", "It was described in 1838.", "When was the Murray Cod described?"),
        (
            "The dam was built in 1936.",
            "For this reason, the valley below it is dry in summer.",
            "Why is the valley dry in summer?",
        ),
        ("Refunds need a receipt.", "They take two weeks.", "How many weeks do refunds take?"),
    ],
)
async def test_a_sentence_that_refers_to_the_one_before_brings_it(
    shipped_evidence: OnnxEvidence, before: str, sentence: str, question: str
) -> None:
    said = await quoted(shipped_evidence, question, passage(f"{before} {sentence} Sheep graze nearby.", "Valley"))
    assert said.quotations[0] == [before, sentence]
    assert said.text.startswith(f"{before} {sentence} [1]")


async def test_the_sentence_before_is_not_brought_from_another_section() -> None:
    text = "# Dams\n\nThe dam was built in 1936.\n\n# Valleys\n\nIt is a dry valley in summer.\n"
    said = await quoted(FakeEvidence(), "Which is a valley that is dry in summer?", passage(text))
    assert said.quotations[0] == ["It is a dry valley in summer."]


async def test_a_heading_that_has_the_subject_of_the_question_is_said_first(shipped_evidence: OnnxEvidence) -> None:
    said = await quoted(shipped_evidence, "How often are backups written?", *documents("operations.md"))
    assert said.text.startswith("Backups: A copy is written every night at 3. [1]")
    assert said.quotations[0] == ["A copy is written every night at 3."], "the heading is no part of the quotation"


async def test_a_heading_above_the_passage_is_said_too(shipped_evidence: OnnxEvidence) -> None:
    below = passage("A copy is written every night at 3.", "operations.md", headers=("Operations", "Backups"))
    said = await quoted(shipped_evidence, "How often are backups written?", below)
    assert said.text.startswith("Backups: A copy is written every night at 3. [1]")


@pytest.mark.parametrize("heading", ["Backups " * 1_000, "Backups [2]"])
async def test_a_heading_is_short_and_holds_no_citation_mark(heading: str) -> None:
    below = passage("A copy is written every night at 3.", "operations.md", headers=(heading,))
    said = await quoted(FakeEvidence(), "How often are backups written every night?", below, passage(MURRAY))
    assert "A copy is written every night at 3. [1]" in said.text
    assert len(said.text) < 500
    assert "[2]" not in said.text


async def test_a_heading_that_is_a_question_has_no_colon(shipped_evidence: OnnxEvidence) -> None:
    text = "## How long does a refund take?\n\nTwo weeks.\n\n## Can I exchange goods?\n\nYes, within a month.\n"
    said = await quoted(shipped_evidence, "How long does a refund take?", passage(text, "faq.md"))
    assert said.text == "How long does a refund take? Two weeks. [1]"


async def test_a_heading_that_the_sentence_repeats_is_not_said(shipped_evidence: OnnxEvidence) -> None:
    text = "# Backups\n\nBackups are written every night at 3.\n"
    said = await quoted(shipped_evidence, "How often are backups written?", passage(text))
    assert said.text == "Backups are written every night at 3. [1]"


# --- several sources

ANN = passage("Our shop sells globes. You can return goods within 30 days of delivery.", "Returns", "ann/shop")
BOB = passage("Goods can be returned within 14 days. Postage is paid by the buyer.", "Return policy", "bob/shop")
RETURNS = "Within how many days can goods be returned?"


async def test_two_sources_that_disagree_are_both_quoted_and_named(shipped_evidence: OnnxEvidence) -> None:
    for passages in ((ANN, BOB), (BOB, ANN)):
        said = await quoted(shipped_evidence, RETURNS, *passages)
        assert {tuple(spans) for spans in said.quotations} == {
            ("You can return goods within 30 days of delivery.",),
            ("Goods can be returned within 14 days.",),
        }
        assert "ann/shop: You can return goods within 30 days of delivery." in said.text
        assert "bob/shop: Goods can be returned within 14 days." in said.text


async def test_sources_that_differ_only_in_a_number_are_all_quoted(shipped_evidence: OnnxEvidence) -> None:
    shops = [passage(f"Goods can be returned within {days} days.", "Returns", f"s{days}/shop") for days in (30, 14)]
    said = await quoted(shipped_evidence, RETURNS, *shops)
    assert "s30/shop: Goods can be returned within 30 days." in said.text
    assert "s14/shop: Goods can be returned within 14 days." in said.text


async def test_three_sources_that_answer_are_all_quoted(shipped_evidence: OnnxEvidence) -> None:
    shops = [passage(f"Goods can be returned within {days} days.", "Returns", f"s{days}/shop") for days in (30, 14, 7)]
    said = await quoted(shipped_evidence, RETURNS, *shops)
    assert {tuple(spans) for spans in said.quotations} == {(shop.text,) for shop in shops}


async def test_one_source_is_not_named(shipped_evidence: OnnxEvidence) -> None:
    assert "ann/shop" not in (await quoted(shipped_evidence, RETURNS, ANN)).text


async def test_a_source_with_several_passages_does_not_hide_another(shipped_evidence: OnnxEvidence) -> None:
    again = passage("Goods that are returned within 30 days are refunded.", "Refunds", "ann/shop")
    said = await quoted(shipped_evidence, RETURNS, ANN, again, BOB)
    assert "30 days" in said.text
    assert "bob/shop: Goods can be returned within 14 days." in said.text


async def test_what_two_sources_say_in_the_same_words_is_quoted_once() -> None:
    twin = passage(ANN.text, "Returns", "cleo/shop")
    said = await quoted(FakeEvidence(), "Can I return goods within days of delivery?", ANN, twin)
    assert said.text.count("30 days") == 1


# --- capital letters

TEN = (
    "How long is the Murray River?",
    "What is the default port?",
    "Which formats can be ingested?",
    "How do I create an API key?",
    "How long is a key valid?",
    "Where is the Murray River?",
    "How often are Backups written?",
    "Are other Files skipped?",
    "Who won the World Cup in 1998?",
    "What is the capital of Iceland?",
)


@pytest.mark.parametrize("question", TEN)
async def test_a_lower_cased_question_has_the_same_answer(shipped_evidence: OnnxEvidence, question: str) -> None:
    said, lowered = [await quoted(shipped_evidence, form, *DOCUMENTATION) for form in (question, question.lower())]
    assert lowered.text == said.text
    assert lowered.support == pytest.approx(said.support, abs=0.02)
    assert said.refused == (question in TEN[-2:])


# --- bounds


async def test_an_endless_sentence_is_cut() -> None:
    said = await quoted(FakeEvidence(), "Which murray cod is large?", passage("murray cod is large " * 5_000))
    assert len(said.text) < 2_000


WORDS = ("Murray", "cod", "river", "is", "It", "long", "1838", "[1]", "`x`", "lee/notes")
LINES = st.builds(
    lambda mark, words, end: f"{mark}{' '.join(words)}{end}",
    st.sampled_from(["", "- ", "# ", "1. ", "| ", "    ", "> ", "```\n"]),
    st.lists(st.sampled_from(WORDS), max_size=8),
    st.sampled_from([".", ":", " |", "?", "\n```", "\n", ""]),
)
TEXTS = st.lists(LINES, max_size=15).map("\n".join) | st.text(max_size=200)


def stated(passages: list[Passage], judged: JudgedUnit) -> str:
    unit = judged.placed.unit
    return passages[judged.placed.passage].text[unit.start : unit.end] if unit.kind == "sentence" else "stated"


@settings(max_examples=examples(250))
@given(
    question=st.lists(st.sampled_from([*WORDS, "which", "How do I", "list all"]), max_size=6).map(" ".join),
    texts=st.lists(TEXTS, min_size=1, max_size=5),
    sources=st.lists(st.sampled_from("abc"), min_size=5, max_size=5),
)
async def test_quotations_are_a_few_spans_in_reading_order_that_never_overlap(
    question: str, texts: list[str], sources: list[str]
) -> None:
    passages = [passage(text, f"T{at}", source) for at, (text, source) in enumerate(zip(texts, sources, strict=False))]
    judged = await Judge(FakeEvidence(), 8).judge(question, passages)
    if judged is None:
        return
    found = quotations(question, passages, judged)
    assert len(found) <= MOST
    assert bool(found) == any(not stated(passages, unit).endswith("?") for unit in judged.units)
    for one in found:
        flat = [offset for span in one.spans for offset in span]
        assert flat == sorted(flat)
        assert flat[-1] <= len(passages[one.passage].text)
        assert all(passages[one.passage].text[start:end].strip() for start, end in one.spans)
        assert one.source == (
            passages[one.passage].source if len({passages[q.passage].source for q in found}) > 1 else ""
        )
    bodies = [(one.passage, *one.spans[-1]) for one in found]
    assert len(set(bodies)) == len(bodies)


ODD = {
    "code fences": "```\n" * 250_000,
    "pipes": "|" * 1_000_000,
    "rows": "| cod | fish |\n|---|---|\n" * 40_000,
    "zero-width characters": "\u200b" * 1_000_000,
    "items": "Cod:\n\n" + "- murray cod\n" * 80_000,
    "headings": "# Murray Cod\n" * 80_000,
    "It": "It is a cod. " * 80_000,
    "sentences": "The Murray Cod does grow large, however long. " * 25_000,
}


@pytest.mark.parametrize("kind", ODD)
async def test_hostile_passages_are_quoted_or_refused_in_little_time(kind: str) -> None:
    passages = [passage(ODD[kind], "T" * 10_000, headers=("Murray " * 1_500,))] * 25
    for question in ("How large does the Murray Cod grow?", "Which are cod?", "", "?!"):
        began = time.process_time()
        said = await quoted(FakeEvidence(), question, *passages, limit=25)
        assert time.process_time() - began < 3.0
        assert said.text


async def test_a_question_in_a_document_is_not_quoted() -> None:
    text = "When does the Zanzibar ferry leave? The ferry does leave every hour."
    answer = await quoted(FakeEvidence(), "When does the Zanzibar ferry leave?", passage(text))
    assert "every hour" in answer.text
    assert "When does" not in answer.text


async def test_what_a_sentence_with_a_colon_announces_is_quoted_with_it() -> None:
    text = "To leave the Zanzibar ferry, do this:\n\nHold the rail with one hand.\n\n# Bicycles\n\nThey are free."
    answer = await quoted(FakeEvidence(), "How do I leave the Zanzibar ferry?", passage(text))
    assert "Hold the rail" in answer.text
    assert "free" not in answer.text


async def test_beside_a_sure_answer_nothing_is_quoted_that_adds_no_word_of_the_question(
    shipped_evidence: OnnxEvidence,
) -> None:
    defined = passage("Anabranch is a service that asks many sources at once.", "Architecture", near=0.7)
    other = passage("Prints the entry of the configuration.", "Anabranch as a server", near=0.6)
    said = await quoted(shipped_evidence, "What is Anabranch?", defined, other)
    assert said.quotations == [["Anabranch is a service that asks many sources at once."]]


async def test_a_prompt_of_megabytes_delays_a_quoted_answer_little() -> None:
    evidence = CachedEvidence(FakeEvidence(), SystemClock(), Recorder())
    question = "Which formats can be ingested? " + "It is what which files of the folder and what " * 80_000
    began = time.process_time()
    answer = await quoted(evidence, question, passage(FORMATS), passage(KEYS))
    assert time.process_time() - began < 0.25
    assert "PDF files" in answer.text
