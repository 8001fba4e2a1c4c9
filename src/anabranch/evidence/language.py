"""Whether a text is English: the evidence model was trained on nothing else."""

import re

# Words that are frequent in one language and rare in the others. A word of several foreign languages counts once.
_ENGLISH = """
the of and to is are was were that this these those for with from by or it be can which when how what where who why not
has have you your will if does do an as on at must should may
"""
_FOREIGN = """
der die das und ist nicht ein eine einen einem einer den dem des zu mit für auf sich wie werden wird sind wurde auch von
im zum zur oder wenn kann aus bei nach ich sie wir was welche wer wo warum
le la les et une dans pour que qui sur est pas par avec sont aux au du ce cette comment quel quelle pourquoi
el los las una por con para como del se su es cuál qué dónde cómo
il lo gli che di della per sono come nel alla
o os em um uma não com são ao dos
het een van en op te dat zijn niet met voor hoe wat
och att det som är en på av för
w na nie jest się że jak
"""
ENGLISH, FOREIGN = frozenset(_ENGLISH.split()), frozenset(_FOREIGN.split()) - frozenset(_ENGLISH.split())
WORD = re.compile(r"[^\W\d_]+")
READ = 2_000
# The largest share of letters outside of the Latin script in a text that is English nevertheless.
OTHER_SCRIPTS = 0.3
LAST_LATIN = "\u024f"


def is_english(text: str) -> bool:
    """True also for what has no language, such as code, numbers and names."""
    words = WORD.findall(text[:READ].lower())
    letters = sum(map(len, words))
    if sum(sign > LAST_LATIN for word in words for sign in word) > OTHER_SCRIPTS * letters:
        return False
    return sum(word in FOREIGN for word in words) <= sum(word in ENGLISH for word in words)
