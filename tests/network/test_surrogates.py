"""Lone surrogates in JSON are replaced, and nothing else is."""

import pytest

from anabranch.network.surrogates import repair_surrogates


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (rb'"\ud83d"', rb'"\ufffd"'),
        (rb'"\uDE00 x"', rb'"\ufffd x"'),
        (rb'"\ud83d\ud83d\ude00"', rb'"\ufffd\ud83d\ude00"'),
        (rb'"\\ud83d"', rb'"\\ud83d"'),
        (rb'"\\\ud83d\n"', rb'"\\\ufffd\n"'),
        (rb'"\ud83"', rb'"\ud83"'),
    ],
    ids=range(6),
)
def test_surrogate_repair_distinguishes_pairs_and_escaped_backslashes(written: bytes, meant: bytes) -> None:
    assert repair_surrogates(written) == meant
