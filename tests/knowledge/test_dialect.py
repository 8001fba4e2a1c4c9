"""SQL of SQLite's dialect is translated for PostgreSQL: placeholders, and the few things that are said otherwise."""

from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.knowledge.records.dialect import Slot, translated
from support.examples import examples


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT ?, ?", "SELECT $1, $2"),
        ("SELECT :name, :name", "SELECT $1, $2"),
        ("VALUES (?,?)", "VALUES ($1,$2)"),
        ("WHERE a=:a1 AND b<:b_2)", "WHERE a=$1 AND b<$2)"),
        ("WHERE (a, b) <= (?, ?)", "WHERE (a, b) <= ($1, $2)"),
        ("SELECT '?', ?, ':x', '%', '%s'", "SELECT '?', $1, ':x', '%', '%s'"),
        ("SELECT 'it''s ?', ?", "SELECT 'it''s ?', $1"),
        ("SELECT '', ?, ''''", "SELECT '', $1, ''''"),
        ("SELECT '$.a.b', ?", "SELECT '$.a.b', $1"),
        ('SELECT "a?:b", ?', 'SELECT "a?:b", $1'),
        ("SELECT ? -- really?\n, ?", "SELECT $1 -- really?\n, $2"),
        ("SELECT ? -- the end: :x '", "SELECT $1 -- the end: :x '"),
        ("SELECT x::text, ?::bigint", "SELECT x::text, $1::bigint"),
        ("SELECT day % ? - -?", "SELECT day % $1 - -$2"),
    ],
)
def test_placeholders_are_numbered_and_literals_stay(sql: str, expected: str) -> None:
    assert translated(sql).sql == expected


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("user = ?", '"user" = $1'),
        ("queries.user, user", 'queries."user", "user"'),
        ("(user, day)", '("user", day)'),
        ("name AS user", 'name AS "user"'),
        ('"user" = :user', '"user" = $1'),
        ("users, user_id, allowed_users, superuser", "users, user_id, allowed_users, superuser"),
        ("'user' -- user", "'user' -- user"),
    ],
)
def test_a_column_called_user_is_quoted(sql: str, expected: str) -> None:
    """Without quotes it is the user of the connection."""
    assert translated(sql).sql == expected


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("title = ? COLLATE NOCASE", 'lower(title) = lower($1 COLLATE "C")'),
        ("documents.title = :name COLLATE NOCASE AND x", 'lower(documents.title) = lower($1 COLLATE "C") AND x'),
        ("length(CAST(content AS BLOB)) + 1", "octet_length(content) + 1"),
    ],
)
def test_what_postgresql_says_otherwise(sql: str, expected: str) -> None:
    assert translated(sql).sql == expected


@pytest.mark.parametrize(
    ("sql", "given_values", "expected"),
    [
        ("?, ?, ?", ("a", 2, None), ["a", 2, None]),
        (":b, :a, :b", {"a": 1, "b": "x"}, ["x", 1, "x"]),
        ("? IS NULL OR user = ?", (None, None), ["t", None]),
        ("? IS NULL OR user = ?", ("dana", "dana"), ["f", "dana"]),
        ("x < ? AND (? IS NOT NULL) AND y = ?", (1.5, 0, b"z"), [1.5, "f", b"z"]),
        ("(:a IS NULL OR a = :a) AND (:b IS NULL OR b = :b)", {"a": "", "b": None}, ["f", "", "t", None]),
        (":collections IS NULL", {"collections": None, "not_in_it": 1}, ["t"]),
        ("title = :name COLLATE NOCASE AND title = :name LIMIT :n", {"name": "x", "n": 3}, ["x", "x", 3]),
        ("no placeholder", (), []),
    ],
)
def test_each_placeholder_gets_its_value_or_whether_that_is_null(
    sql: str, given_values: Any, expected: list[Any]
) -> None:
    assert translated(sql).values(given_values) == expected


def test_of_a_value_that_is_only_compared_with_null_the_type_need_not_be_known() -> None:
    """PostgreSQL cannot know it, and says so in an error."""
    statement = translated("SELECT 1 WHERE :x IS NULL OR name = :x")
    assert statement.sql == "SELECT 1 WHERE nullif(CAST($1 AS boolean), TRUE) IS NULL OR name = $2"
    assert statement.slots == (Slot("x", True), Slot("x", False))


@pytest.mark.parametrize("form", ["{} IS NULL", "{} IS NOT NULL", "{}\nIS NULL", "({} IS NULL)"])
@pytest.mark.parametrize("placeholder", ["?", ":name"])
def test_every_form_of_a_comparison_with_null_is_recognised(form: str, placeholder: str) -> None:
    [slot] = translated(form.format(placeholder)).slots
    assert slot.is_null


