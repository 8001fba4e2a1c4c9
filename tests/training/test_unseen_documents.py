"""Documents of the development questions are not in the training data."""

from typing import Any

from training.documentation.unseen import without

QUESTIONS = {"packages": {"celery": {"files": ["docs/userguide/workers.rst"]}}}


def data(*groups: str) -> dict[str, Any]:
    questions = [{"q": f"about {at}", "pos": [at], "neg": [0, 1]} for at in range(len(groups))]
    return {"P": [{"g": group} for group in groups], "Q": questions, "held": []}


def test_questions_about_a_named_document_are_left_out_and_its_passages_are_no_near_ones() -> None:
    found = without(data("docs:Celery/userguide/workers.rst", "docs:Celery/faq.rst"), QUESTIONS)
    assert found["Q"] == [{"q": "about 1", "pos": [1], "neg": [1]}]


def test_a_document_of_the_same_path_in_another_package_stays() -> None:
    found = without(data("docs:Django/userguide/workers.rst", "docs:Celery/faq.rst"), QUESTIONS)
    assert len(found["Q"]) == 2


def test_a_package_is_found_by_the_name_of_its_distribution() -> None:
    questions = {"packages": {"jinja2": {"files": ["docs/faq.rst"]}}}
    found = without(data("docs:Jinja/faq.rst", "docs:Jinja/switching.rst"), questions)
    assert [question["q"] for question in found["Q"]] == ["about 1"]
