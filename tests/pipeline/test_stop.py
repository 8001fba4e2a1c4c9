"""Stop sequences: what any generator writes ends before the first of them, however it comes in parts."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from hypothesis import given
from hypothesis import strategies as st

from anabranch.domain.model import Delta, QuotedSpan
from anabranch.pipeline.stop import stopped

LETTERS = st.text("abc", max_size=6)


async def cut(parts: Sequence[Delta], *sequences: str) -> list[Delta]:
    async def written() -> AsyncIterator[Delta]:
        for part in parts:
            yield part

    return [part async for part in stopped(written(), sequences)]


@given(st.lists(LETTERS, max_size=12), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4))
def test_an_answer_ends_before_the_first_stop_sequence(parts: list[str], sequences: list[str]) -> None:
    whole = "".join(parts)
    ends = [at for one in sequences if (at := whole.find(one)) >= 0]
    kept = asyncio.run(cut([Delta(text=part) for part in parts], *sequences))
    assert "".join(one.text for one in kept) == whole[: min(ends, default=len(whole))]
    assert [one.finish_reason for one in kept if one.finish_reason] == (["stop"] if ends else [])


async def test_a_part_is_sent_as_soon_as_no_stop_sequence_can_begin_in_it() -> None:
    read: list[str] = []

    async def written() -> AsyncIterator[Delta]:
        for part in ("one ", "two E", "N", "ough"):
            read.append(part)
            yield Delta(text=part)

    seen = [(one.text, len(read)) async for one in stopped(written(), ["END"])]
    assert seen == [("one ", 1), ("two E", 4), ("N", 4), ("ough", 4)]


async def test_a_quotation_that_loses_its_mark_quotes_nothing() -> None:
    span = (QuotedSpan(passage=0, start=0, end=5),)
    first = Delta(text="Yes. [1] ", quotes=span, mark="[1]")
    second = Delta(text="No more. [2]", quotes=span, mark="[2]", finish_reason="stop")
    kept = await cut([first, second], "more")
    assert [(one.text, one.quotes, one.finish_reason) for one in kept] == [
        ("Yes. [1] ", span, None),
        ("No ", (), None),
        ("", (), "stop"),
    ]


async def test_a_refusal_is_not_cut() -> None:
    refusal = Delta(text="The documents do not say.", abstained=True)
    assert await cut([refusal], "documents") == [refusal]