@pytest.mark.parametrize("form", ["{} IS 1", "{} ISNULL", "{} = 1 AND x IS NULL", "coalesce({}, x) IS NULL"])
@pytest.mark.parametrize("placeholder", ["?", ":name"])
def test_other_comparisons_are_none_with_null(form: str, placeholder: str) -> None:
    [slot] = translated(form.format(placeholder)).slots
    assert not slot.is_null


# Generated statements


class Token(NamedTuple):
    """A part of a statement; what it is translated to if it is no placeholder; and what its slots stand for."""

    sql: str
    becomes: str | None = None
    slots: tuple[tuple[int | str, bool], ...] = ()


ANY_TEXT = st.text(st.characters(codec="utf-8"), max_size=10)
NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,5}", fullmatch=True).filter(lambda name: name != "user")
KEPT = st.one_of(
    ANY_TEXT.map(lambda text: "'" + text.replace("'", "''") + "'"),
    ANY_TEXT.map(lambda text: '"' + text.replace('"', "") + '"'),
    ANY_TEXT.map(lambda text: "--" + text.replace("\n", "") + "\n"),
    st.sampled_from(
        ["SELECT", "(", ")", ",", "=", "::text", "x::jsonb", "%", "users", "||", "IS NULL", "1.5", "a.b", "\n"]
    ),
    NAMES,
)


def statements(placeholders: st.SearchStrategy[Token]) -> st.SearchStrategy[list[Token]]:
    kept = KEPT.map(lambda sql: Token(sql, sql))
    return st.lists(st.one_of(kept, placeholders, st.just(Token("user", '"user"'))), max_size=12)


def named_tokens() -> st.SearchStrategy[Token]:
    """In its forms: alone, compared with null, and compared without regard to case."""
    return st.one_of(
        NAMES.map(lambda name: Token(f":{name}", None, ((name, False),))),
        NAMES.map(lambda name: Token(f":{name} IS NULL", None, ((name, True),))),
        NAMES.map(lambda name: Token(f"title = :{name} COLLATE NOCASE", None, ((name, False),))),
    )


def joined(tokens: list[Token]) -> str:
    return " , ".join(token.sql for token in tokens)


def expected_sql(tokens: list[Token]) -> str:
    number, parts = 0, []
    for token in tokens:
        if token.becomes is not None:
            parts.append(token.becomes)
            continue
        number += 1
        if token.sql.endswith("NOCASE"):
            parts.append(f'lower(title) = lower(${number} COLLATE "C")')
        elif token.sql.endswith("NULL"):
            parts.append(f"nullif(CAST(${number} AS boolean), TRUE) IS NULL")
        else:
            parts.append(f"${number}")
    return " , ".join(parts)


@settings(max_examples=examples(300))
@given(tokens=statements(named_tokens()))
def test_named_placeholders_are_found_wherever_they_stand_and_nowhere_else(tokens: list[Token]) -> None:
    statement = translated(joined(tokens))
    assert statement.sql == expected_sql(tokens)
    assert list(statement.slots) == [slot for token in tokens for slot in token.slots]


@settings(max_examples=examples(300))
@given(tokens=statements(st.sampled_from([Token("?"), Token("? IS NULL"), Token("title = ? COLLATE NOCASE")])))
def test_values_go_to_placeholders_in_their_order(tokens: list[Token]) -> None:
    statement = translated(joined(tokens))
    assert statement.sql == expected_sql(tokens)
    placeholders = [token.sql for token in tokens if token.becomes is None]
    values = [f"value {number}" for number in range(len(placeholders))]
    expected = ["f" if sql.endswith("NULL") else value for sql, value in zip(placeholders, values, strict=True)]
    assert statement.values(values) == expected
    nulls = ["t" if sql.endswith("NULL") else None for sql in placeholders]
    assert statement.values([None] * len(placeholders)) == nulls


@settings(max_examples=examples(300))
@given(sql=st.text(st.sampled_from("'\"?:-a \nuser%$") | st.characters(codec="utf-8"), max_size=60))
def test_any_text_is_translated(sql: str) -> None:
    statement = translated(sql)
    assert translated(sql) is statement
    named = {slot.of for slot in statement.slots if isinstance(slot.of, str)}
    positions = [slot.of for slot in statement.slots if isinstance(slot.of, int)]
    assert positions == list(range(len(positions)))
    assert all(f":{name}" in sql for name in named)
