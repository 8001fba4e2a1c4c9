"""Words as the keyword index sees them: folded, without stop words, stemmed; Chinese, Japanese and Korean in pairs."""

import hashlib
import re
import threading
import unicodedata
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import Stemmer

from anabranch.knowledge.stopwords import STOPWORDS

WORD = re.compile(r"[^\W_]+(?:['\u2019][^\W_]+)?")
IDEOGRAPHS = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff]+")
LONGEST = 64
_local = threading.local()


def terms(text: str) -> list[int]:
    """The text's terms in order, each as a number that is the same in every process."""
    if not text.isascii():
        text = unicodedata.normalize("NFKD", text)
        text = "".join(c for c in text if not unicodedata.combining(c)) if not text.isascii() else text
        text = unicodedata.normalize("NFC", text)
    numbers = (_number(word) for word in _words(text.lower()))
    return [number for number in numbers if number]


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
def _number(word: str) -> int:
    """0 for a stop word."""
    plain = word.replace("\u2019", "'")
    plain = plain.removesuffix("'s")
    if plain in STOPWORDS or len(plain) > LONGEST:
        return 0
    stem = _stemmer().stemWord(plain)
    return int.from_bytes(hashlib.blake2b(stem.encode(errors="replace"), digest_size=8).digest(), "little") | 1


def _stemmer() -> Any:
    if not hasattr(_local, "stemmer"):
        _local.stemmer = Stemmer.Stemmer("english")
    return _local.stemmer
