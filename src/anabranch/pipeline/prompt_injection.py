"""Defence against prompt injection: marks passages with suspected instructions; in answers, escapes HTML and removes
links that occur in no source."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from anabranch.domain.contracts import RunInThread
from anabranch.domain.model import Delta, Passage, Prompt

if TYPE_CHECKING:
    from anabranch.text.safe_markdown import SafeMarkdown

# Characters that are read at once: then it is the turn of other callers, and a question that was cancelled ends. More
# is read in a thread. Reading a passage takes as long as EACH characters, also if it is empty.
AT_ONCE, EACH = 10_000, 10
# Characters of a question's passages that are read. Those behind them are marked, because nobody has read them.
MAX_READ = 500_000
NOT_READ = f"not read: the passages before it have {MAX_READ:,} characters"
# Characters of a question with addresses that an answer may have.
MAX_QUESTION = 100_000
# Characters of an answer that are read before other tasks get a turn.
TURN = 16_384


async def marked(passages: tuple[Passage, ...], run: RunInThread = asyncio.to_thread) -> tuple[Passage, ...]:
    """The passages, each with the sentences in it that seem to be orders to a model."""
    if sum(map(_size, passages)) <= AT_ONCE:
        return _marked(passages)
    found: tuple[Passage, ...] = ()
    for part in _parts(passages):
        found += await run(_marked, part)
    rest = passages[len(found) :]
    return (*found, *(msgspec.structs.replace(one, suspected_instructions=(NOT_READ,)) for one in rest))


def _parts(passages: Sequence[Passage]) -> Iterator[Sequence[Passage]]:
    """Those that are read, in parts of about AT_ONCE characters."""
    begin = size = read = 0
    for end, passage in enumerate(passages, 1):
        size += _size(passage)
        if size >= AT_ONCE or end == len(passages):
            yield passages[begin:end]
            begin, size, read = end, 0, read + size
            if read >= MAX_READ:
                break


def _size(passage: Passage) -> int:
    from anabranch.text.instructions import MAX_READ as MOST  # noqa: PLC0415  chat does not need it

    return min(MOST, len(passage.title) + len(passage.text)) + EACH


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
