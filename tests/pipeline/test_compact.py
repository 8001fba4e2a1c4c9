"""Compact prompts: the units of the passages that bear on the question, within a number of tokens."""

import time
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from anabranch.domain.contracts import SystemClock
from anabranch.domain.evidence import Evidence, EvidencePage, Reading
from anabranch.domain.model import (
    ASK,
    QUERY,
    Context,
    Endpoint,
    Ground,
    Message,
    Passage,
    Place,
    Profile,
    Prompt,
    Question,
    SourceReply,
    Status,
)
from anabranch.pipeline.answer import Limits, Pipeline
from anabranch.pipeline.compact import Compactor, evidence_scores, excerpts
from anabranch.pipeline.prompt import Compaction, compose, estimate
from anabranch.pipeline.run import Run
from anabranch.testing import FakeDirectory, FakeEvidence, FakeGenerator, FakeSource, Recorder
from anabranch.text.units import units
from support.examples import examples

RETURNS = """\
The shop opened in 1954. It sells books, maps and globes to customers everywhere.
Refunds for printed books take 30 days. Nobody remembers why the founder liked blue paint.
The founder had three cats. Their names are not recorded.
Globes are never refunded. The cats slept on the globes."""
OPTIONS = """\
## Options

Every option can be set in the file.

| option | default | meaning |
|---|---|---|
| `color` | blue | the color of the paint |
| `timeout` | 30 s | how long a request may take |
| `retries` | 2 | how often it is tried again |

Use one of these formats:

- CSV with a header line
- Parquet, if it is not compressed
- JSON, one object in each line
"""
FERRY = "The ferry leaves every hour. Tickets are sold on board."


def passage(text: str, title: str = "Title", **more: object) -> Passage:
    return Passage(source="docs", title=title, text=text, score=0.5, **more)  # type: ignore[arg-type]


async def prompt(
    text: str,
    *passages: Passage,
    tokens: int = 1_500,
    profile: Profile = QUERY,
    evidence: Evidence | None = None,
    **more: object,
) -> Prompt:
    question = Question(text=text, profile=profile, **more)  # type: ignore[arg-type]
    compaction = Compaction(tokens, Compactor(evidence).choose)
    return await compose(question, passages, Ground.DOCUMENTS, 4_000, compaction, "abcdefghijkl")


def shown(composed: Prompt) -> list[str]:
    """The texts of the passages in a numbered prompt."""
    content, line = composed.messages[-1].content, f"passage-{composed.boundary}"
    blocks = [block.partition(f"\n</{line}>")[0] for block in content.split(f"<{line} ")[1:]]
    return [block.split("\n", 2)[2] for block in blocks]


class RecordingEvidence(FakeEvidence):
    """Keeps the pages that it has read."""

    def __init__(self) -> None:
        super().__init__()
        self.pages: list[EvidencePage] = []

    async def read(
        self, question: str, inputs: Sequence[tuple[EvidencePage, ...]], *, until: float | None = None
    ) -> Sequence[Reading | None]:
        self.pages += [page for (page,) in inputs]
        return await super().read(question, inputs, until=until)


async def test_a_compact_prompt_has_the_sentences_that_share_words_with_the_question() -> None:
    composed = await prompt("How long do refunds take?", passage(RETURNS), tokens=500)
    (text,) = shown(composed)
    assert "Refunds for printed books take 30 days." in text
    assert "1954" not in text
    assert text.startswith("… It sells books"), "a unit is read with those beside it"
    assert "three cats" not in text
    assert text.endswith("blue paint.\n…\nGlobes are never refunded. …")


async def test_passages_that_contribute_nothing_are_left_out_and_numbers_stay_right() -> None:
    refunds, ferry = passage(RETURNS, "Refunds"), passage(FERRY, "Ferry")
    composed = await prompt("How long do refunds for books take?", ferry, refunds)
    assert composed.passages == (refunds,)
    assert (composed.unused, composed.omitted) == ((ferry,), 1)
    assert "[1] Refunds" in composed.messages[-1].content
    assert "[2]" not in composed.messages[-1].content
    assert composed.version == "query-2-compact"


async def test_passages_of_the_prompt_are_whole_so_that_citations_open_the_document() -> None:
    place = Place(chunk_id="c", collection="docs", start=1_000, end=1_000 + len(RETURNS), tokens=90)
    stored = passage(RETURNS, place=place)
    composed = await prompt("How long do refunds take?", stored, tokens=500)
    assert composed.passages == (stored,)
    assert composed.passages[0].text == RETURNS


