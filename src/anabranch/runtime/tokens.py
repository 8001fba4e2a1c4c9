"""How many tokens a text has, for models whose tokenizer nobody knows."""

import asyncio
import re
from collections.abc import Sequence

PIECE = re.compile(r"[A-Za-z]+|\d+|[^\sA-Za-z\d]")


def estimate(text: str) -> int:
    """An estimate that leans high: Latin words count by their length, digits by threes, anything else one by one."""
    total = 0
    for match in PIECE.finditer(text):
        piece = match[0]
        if piece.isascii():
            total += 1 + (len(piece) - 1) // (3 if piece[0].isdigit() else 6)
        else:
            total += 1 + (ord(piece) > 0x2FFF)
    return total


class EstimatedTokens:
    """A TokenCounter that needs no vocabulary; it works in a thread, because long contexts take milliseconds."""

    async def count(self, texts: Sequence[str]) -> Sequence[int]:
        return await asyncio.to_thread(lambda: [estimate(text) for text in texts])
