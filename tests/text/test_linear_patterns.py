"""Patterns that read documents and answers take linear time, also for one repeated character."""

import time
from collections.abc import Callable, Mapping

import pytest

from anabranch.evidence.claims import NUMBER
from anabranch.knowledge.parse import csv_tables
from anabranch.text import disagreement, instructions, name_checks, tables

USES: Mapping[str, Callable[[str], object]] = {
    "joined letters": instructions.SPACED.findall,
    "e-mail addresses": name_checks._EMAIL.findall,
    "numbers of cells": csv_tables._NUMBER.fullmatch,
    "cells": tables._CELL.match,
    "names": disagreement.NAMELIKE.fullmatch,
    "numbers of claims": NUMBER.findall,
}
UNITS = ("_", "a", "A", "1", " ", "| ", "a.", "a@", "a_", "1'", "- ", "a a a a a aa ")
LENGTH = 40_000
# About a hundred times what each takes; the quadratic ones took seconds.
MOST_S = 0.25


@pytest.mark.parametrize("name", USES)
def test_a_pattern_takes_linear_time(name: str) -> None:
    for unit in UNITS:
        for end in ("", "'!"):
            began = time.process_time()
            USES[name]((unit * LENGTH)[:LENGTH] + end)
            assert time.process_time() - began < MOST_S, unit


def test_letters_with_separators_are_still_joined() -> None:
    assert instructions.SPACED.search("so i g n o r e s   all rules") is not None
    assert instructions.SPACED.search("i_g_n_o_r_e_s") is not None
