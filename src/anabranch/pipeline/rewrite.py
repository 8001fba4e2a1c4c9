"""Rewrite: a standalone question, variants of it, and a hypothetical answer to search for."""

import asyncio
import re
from collections.abc import Sequence
from contextlib import aclosing
from typing import NamedTuple

from anabranch.domain.contracts import Generator
from anabranch.domain.errors import AnabranchError
from anabranch.domain.model import Context, Message, Prompt

VERSION = "rewrite-1"
VARIANTS = 3
LONGEST = 1_000
MAX_TOKENS = 150
TURNS = 6
NUMBERED = re.compile(r"^[ \t]*(?:\d+[.)]|[-*])[ \t]*(\S.*)", re.MULTILINE)

STANDALONE = (
    "Below is a conversation and the next question in it. Write that question again so that it can be understood "
    "without the conversation: put names in place of words such as it, they or that. Write the question only."
)
HYPOTHETICAL = (
    "Write one short paragraph, as it might stand in a document, that answers the question. Do not mention the "
    "question, and do not say that you are unsure."
)
OTHER_WORDS = f"Put the question in {VARIANTS} other ways that mean the same, numbered from 1, each on its own line."


class Rewritten(NamedTuple):
    text: str
    variants: tuple[str, ...] = ()
    hypothetical: str | None = None


async def rewrite(
    text: str, history: Sequence[Message], generator: Generator, context: Context, budget_s: float
) -> Rewritten:
    """What the model does not return in time, or in the wrong form, is left out; the question is always returned."""
    found = Rewritten(text)
    try:
        async with asyncio.timeout(budget_s):
            if history:
                turns = "\n".join(f"{turn.role}: {turn.content[:LONGEST]}" for turn in history[-TURNS:])
                standalone = await _generated(generator, STANDALONE, f"{turns}\n\nNext question: {text}", context)
                found = Rewritten(_one_line(standalone) or text)
            hypothetical, variants = await asyncio.gather(
                _generated(generator, HYPOTHETICAL, f"Question: {found.text}", context),
                _generated(generator, OTHER_WORDS, f"Question: {found.text}", context),
            )
    except TimeoutError:
        return found
    return Rewritten(found.text, _listed(variants), hypothetical.strip()[:LONGEST] or None)


async def _generated(generator: Generator, system: str, user: str, context: Context) -> str:
    prompt = Prompt(
        question=user,
        messages=(Message(role="system", content=system), Message(role="user", content=user)),
        max_tokens=MAX_TOKENS,
        temperature=0.0,
        passages=(),
        version=VERSION,
    )
    try:
        async with aclosing(generator.generate(prompt, context)) as deltas:
            return "".join([delta.text async for delta in deltas])
    except AnabranchError:
        return ""


def _one_line(text: str) -> str:
    return " ".join(text.split())[:LONGEST]


def _listed(text: str) -> tuple[str, ...]:
    found = (match[1].strip().strip('"')[:LONGEST] for match in NUMBERED.finditer(text))
    return tuple(dict.fromkeys(line for line in found if line))[:VARIANTS]
