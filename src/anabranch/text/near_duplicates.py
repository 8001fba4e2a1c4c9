"""When two texts say the same although they differ in some characters."""

import re

DIGIT = re.compile(r"\d")
NUMBER = re.compile(r"\d+(?:[.,:/]\d+)*")
AROUND = ".,;:!?()[]{}<>\"'“”\u2018\u2019«»*_`|"
# Characters that negate, in scripts without spaces.
NEGATING = re.compile("[不没沒非未无無]")
# Words that change what is said, although they change few characters: negations in the five languages of the messages,
# and English words for numbers, dates and duties.
DECISIVE = frozenset(
    """
    no not none nor neither never nobody nothing nowhere without except unless cannot unlike
    nicht kein keine keinen keinem keiner keines nie niemals niemand nichts ohne außer
    non pas jamais sans sauf aucun aucune personne rien ni
    nunca jamás sin ningún ninguno ninguna nadie nada salvo
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million billion half
    first second third once twice
    january february march april may june july august september october november december
    monday tuesday wednesday thursday friday saturday sunday
    must shall should
    """.split()  # noqa: SIM905
)


def similarity(one: str, other: str, least: float = 0.0) -> float:
    """The normalized Levenshtein similarity: 1 - distance / length of the longer; 0 if it is below `least`, which is
    faster."""
    from rapidfuzz.distance import Levenshtein  # noqa: PLC0415  few questions need it

    return Levenshtein.normalized_similarity(one, other, score_cutoff=least)


def decisive_words(text: str) -> tuple[str, ...]:
    """The numbers, negations and dates of a text, in order. Texts that differ in them say different things, however
    similar they are."""
    found: list[str] = []
    for word in text.lower().split():
        bare = word.strip(AROUND)
        if bare in DECISIVE or bare.endswith(("n't", "n\u2019t")) or (bare.isascii() and DIGIT.search(bare)):
            found.append(bare)
        elif not bare.isascii():
            found += NUMBER.findall(bare)
            found += NEGATING.findall(bare)
    return tuple(found)