async def test_units_are_in_the_order_of_the_document_with_an_ellipsis_for_what_is_left_out() -> None:
    composed = await prompt("opened globes never", passage(RETURNS), evidence=FakeEvidence())
    assert shown(composed) == [
        "The shop opened in 1954. It sells books, maps and globes to customers everywhere.\n"
        "Refunds for printed books take 30 days.\n…\n"
        "Their names are not recorded.\nGlobes are never refunded. The cats slept on the globes."
    ]


async def test_neighbours_share_what_a_unit_has_found() -> None:
    text = passage("Tea is hot. The kettle boils for long. It takes 30 minutes. Coffee is not. Milk is white.")
    composed = await prompt("How long does the kettle boil?", text)
    assert shown(composed) == ["Tea is hot. The kettle boils for long. It takes 30 minutes. …"]


async def test_a_table_row_comes_with_the_header_of_its_table_and_its_heading() -> None:
    composed = await prompt("timeout", passage(OPTIONS), evidence=FakeEvidence())
    (text,) = shown(composed)
    assert text == (
        "## Options\n…\n| option | default | meaning |\n|---|---|---|\n…\n"
        "| `timeout` | 30 s | how long a request may take |\n…"
    )


async def test_a_list_item_comes_with_the_sentence_that_introduces_it() -> None:
    composed = await prompt("Parquet", passage(OPTIONS), evidence=FakeEvidence())
    (text,) = shown(composed)
    assert text == "## Options\n…\nUse one of these formats:\n…\n- Parquet, if it is not compressed\n…"


async def test_the_evidence_model_reads_titles_headings_and_units() -> None:
    evidence = RecordingEvidence()
    place = Place(chunk_id="c", collection="docs", start=0, end=9, tokens=9, headers=("Guide", "Setup"))
    await prompt("x", passage(OPTIONS, "Manual", place=place), evidence=evidence)
    (page,) = evidence.pages
    assert page.title == "Manual > Guide > Setup"
    assert [unit.before for unit in page.units][:3] == ["Options", "| option | default | meaning |", ""]


async def test_what_the_evidence_model_has_not_read_comes_last() -> None:
    read, unread = passage(FERRY, "Ferry"), passage("Where does the ferry go? The ferry goes to Texel.", "Texel")
    question = "Where does the ferry go?"
    assert (await prompt(question, read, unread, evidence=FakeEvidence(limit=1))).passages == (read,)
    nothing_read = await prompt(question, read, unread, evidence=FakeEvidence(limit=0))
    assert nothing_read == await prompt(question, read, unread), "then the words decide"


async def test_the_evidence_model_reads_the_first_passages_only() -> None:
    evidence = RecordingEvidence()
    passages = [passage(f"Ferry {number} leaves.", f"Ferry {number}") for number in range(5)]
    await Compactor(evidence, 3).choose("ferry", passages, [5] * 5, 500)
    assert [page.title for page in evidence.pages] == ["Ferry 0", "Ferry 1", "Ferry 2"]


@pytest.mark.parametrize(
    ("question", "text"),
    [
        ("Wie lange dauern Erstattungen für Bücher?", RETURNS),
        ("refunds", "Erstattungen (refunds) für Bücher dauern 30 Tage. Der Gründer und die Katzen sind nicht da."),
        ("退款需要多长时间?", "这家商店于1954年开业。印刷书籍的退款需要30天。"),
    ],
    ids=["German question", "German document", "Chinese"],
)
async def test_the_evidence_model_reads_english_only(question: str, text: str) -> None:
    evidence = FakeEvidence()
    composed = await prompt(question, passage(text), evidence=evidence)
    assert evidence.questions == []
    assert composed == await prompt(question, passage(text))


async def test_a_question_without_a_shared_word_still_gets_the_best_passage() -> None:
    composed = await prompt("Wie spät ist es?", passage(FERRY), passage(RETURNS))
    assert len(composed.passages) == 1
    assert shown(composed)[0].startswith("The ferry leaves every hour.")


async def test_a_question_in_chinese_finds_its_sentence() -> None:
    text = "这家商店于1954年开业。印刷书籍的退款需要30天。创始人有三只猫。"
    composed = await prompt("退款需要多长时间?", passage(text), tokens=500)
    assert "退款需要30天" in shown(composed)[0]


async def test_a_unit_that_does_not_fit_is_cut_after_a_word() -> None:
    composed = await prompt("river", passage("river " * 3_000), tokens=500)
    (text,) = shown(composed)
    assert text.endswith("river …")
    assert 0 < _tokens(composed) <= 500


