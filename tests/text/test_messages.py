"""Translated messages, and the choice of the language."""

import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.domain.model import Context, Passage, Prompt
from anabranch.models.extractive import ABSTAINED, Extractive
from anabranch.text.messages import LANGUAGES, PLACEHOLDER, language_of, message, texts

KEYS = sorted(texts("en"))


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_language_has_every_message_with_the_same_placeholders(language: str) -> None:
    said = texts(language)
    assert list(said) == list(texts("en"))
    for key, text in said.items():
        assert text.strip() == text != ""
        assert set(PLACEHOLDER.findall(text)) == set(PLACEHOLDER.findall(texts("en")[key])), key


@pytest.mark.parametrize("language", [language for language in LANGUAGES if language != "en"])
def test_messages_are_translated(language: str) -> None:
    assert not [key for key in KEYS if texts(language)[key] == texts("en")[key]]


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("key", KEYS)
def test_messages_fill_every_placeholder(key: str, language: str) -> None:
    values = {name: f"<{name}>" for name in PLACEHOLDER.findall(texts("en")[key])}
    said = message(key, language, **values)
    assert "{" not in said
    assert "}" not in said
    assert all(value in said for value in values.values())


@pytest.mark.parametrize("value", ["{reason}", "{0}", "{reason.__class__}", "%s", "\\1", "\\g<0>", "{", "🐟"])
def test_message_values_are_inserted_verbatim(value: str) -> None:
    assert message("validation_error", "en", reason=value) == f"The request is not valid: {value}"


def test_an_unknown_message_key_raises() -> None:
    with pytest.raises(KeyError):
        message("no_such_message", "de")


def test_a_missing_message_value_is_shown_as_a_question_mark() -> None:
    assert message("rate_limited", "en", key="x", language="y") == "Too many questions. Ask again in ? s."


def test_messages_in_an_unsupported_language_are_english() -> None:
    assert message("query_empty", "pt") == message("query_empty", None) == message("query_empty", "en")
    assert message("query_empty", "de-AT") == message("query_empty", "de") != message("query_empty", "en")
    assert message("query_empty", "../../../etc/passwd") == message("query_empty", "en")


@pytest.mark.parametrize(
    ("wanted", "language"),
    [
        ("de", "de"),
        ("DE", "de"),
        ("de-AT", "de"),
        ("zh_CN", "zh"),
        ("zh-Hans", "zh"),
        ("zh-Hans-CN", "zh"),
        ("fr_FR", "fr"),
        ("pt", "es"),
        ("deutsch", "es"),
        ("", "es"),
        ("../de", "es"),
        ("de-" + "x" * 100, "es"),
        ("de\n", "es"),
        (None, "es"),
    ],
)
def test_a_language_requested_by_name_comes_before_the_header(wanted: str | None, language: str) -> None:
    assert language_of("es", wanted) == language


@pytest.mark.parametrize(
    ("header", "language"),
    [
        (None, "en"),
        ("", "en"),
        ("de", "de"),
        ("de-CH, en;q=0.8", "de"),
        ("en;q=0.8, de-CH", "de"),
        ("pt-BR, pt;q=0.9, fr;q=0.8, en;q=0.7", "fr"),
        ("fr;q=0.5, es;q=0.5", "fr"),
        ("FR ; Q=0.5 ,\tes;q=0.501", "es"),
        ("fr;q=0, en;q=0.1", "en"),
        ("fr;q=0.000", "en"),
        ("de;q=0, *", "en"),
        ("*", "en"),
        ("en;q=0, *;q=0.5", "de"),
        ("it, *;q=0.5, fr;q=0.4", "en"),
        ("fr;q=0.9, *;q=0.5", "fr"),
        ("en;q=0", "en"),
        ("de;q=0.3, de-AT;q=0.9, fr;q=0.5", "de"),
        ("de;q=2, fr;q=0.1", "fr"),
        ("de;q=-1, fr;q=0.1", "fr"),
        ("de;q=nan, fr;q=0.1", "fr"),
        ("de;q=0.5555, fr;q=0.1", "fr"),
        ("de;q=, fr;q=0.1", "fr"),
        ("de;level=1, fr;q=0.1", "fr"),
        (",,, ;q=1, -, de-, fr", "fr"),
        ("d\u00e9, fr;q=\u0661", "en"),
    ],
)
def test_accept_language_is_parsed_as_in_rfc_9110(header: str | None, language: str) -> None:
    assert language_of(header) == language


@given(st.text(alphabet="dfeznrsh*;q=0.19,-_ \t\u00e9", max_size=60), st.none() | st.text(max_size=12))
def test_any_accept_language_header_gives_a_supported_language(header: str, wanted: str | None) -> None:
    assert language_of(header, wanted) in LANGUAGES


@pytest.mark.parametrize(
    "header",
    [
        "xx;q=0.5," * 200_000 + "de",
        "a" * 2_000_000,
        "a-" * 1_000_000,
        " " * 2_000_000 + "de",
        "de" + " " * 2_000_000 + ";",
        ("de" + "-abcdefgh" * 200_000 + ";q=2"),
        "," * 2_000_000,
        "de;q=0." + "0" * 2_000_000,
    ],
    ids=range(8),
)
def test_a_hostile_accept_language_header_is_bounded(header: str) -> None:
    began = time.process_time()
    assert language_of(header, header) in LANGUAGES
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize("language", LANGUAGES)
async def test_the_extractive_model_abstains_in_the_readers_language(language: str) -> None:
    prompt = Prompt(
        question="Who won the World Cup in 1998?",
        messages=(),
        max_tokens=100,
        temperature=0,
        passages=(Passage(source="a", title="Rivers", text="The Murray is a river.", score=0.5),),
        version="1",
    )
    spoken = msgspec.structs.replace(prompt, language=language)
    [delta] = [each async for each in Extractive().generate(spoken, Context(correlation_id="c", deadline=60))]
    assert delta.text.startswith(texts(language)["refusal_abstained"])
    assert "Rivers" in delta.text
    assert delta.finish_reason == ABSTAINED
    [plain] = [each async for each in Extractive().generate(prompt, Context(correlation_id="c", deadline=60))]
    assert plain.text == (
        "The documents that were found do not answer this. Searched: a. Nearest to the question: “Rivers”."
    )
