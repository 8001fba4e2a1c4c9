"""Word wrap of streamed answers."""

import itertools
import textwrap

from hypothesis import given
from hypothesis import strategies as st

from anabranch.entrypoints.cli.ask import WordWrap


def flowed(pieces: list[str], width: int | None) -> str:
    written: list[str] = []
    flow = WordWrap(written.append, width)
    for piece in pieces:
        flow.feed(piece)
    flow.end()
    return "".join(written)


@given(st.text(alphabet="ab \n", max_size=60), st.lists(st.integers(0, 60), max_size=6), st.integers(5, 20))
def test_word_wrap_does_not_depend_on_how_text_is_streamed(text: str, cuts: list[int], width: int) -> None:
    edges = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})
    pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
    shown = flowed(pieces, width)
    assert shown == flowed([text], width)
    assert shown.split() == text.split()
    assert all(len(line) <= width or " " not in line.strip() for line in shown.split("\n"))
    assert flowed(pieces, None) == text


def test_word_wrap_equals_textwrap() -> None:
    text = "The shop pays for the return label, and says so."
    assert flowed([text], 20) == "\n".join(textwrap.wrap(text, 20))
