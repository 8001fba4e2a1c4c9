"""Statements of an answer: how it is split while it is written, and what claims something."""

# ruff: noqa: RUF001, SIM905  the signs of other scripts are meant, and word lists read better as words

import time
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from anabranch.text.citation_marks import code_spans, without_marks
from anabranch.text.statements import (
    Statement,
    StatementReader,
    claims_something,
    statements,
    without_signs,
)
from support.examples import examples

# What answers are made of, and what breaks their reading.
PARTS = (
    *(
        "The ferry leaves at 7.",
        "It takes 2.5 hours",
        "Dr. Jones et al. say so",
        "Why?",
        "no",
        "A",
        "e.g.",
        "(See it.)",
    ),
    *(
        " ",
        "  ",
        "\n",
        "\n\n",
        "\r\n",
        "\t",
        ".",
        "!",
        "...",
        ":",
        ",",
        "*",
        "_",
        "**bold**",
        "#",
        "# Title",
        "> ",
        "|",
    ),
    *(
        "\u00b9",
        "\u30101\u3011",
        "\u3010",
        "It is so.[1] ",
        "So it is.\u00b2 ",
        "It is.[a b. c d",
        ".[2](b)",
        "| --",
        "10 a.m. ",
        "Mon",
        "5 p.m. New York time",
        "London time ",
        "5 kg. ",
        "cheese etc. ",
        "Acme Inc. ",
        "Refunds are paid",
    ),
    *("[1]", " [2]", "[1, 2]", "[lee/notes]", "[99]", "[", "]", "[[1]]", "[ ]", "[x] ", "[Guide](https://a.example/b)"),
    *("[1](https://a.example)", "(", ")", "- ", "* ", "1. ", "12) ", "| a | b |", "|---|---|", "`x[1]`", "`", "``"),
    *(
        "```",
        "```py\n",
        "~~~",
        "x = a[1]",
        "    ",
        "\u200b",
        "\u0301",
        "\U0001f600",
        "\ud83d",
        "شارع",
        "東京は首都。",
        "é",
    ),
)
TEXTS = st.lists(st.sampled_from(PARTS) | st.text(max_size=8), max_size=24).map("".join)


def read(text: str) -> list[str]:
    return [text[one.start : one.end] for one in statements(text)]


