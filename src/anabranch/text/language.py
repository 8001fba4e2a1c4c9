"""Whether a text is English, by its function words, its accents and its script: for what has learned English only."""

import re

WORD = re.compile(r"[^\W\d_]+")
MAX_READ = 2_000
# The last letter of the Latin script with its common extensions.
LATIN = "\u024f"
FOREIGN_LETTERS = 0.2
_ENGLISH = """
a about after all although also an and another any are as at be because been before between both but by can cannot
could did do does during each either every first for from had has have he her his how however i if in into is it its
made may me more most must my no nor not of off on one only or other our out over own per she should since so some such
takes than that the their them then there these they this those three through to two under until up us used was we were
what when where which while who why will with within without won would wrote you your
"""
# English, and words of other languages too.
_SHARED = "a all also an as do had he her i in me no on or over per so was we will"
# German, Dutch, French, Spanish, Italian, Portuguese; without words that are also English, except "die".
_FOREIGN = """
aber acht als auch auf aus bei beträgt bis das dass dauert dem den der des die drei durch ein eine einem einen einer
eines er es fünf für gegen gibt heißt ich ihr ihre im ist jahre kann kein keine keinen kosten kostet können liegt mit
monate muss müssen nach neun nicht noch nur oder ohne schon sechs sehr seit sich sie sieben sind soll stunden tage tagen
uhr um und unter vier vom von vor waren wann warum weil welche welcher welches wenn werden wie wir wird wo wochen wurde
wurden zehn zu zum zur zwei zwischen öffnet über
een het hoe niet voor waar wat welke wordt zijn
au aux avec ce cette coûte dans du elle est et heures il ils jours la le les leur mais ne ont où ouvre par pas pour
pourquoi prix quand que quel quelle quelles quels qui sont sur un une à être
abre como cuesta cuál cuáles cuándo cuánto cómo con de del desde días dónde el en es esta este está horas la las los muy
más para pero por porque qué se sin son su tiene una y
anche apre che chi con cosa costa costo da dal dalle del della delle di dopo dove giorni gli il la nel nella non ore
perché più quale quali quando quanto sono tra è
ao aos com custa da dias do dos não onde os para pela pelo quais qual são uma é
"""
ENGLISH = dict.fromkeys(_ENGLISH.split(), 1.0) | dict.fromkeys(_SHARED.split(), 0.5)
FOREIGN = frozenset(_FOREIGN.split()) - ENGLISH.keys()
# Words within names of people, places and works.
_PARTICLES = frozenset(["da", "de", "del", "della", "den", "der", "des", "di", "dos", "du", "el", "et", "la", "las"])
_PARTICLES |= {"le", "les", "los", "von", "y"}
# What foreign words count: one before a capital may begin a name ("El Capitan"), and accents are in names too.
IN_NAME, ACCENT, ACCENT_IN_NAME, MOST_ACCENTS = 0.5, 0.5, 0.25, 1.0
# A single foreign word of a name makes no text foreign.
LEAST = 1.0
_NAME_BEFORE = re.compile(r"(?<!\w)[^\W\d_a-z]\w*(?: [a-z]{1,5}){0,2}[ ]\Z")
_ELISION = re.compile(r"(?<!\w)(?:[cdjln]|qu)['\u2019](?=[a-z\u00e0-\u00ff])", re.IGNORECASE)


def is_english(text: str) -> bool:
    """False for another script, and if another language has more of the function words. True for a list of keywords,
    which has none."""
    text = text[:MAX_READ]
    letters = "".join(WORD.findall(text))
    if sum(letter > LATIN for letter in letters) > FOREIGN_LETTERS * len(letters):
        return False
    english = foreign = accents = 0.0
    for found in WORD.finditer(text):
        word = found[0]
        known = word.lower()
        if known in ENGLISH:
            english += ENGLISH[known]
        elif known in FOREIGN:
            foreign += _weight(text, found)
        elif not word.isascii():
            accents += ACCENT if word[0].islower() else ACCENT_IN_NAME
    foreign += min(accents, MOST_ACCENTS) + len(_ELISION.findall(text))
    return foreign < LEAST or foreign <= english


def _weight(text: str, found: re.Match[str]) -> float:
    """What a foreign function word counts: nothing if it is a part of something longer ("IL-25", "de-identified",
    "example.com") or an acronym."""
    start, end = found.span()
    if text[end : end + 1] == "-" or (start and text[start - 1] in ".-_/@"):
        return 0.0
    if len(found[0]) > 1 and found[0].isupper():
        return 0.0
    if found[0] == "die" or text[end + 1 : end + 2].isupper():
        return IN_NAME
    return IN_NAME if found[0] in _PARTICLES and _NAME_BEFORE.search(text, max(0, start - 40), start) else 1.0
