"""Examples for the model: inputs with their labels, drawn afresh in every epoch."""

from collections import defaultdict
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from anabranch.models.evidence_input import JOINT, MAX_QUESTION, SINGLE, InputIds, PageIds, UnitIds, laid_out
from training.claims import differing, made_wrong, reworded
from training.corpus import Answer, Corpus, Question
from training.sources import PASSAGE_ONLY, source
from training.text import keywords

# Labels that are not known, and so not trained.
UNKNOWN = -1
# The claim label of an example that is not a claim: -1 says "not supported".
NO_CLAIM = -9
# Of a claim that only a teacher judges.
UNJUDGED = -2
SUPPORTED, UNCERTAIN, CONTRADICTED = 0, 1, 2
NO_SPAN, NO_ANSWER = (-1, -1), (0, 0)

# Shares of the examples.
WITHOUT_TITLE = 0.12
AS_KEYWORDS = 0.08
WITHOUT_MARK = 0.25
CUT, CHANGED = 0.3, 0.3
ONLY_NEAR = 0.1
NEAR_SPAN = 0.3
# Supported claims that are shown with something changed.
MADE_WRONG = 0.3
# With a teacher: claims that are shown as another of the same title, or with tokens changed at random.
OTHER_CLAIM, NOISE = 0.12, 0.18
# How many claims before and after may be of the same title; and the most tokens that are changed.
NEIGHBOURS, CHANGES = 30, 3
# With questions that need several passages.
SEVERAL_DRAWS, SEVERAL_ONLY_NEAR = 3, 0.8
# The weight of units of near passages: nobody has checked that none of them is evidence.
NEAR_WEIGHT = 0.5

# Room for special tokens and a title.
FRAME = 30
CLAIM_ROOM, SPARSE_ROOM, NEAR_ROOM = 300, 150, 130
# Answers and sentences of these lengths, in characters, make good claims.
LONGEST_ANSWER = 60
SENTENCE = (35, 330)

QUESTION_MARK = 1029


class Example(NamedTuple):
    """`units` has a label for each unit of the input; `span` is the answer's first and last token, NO_ANSWER if the
    input has none, NO_SPAN if it is not known."""

    input: InputIds
    units: tuple[int, ...] = ()
    span: tuple[int, int] = NO_SPAN
    relevance: int = UNKNOWN
    answerable: int = UNKNOWN
    claim: int = NO_CLAIM
    unit_weight: float = 1.0
    # Of each token of the claim, whether it is wrong; empty if that is not known.
    wrong: tuple[int, ...] = ()


class Part(NamedTuple):
    """Units of a passage. `evidence` None: it is not known which units are evidence."""

    passage: int
    units: Sequence[int]
    evidence: Sequence[int] | None
    titled: bool = True


