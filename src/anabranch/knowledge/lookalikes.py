"""Which characters names may have, so that none can be taken for another one: of collections, users and groups."""

# ruff: noqa: RUF001, RUF003  the lookalikes themselves

import re
import unicodedata
from collections.abc import Iterable
from itertools import groupby

from anabranch.domain.errors import InvalidQuestion
from anabranch.text.normal_forms import normal_form

# Control, format (zero-width, bidirectional), surrogate, private and unassigned characters; separators but the space.
HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs")
# Letters and marks that are drawn as nothing or as a space, but are in none of these categories.
BLANK = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
# Marks that are drawn through a letter: they make an l out of a t, or hide what is written.
OVERLAYS = re.compile("[\u0334-\u0338\u0488\u0489\u20d2\u20d3\u20d8-\u20da\u20dd-\u20e0\u20e2-\u20e8]")
MAX_MARKS = 2
# The scripts that Unicode recommends for identifiers (UAX 31, table 5), as the names of their characters begin. Of the
# others, many draw a third of their letters as ASCII, and most readers see all of them as the same empty box.
SCRIPTS = re.compile(
    "ARABIC|ARMENIAN|BENGALI|BOPOMOFO|CYRILLIC|DEVANAGARI|ETHIOPIC|GEORGIAN|GREEK|GUJARATI|GURMUKHI|HANGUL|HAN|HEBREW|"
    "HIRAGANA|KANNADA|KATAKANA|KHMER|LAO|LATIN|MALAYALAM|MYANMAR|ORIYA|SINHALA|TAMIL|TELUGU|THAANA|THAI|TIBETAN|"
)
OTHER_NAMES = {"CJK": "HAN", "IDEOGRAPHIC": "HAN", "EXTENDED": "ARABIC", "COMBINING": "", "DIGIT": ""}
# Letters of these scripts that no language writes today: jamo, Khutsuri, old Cyrillic, phonetic and medieval Latin, and
# what was added behind the first 65,536 characters, except Han.
HISTORIC = re.compile(
    "[\u1100-\u11ff\ua960-\ua97f\ud7b0-\ud7ff\u10a0-\u10cf\u2d00-\u2d2f\u1c80-\u1c8f\ua640-\ua69f\u1d00-\u1dbf"
    "\ua720-\ua7ff\uab30-\uab6f\U00010000-\U0001ffff]"
)
# Latin letters and signs that are drawn as ASCII letters, or as the signs of addresses: these, after Unicode's list of
# confusable characters (UTS 39) without what is refused above, and without ı, æ and œ, which languages need.
LOOKALIKES = frozenset(
    "ƄƅƍƖƦƧƷƼƽȜȢȣȷɑɡɣɩɯʋʣʦʪʫẝỿǀǁǃ×℮∞∣∥∨∪⊤⋁⋃⋿⍳⍴⍺⏽╳⟙⤫⤬⨯‖₶🜀🜇🝌🝜🝨🝫🝬𝈆𝈍𝈒𝈓𝈖𝈪·‐‑⁃‒−∕⁄⧸⟋╱⫻⫽㇓᜵⁁∶꞉׃։፡⁚܃܄᛬᠃᠉ꓸꓹ׀˛᙭᙮￨"
)
ADDRESS_SIGNS = frozenset("-./:@_")
# What keyboards write, although Unicode has another way to write the same; and the dot of Catalan.
WRITTEN_SO = re.compile("[ำຳໜໝև]|(?<=[lL])·(?=[lL])")
# Of each script, the letters and marks that are drawn as ASCII. A script of which a name has only such letters is
# refused. After the same list; of scripts for which it says little, also those that are drawn so in usual fonts.
DRAWN_AS_ASCII = {
    "CYRILLIC": frozenset("абгеорсухіјѕһԁԛԝӏѡѵүҽӕькАВЕЗЅІЈКМНОРСТУХЫЬЮѴҮӔӠԌԚԜӀ"),
    "GREEK": frozenset("αβγικνορστυχωϲϳΑΒΕΖΗΙΚΜΝΟΡΤΥΧϜϹϺͿ"),
    "ARMENIAN": frozenset("ագզլհյոռսցւքօԼՍՏՕ"),
    "HEBREW": frozenset("וטןסװױײ"),
    "ARABIC": frozenset("اهھہە"),
    "ETHIOPIC": frozenset("ሀሠሰበነተከዐዘጠፐ"),
    "GEORGIAN": frozenset("იოყძხჽჿ"),
    "DEVANAGARI": frozenset("ऽॽः"),
    "BENGALI": frozenset("ঃ"),
    "GUJARATI": frozenset("ટડઃ"),
    "ORIYA": frozenset("ଠଃ"),
    "TAMIL": frozenset("டப"),
    "TELUGU": frozenset("ంః"),
    "KANNADA": frozenset("ಽಂಃ"),
    "MALAYALAM": frozenset("ടഠറംഃ"),
    "SINHALA": frozenset("ංඃ"),
    "THAI": frozenset("ดทนบปพฟมรลหเแ"),
    "LAO": frozenset("ດທນບປພຟມຣລຫເແ"),
    "MYANMAR": frozenset("ခဂငထပဝး"),
    "EAST ASIAN": frozenset("〇一丨丶丿ノーㄒㄧㄨ"),
}
# Beside Latin letters, these too are read as one: a word that has only such letters besides is refused.
DRAWN_AMONG_LATIN = DRAWN_AS_ASCII["EAST ASIAN"] | frozenset("工十丁卜口ㄚㄩㄇンソトエロニんへヘ")
# Scripts that one word mixes in Japanese, Chinese and Korean; Latin letters may stand among them (UTS 39, "highly
# restrictive").
EAST_ASIAN = (
    frozenset(("HAN", "HIRAGANA", "KATAKANA")),
    frozenset(("HAN", "BOPOMOFO")),
    frozenset(("HAN", "HANGUL")),
)


