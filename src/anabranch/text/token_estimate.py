"""Estimates token counts for models whose tokenizer is unknown."""

import asyncio
import string
from collections.abc import Callable, Sequence
from functools import partial

LETTERS = string.ascii_letters.encode()
SPACES = string.whitespace.encode()
DIGITS = string.digits.encode()
CONTINUATIONS = bytes(range(0x80, 0xC0))
TWO_BYTE_LEADS = bytes(range(0xC0, 0xE0))
INLINE_CHARACTERS = 500_000


def estimate(text: str) -> int:
    """A conservative estimate: 1.2 to 1.4 times what OpenAI's tokenizers count in English prose, German or code,
    1.0 to 1.9 times in Chinese, Japanese or Russian; only dense digits and base64 come out too low.

    It takes some 40 µs for 50 KB, where counting takes 16 ms and knows the tokens of one model only.
    """
    data = text.encode(errors="replace")
    no_letters = data.translate(None, LETTERS)
    rest = no_letters.translate(None, SPACES + CONTINUATIONS)
    no_digits = rest.translate(None, DIGITS)
    others = no_digits.translate(None, TWO_BYTE_LEADS)
    letters, digits = len(data) - len(no_letters), len(rest) - len(no_digits)
    return (letters * 2) // 7 + (digits * 3) // 5 + (len(no_digits) - len(others)) // 2 + len(others)


class EstimatedTokens:
    """A TokenCounter without a vocabulary; long texts are estimated in a thread."""

    async def count(self, texts: Sequence[str]) -> Sequence[int]:
        counted: Callable[[], list[int]] = partial(list, map(estimate, texts))
        return await asyncio.to_thread(counted) if sum(map(len, texts)) > INLINE_CHARACTERS else counted()
