"""Stop sequences: end what any generator writes before the first text that the question names."""

from collections.abc import AsyncIterator, Iterator, Sequence

import msgspec

from anabranch.domain.model import Delta

# The finish reason of an answer that is complete, or ends at a stop sequence.
STOPPED = "stop"


async def stopped(deltas: AsyncIterator[Delta], sequences: Sequence[str]) -> AsyncIterator[Delta]:
    """The parts of an answer up to the first of the sequences. A part is held back while a sequence may begin in it. A
    text that says that there is no answer is not cut."""
    held: list[Delta] = []
    text = ""
    async for delta in deltas:
        if delta.abstained:
            yield delta
            continue
        held.append(delta)
        text += delta.text
        found = [at for one in sequences if (at := text.find(one)) >= 0]
        if found:
            for part in _cut(held, min(found)):
                yield part
            return
        undecided = _undecided(text, sequences)
        while held and len(held[0].text) <= len(text) - undecided:
            first = held.pop(0)
            text = text[len(first.text) :]
            yield first
    for part in held:
        yield part


def _undecided(text: str, sequences: Sequence[str]) -> int:
    """The length of the longest end of the text with which a sequence begins."""
    longest = max(map(len, sequences)) - 1
    ends = (text[at:] for at in range(max(0, len(text) - longest), len(text)))
    return next((len(end) for end in ends if any(one.startswith(end) for one in sequences)), 0)


def _cut(parts: Sequence[Delta], length: int) -> Iterator[Delta]:
    """Parts of that length together. One that loses its citation mark quotes nothing any more."""
    for part in parts:
        text = part.text[:length]
        length -= len(text)
        quotes = part.quotes if part.mark in text else ()
        yield msgspec.structs.replace(part, text=text, quotes=quotes, finish_reason=None)
    yield Delta(text="", finish_reason=STOPPED)
