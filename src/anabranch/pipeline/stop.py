"""Stop sequences: end what any generator writes before the first text that the question names."""

from collections import deque
from collections.abc import AsyncIterator, Sequence

import msgspec

from anabranch.domain.model import Delta

STOPPED = "stop"


class StopSequences:
    """Cuts the parts of one answer. A part is held back while a stop sequence may begin in it. A text that says that
    there is no answer is not cut."""

    def __init__(self, sequences: Sequence[str]) -> None:
        self._sequences = sequences
        self._held: deque[Delta] = deque()
        # The text of the parts that are held back.
        self._text = ""
        self.found = False

    async def deltas(self, deltas: AsyncIterator[Delta]) -> AsyncIterator[Delta]:
        async for delta in deltas:
            if delta.abstained:
                yield delta
                continue
            # A sequence that ends in this part begins at most that many characters before it.
            begin = max(0, len(self._text) - max(map(len, self._sequences)) + 1)
            self._held.append(delta)
            self._text += delta.text
            found = [at for one in self._sequences if (at := self._text.find(one, begin)) >= 0]
            if found:
                self.found = True
                for part in self._cut(min(found)):
                    yield part
                return
            while self._held and len(self._held[0].text) <= self._decided():
                first = self._held.popleft()
                self._text = self._text[len(first.text) :]
                yield first
        for part in self._held:
            yield part

    def _decided(self) -> int:
        """The length of the held text in which no stop sequence begins."""
        longest = max(map(len, self._sequences)) - 1
        for at in range(max(0, len(self._text) - longest), len(self._text)):
            if any(one.startswith(self._text[at:]) for one in self._sequences):
                return at
        return len(self._text)

    def _cut(self, end: int) -> list[Delta]:
        """The parts up to there. A quoted one that loses its citation mark quotes nothing any more."""
        kept: list[Delta] = []
        for part in self._held:
            text = part.text[:end]
            end -= len(text)
            quotes = part.quotes if part.mark in text else ()
            kept.append(msgspec.structs.replace(part, text=text, quotes=quotes, finish_reason=None))
        kept.append(Delta(text="", finish_reason=STOPPED))
        return kept
