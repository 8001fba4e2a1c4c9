"""Whether a text is English, by its function words and its script: for what has learned English only."""

import re

WORD = re.compile(r"[^\W\d_]+")
MAX_READ = 2_000
# The last letter of the Latin script with its common extensions.
LATIN = "\u024f"
FOREIGN_LETTERS = 0.2
_ENGLISH = """
a an and are as at be by can do does for from has have how i if in is it my not of on or that the their there they this
to was what when where which who why will with you your
"""
# German, Dutch, French, Spanish, Italian, Portuguese; without words that are also English.
_FOREIGN = """
auf aus bei das dem den der des ein eine einen einer für ich ist kann mit nach nicht oder sich sie sind über und von
wann warum welche welcher welches wenn werden wie wir wird wo zu zum zur
een het hoe niet voor waar wat welke wordt zijn
au aux avec ce cette comment dans du elle est et la le les mais ne où par pas pour pourquoi quand que quel quelle
quelles quels qui sont sur un une
como cómo con cuál cuáles cuándo cuánto de del dónde el en es esta la las los para por porque qué se su una y
che chi come cosa della delle di dove gli il non perché quale quali quando sono
com da das dos é não os onde para pelo qual quais são uma
"""
ENGLISH = frozenset(_ENGLISH.split())
FOREIGN = frozenset(_FOREIGN.split()) - ENGLISH


def is_english(text: str) -> bool:
    """False for another script, and if another language has more of the function words. True for a list of keywords,
    which has none."""
    words = WORD.findall(text[:MAX_READ].lower())
    letters = "".join(words)
    if sum(letter > LATIN for letter in letters) > FOREIGN_LETTERS * len(letters):
        return False
    return sum(word in FOREIGN for word in words) <= sum(word in ENGLISH for word in words)