class Examples:
    def __init__(
        self, corpus: Corpus, hard: dict[int, tuple[int, ...]] | None = None, *, unjudged: bool = False
    ) -> None:
        """`hard` has near passages that a trained model takes for right, by question. `unjudged`: there is a teacher,
        who also judges claims without a label."""
        self._corpus = corpus
        self._unjudged = unjudged
        self._hard = hard or {}
        answers = [question for question in corpus.questions if question.answer]
        self._answered = [each for each in answers if each.answer and len(each.answer.text) < LONGEST_ANSWER]
        self._answers: dict[int, list[str]] = defaultdict(list)
        for question in self._answered:
            assert question.answer
            self._answers[question.answer.passage].append(question.answer.text)
        self._claimed = [
            number
            for number in sorted(corpus.used)
            if len(corpus.passages[number].units) > 1 and source(corpus.passages[number].source).claims
        ]

    def of_question(self, number: int, rng: Random) -> list[Example]:
        judged = rng.random() < source(self._corpus.questions[number].source).judged
        examples = self._of_question(number, rng)
        return examples if judged else [_choice(example) for example in examples if 1 in example.units]

    def _of_question(self, number: int, rng: Random) -> list[Example]:
        question = self._corpus.questions[number]
        head = self._head(number, rng)
        if question.source in PASSAGE_ONLY:
            part = self._part(question.positives[0], None, (), self._room(head), rng)
            label = int(question.answerable)
            return [self._example(head, [part], relevance=label, answerable=label)]
        if not question.answerable:
            return self._unanswerable(question, head, rng)
        near = self._near(number)
        return [
            *self._alone(question, head, rng),
            *self._together(question, head, near, rng),
            *self._changed(question, near, rng),
            *self._only_near(question, head, near, rng),
        ]

    def of_claim(self, number: int, rng: Random) -> Example:
        corpus, claim = self._corpus, self._corpus.claims[number]
        first, end = corpus.first_claim_unit[number : number + 2].tolist()
        titled = rng.random() >= WITHOUT_TITLE
        page = PageIds(
            corpus.claim_titles[number] if titled else (),
            [UnitIds((), corpus.claim_units[k]) for k in range(first, end)],
        )
        if self._unjudged and (draw := rng.random()) < OTHER_CLAIM + NOISE:
            shown = [each for unit in page.units for each in unit.text]
            head = self._other_claim(number, rng) if draw < OTHER_CLAIM else corpus.claim_heads[number]
            input_ids = laid_out(_noisy(head, shown, rng) if draw >= OTHER_CLAIM else head, [page], SINGLE, claim=True)
            return Example(input_ids, (UNKNOWN,) * len(input_ids.places), claim=UNJUDGED)
        head, label, wrong = corpus.claim_heads[number], claim.label, self._wrong(claim.text, claim.right)
        if label == SUPPORTED and self._claimed and rng.random() < MADE_WRONG:
            elsewhere = self._text(rng.choice(self._claimed))
            if changed := made_wrong(claim.text, " ".join(claim.evidence), elsewhere, rng):
                head, label, wrong = corpus.ids(changed), CONTRADICTED, self._wrong(changed, claim.text)
        input_ids = laid_out(head, [page], SINGLE, claim=True)
        labels = [UNKNOWN if claim.needed is None else int(place.unit in claim.needed) for place in input_ids.places]
        return Example(input_ids, tuple(labels), claim=label, wrong=wrong)

    def _other_claim(self, number: int, rng: Random) -> list[int]:
        """A claim near this one in the data, of the same title if there is one."""
        claims = self._corpus.claims
        near = range(max(0, number - NEIGHBOURS), min(len(claims), number + NEIGHBOURS + 1))
        same = [each for each in near if claims[each].title == claims[number].title]
        return self._corpus.claim_heads[rng.choice(same)]

    def _wrong(self, text: str, right: str | None) -> tuple[int, ...]:
        if right is None:
            return ()
        ids = self._corpus.ids(text)
        return tuple(differing(self._corpus.ids(right), ids)) if text != right else (0,) * len(ids)

    def made_claim(self, rng: Random) -> Example | None:
        """A claim made of a sentence, or of a question and an answer; None if the draw does not give one."""
        if self._answered and (rng.random() < 0.35 or not self._claimed):
            return self._answer_claim(rng)
        return self._sentence_claim(rng) if self._claimed else None

    # What a question gives.

    def _head(self, number: int, rng: Random) -> list[int]:
        """People also type keywords, and leave the question mark out. Capital letters need no variety: the tokenizer
        does not see them."""
        if rng.random() < AS_KEYWORDS:
            return self._corpus.ids(keywords(self._corpus.questions[number].text))
        head = self._corpus.heads[number]
        return head[:-1] if head[-1:] == [QUESTION_MARK] and rng.random() < WITHOUT_MARK else head

    def _near(self, number: int) -> tuple[int, ...]:
        """Hard ones twice, so that they are drawn more often."""
        near = self._corpus.questions[number].negatives
        if number not in self._hard:
            return near
        hard = self._hard[number]
        return (*near, *(each for each in hard if each in near)) if hard else near

    def _alone(self, question: Question, head: list[int], rng: Random) -> list[Example]:
        """Each right passage by itself; and without its evidence, if the answer is not elsewhere in it."""
        examples = []
        for number in question.positives:
            answer, evidence = self._answer_in(question, number), question.evidence.get(number)
            part = self._part(number, evidence, _needed(evidence, answer), self._room(head), rng)
            answerable = UNKNOWN if question.several else 1
            examples.append(
                self._example(head, [part], answer=answer, expected=bool(answer), relevance=1, answerable=answerable)
            )
            if rng.random() < CUT and self._can_be_cut(question, answer, evidence):
                assert evidence
                part = self._part(number, (), (), self._room(head), rng, without=evidence)
                examples.append(self._example(head, [part], span=NO_ANSWER, answerable=0))
        return examples

    def _can_be_cut(self, question: Question, answer: Answer | None, evidence: Sequence[int] | None) -> bool:
        if not answer or not evidence or question.several or not source(question.source).cut:
            return False
        units = self._corpus.passages[answer.passage].units
        rest = "".join(unit for number, unit in enumerate(units) if number not in evidence)
        return bool(rest.strip()) and answer.text.lower() not in rest.lower()

    def _together(self, question: Question, head: list[int], near: Sequence[int], rng: Random) -> list[Example]:
        """All right passages with near ones, in any order: whole, and with a few units of each."""
        use = source(question.source)
        if question.incomplete or not near:
            return []
        examples = []
        draws = SEVERAL_DRAWS if question.several else 1
        if use.joint and (question.several or rng.random() < use.joint):
            for _ in range(draws):
                chosen = self._mixed(question, near, rng.choice((1, 2, 3)), rng)
                room = (JOINT - len(head[:MAX_QUESTION]) - FRAME * len(chosen)) // len(chosen)
                parts = [self._part(*self._marked(question, number), room, rng) for number in chosen]
                examples.append(self._joint_example(question, head, parts))
        if use.sparse and (question.several or rng.random() < use.sparse):
            for _ in range(draws):
                chosen = self._mixed(question, near, rng.choice((3, 4, 5, 6)), rng)
                parts = [self._sparse_part(question, number, rng) for number in chosen]
                examples.append(self._joint_example(question, head, parts))
        return examples

    def _mixed(self, question: Question, near: Sequence[int], count: int, rng: Random) -> list[int]:
        chosen = [*question.positives, *_drawn(near, count, rng)]
        rng.shuffle(chosen)
        return chosen

    def _marked(self, question: Question, number: int) -> tuple[int, Sequence[int] | None, Sequence[int]]:
        """A passage, its evidence, and the units that must be shown."""
        evidence = question.evidence.get(number, None if number in question.positives else ())
        return number, evidence, _needed(evidence, self._answer_in(question, number))

    def _sparse_part(self, question: Question, number: int, rng: Random) -> Part:
        _, evidence, needed = self._marked(question, number)
        count = len(self._corpus.passages[number].units)
        rest = [unit for unit in range(count) if unit not in needed]
        more = rng.choice((0, 1, 1, 2) if needed else (1, 2, 2, 3))
        kept = {*needed[:3], *rng.sample(rest, min(len(rest), more))}
        without = [unit for unit in range(count) if unit not in kept]
        return self._part(number, evidence, needed, SPARSE_ROOM, rng, without=without)

    def _joint_example(self, question: Question, head: list[int], parts: Sequence[Part]) -> Example:
        expected = bool(question.answer)
        return self._example(head, parts, answer=question.answer, expected=expected, relevance=1, answerable=1)

    def _changed(self, question: Question, near: Sequence[int], rng: Random) -> list[Example]:
        use = source(question.source)
        if not (use.changed and question.answer and not question.several and rng.random() < CHANGED and self._claimed):
            return []
        passage = self._text(rng.choice(near)) if near else ""
        wrong = made_wrong(question.text, passage, self._text(rng.choice(self._claimed)), rng)
        if not wrong:
            return []
        head = self._corpus.ids(wrong)
        part = self._part(question.positives[0], (), (), self._room(head), rng)
        return [self._example(head, [part], span=NO_ANSWER, answerable=0)]

    def _only_near(self, question: Question, head: list[int], near: Sequence[int], rng: Random) -> list[Example]:
        examples = []
        for number in _drawn(near, 4 if question.several else 2, rng):
            part = self._part(number, (), (), self._room(head), rng)
            span = NO_ANSWER if rng.random() < NEAR_SPAN else NO_SPAN
            examples.append(self._example(head, [part], span=span, relevance=0, answerable=0, unit_weight=NEAR_WEIGHT))
        if len(near) > 2 and rng.random() < (SEVERAL_ONLY_NEAR if question.several else ONLY_NEAR):
            examples.append(self._joint_near(head, _drawn(near, rng.choice((2, 3, 4)), rng), rng, NEAR_WEIGHT))
        return examples

    def _unanswerable(self, question: Question, head: list[int], rng: Random) -> list[Example]:
        examples = []
        for number in question.positives:
            part = self._part(number, (), (), self._room(head), rng, without=question.cut)
            if part.units:
                examples.append(self._example(head, [part], span=NO_ANSWER, answerable=0))
        if not question.positives and question.negatives:
            examples.append(self._joint_near(head, _drawn(question.negatives, 4, rng), rng, 1.0))
        return [*examples, *self._unanswerable_together(question, head, rng)]

    def _unanswerable_together(self, question: Question, head: list[int], rng: Random) -> list[Example]:
        """The passage that seems to answer with near ones: whole, and with a few units of each."""
        use = source(question.source)
        if not question.positives or not question.negatives or question.several:
            return []
        examples = []
        if rng.random() < use.joint:
            chosen = self._mixed(question, question.negatives, rng.choice((1, 2, 3)), rng)
            room = (JOINT - len(head[:MAX_QUESTION]) - FRAME * len(chosen)) // len(chosen)
            parts = [self._part(number, (), (), room, rng, without=self._cut(question, number)) for number in chosen]
            examples.append(self._example(head, parts, span=NO_ANSWER, answerable=0))
        if rng.random() < use.sparse:
            chosen = self._mixed(question, question.negatives, rng.choice((2, 3, 4, 5)), rng)
            parts = [self._few_units(question, number, rng) for number in chosen]
            examples.append(self._example(head, parts, span=NO_ANSWER, answerable=0))
        return [example for example in examples if example.units]

    def _cut(self, question: Question, number: int) -> Sequence[int]:
        return question.cut if number in question.positives else ()

    def _few_units(self, question: Question, number: int, rng: Random) -> Part:
        """Of the passage that seems to answer more units than of the others."""
        count = len(self._corpus.passages[number].units)
        rest = [unit for unit in range(count) if unit not in self._cut(question, number)]
        more = rng.choice((2, 3, 3, 4) if number in question.positives else (1, 2, 2, 3))
        kept = rng.sample(rest, min(len(rest), more))
        return self._part(number, (), (), SPARSE_ROOM, rng, without=[unit for unit in range(count) if unit not in kept])

    def _joint_near(self, head: list[int], near: Sequence[int], rng: Random, weight: float) -> Example:
        parts = [self._part(number, (), (), NEAR_ROOM, rng) for number in near]
        return self._example(head, parts, span=NO_ANSWER, relevance=0, answerable=0, unit_weight=weight)

    # Claims.

    def _answer_claim(self, rng: Random) -> Example:
        """The question followed by its answer, or by the answer to another question about the passage."""
        question = rng.choice(self._answered)
        answer = question.answer
        assert answer
        right = answer.text
        wrong = [
            other
            for other in self._answers[answer.passage]
            if other.lower() not in right.lower() and right.lower() not in other.lower()
        ]
        draw = rng.random()
        passage, evidence, label, said = answer.passage, question.evidence.get(answer.passage), SUPPORTED, right
        if draw >= 0.85 and question.negatives and wrong:
            passage, evidence, label = rng.choice(question.negatives), (), UNCERTAIN
        elif draw >= 0.45 and wrong:
            label, said = CONTRADICTED, rng.choice(wrong)
        text = question.text if rng.random() < 0.6 else question.text.rstrip("?")
        part = self._part(passage, evidence, evidence or (), CLAIM_ROOM, rng)
        end = rng.choice((".", ".", ""))
        original = f"{text} {right}{end}" if label != UNCERTAIN else None
        return self._claim_example(f"{text} {said}{end}", part, label, original)

    def _sentence_claim(self, rng: Random) -> Example | None:
        number = rng.choice(self._claimed)
        passage = self._corpus.passages[number]
        least, most = SENTENCE
        good = [unit for unit, text in enumerate(passage.units) if least < len(text.strip()) < most]
        if not good:
            return None
        unit = rng.choice(good)
        text = reworded(passage.units[unit], passage.title, rng)
        draw = rng.random()
        if draw < 0.4:
            return self._claim_example(text, self._part(number, [unit], [unit], CLAIM_ROOM, rng), SUPPORTED, text)
        if draw < 0.82:
            wrong = made_wrong(text, self._text(number), self._text(rng.choice(self._claimed)), rng)
            part = self._part(number, [unit], [unit], CLAIM_ROOM, rng)
            return self._claim_example(wrong, part, CONTRADICTED, text) if wrong else None
        if len(passage.units) < 3:
            return None
        return self._claim_example(text, self._part(number, (), (), CLAIM_ROOM, rng, without=[unit]), UNCERTAIN, None)

    def _claim_example(self, text: str, part: Part, label: int, right: str | None) -> Example:
        input_ids = laid_out(self._corpus.ids(text), [self._page(part)], SINGLE, claim=True)
        return Example(input_ids, _labels(input_ids, [part]), claim=label, wrong=self._wrong(text, right))

    # Inputs.

    def _example(
        self,
        head: list[int],
        parts: Sequence[Part],
        *,
        answer: Answer | None = None,
        expected: bool = False,
        span: tuple[int, int] = NO_SPAN,
        relevance: int = UNKNOWN,
        answerable: int = UNKNOWN,
        unit_weight: float = 1.0,
    ) -> Example:
        """An answer that is expected and was cut off with the end of its unit gives no span."""
        input_ids = laid_out(head, [self._page(part) for part in parts], SINGLE if len(parts) == 1 else JOINT)
        if expected and answer:
            span = _span(input_ids, parts, answer)
        return Example(
            input_ids,
            _labels(input_ids, parts),
            span=span,
            relevance=relevance,
            answerable=answerable,
            unit_weight=unit_weight,
        )

    def _page(self, part: Part) -> PageIds:
        corpus, first = self._corpus, int(self._corpus.first_unit[part.passage])
        return PageIds(
            corpus.titles[part.passage] if part.titled else (),
            [UnitIds(corpus.before[first + unit], corpus.units[first + unit]) for unit in part.units],
        )

    def _part(
        self,
        number: int,
        evidence: Sequence[int] | None,
        needed: Sequence[int],
        room: int,
        rng: Random,
        without: Sequence[int] = (),
    ) -> Part:
        """A passage; of a long one, as much around a needed unit as there is room for."""
        first, end = self._corpus.first_unit[number : number + 2].tolist()
        sizes = self._corpus.sizes[first:end].tolist()
        units = [unit for unit in range(end - first) if unit not in without]
        if sum(sizes[unit] for unit in units) > room:
            needed = [unit for unit in needed if unit in units]
            middle = units.index(min(needed) if needed else rng.choice(units))
            units = _window(units, sizes, middle, room, rng)
        return Part(number, units, evidence, titled=rng.random() >= WITHOUT_TITLE)

    def _room(self, head: list[int]) -> int:
        return SINGLE - len(head[:MAX_QUESTION]) - FRAME

    def _text(self, number: int) -> str:
        return "".join(self._corpus.passages[number].units)

    def _answer_in(self, question: Question, number: int) -> Answer | None:
        return question.answer if question.answer and question.answer.passage == number else None


