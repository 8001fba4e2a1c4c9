"""Means, percentiles and the paired bootstrap of an evaluation of answers."""

import math

from anabranch.app.answer_comparison import differences, summary
from anabranch.app.answer_evaluation import MeasuredAnswer


def measured(
    recall: float | None = None, *, ms: float | None = 10.0, answerable: bool = True, no: bool = False
) -> MeasuredAnswer:
    failed = "The model is down." if ms is None else None
    return MeasuredAnswer(
        question="?", answerable=answerable, citation_recall=recall, latency_ms=ms, abstained=no, failed=failed
    )


def test_a_measure_is_the_mean_over_the_questions_that_it_applies_to() -> None:
    found = summary([measured(1.0), measured(0.5), measured(None, no=True), measured(None, no=True, answerable=False)])
    assert (found["citation_recall"].value, found["citation_recall"].questions) == (0.75, 2)
    assert found["answerable_refused"].value == round(1 / 3, 4)
    assert found["unanswerable_refused"].value == 1.0
    assert "containment" not in found


def test_latencies_are_percentiles_and_leave_out_failed_questions() -> None:
    found = summary([*(measured(ms=float(one)) for one in range(1, 101)), measured(ms=None)])
    assert (found["latency_p50_ms"].value, found["latency_p95_ms"].value) == (50.5, 95.05)
    assert found["latency_p50_ms"].questions == 100
    assert found["answerable_refused"].questions == 100


def test_a_paired_difference_is_certain_where_unpaired_means_are_not() -> None:
    """Every question is 0.1 better, while the questions differ much more than that from each other."""
    first = [measured(one % 9 / 10) for one in range(60)]
    second = [measured(one % 9 / 10 + 0.1) for one in range(60)]
    paired = differences(first, second)["citation_recall"]
    assert (paired.value, paired.low, paired.high) == (0.1, 0.1, 0.1)
    alone = summary(first)["citation_recall"]
    assert alone.low < alone.value - 0.04
    assert alone.high > alone.value + 0.04


def test_the_interval_of_a_mean_is_that_of_its_standard_error() -> None:
    found = summary([measured(float(one % 2)) for one in range(400)])["citation_recall"]
    assert abs((found.high - found.low) / 2 - 1.96 * math.sqrt(0.25 / 400)) < 0.005


def test_a_difference_of_a_measure_that_one_configuration_lacks_is_left_out() -> None:
    found = differences([measured(1.0), measured(0.0)], [measured(None), measured(None)])
    assert "citation_recall" not in found
    partly = differences([measured(1.0), measured(0.0)], [measured(None), measured(1.0)])["citation_recall"]
    assert (partly.value, partly.questions) == (0.5, 2)


def test_a_difference_that_rounds_to_zero_has_no_sign() -> None:
    found = differences([measured(1.0)] * 3, [measured(0.99999)] * 3)["citation_recall"]
    assert str((found.value, found.low, found.high)) == "(0.0, 0.0, 0.0)"


def test_equal_answers_give_equal_results() -> None:
    answers = [measured(one / 7) for one in range(7)]
    assert summary(answers) == summary(answers)
