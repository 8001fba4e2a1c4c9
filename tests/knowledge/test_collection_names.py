"""Names of collections: which ones are refused, and which collection a name stands for."""

# ruff: noqa: RUF001  the lookalikes themselves

from pathlib import Path

import pytest

from anabranch.domain.errors import Conflict, InvalidQuestion, NotFound
from anabranch.knowledge.collection_names import checked_name, matching, only, unambiguous
from anabranch.knowledge.key_requests import KeyRequest
from anabranch.knowledge.model import Collection, CollectionSettings
from anabranch.knowledge.records import collections
from anabranch.knowledge.records.database import new_id
from support.knowledge_fixtures import ALICE, BOB, GUEST, OPERATOR, workshop


@pytest.mark.parametrize(
    "name",
    [
        *("handbook", "a/b shop", "O'Reilly & Co. (2)", "O’Reilly", "2023–2024", "C++", "Q3 → Q4", "ada@example.com"),
        *("ünïcode é", "Tiếng Việt", "ışık", "Œuvre", "col·lecció", "þing", "Ɓala Ɗan Ƙano", "Nɔ ŋutí", "naïve café"),
        *("Отчёт о расходах", "Q3 отчёт", "Город", "Нотатки", "Құжаттар", "Έγγραφα", "Αγορά", "Նշումներ", "և այլն"),
        *("עברית מסמכים", "יסוד", "العربية مستندات", "دستاویزات", "ދިވެހި", "ማስታወሻዎች", "შენიშვნები"),
        *("हिन्दी दस्तावेज़", "परियोजना २०२४", "প্রকল্প ২০২৪", "ਦਸਤਾਵੇਜ਼", "દસ્તાવેજો", "ନୋଟ୍", "ஆவணங்கள்", "గమనికలు", "ಟಿಪ್ಪಣಿಗಳು"),
        *("കുറിപ്പുകൾ", "ධනය", "ภาษาไทย", "น้ำ", "โครงการ ๒๕๖๗", "ບັນທຶກ", "ນ້ຳ", "မှတ်စုများ", "ឯកសារ", "ཡིག་ཆ"),
        *("日本語 ノート", "らーめん", "御茶ノ水", "〇〇さん", "2024年 報告", "員工手冊", "ㄅㄆㄇ", "한국어 漢字"),
        *("社内Wiki", "AIポリシー", "회사Wiki규정", "T細胞"),
        *("😀", "🚀 launch"),
    ],
)
def test_names_in_a_script_of_today_are_taken(name: str) -> None:
    assert checked_name(f" {name} ") == name


def test_a_name_is_composed() -> None:
    assert checked_name("e\u0301cole") == "école"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("h\u0430ndbook", "mixes several scripts in 'h\u0430ndbook' (CYRILLIC, LATIN)"),
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
        ("a\u30ceb", "among Latin letters in 'a\u30ceb'"),
        ("\u3093andbook", "among Latin letters"),
        ("\u5de5nfo", "among Latin letters"),
        ("b\u0e50x", "mixes several scripts in 'b\u0e50x' (LATIN, THAI)"),
        ("b\u0d02x", "mixes several scripts in 'b\u0d02x' (LATIN, MALAYALAM)"),
        ("report \u09ea", "Bengali digits, but no letters"),
        ("\u0b66\u0b68", "Oriya digits, but no letters"),
        ("report \u17e0", "Khmer digits, but no letters"),
        ("3\u00d73", "MULTIPLICATION SIGN"),
        ("bo\u2a2f", "looks like another character"),
        ("c\u02bbd", "looks like another character"),
        ("\u2105", "write 'c/o'"),
        ("\u249c", "write '(a)'"),
        ("two  spaces", "several spaces"),
        ("collection:x", "must not begin with"),
        ("COLLECTION:x", "must not begin with"),
        ("collection\uff1ax", "write ':'"),
        ("collect\u0131on:x", "must not begin with"),
        ("collection\u0589x", "looks like another character"),
        ("ada\uff20example.com", "write '@'"),
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


