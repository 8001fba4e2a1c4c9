"""Defence against prompt injection: marks passages with suspected instructions; in answers, escapes HTML and removes
links that occur in no source."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from anabranch.domain.model import Delta, Passage, Prompt

if TYPE_CHECKING:
    from anabranch.text.safe_markdown import SafeMarkdown

# More is read in a thread.
INLINE_CHARACTERS = 20_000
# Characters of a question with addresses that an answer may have.
MAX_QUESTION = 100_000
# Characters of an answer that are read before other tasks get a turn.
TURN = 16_384


async def marked(passages: tuple[Passage, ...]) -> tuple[Passage, ...]:
    """The passages, each with the sentences in it that seem to be orders to a model."""
    if sum(len(passage.text) for passage in passages) > INLINE_CHARACTERS:
        return await asyncio.to_thread(_marked, passages)
    return _marked(passages)


def _marked(passages: Sequence[Passage]) -> tuple[Passage, ...]:
    from anabranch.text.instructions import suspected_instructions  # noqa: PLC0415  chat does not need it

    found = [suspected_instructions(f"{passage.title}\n{passage.text}") for passage in passages]
    return tuple(
        msgspec.structs.replace(passage, suspected_instructions=orders) if orders else passage
        for passage, orders in zip(passages, found, strict=True)
    )


def checked_answer(prompt: Prompt) -> "SafeMarkdown":
    """What an answer to the prompt goes through: its links may lead where its passages and the question do."""
    from anabranch.text.safe_markdown import SafeMarkdown  # noqa: PLC0415  chat does not need it

    def addresses() -> str:
        urls = [one for passage in prompt.passages for one in (passage.url, passage.place and passage.place.url) if one]
        texts = [f"{passage.title}\n{passage.text}" for passage in prompt.passages]
        return "\n".join((prompt.question[:MAX_QUESTION], *urls, *texts))

    return SafeMarkdown(addresses)


async def checked_deltas(deltas: AsyncIterator[Delta], markdown: "SafeMarkdown") -> AsyncIterator[Delta]:
    """The parts of an answer as they may be shown. A part that says what it quotes stays whole, so that its citation
    marks keep their places."""
    read = 0
    async for delta in deltas:
        # Some models send all at once. A delta with quotes is one unit, and short.
        last = 0 if delta.quotes else max(0, len(delta.text) - 1) // TURN * TURN
        for at in range(0, last, TURN):
            yield Delta(text=markdown.feed(delta.text[at : at + TURN]))
            await asyncio.sleep(0)
        shown = markdown.feed(delta.text[last:]) + (markdown.end() if delta.quotes else "")
        yield delta if shown == delta.text else msgspec.structs.replace(delta, text=shown)
        read += len(delta.text) - last
        if read >= TURN:
            read = 0
            await asyncio.sleep(0)
    if rest := markdown.end():
        yield Delta(text=rest)
