"""Evaluates answers: asks a question, and measures its answer, its citations and its time."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from typing import NamedTuple

import msgspec

from anabranch.app.anabranch import Anabranch
from anabranch.app.endpoint_resolver import COLLECTIONS
from anabranch.domain.contracts import SystemClock
from anabranch.domain.errors import AnabranchError
from anabranch.domain.evidence import ClaimChecker
from anabranch.domain.model import Answer, AnswerPolicy, Passage, Until, Value
from anabranch.pipeline.verify import WORTH, SentenceCheck
from anabranch.text.answer_match import containment, token_f1, tokens
from anabranch.text.citation_marks import without_marks
from anabranch.text.pages import titled
from anabranch.text.sentences import Span
from anabranch.text.statements import claims_something, statements

# Passages of one sentence that are read; further ones are not counted.
MAX_CITED = 10
FEW_WORDS = 3
# Words that a citation and a gold sentence must share, one after the other: the share of the shorter one's.
SAME = 0.5
FENCES = ("```", "~~~")


class GoldSentence(Value):
    """A sentence that carries the answer. `document` is the name of its document in the dataset."""

    document: str
    text: str


class EvaluatedQuestion(Value):
    """A question of a dataset with what is known about its answer."""

    question: str
    answers: tuple[str, ...] = ()
    evidence: tuple[GoldSentence, ...] = ()
    answerable: bool = True


class MeasuredAnswer(Value):
    """The measures of one answer; None where one does not apply. `failed` is why there is no answer."""

    question: str
    answerable: bool
    answer: str = ""
    failed: str | None = None
    abstained: bool = False
    latency_ms: float | None = None
    citation_recall: float | None = None
    citation_precision: float | None = None
    gold_recall: float | None = None
    gold_precision: float | None = None
    faithfulness: float | None = None
    containment: float | None = None
    token_f1: float | None = None
    sentences: int = 0
    citations: int = 0
    unchecked: int = 0


class AnswerOptions(Value):
    """How the questions of an evaluation are asked; None is as the settings say."""

    model: str | None = None
    top_k: int | None = None
    answer_policy: AnswerPolicy = "all"


async def answer_to(anabranch: Anabranch, text: str, options: AnswerOptions) -> tuple[Answer, float]:
    """The answer from the collections, and its time in milliseconds. It is not from the cache, and if the model fails,
    no other one answers."""
    question = await anabranch.questions.library(
        text,
        [COLLECTIONS],
        options.model,
        (),
        None,
        options.top_k,
        Until.GENERATE,
        fallback=False,
        answer_policy=options.answer_policy,
    )
    begin = time.perf_counter()
    run = anabranch.start(msgspec.structs.replace(question, fresh=True), anabranch.context(operator=True))
    answer = await run.value()
    return answer, (time.perf_counter() - begin) * 1000


class AnswerEvaluation:
    """Measures answers. `documents` has the ids of the dataset's documents by their names."""

    def __init__(self, checker: ClaimChecker, documents: Mapping[str, str]) -> None:
        self._checker = checker
        self._documents = documents

    async def measured(self, anabranch: Anabranch, asked: EvaluatedQuestion, options: AnswerOptions) -> MeasuredAnswer:
        """Ask the question and measure its answer."""
        try:
            answer, latency_ms = await answer_to(anabranch, asked.question, options)
        except AnabranchError as error:
            return MeasuredAnswer(question=asked.question, answerable=asked.answerable, failed=error.message)
        return await self.measure(asked, answer, latency_ms)

    async def measure(
        self, asked: EvaluatedQuestion, answer: Answer, latency_ms: float | None = None
    ) -> MeasuredAnswer:
        claims = _claims(answer)
        abstained = answer.refused or (not claims and _says_nothing(answer))
        bare = "" if abstained else without_marks(answer.text)
        known = asked.answers if asked.answerable else ()
        found = MeasuredAnswer(
            question=asked.question,
            answerable=asked.answerable,
            answer=answer.text,
            abstained=abstained,
            latency_ms=None if latency_ms is None else round(latency_ms, 1),
            containment=containment(bare, known) if known else None,
            token_f1=token_f1(bare, known) if known else None,
        )
        if abstained:
            return found
        checked = [await self._checked(claim) for claim in claims]
        counted = [one for one in checked if one.recall is not None]
        citations = sum(one.citations for one in counted)
        return msgspec.structs.replace(
            found,
            citation_recall=_mean([float(one.recall or 0) for one in counted]),
            citation_precision=sum(one.precise for one in counted) / max(1, citations) if counted else None,
            faithfulness=await self._faithfulness(answer, claims),
            sentences=len(claims),
            citations=citations,
            unchecked=len(checked) - len(counted),
            **self._against_gold(asked, answer),
        )

    async def _checked(self, claim: "CitedClaim") -> "CitationScore":
        """ALCE's citation recall and precision of one sentence: its cited words support it together; a citation is
        precise if it supports the sentence by itself, or if the others do not support it without it."""
        cited = claim.cited
        if not cited:
            return CitationScore(recall=False, precise=0, citations=0)
        together = await self._supports(claim.text, cited)
        if not together or len(cited) == 1:
            return CitationScore(together, int(bool(together)), len(cited))
        precise = 0
        for at, one in enumerate(cited):
            others = [*cited[:at], *cited[at + 1 :]]
            precise += bool(await self._supports(claim.text, [one]) or not await self._supports(claim.text, others))
        return CitationScore(together, precise, len(cited))

    async def _supports(self, claim: str, cited: Sequence[Passage]) -> bool | None:
        """Whether the words of all these citations together support a claim; None if that cannot be checked."""
        titles = " / ".join(dict.fromkeys(one.title for one in cited))
        read = Passage(source="", title=titles, text="\n\n".join(one.text for one in cited), score=1.0)
        found = await SentenceCheck(self._checker, [read], SystemClock()).find(claim, [[0]])
        return None if isinstance(found, str) else found.verdict == "supported"

    async def _faithfulness(self, answer: Answer, claims: Sequence["CitedClaim"]) -> float | None:
        """As the answer has it, or as a verified answer would have it."""
        if answer.sentences:
            return answer.faithfulness
        check = SentenceCheck(self._checker, answer.passages, SystemClock())
        found = [await check.find(claim.text, [claim.passages]) for claim in claims]
        return _mean([WORTH[one.verdict] for one in found if not isinstance(one, str)])

    def _against_gold(self, asked: EvaluatedQuestion, answer: Answer) -> dict[str, float | None]:
        """The share of the gold sentences that are cited, and the share of the citations that are gold sentences."""
        gold = [(self._documents.get(one.document), tokens(one.text)) for one in asked.evidence]
        if not gold:
            return {}
        spans = dict.fromkeys((one.passage, one.passage_start, one.passage_end) for one in answer.citations)
        cited = [
            (answer.passages[passage].document_id, tokens(answer.passages[passage].text[start:end]))
            for passage, start, end in spans
        ]
        hits = [[same_words(one, sentence) for sentence in gold] for one in cited]
        return {
            "gold_recall": sum(any(row[at] for row in hits) for at in range(len(gold))) / len(gold),
            "gold_precision": sum(map(any, hits)) / max(1, len(hits)),
        }


