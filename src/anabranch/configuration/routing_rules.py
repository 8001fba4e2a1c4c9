"""Which rule a question falls under: patterns that are found in time linear in the question, whatever they are."""

import re
from collections.abc import Callable, Iterable
from functools import lru_cache

from anabranch.domain.mcp import ServerRule

MAX_PATTERN = 1_000
# Steps for each character of a question: `(a{1,1000}){1,100}` would be 100,000 of them.
MAX_EXPANDED = 1_000
TOKEN = re.compile(
    r"(?P<atom>\\[pPxuU]\{[^}]*\}|\\.|\[(?:\\.|[^\]\\])*\])|(?P<open>\()|(?P<close>\))|\{(?P<least>\d+)(?:,(?P<most>\d*))?\}|.",
    re.DOTALL,
)


def matching(rules: Iterable[ServerRule], query: str) -> ServerRule | None:
    """The first rule whose pattern is found in the question, in capital or small letters."""
    return next((rule for rule in rules if _finder(rule.pattern)(query)), None)


def mistake(pattern: str) -> str | None:
    """What is wrong with a pattern, if anything is."""
    if len(pattern) > MAX_PATTERN:
        return f"it is longer than {MAX_PATTERN:,} characters"
    if _expanded(pattern) > MAX_EXPANDED:
        return f"its repetitions come to more than {MAX_EXPANDED:,} characters"
    try:
        _finder(pattern)
    except ValueError as error:
        return str(error)
    return None


@lru_cache(maxsize=1_024)
def _finder(pattern: str) -> Callable[[str], bool]:
    """Python's own engine backtracks: `(a+)+$` would hold up everybody for hours. Rust's does not, and the MCP SDK
    brings it along."""
    from pydantic_core import SchemaError, SchemaValidator, core_schema  # noqa: PLC0415  35 ms, for those with rules

    try:
        schema = core_schema.str_schema(pattern=f"(?i){pattern}", regex_engine="rust-regex")
        return SchemaValidator(schema).isinstance_python
    except SchemaError as error:
        raise ValueError(_reason(str(error))) from None


def _reason(said: str) -> str:
    """The engine's own words: the last line, without what it has drawn above it."""
    last = said.strip().splitlines()[-1].strip()
    return last.removeprefix("error: ").removeprefix("SchemaError: ").rstrip(".")


def _expanded(pattern: str) -> int:
    """How many characters a pattern comes to when every counted repetition is written out, at the most."""
    sizes, last = [0], 0
    for token in TOKEN.finditer(pattern):
        if token["open"]:
            sizes.append(0)
        elif token["close"]:
            last = sizes.pop() if len(sizes) > 1 else 0
            sizes[-1] += last
        elif token["least"]:
            # Longer numbers are more than enough, and would take long to read.
            times = max(int(token["least"][:9]), int((token["most"] or "0")[:9]))
            sizes[-1] += last * max(times - 1, 0)
            last *= max(times, 1)
        else:
            sizes[-1] += 1
            last = 1
    return sum(sizes)