def check_lookalikes(name: str, what: str = "name") -> None:
    """Refuse a name that could be taken for another one; `what` says of which kind it is."""
    if "  " in name:
        raise InvalidQuestion(f"{what} has several spaces in a row; write one.")
    for character in WRITTEN_SO.sub("", name):
        _check_character(character, what)
    _check_marks(name, what)
    _check_scripts(name, what)


def _check_character(character: str, what: str) -> None:
    code, called = f"U+{ord(character):04X}", unicodedata.name(character, "no character")
    if character != " " and (unicodedata.category(character) in HIDDEN or BLANK.match(character)):
        raise InvalidQuestion(f"{what} has a character that cannot be seen, {code} ({called}); leave it out.")
    is_variant = "SMALL CAPITAL" in called or called.startswith("MODIFIER LETTER")
    if character in LOOKALIKES or OVERLAYS.match(character) or is_variant:
        raise InvalidQuestion(
            f"{what} has {character!r} ({code}, {called}), which looks like another character; write that one."
        )
    plain = normal_form(character, "NFKC")
    is_ascii = plain in ADDRESS_SIGNS or any(one.isascii() and one.isalnum() for one in plain)
    if plain != character and (character.isalnum() or plain.isalnum() or is_ascii):
        raise InvalidQuestion(f"{what} has {character!r} ({code}), which looks like {plain!r}; write {plain!r}.")
    is_recommended = SCRIPTS.fullmatch(_script(character)) and not HISTORIC.match(character)
    if _is_of_word(character) and not is_recommended:
        raise InvalidQuestion(
            f"{what} has {character!r} ({code}, {called}). New names have letters of the scripts that Unicode "
            "recommends for identifiers, and none of the past, because many others look alike; write it in one of "
            "these scripts."
        )


def _check_marks(name: str, what: str) -> None:
    """Refuse marks that stand on nothing, or several on each other."""
    row = MAX_MARKS
    for character in name:
        category = unicodedata.category(character)
        is_mark = category in ("Mn", "Me")
        row = row + 1 if is_mark else 0 if character.isalpha() or category == "Mc" else MAX_MARKS
        if row > MAX_MARKS:
            raise InvalidQuestion(
                f"{what} has the mark U+{ord(character):04X} ({unicodedata.name(character)}) where no letter carries "
                "it; leave it out."
            )


def _check_scripts(name: str, what: str) -> None:
    """Refuse words in several scripts, numbers in digits of several, and scripts that a name has only lookalikes or
    digits of."""
    used: dict[str, set[str]] = {}
    for is_word, characters in groupby(name, _is_of_word):
        word = "".join(characters) if is_word else ""
        scripts = {script for script in map(_script, word) if script}
        if len(scripts) > 1 and not any(scripts - {"LATIN"} <= mixed for mixed in EAST_ASIAN):
            raise InvalidQuestion(
                f"{what} mixes several scripts in {word!r} ({_listed(scripts)}), so that it can be taken for another "
                "one; write each word in one script."
            )
        foreign = {one for one in word if _group(_script(one)) == "EAST ASIAN"}
        if "LATIN" in scripts and foreign and foreign <= DRAWN_AMONG_LATIN:
            raise InvalidQuestion(
                f"{what} has {_listed(foreign)} among Latin letters in {word!r}, which look like Latin ones there; "
                "write it in Latin letters, or add a letter."
            )
        for character in word:
            used.setdefault(_group(_script(character)), set()).add(character)
    if len({ord(one) - unicodedata.decimal(one) for one in name if one.isdecimal()}) > 1:
        raise InvalidQuestion(f"{what} mixes digits of several scripts; use those of one.")
    used.pop("", None)
    for script, found in used.items():
        letters = {one for one in found if not one.isdecimal()}
        if letters <= DRAWN_AS_ASCII.get(script, frozenset()):
            told = (
                f"letters that all look like Latin ones ({_listed(letters)})" if letters else "digits, but no letters"
            )
            raise InvalidQuestion(
                f"{what} has {script.title()} {told}, so that it can be taken for another one; write it in Latin "
                "letters and the digits 0 to 9, or add a word."
            )


def _is_of_word(character: str) -> bool:
    """Whether it is a letter, a mark or a number, but no ASCII digit: those stand in words of every script."""
    return unicodedata.category(character)[0] in "LMN" and not ("0" <= character <= "9")


def _script(character: str) -> str:
    """The script of a letter, mark or number, by its Unicode name; empty if it is of every script."""
    first = unicodedata.name(character, "?").partition(" ")[0].partition("-")[0]
    return OTHER_NAMES.get(first, first)


def _group(script: str) -> str:
    return "EAST ASIAN" if any(script in mixed for mixed in EAST_ASIAN) else script


def _listed(found: Iterable[str]) -> str:
    return ", ".join(sorted(found))
