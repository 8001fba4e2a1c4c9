"""Names of collections: which are allowed, and which collection a name stands for."""

# ruff: noqa: RUF001  the lookalikes themselves

import re
import unicodedata
from collections.abc import Iterable, Sequence

from anabranch.domain.errors import Conflict, InvalidQuestion
from anabranch.knowledge.model import ADDRESS, EVERYTHING, Caller, Collection

MAX_NAME = 100
MAX_CHOICES = 10
# Control, format (zero-width, bidirectional), surrogate, private and unassigned characters; separators but the space.
HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs")
# Letters and marks that are drawn as nothing or as a space, but are in none of these categories.
BLANK = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
# Marks that are drawn through a letter: they make an l out of a t, or hide what is written.
OVERLAYS = re.compile("[\u0334-\u0338\u0488\u0489\u20d2\u20d3\u20d8-\u20da\u20dd-\u20e0\u20e2-\u20e8]")
MAX_MARKS = 2
# Latin letters and signs that are drawn as an ASCII letter, an apostrophe, a stop, a colon or a slash.
LOOKALIKES = frozenset("ɑɡɩɪʟʜʏǀǃꞁꞌʹʺʻʼʽˈˊˋ·ːꓸꓹ․‐‑∶：꞉∕⁄⧸／ƅƖ")
# Letters of other scripts that are drawn as one of ASCII. A script of which a name has only such letters is refused.
DRAWN_AS_ASCII = {
    "CYRILLIC": frozenset("аеорсухіјѕһԁԛԝӏѵькАВЕЅІЈКМНОРСТУХҮԌԚԜӀ"),
    "GREEK": frozenset("αβγιικνορτυχωϲϳΑΒΕΖΗΙΚΜΝΟΡΤΥΧϹͿ"),
    "ARMENIAN": frozenset("օսոհցզյՕՍՏԼ"),
    "CHEROKEE": frozenset("ᎠᎡᎢᎥᎩᎪᎫᎬᎳᎷᎻᎽᏀᏂᏃᏎᏒᏔᏕᏙᏚᏞᏟᏢᏦᏧᏴ"),
    "HEBREW": frozenset("ןסו"),
    "ARABIC": frozenset("اه٥ە"),
    "LISU": frozenset("ꓐꓑꓒꓓꓖꓗꓙꓚꓜꓝꓞꓟꓠꓡꓢꓣꓤꓦꓧꓨꓪꓫꓬꓮꓰꓲꓳꓴ"),
}
# Scripts that one word mixes in Japanese, Chinese and Korean.
EAST_ASIAN = (
    frozenset(("HAN", "HIRAGANA", "KATAKANA")),
    frozenset(("HAN", "BOPOMOFO")),
    frozenset(("HAN", "HANGUL")),
)
HAN = ("CJK", "IDEOGRAPHIC")


def checked_name(name: str) -> str:
    """The name for a new collection, composed (NFC); InvalidQuestion if it could be taken for another one."""
    name = unicodedata.normalize("NFC", name.strip())
    if not 1 <= len(name) <= MAX_NAME:
        raise InvalidQuestion(f"name must have 1 to {MAX_NAME} characters.")
    if name == EVERYTHING:
        raise InvalidQuestion(f"The name {EVERYTHING!r} stands for all collections; choose another one.")
    if "  " in name:
        raise InvalidQuestion("name has several spaces in a row; write one.")
    if name.casefold().startswith(ADDRESS):
        raise InvalidQuestion(f"name must not begin with {ADDRESS!r}: the addresses of collections do.")
    for character in name:
        _check_character(character)
    _check_marks(name)
    _check_scripts(name)
    return name


def matching(name: str, visible: Sequence[Collection], caller: Caller) -> list[Collection]:
    """The collection with this id, else address, else name; of several with the name the caller's own, else all. What
    is written as an address with an owner is never a name: whoever may choose a name could stand in for that owner."""
    written = {name, unicodedata.normalize("NFC", name)}
    bare = {one.removeprefix(ADDRESS) for one in written if not (one.startswith(ADDRESS) and "/" in one)}
    has_own = caller.operator or caller.user is not None
    named = [one for one in visible if one.name in bare]
    return (
        [one for one in visible if one.id in bare]
        or [one for one in visible if one.address in written]
        or [one for one in named if has_own and one.owner == caller.owner]
        or named
    )


