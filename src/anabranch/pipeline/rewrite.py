"""Rewrite: the question in words that stand alone, in other words, and the answer that one would hope to find."""

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
TURNS = 6
NUMBERED = re.compile(r"^[ \t]*(?:\d+[.)]|[-*])[ \t]*(\S.*?)[ \t]*$", re.MULTILINE)

ALONE = (
    "Below is a conversation and the next question in it. Write that question again so that it can be understood "
    "without the conversation: put names in place of words such as it, they or that. Write the question only."
)
HOPED_FOR = (
    "Write one short paragraph, as it might stand in a document, that answers the question. Do not mention the "
    "question, and do not say that you are unsure."
)
OTHERWISE = f"Put the question in {VARIANTS} other ways that mean the same, numbered from 1, each on its own line."


class Rewritten(NamedTuple):
    text: str
    variants: tuple[str, ...] = ()
    hypothetical: str | None = None


async def rewrite(
    text: str, history: Sequence[Message], generator: Generator, context: Context, budget_s: float
) -> Rewritten:
    """Whatever the model does not say in time, or says badly, is left out: the question itself is always there."""
    found = Rewritten(text)
    try:
        async with asyncio.timeout(budget_s):
            if history:
                told = "\n".join(f"{turn.role}: {turn.content[:LONGEST]}" for turn in history[-TURNS:])
                alone = await _said(generator, ALONE, f"{told}\n\nNext question: {text}", context, 150)
                found = Rewritten(_one_line(alone) or text)
            hoped, other = await asyncio.gather(
                _said(generator, HOPED_FOR, f"Question: {found.text}", context, 150),
                _said(generator, OTHERWISE, f"Question: {found.text}", context, 150),
            )
    except TimeoutError:
        return found
    return Rewritten(found.text, _listed(other), hoped.strip()[:LONGEST] or None)


async def _said(generator: Generator, system: str, user: str, context: Context, max_tokens: int) -> str:
    prompt = Prompt(
        question=user,
        messages=(Message(role="system", content=system), Message(role="user", content=user)),
        max_tokens=max_tokens,
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