class CitedClaim(NamedTuple):
    """A sentence that claims something, the numbers of the passages that it cites, and the words of each."""

    text: str
    passages: tuple[int, ...]
    cited: tuple[Passage, ...]


class CitationScore(NamedTuple):
    recall: bool | None
    precise: int
    citations: int


def _claims(answer: Answer) -> list[CitedClaim]:
    """The sentences of an answer that claim something, with what they cite. Words of one passage are one citation."""
    spans = [*_claiming(answer)]
    words: list[dict[int, dict[Span, None]]] = [{} for _ in spans]
    for citation in answer.citations:
        inside = (at for at, (start, end) in enumerate(spans) if start <= citation.start and citation.end <= end)
        if (at := next(inside, None)) is not None:
            words[at].setdefault(citation.passage, {})[citation.passage_start, citation.passage_end] = None
    return [
        CitedClaim(
            without_marks(answer.text[start:end]).strip(),
            tuple(cited),
            tuple(_words(answer.passages[at], cited[at]) for at in list(cited)[:MAX_CITED]),
        )
        for (start, end), cited in zip(spans, words, strict=True)
    ]


def _says_nothing(answer: Answer) -> bool:
    """Whether an answer without a claim says that there is none; a short one may be a name."""
    return answer.left_out > 0 or not answer.text.strip() or len(tokens(answer.text)) > FEW_WORDS


def _claiming(answer: Answer) -> Iterator[Span]:
    """Where the sentences are that claim something; code is none. A verified answer says where they are: what it adds
    about sentences that it has left out is not the model's."""
    if answer.sentences or answer.left_out:
        for sentence in answer.sentences:
            if sentence.reason not in ("no_claim", "code") and not answer.text.startswith(FENCES, sentence.start):
                yield sentence.start, sentence.end
        return
    for one in statements(answer.text):
        if not one.code and claims_something(without_marks(answer.text[one.start : one.end])):
            yield one.start, one.end


def _words(passage: Passage, spans: Iterable[Span]) -> Passage:
    headers = passage.place.headers if passage.place is not None else ()
    text = "\n".join(passage.text[start:end] for start, end in sorted(spans))
    return Passage(source=passage.source, title=titled(passage.title, headers), text=text, score=1.0)


def same_words(cited: tuple[str | None, list[str]], gold: tuple[str | None, list[str]]) -> bool:
    """Whether they are of one document and have the same words, one after the other."""
    if cited[0] is None or cited[0] != gold[0] or not (cited[1] and gold[1]):
        return False
    run = SequenceMatcher(None, cited[1], gold[1], autojunk=False).find_longest_match().size
    return run >= SAME * min(len(cited[1]), len(gold[1]))


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
