"""Lone surrogates in JSON: text that JSON allows, that cannot be encoded, and that decoders refuse."""

import re

SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
# Matches whole escapes, so that an escaped backslash does not start one.
ESCAPES = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.", re.DOTALL
)


def repair_surrogates(text: bytes) -> bytes:
    """The text with U+FFFD in place of each lone surrogate."""
    if SURROGATE.search(text) is None:
        return text
    return ESCAPES.sub(lambda found: rb"\ufffd" if found[1] else found[0], text)
