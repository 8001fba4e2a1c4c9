"""Measures answers without a language model: by rules, by the evidence model alone, and by both.

    python -m benchmarks.evidence find --set NAME --out FILE        what search finds, for training.fit
    python -m benchmarks.evidence observe --set NAME --out FILE     what the model and the rules see, for training.fit
    python -m benchmarks.evidence report --set NAME...              the table
    python -m benchmarks.evidence reliability --set NAME... --out F the plot of support

Sets: hotpot, squad, bioasq, cranfield, medline (need --data and --evals), held (--study), development, validation
and test (--sources, and --data-dir with a collection `docs` of the documents).
"""

import argparse
import asyncio
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from rich.console import Console

from anabranch.configuration.settings import Settings
from anabranch.domain.evidence import EvidencePage, Reading
from anabranch.domain.model import Prompt
from anabranch.evidence.choice import candidates
from anabranch.evidence.features import Observed
from anabranch.evidence.judge import SUPPORTED as LIKELY
from anabranch.evidence.judge import Judge, judgement
from anabranch.evidence.quotations import Quotation, quotations
from anabranch.models.evidence import OnnxEvidence
from anabranch.models.extractive import SUPPORTED, Written, quotes
from anabranch.models.minilm import MiniLM
from anabranch.pipeline.retrieve import EVIDENCE_DEPTH
from anabranch.text.support import support
from benchmarks.evidence import cases as sets
from benchmarks.evidence.cases import Case, answers, holds, interval, overlaps
from benchmarks.evidence.reliability import draw

QUESTIONS = Path(__file__).parent.parent / "questions"
PASSAGES = 8
# Characters of an answer without its marks and headings.
SHORT = 400
HELD_OF_EACH = 120
DOCUMENTATION = ("development", "validation", "test")
WAYS = ("rules", "model", "both")


class Outcome(NamedTuple):
    """An answer: None if it was refused."""

    case: Case
    quoted: list[Quotation] | None


class Remembering:
    """An Evidence that reads each input once, whatever the question's capital letters: the model does not see them."""

    def __init__(self, inner: OnnxEvidence) -> None:
        self._inner = inner
        self._known: dict[tuple[str, tuple[EvidencePage, ...]], Reading | None] = {}

    async def read(
        self, question: str, inputs: Sequence[tuple[EvidencePage, ...]], *, until: float | None = None
    ) -> Sequence[Reading | None]:
        low = question.lower()
        new = [pages for pages in inputs if (low, pages) not in self._known]
        for pages, reading in zip(new, await self._inner.read(low, new, until=until), strict=True):
            self._known[low, pages] = reading
        return [self._known[low, pages] for pages in inputs]


Searched = Literal["rules", "model", "both"]


def loaded(name: str, told: argparse.Namespace, way: Searched) -> list[Case]:
    """Documentation is searched as the product does it for that way to answer; for `model`, what is found for evidence
    is not put in order."""
    if name in DOCUMENTATION:
        asked = sets.Documentation(QUESTIONS / f"{name}.json", told.sources)
        top_k = EVIDENCE_DEPTH if way == "model" else 10
        evidence: Literal["auto", "off"] = "auto" if way == "both" else "off"
        settings = Settings(data_dir=str(told.data_dir), evidence=evidence, default_top_k=top_k)
        return asyncio.run(sets.documentation(name, asked, settings, deep=way != "rules"))
    model = MiniLM(told.models, threads=2)
    if name == "hotpot":
        return list(sets.cases(name, sets.hotpot(told.data / "hotpotqa-100"), model))
    if name in ("cranfield", "medline"):
        other = "medline" if name == "cranfield" else "cranfield"
        return list(sets.topics(told.data / name, told.data / other, model, name))
    if name == "held":
        return list(sets.cases(name, sets.held(told.study, HELD_OF_EACH), model))
    return list(sets.cases(name, sets.five(told.evals, {"squad": "sq5", "bioasq": "bio5"}[name]), model))


def by_rules(case: Case) -> Outcome:
    if not case.passages or support(case.question, case.passages) < SUPPORTED:
        return Outcome(case, None)
    return Outcome(case, [Quotation(q.passage, ((q.start, q.end),)) for q in quotes(case.question, case.passages)])


def by_model(case: Case, found: Observed | None) -> Outcome:
    """The model alone: the units above even odds, of a passage that answers."""
    if found is None or found.support.answerable < 0:
        return Outcome(case, None)
    order = sorted(range(len(found.units)), key=lambda at: -found.units[at].alone)
    chosen = [at for at in order[:3] if at == order[0] or found.units[at].alone > 0]
    spans = [(found.placed[at].passage, (found.placed[at].unit.start, found.placed[at].unit.end)) for at in chosen]
    return Outcome(case, [Quotation(passage, (span,)) for passage, span in spans])


def by_both(case: Case, found: Observed | None) -> Outcome:
    if found is None:
        return Outcome(case, None)
    judged = judgement(found, range(len(case.passages)), len(case.passages))
    if judged.support < LIKELY:
        return Outcome(case, None)
    return Outcome(case, quotations(case.question, case.passages, judged))


def said(outcome: Outcome) -> str:
    case = outcome.case
    prompt = Prompt(
        question=case.question, messages=(), max_tokens=1, temperature=0, passages=case.passages, version="benchmark"
    )
    return "\n".join(Written(quotation, prompt).text for quotation in outcome.quoted or ())


def quoted_length(outcome: Outcome) -> int:
    return sum(end - start for one in outcome.quoted or () for start, end in one.spans)


