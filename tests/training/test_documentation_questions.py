"""Questions about documentation: from small reStructuredText documents to questions with their evidence."""

import re
from random import Random

import pytest

from anabranch.domain.model import Embedding
from anabranch.knowledge.model import Chunking
from anabranch.models.calibration import MINILM
from training.documentation.__main__ import held_out
from training.documentation.asking import Place, Question
from training.documentation.dataset import Answers
from training.documentation.generators import questions
from training.documentation.markdown import written
from training.documentation.markup import markdown, plain
from training.documentation.passages import Prepared, normal, prepared
from training.documentation.prose import asked
from training.documentation.sources import Document
from training.documentation.structure import Items, Node, Section, Table, Thing, leaves_of, read
from training.documentation.unanswerable import Names, unanswerable
from training.documentation.wording import keywords, lower_first, reworded, third, typed, verb_phrase

SETTINGS = """\
========
Settings
========

Worker settings
===============

.. setting:: WORKER_TIMEOUT

``WORKER_TIMEOUT``
------------------

.. versionadded:: 2.4

Default: ``30``

The maximum number of seconds that a worker may take for a request.

If a worker takes longer, it is stopped.

.. setting:: WORKER_COUNT

``WORKER_COUNT``
----------------

Default: ``4``

Controls how many workers are started.

.. confval:: log_file
   :type: str
   :default: ``None``

   The path of the file that log messages are written to.

Stopping workers
================

To stop all workers at once, send a signal to the main process:

.. code-block:: console

   $ kill -TERM 1

The following signals are supported:

* ``TERM``: stops after the current request has been answered.
* ``INT``: stops at once, without waiting.

========  ===========  ==================
Signal    Since        Description
========  ===========  ==================
``TERM``  1.0          Waits for requests
``INT``   1.2          Stops at once
========  ===========  ==================
"""


DOCSTRING = """\
tables
======

read()
~~~~~~

Read a file into a table, row by row.

Parameters
----------
sep : str, default ','
    The character between two values of a row.
"""


def of_kind(text: str, kind: str, seed: int = 1) -> list[Question]:
    return [each for each in questions(read(text), Place("Demo"), Random(seed)) if each.kind == kind]


def words(question: Question) -> str:
    return " / ".join(leaf.words for leaf in question.evidence)


def find(nodes: list[Node], kind: type[Node]) -> list[Node]:
    found = []
    for node in nodes:
        found += [node] if isinstance(node, kind) else []
        found += find(getattr(node, "body", []), kind)
        found += [each for item in getattr(node, "items", ()) for each in find(item, kind)]
    return found


def test_leaves_are_spans_of_the_source() -> None:
    nodes = read(SETTINGS)
    for node in nodes:
        for leaf in leaves_of(node):
            assert SETTINGS[leaf.start : leaf.end].strip() == SETTINGS[leaf.start : leaf.end]
    sections = [node.title.words for node in find(nodes, Section) if isinstance(node, Section)]
    assert sections == ["Settings", "Worker settings", "WORKER_TIMEOUT", "WORKER_COUNT", "Stopping workers"]
    assert [len(node.items) for node in find(nodes, Items) if isinstance(node, Items)] == [2]
    assert [[cell.words for cell in node.header] for node in find(nodes, Table) if isinstance(node, Table)] == [
        ["Signal", "Since", "Description"]
    ]


def test_a_section_below_a_setting_directive_describes_that_setting() -> None:
    things = {thing.names[0]: thing for thing in find(read(SETTINGS), Thing) if isinstance(thing, Thing)}
    assert {name: thing.kind for name, thing in things.items()} == dict.fromkeys(
        ("WORKER_TIMEOUT", "WORKER_COUNT", "log_file"), "setting"
    )
    assert [thing.fields["default"].words for thing in things.values()] == ["30", "4", "None"]


def test_defaults_types_and_versions_are_asked_with_the_value_as_answer() -> None:
    answers = [(each.answer, words(each)) for each in of_kind(SETTINGS, "default")]
    assert answers == [("30", "30"), ("4", "4"), ("None", "None")]
    assert [each.answer for each in of_kind(SETTINGS, "type")] == ["str"]
    assert [each.answer for each in of_kind(SETTINGS, "version")] == ["2.4"]


def test_a_description_leads_to_its_setting() -> None:
    found = {each.answer: each.text for each in of_kind(SETTINGS, "thing-which")}
    assert "the maximum number of seconds that a worker may take for a request" in found["WORKER_TIMEOUT"]
    assert "controls how many workers are started" in found["WORKER_COUNT"]


def test_code_answers_what_the_sentence_before_it_says() -> None:
    (found,) = of_kind(SETTINGS, "code")
    assert "stop all workers at once" in found.text
    assert words(found).endswith("$ kill -TERM 1")


def test_a_list_answers_with_all_its_items() -> None:
    (found,) = of_kind(SETTINGS, "list")
    assert "signals" in found.text
    assert "supported" in found.text
    assert len(found.evidence) == 3


def test_a_table_is_asked_by_row_and_column() -> None:
    assert {each.answer for each in of_kind(SETTINGS, "table")} == {"1.0", "1.2", "Waits for requests", "Stops at once"}
    assert {each.answer for each in of_kind(SETTINGS, "table-reverse")} == {"TERM", "INT"}


