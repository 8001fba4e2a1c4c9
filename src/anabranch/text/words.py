"""Index terms of a text: normalized, stemmed, without stop words."""

import hashlib
import re
import threading
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import Stemmer

from anabranch.text.normal_forms import normal_form, without_accents

# Including the parts of contractions that are split at the apostrophe.
_WORDS = """
a about above after again against all almost already also although always am among an and another any anyone anything
are aren around as at be because been before behind being below beside between beyond both but by can cannot could
couldn did didn do does doesn doing don down during each either else even ever every everyone everything except few
for from had hadn has hasn have haven having he hence her here hers herself him himself his how however i if in indeed
into is isn it its itself just ll many may maybe me might more most much must my myself neither never nevertheless no
nobody none nor not nothing now of off often on once one only onto or other others otherwise our ours ourselves out
over own per perhaps quite rather re really s same shall she should shouldn since so some somebody someone something
sometimes still such t than that the their theirs them themselves then there therefore these they this those though
through throughout thus to too toward towards under unless until up upon us ve very via was wasn we were weren what
whatever when whenever where whereas wherever whether which while who whoever whom whose why will with within without
would wouldn yet you your yours yourself yourselves
"""

STOPWORDS = frozenset(_WORDS.split())

WORD = re.compile(r"[^\W_]+(?:['\u2019][^\W_]+)?")
IDEOGRAPHS = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff]+")
LONGEST = 64
_local = threading.local()


def terms(text: str) -> list[int]:
    """The text's terms in order, each as a 64-bit hash that is stable across processes."""
    text = normal_form(without_accents(text), "NFC").lower()
    return [term for term in map(_hashed, _words(text)) if term]


def _words(text: str) -> Iterator[str]:
    for word in WORD.findall(text):
        if word.isascii() or not IDEOGRAPHS.search(word):
            yield word
            continue
        at = 0
        for run in IDEOGRAPHS.finditer(word):
            if run.start() > at:
                yield word[at : run.start()]
            signs = run[0]
            yield from (signs[i : i + 2] for i in range(max(1, len(signs) - 1)))
            at = run.end()
        if at < len(word):
            yield word[at:]


@lru_cache(maxsize=200_000)
def _hashed(word: str) -> int:
    """The hash of a word's stem; 0 for a stop word."""
    plain = word.replace("\u2019", "'").removesuffix("'s")
    if plain in STOPWORDS or len(plain) > LONGEST:
        return 0
    stem = _stemmer().stemWord(plain)
    return int.from_bytes(hashlib.blake2b(stem.encode(errors="replace"), digest_size=8).digest(), "little") | 1


def _stemmer() -> Any:
    if not hasattr(_local, "stemmer"):
        _local.stemmer = Stemmer.Stemmer("english")
    return _local.stemmer