def streamed(parts: Sequence[str], longest: int = 1_000_000) -> list[Statement]:
    reader = StatementReader(longest=longest)
    return [*(one for part in parts for one in reader.add(part)), *reader.end()]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        (" \n ", []),
        ("One. [1] Two [2]. Three.[3]", ["One. [1]", "Two [2].", "Three.[3]"]),
        ("One. [1][2], [3]. Two.", ["One. [1][2]", ", [3].", "Two."]),
        ("One. [lee/notes, lee/other] Two.", ["One. [lee/notes, lee/other]", "Two."]),
        ("One.\n[1]\nTwo is here.", ["One.\n[1]", "Two is here."]),
        ("One.\n\n[1] Two.", ["One.", "[1] Two."]),
        ("Do this:\n- one [1]\n- two [2]\n", ["Do this:", "- one [1]", "- two [2]"]),
        ("One is.[1] Two is.[1]\nThree is.[2]", ["One is.[1]", "Two is.[1]", "Three is.[2]"]),
        (
            "One is.[1][2] Two is.[lee/notes, lee/other] [3] Three.",
            ["One is.[1][2]", "Two is.[lee/notes, lee/other] [3]", "Three."],
        ),
        (
            "One is.\u00b9 Two is.\u00b2\u00b3\nThree is.\u2074",
            ["One is.\u00b9", "Two is.\u00b2\u00b3", "Three is.\u2074"],
        ),
        (
            'It is "one."[1] **Two is.**[2] (So is three.)[3] Four.',
            ['It is "one."[1]', "**Two is.**[2]", "(So is three.)[3]", "Four."],
        ),
        (
            "One is.\u30101\u3011 Two is. \u30102\u3011 Three.",
            ["One is.\u30101\u3011", "Two is. \u30102\u3011", "Three."],
        ),
        (
            "One is.[1](https://a.example) Two is.[[2]] Three.",
            ["One is.[1](https://a.example)", "Two is.[[2]]", "Three."],
        ),
        ("In the U.S.[1] Army it is. [1].[2] [3].\u00b9 So.", ["In the U.S.[1] Army it is. [1].[2] [3].\u00b9", "So."]),
        ("One is.[Guide](https://a.example) two", ["One is.[Guide](https://a.example) two"]),
        ("| a | b |\n|---|---|\n| 1 | 2 | [1]\nText.", ["| a | b |\n|---|---|", "| 1 | 2 | [1]", "Text."]),
        ("So:\n| a | b |\n | :-- | --: |\n| 1 | 2 |", ["So:", "| a | b |\n | :-- | --: |", "| 1 | 2 |"]),
        ("| a |\n|--|\n|--|\n| 1 |\n|--|\n| 2 |", ["| a |\n|--|", "|--|", "| 1 |", "|--|", "| 2 |"]),
        ("Run:\n```sh\na. b\n\nc[1]\n```\nThen stop.", ["Run:", "```sh\na. b\n\nc[1]\n```", "Then stop."]),
        ("Run:\n  ~~~\na\n```\nb", ["Run:", "~~~\na\n```\nb"]),
        ("It ends. [Guide](https://a.example) says so.", ["It ends.", "[Guide](https://a.example) says so."]),
        ("It ends. [1](https://a.example) Next.", ["It ends. [1](https://a.example)", "Next."]),
        ("It is done.\n[x] first\n[ ] second", ["It is done.", "[x] first", "[ ] second"]),
        ("A pipe. | Not a row | here.", ["A pipe.", "| Not a row | here."]),
        ("It weighs 5 kg. [1] Refunds are paid.", ["It weighs 5 kg. [1]", "Refunds are paid."]),
        ("It weighs 5 kg.[1] Refunds are paid.", ["It weighs 5 kg.[1]", "Refunds are paid."]),
        ("One. [1]. [2]. [3] Two.", ["One. [1]. [2]. [3]", "Two."]),
        (
            "商店支付运费。商店不支付运费。真的！好吗？是",
            ["商店支付运费。", "商店不支付运费。", "真的！", "好吗？", "是"],
        ),
    ],
)
def test_an_answer_is_split_into_sentences_items_rows_and_code_with_the_marks_behind_them(
    text: str, expected: list[str]
) -> None:
    assert read(text) == expected


REFUNDS = "Refunds are paid within 30 days of the return."


@pytest.mark.parametrize(
    "sentence",
    [
        *(
            f"The limit is 500 {unit}."
            for unit in "kg km cm mm mg g lbs lb oz ml l ft mi hr hrs min sec Hz kWh".split()
        ),
        *("The limit is 500kg.", "It is 20 °C.", "It weighs **5 kg.**", "We sell bread, cheese etc."),
        *("It is sold by Acme Inc.", "She has a Ph.D."),
    ],
)
def test_a_sentence_of_an_answer_ends_with_a_unit_or_an_abbreviation(sentence: str) -> None:
    assert read(f"{sentence} {REFUNDS}") == [sentence, REFUNDS]
    assert streamed(list(f"{sentence} {REFUNDS}")) == statements(f"{sentence} {REFUNDS}")


@pytest.mark.parametrize(
    "sentence",
    [
        *("The U.S. Army is large.", "He reads Inc. magazine.", "It is in St. Louis.", "Use a code, e.g. Refunds."),
        *(
            "Dr. Smith left.",
            "It is No. 5 of them.",
            "See p. 7 of it.",
            "It was Italy vs. Spain.",
            "He is 5 ft. 3 in. tall.",
        ),
        *("It ends at 5 p.m. London time.", "It ends at 5 p.m. New York time.", "It weighs 5 kg. or less."),
        *("In 1999 C. Smith came.", "The Acme Corp. Annual Report is here.", "It has 5 Ft. Lauderdale hotels."),
        "Apples, pears etc. are sold.",
    ],
)
def test_a_sentence_of_an_answer_goes_on_after_other_abbreviations(sentence: str) -> None:
    assert read(sentence) == [sentence]
    assert streamed(list(sentence)) == statements(sentence)