async def test_code_and_text_are_escaped_in_a_compact_prompt() -> None:
    composed = await prompt("tags", passage("Tags such as </passages> & <b> are tags."))
    assert "&lt;/passages&gt; &amp; &lt;b&gt;" in composed.messages[-1].content


async def test_the_earliest_turns_are_left_out_of_a_compact_prompt() -> None:
    turns = tuple(Message(role="user", content=f"{number} " + "word " * 100) for number in range(5))
    composed = await prompt("ferry", passage(FERRY), history=turns, tokens=1_500)
    assert composed.messages[1:-1] == turns[2:]
    assert sum(estimate(turn.content) for turn in turns[2:]) <= 1_500 // 4


async def test_a_compact_document_prompt_names_its_sources() -> None:
    composed = await prompt("How long do refunds take?", passage(RETURNS), passage(FERRY), profile=ASK, tokens=900)
    content = composed.messages[-1].content
    assert content.count(f"<document-{composed.boundary} index=") == 1
    assert "<source>docs</source>" in content
    assert "1954" not in content
    assert composed.version == "chat-2-compact"


def _tokens(composed: Prompt) -> int:
    return sum(estimate(message.content) for message in composed.messages)


words = st.sampled_from(
    [
        "refunds",
        "take",
        "30 days",
        "café",
        "退款",
        "- item",
        "| a | b |",
        "\n\n",
        ". ",
        "# Head\n",
        "x" * 90,
        "<b> & </b>",
        "-" * 80,
    ]
)


@settings(max_examples=examples(60), deadline=None)
@example([" ".join(["refunds " * 4, "x" * 90, *["-" * 80] * 3, "refunds " * 5])], 500)
@given(st.lists(st.lists(words, max_size=60).map(" ".join), min_size=1, max_size=8), st.integers(500, 2_000))
async def test_a_compact_prompt_is_within_its_tokens_and_quotes_only_the_passages(
    texts: list[str], tokens: int
) -> None:
    passages = [passage(text, f"Title {number}") for number, text in enumerate(texts)]
    for profile in (QUERY, ASK):
        composed = await prompt("How long do refunds take?", *passages, tokens=tokens, profile=profile)
        assert _tokens(composed) <= max(tokens, 800 if profile is ASK else 0)
        assert all(one in passages for one in composed.passages)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.floats(-9, 9), min_size=1, max_size=12), st.integers(0, 400))
def test_excerpts_are_pieces_of_the_text_in_its_order(scores: list[float], room: int) -> None:
    text = passage(" ".join(f"Sentence number {number} is here." for number in range(len(scores))))
    found = units(text.text)
    for chosen in excerpts([text], [found], [scores], [5], room):
        at = 0
        for piece in filter(None, chosen.text.split("…")):
            at = text.text.index(piece.strip(), at)


def test_log_odds_count_from_minus_four_on() -> None:
    scores = evidence_scores([((1.0, -5.0),), None], [[0.2, 0.2, 0.3], [0.5]])
    assert scores[0][:2] == [5.0, -1.0]
    assert scores[0][2] < -1.0
    assert scores[1][0] < -1.0


@pytest.mark.parametrize(
    ("model", "compact"),
    [
        (Endpoint(slug="m", kind="openai", operator=True), True),
        (Endpoint(slug="m", kind="openai"), False),
        (Endpoint(slug="m", kind="extractive", operator=True), False),
    ],
    ids=["the operator's", "the caller's", "extractive"],
)
async def test_only_the_operators_language_models_get_compact_prompts(model: Endpoint, compact: bool) -> None:
    writer = FakeGenerator(["Refunds take 30 days [1]."])
    reply = SourceReply(path="docs", status=Status.SUCCESS, passages=(passage(RETURNS), passage(FERRY)))
    pipeline = Pipeline(
        directory=FakeDirectory({"docs": FakeSource(reply)}, {"m": writer}),
        clock=SystemClock(),
        telemetry=Recorder(),
        limits=Limits(retrieval_timeout_s=1, generation_timeout_s=1, context_tokens=1_000),
        compaction=Compaction(600, Compactor().choose),
    )
    question = Question(text="How long do refunds take?", sources=(Endpoint(slug="docs"),), model=model, profile=QUERY)
    context = Context(correlation_id="c", deadline=time.monotonic() + 5)
    answer = await Run(pipeline, question, context, Recorder()).start().value()
    assert ("1954" in writer.prompts[0].messages[-1].content) is not compact
    assert (len(answer.passages), len(answer.unused)) == ((1, 1) if compact else (2, 0))
    citation = answer.citations[0]
    cited = answer.passages[citation.passage].text[citation.passage_start : citation.passage_end]
    assert cited == "Refunds for printed books take 30 days."
