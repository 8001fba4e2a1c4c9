"""Training data becomes inputs with labels that point at the right units and tokens."""

import json
import lzma
from pathlib import Path
from random import Random
from typing import Any

import pytest

from anabranch.models.evidence_input import UNIT
from anabranch.models.minilm import NAME, TOKENIZER
from training.batches import FIELDS, Epochs
from training.corpus import Corpus
from training.examples import NO_ANSWER, NO_SPAN, UNKNOWN, Example, Examples
from training.inputs import plain_tokenizer
from training.mine import OtherData, hard, mined

UNITS = [
    "The cache holds 300 pages. ",
    "Pages are dropped from the cache after one hour. ",
    "Ask the operator for more room when it is full.",
]
NEAR = [["Bread is baked with flour. ", "It needs salt."], ["Rivers carry water. ", "Some are long."]] * 2


def data() -> dict[str, Any]:
    passages = [{"t": "Cache", "s": UNITS, "g": "squad1:Cache"}]
    passages += [{"t": "Other", "s": units, "g": "squad1:Other"} for units in NEAR]
    passages.append({"t": "Held", "s": ["A held text."], "g": "held:docs"})
    settings = ["`size`: how many pages", "`age`: how long they stay"]
    passages.append({"t": "Settings", "s": settings, "b": ["Settings of the cache", ""], "g": "docs:x"})
    return {
        "P": passages,
        "Q": [
            {
                "q": "How many pages does the cache hold?",
                "pos": [0],
                "sup": {"0": [0]},
                "ans": [0, 16, "300"],
                "a": 1,
                "neg": [1, 2, 3, 4, 5],
                "k": "squad1",
            },
            {"q": "What is `age`?", "pos": [6], "sup": {}, "ans": None, "a": 0, "cut": [1], "k": "docs:cut"},
            {"q": "What is `size`?", "pos": [6], "sup": {"6": [0]}, "ans": None, "a": 1, "neg": [1], "k": "docs:item"},
        ],
        "C": [["The cache holds pages.", UNITS[0], 0, "fever"], ["It is red.", UNITS[1], -1, "mnli", "Cache"]],
        "held": [{"q": "Held?", "pos": [5], "a": 1}],
    }


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "data.json.xz"
    path.write_bytes(lzma.compress(json.dumps(data()).encode()))
    return path


@pytest.fixture(scope="module")
def corpus(path: Path, models_dir: Path) -> Corpus:
    return Corpus([path], plain_tokenizer((models_dir / NAME / TOKENIZER).read_bytes()))


def of_question(corpus: Corpus, number: int) -> list[Example]:
    examples = Examples(corpus)
    return [example for seed in range(60) for example in examples.of_question(number, Random(seed))]


def evidence(corpus: Corpus, example: Example) -> list[list[int]]:
    """The ids of the units that are labelled as evidence."""
    return [
        example.input.ids[place.marker + 1 : place.end]
        for place, label in zip(example.input.places, example.units, strict=True)
        if label == 1
    ]


def test_evidence_and_answer_are_labelled_where_they_are(corpus: Corpus) -> None:
    found = [example for example in of_question(corpus, 0) if example.answerable == 1]
    assert {len(example.input.places) for example in found} > {3}
    for example in found:
        first, last = example.span
        assert example.input.ids[first : last + 1] == corpus.ids("300")
        assert evidence(corpus, example) == [corpus.ids(UNITS[0])]
        assert example.relevance == 1


def test_inputs_without_the_evidence_are_not_answerable(corpus: Corpus) -> None:
    found = [example for example in of_question(corpus, 0) if example.answerable == 0]
    assert found
    for example in found:
        assert example.span in (NO_ANSWER, NO_SPAN)
        assert not evidence(corpus, example)
    assert any(corpus.ids(UNITS[2]) == example.input.ids[-1 - len(corpus.ids(UNITS[2])) : -1] for example in found)


def test_units_that_are_cut_are_not_shown_and_what_is_before_a_unit_is(corpus: Corpus) -> None:
    found = of_question(corpus, 1)
    assert found
    for example in found:
        [place] = example.input.places
        before = corpus.ids("Settings of the cache")
        assert example.input.ids[place.marker - len(before) : place.marker] == before
        assert example.input.ids[place.marker : place.end] == [UNIT, *corpus.ids("`size`: how many pages")]
        assert (example.answerable, example.span) == (0, NO_ANSWER)


def test_questions_made_from_structure_mostly_teach_only_which_unit_answers(corpus: Corpus) -> None:
    found = of_question(corpus, 2)
    unjudged = [example for example in found if example.answerable == UNKNOWN]
    assert all(example.relevance == UNKNOWN and 1 in example.units for example in unjudged)
    assert {example.answerable for example in found} == {UNKNOWN, 0, 1}
    assert len(unjudged) > sum(example.answerable == 1 for example in found)


def test_held_out_passages_are_not_shown(corpus: Corpus) -> None:
    assert corpus.questions[0].negatives == (1, 2, 3, 4)
    assert len(corpus.questions) == 3


def test_capital_letters_do_not_matter(corpus: Corpus) -> None:
    assert corpus.ids("What is DEBUG in Django?") == corpus.ids("what is debug in django?")


def test_a_claim_says_what_it_is(corpus: Corpus) -> None:
    examples = Examples(corpus)
    assert [examples.of_claim(number, Random(0)).claim for number in (0, 1)] == [0, -1]
    made = [examples.made_claim(Random(seed)) for seed in range(80)]
    assert {example.claim for example in made if example} == {0, 1, 2}


def test_a_chunk_depends_only_on_the_seed_and_its_number(corpus: Corpus) -> None:
    def numbers(seed: int, chunk: int) -> bytes:
        epochs = Epochs(corpus, Examples(corpus), seed=seed, tokens=512, made_claims=3)
        return epochs[chunk].numbers.tobytes()

    assert numbers(1, 2) == numbers(1, 2)
    assert len({numbers(1, 2), numbers(1, 3), numbers(2, 2)}) == 3


def test_batches_hold_their_examples_within_the_token_limit(corpus: Corpus) -> None:
    chunk = Epochs(corpus, Examples(corpus), seed=1, tokens=512, made_claims=5)[0]
    at = 0
    for shape in chunk.shapes:
        rows = chunk.numbers[at : at + shape.inputs * shape.width()].reshape(shape.inputs, -1)
        at += rows.size
        assert shape.inputs * shape.tokens <= 512 or shape.inputs == 1
        lengths = rows[:, FIELDS.index("length")]
        ids = rows[:, len(FIELDS) + 2 * shape.units + shape.tokens :]
        assert [int((row != 0).sum()) for row in ids] == lengths.tolist()
    assert at == chunk.numbers.size


def test_hard_passages_are_those_that_do_not_answer_after_all() -> None:
    scores = {0: (3.0, 2.0), 1: (2.0, 2.5), 2: (1.0, -1.0), 3: (-9.0, -9.0), 4: (2.5, 0.0)}
    assert hard(scores, 0) == [4, 2]


def test_hard_passages_of_other_data_are_refused(corpus: Corpus, tmp_path: Path) -> None:
    file = tmp_path / "hard.json"
    record = {"data_sha256": corpus.sha256, "questions": len(corpus.questions), "hard": {"0": [2]}}
    file.write_text(json.dumps(record))
    assert mined(file, corpus) == {0: (2,)}
    for other in ({"data_sha256": {"data.json.xz": "0"}}, {"questions": 2}):
        file.write_text(json.dumps({**record, **other}))
        with pytest.raises(OtherData, match="other data"):
            mined(file, corpus)
