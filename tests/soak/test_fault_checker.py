"""The checker of the fault scenarios: what it accepts, and that every rule and limit finds what breaks it."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support import fault_checker, fault_report
from support.fault_checker import EPOCH, LIMITS, RULES, History, faults, percentile
from support.fault_scenarios import SCENARIOS

TEXT = "Answer 1: it rejoins downstream [alice/docs]."
PASSAGE = "An anabranch rejoins the river downstream."
SOURCES = {"Rivers": {"slug": "alice/docs", "content": PASSAGE}}
QUOTE = {"source": "alice/docs", "start_char": 13, "end_char": 20, "quoted_text": "rejoins"}

Line = dict[str, Any]


def lines(client: str = "a", question: str = "1", **more: Any) -> list[Line]:
    """A question that was answered as it should be, in two connections."""
    own = {"client": client, "question": question}
    return [
        {"kind": "asked", "t": 0.0, "group": "questions", **own, **more},
        {"kind": "response", "t": 0.1, "status": 200, "stream": "s", **own},
        event(1, "token", {"content": TEXT[:10]}, **own),
        {"kind": "broken", "t": 0.2, **own},
        {"kind": "response", "t": 0.4, "status": 200, "stream": "s", **own},
        event(2, "token", {"content": TEXT[10:]}, **own),
        event(3, "done", {"sources": SOURCES, "sentences": [{"citations": [QUOTE]}]}, **own),
    ]


def event(number: int | None, name: str, data: Any, client: str = "a", question: str = "1") -> Line:
    return {"kind": "event", "t": 0.5, "id": number, "name": name, "data": data, "client": client, "question": question}


def history(*more: Line, own: list[Line] | None = None) -> History:
    sent = {"kind": "sent", "t": 0.0, "source": "alice/docs", "texts": [PASSAGE]}
    said = {"kind": "said", "t": 0.0, "question": "1", "text": TEXT}
    memory = [{"kind": "memory", "t": 0.0, "bytes": size * 2**20} for size in (100, 130)]
    fact = {"kind": "fact", "t": 0.0, "name": "left", "value": 3}
    return History([sent, said, *memory, fact, *(lines() if own is None else own), *more])


def found(wrong: History, **limits: Any) -> str:
    return "\n".join(faults(wrong, limits))


def test_a_history_as_it_should_be_has_no_faults() -> None:
    limits = {
        "answered": {"all": 1.0},
        "p50_s": {"all": 0.5},
        "p99_s": {"questions": 0.5},
        "memory_mb": 30,
        "facts": {"left": [0, 3]},
        "texts": {"questions": TEXT},
    }
    assert set(limits) | {"statuses", "errors"} == set(LIMITS)
    assert found(history(own=[*lines("a"), *lines("b")]), **limits) == ""
    # After a reset everything comes again, under other ids.
    again = [{**one, "id": EPOCH + one["id"]} if one["kind"] == "event" else one for one in lines()[1:]]
    assert found(history(*again, own=[*lines()[:3], event(None, "reset", {})])) == ""


def without(place: int) -> list[Line]:
    return [line for number, line in enumerate(lines()) if number != place]


LATER = {"client": "b", "question": "1"}
BROKEN: dict[str, tuple[History, str]] = {
    "no end": (history(own=lines()[:-1]), "accepted, and has no end"),
    "two ends": (history(event(4, "error", {"error": "x"})), "2 ends"),
    "after the end": (history(event(4, "token", {"content": ""})), "token after the end"),
    "twice": (history(own=[*lines()[:4], *lines()[2:]]), "1 after 1"),
    "backwards": (history(event(2, "token", {"content": ""})), "2 after 3"),
    "gap": (history(own=without(5)), "2 is missing, 3 came"),
    "late start": (history(own=without(2)), "1 is missing, 2 came"),
    "gap after a reset": (
        history(event(None, "reset", {}), event(EPOCH + 2, "done", {}), own=lines()[:3]),
        f"{EPOCH + 1} is missing",
    ),
    "other event": (
        history(*lines("b")[:2], event(1, "token", {"content": "Another"}, **LATER), {"kind": "left", "t": 1, **LATER}),
        "1 is token, and token for another reader, or other data",
    ),
    "other answer": (
        history(*lines("b")[:2], event(EPOCH + 1, "done", {}, **LATER)),
        "another answer than another reader",
    ),
    "text": (
        history(own=[*lines()[:5], event(2, "token", {"content": "!"}), lines()[6]]),
        "is not what the model said",
    ),
    "other words": (
        history(own=[*lines()[:2], event(1, "token", {"content": "Answer 2"}), event(2, "error", {"error": "x"})]),
        "has words of another answer",
    ),
    "document": (
        history(
            own=[*lines()[:6], event(3, "done", {"sources": {"Rivers": {**SOURCES["Rivers"], "content": "Lies."}}})]
        ),
        "never sent the document 'Rivers'",
    ),
    "borrowed name": (
        history(own=[*lines()[:6], event(3, "done", {"sources": {"Rivers": {**SOURCES["Rivers"], "slug": "eve/x"}}})]),
        "eve/x never sent",
    ),
    "quote": (
        history(own=[*lines()[:6], event(3, "done", {"sentences": [{"citations": [{**QUOTE, "start_char": 11}]}]})]),
        "does not stand in alice/docs",
    ),
    "status": (history({**lines()[1], "status": 503}), "HTTP [503]"),
    "error": (history(own=[*lines()[:3], event(2, "error", {"error": "internal_error"})]), "ended with internal_error"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_every_broken_rule_is_found(name: str) -> None:
    wrong, message = BROKEN[name]
    assert message in found(wrong)


def test_no_rule_is_without_a_history_that_breaks_it() -> None:
    for rule in RULES:
        assert any(list(rule(wrong)) for wrong, _ in BROKEN.values()), rule.__name__


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"answered": {"questions": 1.0}}, "66.7% of 3 questions"),
        ({"answered": {"nobody": 0.1}}, "nobody: 0.0% of 0"),
        ({"p50_s": {"all": 0.4}}, "p50 is 0.5 s"),
        ({"p99_s": {"all": 0.4}}, "p99 is 0.5 s"),
        ({"p99_s": {"nobody": 9}}, "p99 is None"),
        ({"memory_mb": 29}, "grew by 30.0 MB"),
        ({"facts": {"left": [0, 2]}}, "left is 3"),
        ({"facts": {"right": [0, 2]}}, "right was not measured"),
        ({"texts": {"questions": "Something else"}}, "not 'Something else'"),
    ],
)
def test_every_limit_that_is_exceeded_is_found(limits: Any, message: str) -> None:
    unanswered = lines("c")[:1]
    assert message in found(history(*lines("b"), *unanswered), **limits)


def test_a_500_is_never_allowed() -> None:
    assert "HTTP [500]" in found(history({**lines()[1], "status": 500}), statuses=[200, 500])


def test_a_client_that_left_needs_no_end() -> None:
    assert found(history({"kind": "left", "t": 1.0, "client": "a", "question": "1"}, own=lines()[:3])) == ""


def test_a_history_of_nobody_keeps_no_promise() -> None:
    assert found(history(own=[])) == "nobody asked anything"


def test_limits_and_lines_of_an_unknown_kind_are_refused() -> None:
    with pytest.raises(KeyError):
        faults(history(), {"p98_s": {}})
    with pytest.raises(ValueError, match="unknown kind"):
        history({"kind": "rumour", "t": 0})


def test_percentiles_are_values_that_were_measured() -> None:
    assert [percentile(range(1, 101), rank) for rank in (0.5, 0.99, 1)] == [50, 99, 100]
    assert (percentile([7], 0.99), percentile([], 0.5)) == (7, None)


def test_the_checker_runs_by_itself_and_imports_nothing_but_the_standard_library(tmp_path: Path) -> None:
    source = Path(fault_checker.__file__)
    tree = ast.walk(ast.parse(source.read_text(encoding="utf-8")))
    modules = [
        name
        for node in tree
        for name in (
            [one.name for one in node.names]
            if isinstance(node, ast.Import)
            else [node.module]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    ]
    assert {str(name).partition(".")[0] for name in modules} <= sys.stdlib_module_names
    (tmp_path / "history.jsonl").write_text("\n".join(map(json.dumps, lines())), encoding="utf-8")
    (tmp_path / "limits.json").write_text('{"p99_s": {"all": 0.1}}', encoding="utf-8")
    command = [sys.executable, "-I", str(source), str(tmp_path / "history.jsonl"), str(tmp_path / "limits.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "all: p99 is 0.5 s, and the limit 0.1 s" in json.loads(done.stdout)["faults"]


def test_every_scenario_promises_something_that_can_be_broken() -> None:
    names = [one.name for one in SCENARIOS]
    assert len(set(names)) == len(names) == 21
    for scenario in SCENARIOS:
        assert scenario.promise.endswith("."), scenario.name
        assert "answered" in scenario.limits, scenario.name
        assert set(scenario.all_limits) <= set(LIMITS), scenario.name


def test_the_report_hides_no_scenario_that_failed_or_was_not_run() -> None:
    about = {"promise": "It holds.", "date": "2026-01-01", "machine": "2 cores", "python": "3.11", "load": 0.5}
    figures = {"all": {"asked": 2, "answered": 1, "p50_s": 0.1, "p99_s": 0.25, "refused": {"503": 1}}}
    page = fault_report.page(
        [
            {"scenario": "good", **about, "measured": figures, "faults": []},
            {"scenario": "bad", **about, "measured": figures, "faults": ["c1, question 1: accepted, and has no end"]},
            {"scenario": "crashed", **about, "measured": {}, "faults": ["it did not run to its end"]},
            {"scenario": "skipped", **about, "skipped": "there is no C compiler"},
            {"scenario": "missing", "promise": "It holds."},
        ]
    )
    assert "1 of 5 promises were kept. Measured 2026-01-01 on 2 cores, Python 3.11" in page
    assert "| `good` | It holds. | kept | all: 1 of 2, 0.10 s and 0.25 s, 1 times 503 |" in page
    assert "| `bad` | It holds. | **broken** |" in page
    assert "| `crashed` | It holds. | **broken** |" in page
    assert "| `skipped` | It holds. | not run | there is no C compiler |" in page
    assert "| `missing` | It holds. | not run | there is no result |" in page
    assert "`bad`:\n\n- c1, question 1: accepted, and has no end" in page