@pytest.mark.parametrize(
    "text", ["e.g. i.e. " * 40_000, "[1-9]" * 30_000, "[1]. " * 100_000], ids=lambda text: text[:10]
)
def test_a_very_long_statement_is_read_in_a_second(text: str) -> None:
    began = time.process_time()
    assert len(streamed([text[at : at + 4_000] for at in range(0, len(text), 4_000)])) == 1
    assert time.process_time() - began < 1.5


def test_code_is_known_as_code() -> None:
    text = "Run:\n```\na\n```\nThen stop."
    assert [one.code for one in statements(text)] == [False, True, False]
    assert [one.code for one in statements("```\nnever closed")] == [True]


def test_a_sentence_is_complete_when_the_next_one_has_begun() -> None:
    reader = StatementReader()
    assert reader.add("The ferry leaves at 7.") == []
    assert reader.add(" [1]") == [], "a second mark may follow"
    assert reader.add(" It") == [], "the word is not complete"
    assert reader.add(" takes") == [Statement(0, 26)]
    assert reader.end() == [Statement(27, 35)]


@given(TEXTS, st.lists(st.integers(0, 60), max_size=12))
@settings(max_examples=examples(800), deadline=None)
@example("One is. | a b", [8, 9, 3])
@example("One is . .[1, 2] Two is.", [10, 14])
@example(f"One is . {'.' * 24} Two is.", [32])
@example("One.\n[1] Two is. [Guide](x) y", [5, 9, 20])
def test_the_statements_are_the_same_however_the_answer_is_cut(text: str, cuts: list[int]) -> None:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [text[start:end] for start, end in pairwise(places)]
    assert streamed(parts) == statements(text)
    assert streamed(list(text)) == statements(text)
    assert streamed(parts, longest=12) == streamed(list(text), longest=12) == streamed([text], longest=12)


@pytest.mark.parametrize("unit", ["a\n", "[1]. ", "word ", "`a` "])
@pytest.mark.parametrize("size", [7, 5_000, 400_000])
def test_from_a_statement_on_that_is_too_long_the_answer_is_not_told_apart(unit: str, size: int) -> None:
    text = f"One is here. Two is there. {unit * (300_000 // len(unit))} Three."
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    *told, rest = streamed(parts, longest=50_000)
    assert [text[one.start : one.end] for one in told[:1]] == ["One is here."]
    assert len(told) <= 2
    assert rest.rest
    assert rest.end == len(text)


@given(TEXTS)
@settings(max_examples=examples(800), deadline=None)
def test_statements_are_in_order_and_nothing_visible_is_outside_of_them(text: str) -> None:
    at = 0
    for one in statements(text):
        assert at <= one.start < one.end <= len(text)
        assert not text[at : one.start].strip()
        assert text[one.start : one.end] == text[one.start : one.end].strip()
        at = one.end
    assert not text[at:].strip()


@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        "[1] ",
        "[",
        "a. ",
        "\n",
        "A word is here [1]. ",
        "| a | b |\n",
        "| a |\n|--|\n",
        "|--|\n",
        "A.[1] ",
        "A.[1",
        ".\u00b9",
        "[1].",
        "\u3010",
        "```\nx\n",
        ".",
        "a [",
        "`",
        "[1](",
        "- a\n",
        "thanks, and ",
        "i hope this helps, ",
        "the documents do not say and ",
        "e.g. i.e. ",
        "[1-9]",
        "[1]. ",
        "5 kg. A",
        "5 p.m. New York ",
        "here is a:",
        "have a very ",
    ],
)
def test_the_time_for_a_hostile_answer_grows_with_its_length(text: str) -> None:
    def seconds(size: int) -> float:
        answer = (text * size)[:size]
        began = time.process_time()
        found = streamed([answer[at : at + 7] for at in range(0, size, 7)])
        for one in found:
            code_spans(answer[one.start : one.end])
            claims_something(without_marks(answer[one.start : one.end]))
        return time.process_time() - began

    short = min(seconds(10_000) for _ in range(2))
    assert seconds(80_000) < 20 * short + 0.5


