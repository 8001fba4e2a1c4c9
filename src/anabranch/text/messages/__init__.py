"""Our own messages in several languages, and the choice of the language."""

import re
from collections.abc import Mapping
from functools import cache

import msgspec

DEFAULT = "en"
LANGUAGES = (DEFAULT, "de", "es", "fr", "zh")

# Bounds on the Accept-Language header.
MAX_RANGES = 32
MAX_RANGE = 64

PLACEHOLDER = re.compile(r"\{(\w+)\}")
SUBTAGS = re.compile(r"([a-z]{1,8})(?:[-_][a-z0-9]{1,8})*", re.IGNORECASE | re.ASCII)
RANGE = re.compile(
    r"[ \t]*([a-z]{1,8}|\*)(?:-[a-z0-9]{1,8})*[ \t]*(?:;[ \t]*q=(0(?:\.\d{0,3})?|1(?:\.0{0,3})?)[ \t]*)?",
    re.IGNORECASE | re.ASCII,
)


def message(key: str, language: str | None = None, /, **values: str | int | float) -> str:
    """The message, in English for an unknown language. Values are inserted verbatim; a missing value is
    shown as `?`."""
    text = texts(known(language) or DEFAULT)[key]
    return PLACEHOLDER.sub(lambda found: str(values.get(found[1], "?")), text)


def known(tag: str | None) -> str | None:
    """The supported language of a tag such as `de-AT` or `zh_CN`, if any."""
    found = SUBTAGS.fullmatch(tag) if tag is not None and len(tag) <= MAX_RANGE else None
    language = found[1].lower() if found else None
    return language if language in LANGUAGES else None


def language_of(accept_language: str | None, wanted: str | None = None) -> str:
    """The language requested by name, else the best match of the Accept-Language header (RFC 9110, 12.5.4)."""
    return known(wanted) or _preferred(accept_language or "") or DEFAULT


def _preferred(accept_language: str) -> str | None:
    """The supported language with the highest weight, the first of equals; invalid parts are ignored."""
    weights: dict[str, float] = {}
    for entry in accept_language.split(",", MAX_RANGES)[:MAX_RANGES]:
        if len(entry) <= MAX_RANGE and (found := RANGE.fullmatch(entry)):
            language, weight = found[1].lower(), float(found[2] or 1)
            weights[language] = max(weight, weights.get(language, 0.0))
    if anything := weights.pop("*", 0.0):
        rest = next((language for language in LANGUAGES if language not in weights), DEFAULT)
        weights.setdefault(rest, anything)
    ours = [language for language, weight in weights.items() if weight > 0 and language in LANGUAGES]
    return max(ours, key=lambda language: weights[language], default=None)


@cache
def texts(language: str) -> Mapping[str, str]:
    from importlib.resources import files  # noqa: PLC0415  most processes need no message

    return msgspec.json.decode(files(__package__).joinpath(f"{language}.json").read_bytes(), type=dict[str, str])
