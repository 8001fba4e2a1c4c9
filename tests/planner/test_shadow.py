"""The comparison of shadow mode: where two answers differ, and nothing of what they say."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.planner.shadow import MAX_DIFFERENCES, MAX_PATH, differences
from support.examples import examples

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.5, 1.0, "", "x", "~/"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "/", "~"]), inner, max_size=3)
    ),
    max_leaves=8,
)
answers = st.dictionaries(st.sampled_from(["k", "l", "m/n"]), json_values, max_size=3)


def raws(answer: dict[str, Any]) -> dict[str, msgspec.Raw]:
    return {key: msgspec.Raw(json.dumps(value).encode()) for key, value in answer.items()}


def told(legacy: dict[str, Any], results: dict[str, Any]) -> list[str]:
    return [str(difference) for difference in differences(raws(legacy), raws(results))]


@pytest.mark.parametrize(
    ("legacy", "results", "found"),
    [
        ({}, {}, []),
        ({"k": {"a": 1, "b": [1, 2]}}, {"k": {"b": [1, 2], "a": 1.0}}, []),
        ({"k": {}}, {}, ["missing /k"]),
        ({}, {"k": {}}, ["extra /k"]),
        ({"k": {"a": 1}}, {"k": {"a": 2}}, ["different /k/a"]),
        ({"k": {"a": True}}, {"k": {"a": 1}}, ["different /k/a"]),
        ({"k": {"a": None}}, {"k": {}}, ["missing /k/a"]),
        ({"k": {"a": [1, {"b": 1}]}}, {"k": {"a": [1, {"b": 2}, 3]}}, ["different /k/a/1/b", "extra /k/a/2"]),
        ({"k": {"a": []}}, {"k": {"a": {}}}, ["different /k/a"]),
        ({"k": {"a/b": 1, "~": 1}}, {"k": {"~": 2}}, ["missing /k/a~1b", "different /k/~0"]),
    ],
)
def test_differences_between_the_legacy_answer_and_the_results(
    legacy: dict[str, Any], results: dict[str, Any], found: list[str]
) -> None:
    assert told(legacy, results) == found


@settings(max_examples=examples(60))
@given(answers, answers)
def test_differences_are_found_exactly_if_the_json_values_differ(one: dict[str, Any], other: dict[str, Any]) -> None:
    found, back = told(one, other), told(other, one)
    assert bool(found) == (json.dumps(_normal(one), sort_keys=True) != json.dumps(_normal(other), sort_keys=True))
    turned = {"missing": "extra", "extra": "missing", "different": "different"}
    assert sorted(f"{turned[kind]} {path}" for kind, _, path in (line.partition(" ") for line in found)) == sorted(back)


def _normal(value: Any) -> Any:
    """Numbers are equal if their values are, as in JSON."""
    if isinstance(value, dict):
        return {key: _normal(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_normal(inner) for inner in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def test_differences_are_bounded_and_contain_no_values() -> None:
    secret = "s3cret"
    found = told({"k": {str(n): secret for n in range(200)}}, {"k": {"x" * 1000: secret}})
    assert len(found) == MAX_DIFFERENCES
    assert all(len(line) <= MAX_PATH + len("different ") and secret not in line for line in found)


@pytest.mark.parametrize("broken", [b"{", b'{"a":"\xff"}', b"[" * 5000 + b"]" * 5000])
def test_json_that_cannot_be_decoded_is_different(broken: bytes) -> None:
    assert [str(one) for one in differences({"k": msgspec.Raw(b"{}")}, {"k": msgspec.Raw(broken)})] == ["different /k"]