@pytest.mark.parametrize(
    "name",
    [
        *("\u2ca3\u2c9f\u2ca3", "\u2d54\u2d5d", "\u07ca\u07ca", "\U0001042c\U00010448", "\U000104ea\U000104f6"),
        *("\U000118c8\U000118dc", "\u13a0\u13a1\u13c0", "\ua4d0\ua4f3\ua4eb", "\u15f7\u1541", "\U00016f3a\U00016f43"),
        *("\U00010415\U00010404", "\U00010297\U00010292", "\U000102a1\U000102ab", "\u16b7\u16c1"),
        *("\u1d0f\u1d22x", "\ua79f\ua731", "b\uab3dx", "\u1175", "\ua647", "\u10a0", "\u2776"),
    ],
)
def test_scripts_that_unicode_does_not_recommend_for_identifiers_are_refused(name: str) -> None:
    with pytest.raises(InvalidQuestion, match=r"scripts that Unicode recommends|looks like another character"):
        checked_name(name)


@pytest.mark.parametrize(
    ("script", "letters"),
    [
        *(("Cyrillic", "гор"), ("Cyrillic", "ЗбЬ"), ("Greek", "σορυ"), ("Armenian", "հոռա"), ("Hebrew", "סוט")),
        *(("Arabic", "اهہ"), ("Ethiopic", "ዐሀ"), ("Georgian", "ოყ"), ("Gujarati", "ડટ"), ("Oriya", "ଠଃ")),
        *(("Tamil", "டப"), ("Telugu", "ంః"), ("Malayalam", "ഠം"), ("Thai", "ทน"), ("Lao", "ບນ"), ("Myanmar", "ဝင")),
        *(("East Asian", "〇"), ("East Asian", "ノ")),
    ],
)
def test_letters_of_a_recommended_script_that_all_look_latin_are_refused(script: str, letters: str) -> None:
    for name in (letters, f"{letters} of handbook", f"x-{letters}"):
        with pytest.raises(InvalidQuestion, match=f"{script} letters that all look like Latin ones"):
            checked_name(name)


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
    assert unambiguous(ODD, ALL, ALICE, "collection:") == "collection:carol/bob%2Fnotes"


def test_no_two_collections_have_one_address_whatever_slashes_their_names_and_owners_have() -> None:
    owned = [("bob/x", "notes"), ("bob", "x/notes"), ("bob", "x%2Fnotes"), ("", "/bob"), ("/", "bob"), ("", "bob")]
    several = [of(key, *one) for key, one in enumerate(owned)]
    for one in several:
        assert only(one.address, several, ALICE) == one
        assert only(one.address, [other for other in several if other != one], ALICE) is None


def test_a_name_in_the_form_of_an_id_is_refused_and_an_old_one_stands_for_no_id() -> None:
    identifier = new_id()
    for name in (identifier, identifier.upper(), f" {identifier} "):
        with pytest.raises(InvalidQuestion, match="the form of an id"):
            checked_name(name)
    assert checked_name(f"{identifier}-notes") == f"{identifier}-notes"
    old = of(8, "bob", identifier)
    for written in (identifier, f"collection:{identifier}"):
        assert only(written, [old], BOB) is None
    assert unambiguous(old, [old], BOB) == f"collection:bob/{identifier}"
    assert [only(named, [old], ALICE) for named in (old.id, old.address)] == [old, old]


def test_a_name_is_found_however_its_accents_are_encoded() -> None:
    school = of(7, "alice", "école")
    assert only("e\u0301cole", [school], BOB) == school


async def test_a_key_is_never_restricted_to_a_collection_that_is_named_like_the_id_of_another(tmp_path: Path) -> None:
    async with workshop(tmp_path) as shop:
        deleted = await shop.collection("handbook", caller=ALICE)
        await shop.room.delete_collection(ALICE, "handbook")
        settings = CollectionSettings(embedding_model="m")
        old = shop.database.writing(
            lambda db: collections.create(db, owner="mallory", name=deleted, description="", settings=settings)
        )
        assert old is not None
        with pytest.raises(NotFound):
            await shop.room.create_api_key(KeyRequest(user="carl", collections=(deleted,)), ())
        key, _ = await shop.room.create_api_key(KeyRequest(user="carl", collections=(old.id, old.address)), ())
        assert key.rights.collections == (old.key,)