def measures(outcomes: Sequence[Outcome]) -> dict[str, tuple[float, int]]:
    """Each share with the number of questions that it is of."""
    asked = [one for one in outcomes if one.case.answerable]
    known = [one for one in asked if one.case.answers]
    right = [holds(said(one), one.case.answers) for one in known]
    short = [good and quoted_length(one) <= SHORT for good, one in zip(right, known, strict=True)]
    answered = [one for one in asked if one.quoted and any(one.case.gold)]
    precisions = [np.mean([_is_right(one, quotation) for quotation in one.quoted or ()]) for one in answered]
    found = [one for one in asked if any(one.case.gold) or one.case.unread]
    return {
        "right": _share(right),
        "right in the first 400": _share([holds(said(one)[:SHORT], one.case.answers) for one in known]),
        "right within 400": _share(short),
        "precision": _share([float(value) for value in precisions]),
        "F1": _share([_f1(one) for one in found]),
        "refused answerable": _share([one.quoted is None for one in asked]),
        "refused unanswerable": _share([one.quoted is None for one in outcomes if not one.case.answerable]),
    }


def _is_right(outcome: Outcome, quotation: Quotation) -> bool:
    return overlaps(quotation.spans, outcome.case.gold[quotation.passage])


def _f1(outcome: Outcome) -> float:
    """Of the quoted spans against all that are right to quote."""
    quoted = outcome.quoted or []
    right = sum(_is_right(outcome, quotation) for quotation in quoted)
    gold = [(passage, span) for passage, spans in enumerate(outcome.case.gold) for span in spans]
    covered = sum(
        any(quotation.passage == passage and overlaps(quotation.spans, [span]) for quotation in quoted)
        for passage, span in gold
    )
    if not right or not covered:
        return 0.0
    precision, recall = right / len(quoted), covered / (len(gold) + outcome.case.unread)
    return 2 * precision * recall / (precision + recall)


def _share(values: Sequence[float]) -> tuple[float, int]:
    return (float(np.mean(values)) if values else float("nan"), len(values))


def chosen(case: Case) -> Case:
    """With the passages that the product judges."""
    order = candidates(case.question, case.passages, PASSAGES)
    return case._replace(
        passages=tuple(case.passages[index] for index in order),
        gold=tuple(case.gold[index] for index in order),
        unread=sum(len(spans) for index, spans in enumerate(case.gold) if index not in order),
    )


async def observed(cases: Sequence[Case], told: argparse.Namespace) -> list[list[Observed | None]]:
    """For each case as it is and in lower case."""
    judge = Judge(Remembering(OnnxEvidence(told.models, threads=2)), PASSAGES)
    found = []
    for case in cases:
        both = (case.question, case.question.lower())
        found.append([await judge.observe(question, case.passages) if case.passages else None for question in both])
    return found


def report(console: Console, name: str, told: argparse.Namespace) -> None:
    searched = loaded(name, told, "rules")
    judged = [chosen(case) for case in loaded(name, told, "model")]
    ordered = [chosen(case) for case in loaded(name, told, "both")] if name in DOCUMENTATION else judged
    ways: list[tuple[str, list[Case], Callable[[Case, Observed | None], Outcome]]] = [
        ("rules", searched, lambda case, _: by_rules(case)),
        ("model", judged, by_model),
        ("both", ordered, by_both),
    ]
    seen: list[list[Observed | None]] = [[None, None] for _ in searched]
    for way, cases, answer in ways:
        if way not in told.only:
            continue
        if way == "model" or (way == "both" and (cases is not judged or "model" not in told.only)):
            seen = asyncio.run(observed(cases, told))
        for lower in (0, 1):
            outcomes = [
                answer(sets.lowered(case) if lower else case, pair[lower])
                for case, pair in zip(cases, seen, strict=True)
            ]
            cells = []
            for measure, (value, count) in measures(outcomes).items():
                if count:
                    low, high = interval(value, count)
                    cells.append(f"{measure} {value:.1%} ({low:.0%}–{high:.0%})")  # noqa: RUF001
            console.print(f"{name:12} {way:6} {'lower case' if lower else 'as asked':10} " + "  ".join(cells))


def supported(name: str, told: argparse.Namespace) -> list[tuple[float, bool]]:
    """The support of each question as it is asked, and whether the passages answer."""
    cases = [chosen(case) for case in loaded(name, told, "both")]
    seen = asyncio.run(observed(cases, told))
    return [
        (judgement(pair[0], range(len(case.passages)), len(case.passages)).support, answers(case))
        for case, pair in zip(cases, seen, strict=True)
        if pair[0] is not None
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("find", "observe", "report", "reliability"))
    parser.add_argument("--set", nargs="+", required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--data", type=Path, help="folder of hotpotqa-100, cranfield and medline")
    parser.add_argument("--evals", type=Path, help="the five-passage tasks, evals.json.xz")
    parser.add_argument("--study", type=Path, help="what training.split wrote")
    parser.add_argument("--sources", type=Path, help="folder of the unpacked packages of benchmarks/questions")
    parser.add_argument("--data-dir", type=Path, help="data folder with the collection of their documents")
    parser.add_argument("--models", type=Path, default=Path.home() / ".cache/anabranch/models")
    parser.add_argument("--only", nargs="+", default=WAYS, choices=WAYS, help="lines of the table")
    told = parser.parse_args()
    if told.task == "reliability":
        draw({name: supported(name, told) for name in told.set}, told.out)
        return
    for name in told.set:
        if told.task == "report":
            report(Console(highlight=False, width=400), name, told)
            continue
        found = loaded(name, told, "model")
        if told.task == "find":
            told.out.write_bytes(pickle.dumps(found))
            continue
        cases = [chosen(case) for case in found]
        seen = asyncio.run(observed(cases, told))
        rows = [(case, pair[0]) for case, pair in zip(cases, seen, strict=True) if pair[0] is not None]
        told.out.write_bytes(pickle.dumps(rows))


if __name__ == "__main__":
    main()