def only(name: str, visible: Sequence[Collection], caller: Caller) -> Collection | None:
    """The collection that a name stands for; Conflict, with the choices, if it is ambiguous."""
    found = matching(name, visible, caller)
    if len(found) < 2:
        return found[0] if found else None
    choices = sorted(unambiguous(one, visible, caller) for one in found)
    more = f", or one of {len(choices) - MAX_CHOICES} more" if len(choices) > MAX_CHOICES else ""
    raise Conflict(f"Several collections are named {name!r}; use {' or '.join(choices[:MAX_CHOICES])}{more}.")


def unambiguous(one: Collection, visible: Sequence[Collection], caller: Caller, prefix: str = "") -> str:
    """The shortest name by which a caller gets this collection: its name behind the prefix, its address, or its id."""
    names = (prefix + one.name, one.address)
    return next((name for name in names if matching(name, visible, caller) == [one]), prefix + one.id)


def _check_character(character: str) -> None:
    code, called = f"U+{ord(character):04X}", unicodedata.name(character, "no character")
    if character != " " and (unicodedata.category(character) in HIDDEN or BLANK.match(character)):
        raise InvalidQuestion(f"name has a character that cannot be seen, {code} ({called}); leave it out.")
    if character in LOOKALIKES or OVERLAYS.match(character) or "SMALL CAPITAL" in called:
        raise InvalidQuestion(
            f"name has {character!r} ({code}, {called}), which looks like another character; write that one."
        )
    plain = unicodedata.normalize("NFKC", character)
    if plain != character and (character.isalnum() or plain.isalnum()):
        raise InvalidQuestion(f"name has {character!r} ({code}), which looks like {plain!r}; write {plain!r}.")


def _check_marks(name: str) -> None:
    """Refuse marks that stand on nothing, or several on each other."""
    row = MAX_MARKS
    for character in name:
        is_mark = unicodedata.category(character) in ("Mn", "Me")
        row = row + 1 if is_mark else 0 if character.isalpha() or _is_spacing_mark(character) else MAX_MARKS
        if row > MAX_MARKS:
            raise InvalidQuestion(
                f"name has the mark U+{ord(character):04X} ({unicodedata.name(character)}) where no letter carries it; "
                "leave it out."
            )


def _check_scripts(name: str) -> None:
    """Refuse words in letters of several scripts, numbers in digits of several, and scripts that a name has only
    lookalikes of."""
    letters: dict[str, set[str]] = {}
    for word in re.findall(r"[^\W\d_]+", name):
        found = {script: {one for one in word if _script(one) == script} for script in map(_script, word) if script}
        if len(found) > 1 and not any(found.keys() <= mixed for mixed in EAST_ASIAN):
            raise InvalidQuestion(
                f"name mixes letters of several scripts in {word!r} ({_listed(found)}), so that it can be taken for "
                "another name; write each word in one script."
            )
        for script, used in found.items():
            letters.setdefault(script, set()).update(used)
    for script, used in letters.items():
        if used <= DRAWN_AS_ASCII.get(script, frozenset()):
            raise InvalidQuestion(
                f"name has {script.title()} letters that all look like Latin ones ({_listed(used)}), so that it can be "
                "taken for another name; write it in Latin letters, or add a word."
            )
    zeros = {ord(one) - unicodedata.decimal(one) for one in name if one.isdecimal()}
    if len(zeros) > 1:
        raise InvalidQuestion("name mixes digits of several scripts; use those of one.")


def _script(character: str) -> str:
    """The script of a letter, by its Unicode name; empty for a mark, which has that of its letter."""
    if not character.isalpha():
        return ""
    first = unicodedata.name(character, "").partition(" ")[0].partition("-")[0]
    return "HAN" if first in HAN else "" if first == "MODIFIER" else first


def _is_spacing_mark(character: str) -> bool:
    return unicodedata.category(character) == "Mc"


def _listed(found: Iterable[str]) -> str:
    return ", ".join(sorted(found))
