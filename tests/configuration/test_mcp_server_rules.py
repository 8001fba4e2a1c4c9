"""Server rules of the aggregator: which rule matches a question, and patterns that do not backtrack."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.configuration.mcp_servers import matching, pattern_problem
from anabranch.domain.mcp import ServerRule

RULES = (
    ServerRule(pattern="documentation|library|package|module", servers=("context7",)),
    ServerRule(pattern="code|class|function|method|variable", servers=("serena",)),
    ServerRule(pattern=r"^\d{4}-\d{2}$", servers=("memory",)),
)
LONG = 10_000


@pytest.mark.parametrize(
    ("query", "servers"),
    [
        ("which library parses YAML", ("context7",)),
        ("Documentation for requests", ("context7",)),
        ("a METHOD of that class", ("serena",)),
        ("the class of that library", ("context7",)),  # the first that matches
        ("2026-11", ("memory",)),
        ("in 2026-11", None),
        ("x" * LONG + " module", ("context7",)),
        ("", None),
    ],
)
def test_the_first_server_rule_that_matches_the_question_is_used(query: str, servers: tuple[str, ...] | None) -> None:
    rule = matching(RULES, query)
    assert (rule.servers if rule else None) == servers


@pytest.mark.parametrize(
    ("pattern", "query", "found"),
    [
        (".*", "", True),
        (".*", "\n", True),
        ("(?-i)Go", "go home", False),
        ("(?-i)Go", "Go home", True),
        ("straße", "STRASSE", False),
        ("ÉTÉ", "été", True),
        ("a|", "z", True),
        ("(?x) a b  # both", "ab", True),
        (r"\bC\+\+", "in C++ and", True),
        (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "id 123e4567-e89b-12d3-a456-426614174000", True),
    ],
)
def test_server_rule_patterns(pattern: str, query: str, found: bool) -> None:
    assert pattern_problem(pattern) is None
    assert bool(matching([ServerRule(pattern=pattern, servers=("a",))], query)) is found


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("[", "unclosed character class"),
        ("(", "unclosed group"),
        ("a)(b", "unopened group"),
        ("*", "repetition operator missing expression"),
        ("(?=a)", "look-around, including look-ahead and look-behind, is not supported"),
        (r"(a)\1", "backreferences are not supported"),
        ("x" * 1_001, "it is longer than 1,000 characters"),
        ("(a{1,1000}){1,100}b", "its repetitions expand to more than 1,000 characters"),
        ("a{99999999999999999999}", "its repetitions expand to more than 1,000 characters"),
        (r"\w{900}", "Compiled regex exceeds size limit of 10485760 bytes"),
    ],
)
def test_an_invalid_server_rule_pattern_says_why(pattern: str, said: str) -> None:
    assert pattern_problem(pattern) == said


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "(a|aa)+$",
        "(a*)*b",
        r"(.*a){20}b",
        "(a{0,30}){0,30}b",
        r"(\w+\s?)*!!",
        r"(?:a?){200}a{200}",
        r"(([a-z])+.)+[A-Z]([a-z])+$",
    ],
)
def test_server_rule_patterns_do_not_backtrack(pattern: str) -> None:
    """Python's own engine would take longer than the universe is old."""
    assert pattern_problem(pattern) is None
    rules = [ServerRule(pattern=pattern, servers=("a",))]
    began = time.process_time()
    matching(rules, "a" * (LONG - 1) + "?")
    assert time.process_time() - began < 1.0


@given(st.text(alphabet="ab(){}[]|*+?.^$\\0123456789,:!<=>ipx-", max_size=30), st.text(max_size=50))
def test_any_text_is_a_pattern_or_has_a_pattern_problem(pattern: str, query: str) -> None:
    if pattern_problem(pattern) is None:
        matching([ServerRule(pattern=pattern, servers=("a",))], query)
