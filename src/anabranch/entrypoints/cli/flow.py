"""Text that arrives in pieces, wrapped at words as it is printed."""

import re
from collections.abc import Callable

from rich.cells import cell_len

PIECE = re.compile(r"\n|[^\S\n]+|\S+")


class Flow:
    """Writes each word once it is whole, on a new line where the old one has no room. Without a width nothing is
    wrapped, and nothing is held back."""

    def __init__(self, write: Callable[[str], None], width: int | None) -> None:
        self._write = write
        self._width = width
        self._column = 0
        self._space = ""
        self._word = ""

    def feed(self, text: str) -> None:
        if self._width is None:
            self._write(text)
            return
        pieces = PIECE.findall(self._word + text)
        self._word = pieces.pop() if pieces and not pieces[-1].isspace() else ""
        for piece in pieces:
            self._place(piece)

    def end(self) -> None:
        self._place(self._word)
        self._word = ""

    def _place(self, piece: str) -> None:
        if piece == "\n":
            self._write("\n")
            self._column, self._space = 0, ""
        elif piece.isspace():
            self._space += piece.replace("\t", "    ")
        elif piece:
            length = cell_len(self._space) + cell_len(piece)
            if self._column and self._width is not None and self._column + length > self._width:
                self._write("\n")
                self._column, self._space = 0, ""
            self._write(self._space + piece)
            self._column += cell_len(self._space) + cell_len(piece)
            self._space = ""