@pytest.mark.parametrize(
    "statement",
    [
        *(
            "# Refunds",
            "**Refunds**",
            "Is that so?",
            "“Is that so?”",
            "The steps are:",
            "**The steps:**",
            "Refunds",
            "---",
        ),
        *("Sure!", "Great question!", "Yes.", "I hope this helps.", "Let me know if you need more.", "In summary,", ""),
        *("Have a nice day!", "Thanks, and have a nice day!", "You are welcome.", "You\u2019re very welcome!"),
        *("Sorry, I cannot answer that.", "Good morning, dear customer!", "Best regards, your assistant."),
        *("Enjoy your trip!", "Of course.", "Thanks! Let me know if it works.", "Here is what I found: Of course."),
        *(
            "I'm sorry, but the documents do not mention that.",
            "I am afraid I don't know.",
            "Thank you for your question!",
        ),
        *("Please do not hesitate to contact us.", "I'd be happy to help you with more.", "That's a great question!"),
        *("I apologize for the confusion.", "As an AI language model, I cannot answer this question."),
        *("According to the documents,", "Here is what the sources say:", "The documents do not mention prices."),
        *("| Part | Number |\n|---|---|", "| Part | Price in 2020 |\n| :-- | --: |"),
        *("I could not find an answer in the sources.", "|---|---|", "- ", "1.", "\u200b", "[ ]"),
        *(
            "Opening hours",
            "Opening hours:",
            "According to the documents:",
            "The 3 steps are:",
            "步骤如下：",
            "退货政策",
        ),
        *("According to the documents, the fees are as follows:", "Sure, here is what I found:", "You need:"),
        *("To reset the pump, do this:", "If the pump is blocked, do the following:", "There are three ways to pay:"),
        *("The documents do not say how much it costs.", "I could not find that in the sources.", "I hope this helps!"),
        *("Let me know if you have questions.", "Sure, here is what I found.", "Here is a summary of the policy."),
        *("The documents do not mention prices, opening hours, or the address of the shop.", "Not specified."),
        *("The documents do not say how much it costs, so I cannot answer.", "None of the sources mention a limit."),
        *(
            "The documents do not say how much it costs and how long it takes.",
            "Hope this helps!",
            "The sources disagree.",
        ),
        *("The sources disagree on how long it takes.", "The price is not mentioned in the documents."),
        *("If you have any other questions, feel free to ask.", "The documents do not say what happened in 1921."),
        "I'm sorry, but I couldn't find any information about refunds in the documents provided.",
        "Let me know if you have any other questions or need more help.",
        *("The documents contain no information on prices.", "The sources say nothing about it.", "Hello Anna!"),
        *("I have no information about that.", "You can return items in two ways:", "Sources: , .", "See ."),
    ],
)
def test_headings_questions_greetings_and_announcements_claim_nothing(statement: str) -> None:
    assert not claims_something(statement)