def test_parameters_of_docstrings_belong_to_their_function() -> None:
    (default,) = of_kind(DOCSTRING, "default")
    assert default.answer == "','"
    assert "sep" in default.text
    assert "parameter of read" in default.text or "argument of read" in default.text
    (field,) = of_kind("f()\n===\n\n:param echo=False: if True, all statements are logged to the console.\n", "default")
    assert field.answer == "False"


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("If the template cannot be found, an error is raised.", r"(?i)what .*template cannot be found\?"),
        ("A chord is a task that runs after a group of tasks.", r"(?i).*\ba chord\b.*"),
        ("You cannot change the name of a running worker.", r".*change the name of a running worker\?"),
        ("Tags are slower than filters because tags can do anything.", r"Why are tags slower than filters\?"),
        ("Use the refresh method to load all values from the database.", r".*load all values from the database.*"),
    ],
)
def test_prose_becomes_the_question_that_it_answers(sentence: str, expected: str) -> None:
    (found,) = asked(sentence, Random(4))
    assert re.fullmatch(expected, found.text)


@pytest.mark.parametrize(
    "sentence",
    [
        "If this is the case, you can use the method above.",
        "It is a list of names.",
        "See the next section for details on workers and their limits.",
        "These can be changed later, as described below.",
    ],
)
def test_a_sentence_that_points_elsewhere_is_not_asked(sentence: str) -> None:
    assert asked(sentence, Random(1)) == []


def test_headings_become_imperatives() -> None:
    assert verb_phrase("Writing custom fields") == "write custom fields"
    assert verb_phrase("How to manage errors") == "manage errors"
    assert verb_phrase("Customize the pool") == "customize the pool"
    assert verb_phrase("Test discovery") is None
    assert verb_phrase("Connection pooling") is None
    assert third("apply") == "applies"
    assert lower_first("Django stores it") == "Django stores it"


def test_a_question_is_typed_in_many_ways() -> None:
    seen = {typed("How do I disable the maximum number of workers?", "Demo", Random(seed)) for seed in range(200)}
    assert len(seen) > 20
    assert any("turn off" in each or "switch off" in each for each in seen)
    assert any(each == each.lower() and not each.endswith("?") for each in seen)
    assert any("Demo" in each for each in seen)
    assert keywords("How do I set the timeout of a task?") == "set timeout task"
    assert reworded("What does `remove` do?", Random(1)) == "What does `remove` do?"


def test_markup_becomes_words_or_markdown() -> None:
    text = "Set :setting:`DEBUG` to ``False``, see :ref:`the guide <guide>` and `Redis <https://x>`_::"
    assert plain(text) == "Set DEBUG to False, see the guide and Redis:"
    assert markdown(text) == "Set `DEBUG` to `False`, see the guide and Redis:"


@pytest.mark.parametrize("seed", range(12))
def test_a_document_in_markdown_keeps_every_leaf(seed: int) -> None:
    nodes = read(SETTINGS)
    text, spans = written(SETTINGS, nodes, Random(seed))
    assert "::" not in text
    for node in nodes:
        for leaf in leaves_of(node):
            low, high = spans[leaf]
            assert normal(leaf.words) in normal(text[low:high]) or leaf.words == "2.4"


class Words:
    """An embedder whose tokens are words."""

    name = "words"
    dimensions = 1
    window = 254
    calibration = MINILM

    def tokens(self, text: str) -> list[tuple[int, int]]:
        return [found.span() for found in re.finditer(r"\w+|[^\w\s]", text)]

    async def embed(self, texts: object) -> list[Embedding]:
        raise NotImplementedError


async def ready(seed: int) -> Prepared:
    document = Document("Demo", "settings.rst", SETTINGS)
    return await prepared(document, "docs:demo", Chunking(strategy="sentence"), Words(), Random(seed))


@pytest.mark.parametrize("seed", range(8))
async def test_evidence_is_found_in_the_units_of_passages(seed: int) -> None:
    found = {each.question.kind: each for each in (await ready(seed)).found}
    assert {"default", "version", "thing-what", "code", "list", "table"} <= set(found)
    default = found["default"]
    assert default.answer is not None
    number, (low, high) = default.answer
    assert number in default.units
    assert default.passage.page.units[number].text[low:high] == default.question.answer
    assert any("kill" in found["code"].passage.page.units[number].text for number in found["code"].units)


async def test_unanswerable_questions_lose_their_evidence_or_ask_for_something_else() -> None:
    made = {}
    for seed in range(40):
        found = (await ready(seed % 4)).found
        names = Names(found)
        for each in found:
            if (question := unanswerable(each, names, Random(seed))) is not None:
                made[question.kind] = (each, question)
    each, cut = made["cut"]
    assert set(each.units) <= set(cut.cut)
    each, swapped = made["swap"]
    assert swapped.text != each.question.text
    assert not swapped.cut
    each, missing = made["missing"]
    assert re.search(r"(?i)version|default|introduced|since|not set", missing.text)


async def test_a_passage_with_the_evidence_is_no_negative() -> None:
    done = await ready(1)
    for each in done.found:
        assert Answers(each).may_be_in(each.passage)


def test_documents_of_every_package_are_held_out() -> None:
    found = [Document(package, f"{number}.rst", "x" * 100) for package in ("A", "B") for number in range(50)]
    held = held_out(found, seed=1)
    assert {name: sum(each.package == name for each in held) for name in ("A", "B")} == {"A": 4, "B": 4}
    assert held == held_out(list(reversed(found)), seed=1)
    assert held != held_out(found, seed=2)
