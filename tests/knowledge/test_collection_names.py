"""Names of collections: which ones are refused, and which collection a name stands for."""

# ruff: noqa: RUF001  the lookalikes themselves

import pytest

from anabranch.domain.errors import Conflict, InvalidQuestion
from anabranch.knowledge.collection_names import checked_name, matching, only, unambiguous
from anabranch.knowledge.model import Collection, CollectionSettings
from support.knowledge_fixtures import ALICE, BOB, GUEST, OPERATOR


@pytest.mark.parametrize(
    "name",
    [
        *("handbook", "Q3 отчёт", "Отчёт о расходах", "ünïcode é", "日本語 ノート", "한국어 漢字", "हिन्दी दस्तावेज़"),
        *("ภาษาไทย", "العربية مستندات", "עברית מסמכים", "a/b shop", "O'Reilly & Co. (2)", "Tiếng Việt", "ışık", "😀"),
    ],
)
def test_names_in_any_one_script_are_taken(name: str) -> None:
    assert checked_name(f" {name} ") == name


def test_a_name_is_composed() -> None:
    assert checked_name("e\u0301cole") == "école"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("h\u0430ndbook", "mixes letters of several scripts in 'h\u0430ndbook' (CYRILLIC, LATIN)"),
        ("\u0441\u043e\u0440\u0443", "Cyrillic letters that all look like Latin ones"),
        ("\u0441\u043e\u0440\u0443 of handbook", "Cyrillic letters that all look like Latin ones"),
        ("h-\u0430-n-d", "Cyrillic letters that all look like Latin ones"),
        ("hand\u200bbook", "U+200B (ZERO WIDTH SPACE)"),
        ("\u202ekoobdnah", "U+202E (RIGHT-TO-LEFT OVERRIDE)"),
        ("\u2066x\u2069", "U+2066 (LEFT-TO-RIGHT ISOLATE)"),
        ("hand\u00adbook", "U+00AD (SOFT HYPHEN)"),
        ("hand\u00a0book", "U+00A0 (NO-BREAK SPACE)"),
        ("hand\u3164book", "U+3164 (HANGUL FILLER)"),
        ("x\ufe0f", "U+FE0F (VARIATION SELECTOR-16)"),
        ("a\nb", "U+000A"),
        ("\ue000", "U+E000"),
        ("\ufb01le", "looks like 'fi'"),
        ("\uff48andbook", "looks like 'h'"),
        ("\U0001d421andbook", "looks like 'h'"),
        ("\u0251bc", "LATIN SMALL LETTER ALPHA"),
        ("\u1d00bc", "LATIN LETTER SMALL CAPITAL A"),
        ("l\u0338", "COMBINING LONG SOLIDUS OVERLAY"),
        ("\u0301a", "where no letter carries it"),
        ("a\u0323\u0302\u0303\u0304\u0301", "where no letter carries it"),
        ("\u06612", "digits of several scripts"),
        ("two  spaces", "several spaces"),
        ("collection:x", "must not begin with"),
        ("COLLECTION:x", "must not begin with"),
        ("collection\uff1ax", "looks like another character"),
        ("bob\u2215x", "looks like another character"),
        ("collections", "stands for all collections"),
        ("", "1 to 100"),
        ("n" * 101, "1 to 100"),
    ],
)
def test_a_name_that_could_be_taken_for_another_one_is_refused_and_says_why(name: str, said: str) -> None:
    with pytest.raises(InvalidQuestion) as refused:
        checked_name(name)
    assert said in refused.value.message


def of(key: int, owner: str, name: str) -> Collection:
    settings = CollectionSettings(embedding_model="m")
    return Collection(key=key, id=f"id-{key}", owner=owner, name=name, description="", settings=settings, created_at=0)


ALICES, BOBS, OURS, ODD = (
    of(1, "alice", "notes"),
    of(2, "bob", "notes"),
    of(3, "", "notes"),
    of(4, "carol", "bob/notes"),
)
ALL = [ALICES, BOBS, OURS, ODD]


def test_a_name_is_the_callers_own_collection_first() -> None:
    assert [only("notes", ALL, caller) for caller in (ALICE, BOB, OPERATOR)] == [ALICES, BOBS, OURS]
    assert only("nothing", ALL, ALICE) is None
    assert only("notes", [BOBS], ALICE) == BOBS


def test_a_guest_owns_nothing_so_a_name_of_several_collections_is_ambiguous() -> None:
    with pytest.raises(Conflict, match=r"use collection:/notes or collection:alice/notes or collection:bob/notes\."):
        only("notes", ALL, GUEST)


def test_an_address_is_exact_whatever_others_name_their_collections() -> None:
    for one in (ALICES, BOBS, OURS):
        assert matching(one.address, ALL, ALICE) == [one]
    assert only("bob/notes", ALL, ALICE) == ODD
    assert only("collection:notes", ALL, ALICE) == ALICES
    assert only("collection:bob/notes", [ODD], ALICE) is None, "a name does not stand in for an owner"
    assert unambiguous(ODD, ALL, ALICE, "collection:") == "collection:carol/bob/notes"


def test_collections_with_one_address_are_named_by_their_ids() -> None:
    other = of(5, "bob/x", "notes")
    same = of(6, "bob", "x/notes")
    assert other.address == same.address
    with pytest.raises(Conflict, match="use notes or x/notes"):
        only(other.address, [other, same], ALICE)
    assert unambiguous(other, [other, same, BOBS], ALICE) == "id-5"


def test_a_name_is_found_however_its_accents_are_encoded() -> None:
    school = of(7, "alice", "école")
    assert only("e\u0301cole", [school], BOB) == school
