"""What reads documents and answers takes linear time, also for one repeated character."""

import time
from collections.abc import Callable, Mapping
from itertools import product

import pytest

from anabranch.domain.model import Passage
from anabranch.evidence import claims, conflicts
from anabranch.evidence.claims import NUMBER
from anabranch.evidence.pages import paged
from anabranch.knowledge.parse import csv_tables
from anabranch.models import extractive
from anabranch.pipeline import rewrite
from anabranch.pipeline.cite import Marks, cite
from anabranch.pipeline.prompt import estimate
from anabranch.text import disagreement, exact_checks, instructions, language, name_checks, notation, tables
from anabranch.text.citation_marks import code_spans, without_marks
from anabranch.text.safe_markdown import SafeMarkdown
from anabranch.text.sentences import items, sentences
from anabranch.text.statements import claims_something, statements, without_signs
from anabranch.text.support import Wording, support
from anabranch.text.units import units
from anabranch.text.untrusted import neutralised
from anabranch.text.words import terms

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


QUESTION = "How long is the river in the north?"


def passages(text: str) -> tuple[Passage, ...]:
    said = {"geo/rivers": text, "geo/lakes": "It is long."}
    return tuple(Passage(text=one, title="Rivers", source=source, score=0.5) for source, one in said.items())


def safe(text: str) -> str:
    markdown = SafeMarkdown(lambda: "https://geo.example/")
    return markdown.feed(text) + markdown.end()


READERS: Mapping[str, Callable[[str], object]] = {
    "units": units,
    "sentences": lambda text: list(sentences(text)),
    "items": lambda text: list(items(text)),
    "statements": statements,
    "what is claimed": claims_something,
    "signs": without_signs,
    "instructions": instructions.suspected_instructions,
    "language": language.is_english,
    "marks": lambda text: list(Marks(passages(text)).written(text)),
    "citations of an answer": lambda text: cite(text + "[geo/lakes]", passages("It is long.")),
    "citations of a passage": lambda text: cite("This is how long it is [geo/rivers]", passages(text)),
    "code": code_spans,
    "text without marks": without_marks,
    "safe Markdown": safe,
    "a statement": lambda text: disagreement.ReadStatement(disagreement.Stated(text)).words,
    "differences": lambda text: exact_checks.differences("It is 5 km long in Berlin.", text, text),
    "numbers and times": lambda text: notation.in_notation_of("It is 5 km long.", text),
    "terms": terms,
    "passages of an answer": lambda text: claims.ReadPassages(passages(text)).candidates(QUESTION),
    "a copied sentence": lambda text: claims.ReadPassages(passages("It is long.")).copied(text),
    "pages": lambda text: paged(QUESTION, passages(text)),
    "conflicts": lambda text: conflicts.pairs(QUESTION, passages(text)),
    "words of a question": lambda text: Wording(QUESTION).within(text),
    "support": lambda text: support(QUESTION, passages(text)),
    "quotes": lambda text: extractive.quotes(QUESTION, passages(text)),
    "what is seen": lambda text: neutralised(text, "abcdef"),
    "tokens": estimate,
    "variants of a question": rewrite._listed,
}
HEADS = ("", "- a", "| ", "one two three four ", "[", "```")
REPEATED = ("a_", "_", " ", "\n", "\n-", ":", "a ", "1.", "*", "| a ", "[1]", "`", "(a", "a, ", "http://")
TAILS = ("!", "five:")
SHORT, LONG = 2_000, 8_000
# Four times the characters take four times as long; quadratic time is sixteen times as long.
MOST_TIMES = 8
# A text that is read faster than this is not measured again.
QUICK_S = 0.01


def seconds(read: Callable[[str], object], text: str, times: int) -> float:
    """The least of several measurements: other processes can only add to one."""
    taken: list[float] = []
    for _ in range(times):
        began = time.thread_time()
        read(text)
        taken.append(time.thread_time() - began)
    return min(taken)


@pytest.mark.parametrize("name", READERS)
def test_four_times_the_characters_take_about_four_times_as_long(name: str) -> None:
    read = READERS[name]
    read(QUESTION)
    for head, unit, tail in product(HEADS, REPEATED, TAILS):
        long = head + (unit * LONG)[:LONG] + tail
        if (once := seconds(read, long, 1)) < QUICK_S:
            continue
        short = seconds(read, head + (unit * SHORT)[:SHORT] + tail, 3)
        if once < MOST_TIMES * short:
            continue
        # A limit between the two lengths may have made the difference, or another process: asked again beyond it.
        longer = head + (unit * LONG * 4)[: LONG * 4] + tail
        assert seconds(read, longer, 3) < MOST_TIMES * max(seconds(read, long, 3), QUICK_S), (head, unit, tail)