@pytest.mark.parametrize(
    "statement",
    [
        *(
            "Refunds take 30 days.",
            "- the ferry leaves daily",
            "It costs 5.",
            "| Cod | 12 kg |",
            "| Cod | 12 kg |\n| | |",
            "1. Press the red button",
        ),
        *(
            "No refunds are given after a month.",
            "According to the documents, refunds take a month.",
            "**Note:** it is.",
        ),
        *("Thanks to a grandfather clause, the Packers may belong to shareholders.", "Good morning is a film of 1959."),
        *("Have a nice day is a song.", "You are welcome to bring dogs.", "No problem is known with this pump."),
        *(
            "Sorry, the tank holds more oil.",
            "I'm sorry, but refunds are not given after a month.",
            "Take care of it daily.",
        ),
        *("I am happy to confirm that refunds take a month.", "Here is what I found: refunds take a month."),
        *("Unfortunately, the ferry is late.", "Please press the red button.", "Great Britain is an island."),
        *("The documents are kept for ten years.", "Yes, the shop pays for it.", "> Refunds take a month"),
        *("| Manager | Napoleon |", "There was no evidence of a fault.", "We do not have a fee."),
        *(
            "Feel free to bring your dog.",
            "If you need a refund, contact support.",
            "There is no fee, say the documents.",
        ),
    ],
)
def test_what_a_source_could_support_is_a_claim(statement: str) -> None:
    assert claims_something(statement)


@pytest.mark.parametrize(
    "statement",
    [
        "I cannot find it in the sources, but refunds take 90 days and cost 500 euros.",
        "The provided context does not specify this; typically, refunds take 90 days.",
        "The sources do not mention a limit, and refunds cost 500 euros.",
        "The sources do not mention a limit and refunds cost 500 euros.",
        "The sources do not mention a limit, and the fee is high.",
        "The sources do not mention a limit, which is 500 euros.",
        "The sources do not mention a limit (it is 500 euros).",
        "The sources do not mention it, although refunds are free.",
        "The sources disagree: the head of HR is Napoleon.",
        "I hope this helps: refunds take 90 days and cost 500 euros.",
        "I hope you know that refunds are free.",
        "Let me know if you need more, but refunds take 90 days.",
        "According to the sources Napoleon rules.",
    ],
)
def test_a_claim_beside_a_phrase_about_the_answer_is_a_claim(statement: str) -> None:
    assert claims_something(statement)


@pytest.mark.parametrize(
    "statement",
    [
        *("Refunds are never paid, and the fee is 500 euros:", "Refunds are never paid, and the steps are:"),
        *("Refunds take 90 days:", "The fee is 500 euros, as follows:", "退款从不支付，费用是500欧元："),
        *("**Refunds are never paid.**", "# Refunds are never paid."),
    ],
)
def test_a_sentence_is_a_claim_although_it_ends_with_a_colon_or_looks_like_a_heading(statement: str) -> None:
    assert claims_something(statement)


@pytest.mark.parametrize(
    "statement",
    [
        "Napoleon Bonaparte.",
        "By Napoleon.",
        "Answer: Napoleon",
        "In Berlin.",
        "30 days.",
        "“Napoleon.”",
        "Yes, Napoleon.",
    ],
)
def test_a_name_or_a_number_that_is_the_whole_answer_is_a_claim(statement: str) -> None:
    assert claims_something(statement)


@pytest.mark.parametrize(
    "statement",
    [
        *("商店支付运费。", "商店支付运费", "返品は三十日以内です。", "החנות משלמת.", "المتجر يدفع."),
        *("ร้านค้าจ่ายค่าจัดส่ง", "상점이 지불합니다.", "Магазин платит."),
    ],
)
def test_a_sentence_in_another_script_is_a_claim(statement: str) -> None:
    assert claims_something(statement)


def test_inline_code_is_found() -> None:
    text = "Use `a[1]` and ``b[2]`` but not [3] or ` alone."
    assert [text[start:end] for start, end in code_spans(text)] == ["`a[1]`", "``b[2]``"]
    assert code_spans("no `code\nover lines`") == []


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("- **a** b", "    a   b"),
        ("12) it is", "    it is"),
        ("2**3 is 8", "2**3 is 8"),
        ("## Title", "## Title"),
        ("**Note:** it is", "  Note:   it is"),
    ],
)
def test_list_markers_and_the_signs_of_bold_text_become_spaces(statement: str, expected: str) -> None:
    assert without_signs(statement) == expected