def _choice(example: Example) -> Example:
    """Only which units are evidence, and where the answer is."""
    return example._replace(relevance=UNKNOWN, answerable=UNKNOWN)


def _noisy(ids: list[int], shown: Sequence[int], rng: Random) -> list[int]:
    """With a few tokens left out, exchanged, or replaced by some that are shown."""
    ids = list(ids)
    for _ in range(rng.randint(1, CHANGES)):
        if len(ids) < 2:
            break
        at, other = rng.sample(range(len(ids)), 2)
        way = rng.random()
        if way < 0.3:
            del ids[at]
        elif way < 0.5 or not shown:
            ids[at], ids[other] = ids[other], ids[at]
        else:
            ids[at] = rng.choice(shown)
    return ids


def _needed(evidence: Sequence[int] | None, answer: Answer | None) -> list[int]:
    """The units that an input must show."""
    return list(evidence) if evidence else [answer.unit] if answer else []


def _drawn(near: Sequence[int], count: int, rng: Random) -> list[int]:
    """Different passages, at most so many. One that is in the list twice is drawn more often."""
    drawn = rng.sample(near, len(near)) if len(near) <= count else rng.sample(near, min(len(near), 2 * count))
    return list(dict.fromkeys(drawn))[:count]


def _window(units: list[int], sizes: list[int], middle: int, room: int, rng: Random) -> list[int]:
    """Grows from the middle to random sides, while the next unit fits."""
    first = last = middle
    left = room - sizes[units[middle]]
    while True:
        steps = []
        if first > 0 and sizes[units[first - 1]] <= left:
            steps.append(first - 1)
        if last + 1 < len(units) and sizes[units[last + 1]] <= left:
            steps.append(last + 1)
        if not steps:
            return units[first : last + 1]
        step = rng.choice(steps)
        left -= sizes[units[step]]
        first, last = min(first, step), max(last, step)


def _labels(input_ids: InputIds, parts: Sequence[Part]) -> tuple[int, ...]:
    labels = []
    for place in input_ids.places:
        part = parts[place.page]
        labels.append(UNKNOWN if part.evidence is None else int(part.units[place.unit] in part.evidence))
    return tuple(labels)


def _span(input_ids: InputIds, parts: Sequence[Part], answer: Answer) -> tuple[int, int]:
    for place in input_ids.places:
        part = parts[place.page]
        if part.passage == answer.passage and part.units[place.unit] == answer.unit:
            first, last = place.marker + 1 + answer.first, place.marker + 1 + answer.last
            return (first, last) if last < place.end else NO_SPAN
    return NO_SPAN
