"""How often the extractive generator refuses, and whether it quotes the sentences that carry the answer."""

import argparse
import asyncio
import itertools
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from rich.console import Console

from anabranch.domain.model import Context, Passage, Place, Prompt, Scores
from anabranch.models.extractive import ABSTAINED, Extractive, Quote, quotes
from anabranch.models.minilm import MiniLM
from anabranch.text.support import Wording, signals
from benchmarks.room import room

Floats = npt.NDArray[np.float64]
Cosines = dict[tuple[str, str], float]

# In the folds the threshold refuses this share of the answerable questions that were fitted on.
REFUSED = 0.07
RIDGE = 2.0
REPEATS = 20


class Asked(NamedTuple):
    """A question, its paragraphs, and which sentences of which paragraphs carry the answer."""

    text: str
    answer: str
    paragraphs: dict[str, list[str]]
    facts: set[tuple[str, int]]

    def texts(self, *, answerable: bool) -> dict[str, str]:
        carrying = {title for title, _ in self.facts}
        kept = {title: "".join(each) for title, each in self.paragraphs.items() if answerable or title not in carrying}
        return {title: text for title, text in kept.items() if text.strip()}


def hotpot(folder: Path) -> list[Asked]:
    """questions.json as HotpotQA has it: `context` = [title, sentences], `supporting_facts` = [title, sentence]."""
    rows = json.loads((folder / "questions.json").read_text(encoding="utf-8"))
    return [
        Asked(row["question"], row["answer"], dict(row["context"]), {(t, n) for t, n in row["supporting_facts"]})
        for row in rows
    ]


def collection(folder: Path) -> tuple[list[str], dict[str, tuple[str, str]]]:
    """queries.jsonl and corpus.jsonl as BEIR has them."""
    queries = [json.loads(line)["text"] for line in (folder / "queries.jsonl").read_text("utf-8").splitlines()]
    rows: list[dict[str, Any]] = [
        json.loads(line) for line in (folder / "corpus.jsonl").read_text("utf-8").splitlines()
    ]
    return queries, {row["_id"]: (row.get("title", ""), row["text"]) for row in rows if row["text"].strip()}


def vectors(model: MiniLM, texts: Sequence[str]) -> npt.NDArray[np.float32]:
    embedded = asyncio.run(model.embed(texts))
    return np.stack([np.frombuffer(each.vector, np.float32) for each in embedded])


def cosines(model: MiniLM, questions: Sequence[Asked]) -> Cosines:
    texts = sorted({text for asked in questions for text in asked.texts(answerable=True).values()})
    at = {text: number for number, text in enumerate(texts)}
    documents, asking = vectors(model, texts), vectors(model, [asked.text for asked in questions])
    return {
        (asked.text, text): float(documents[at[text]] @ vector)
        for asked, vector in zip(questions, asking, strict=True)
        for text in asked.texts(answerable=True).values()
    }


def passage(title: str, text: str, cosine: float | None) -> Passage:
    place = Place(chunk_id=title, collection="c", start=0, end=len(text), tokens=0, scores=Scores(dense=cosine))
    return Passage(
        source="c", title=title, text=text, score=max(0.0, cosine or 0.0), document_id=title or text[:40], place=place
    )


def passages(asked: Asked, known: Cosines, *, answerable: bool, titled: bool = True) -> tuple[Passage, ...]:
    """Nearest first, as a search returns them; in the order of the file where no vectors are used."""
    found = [
        passage(title if titled else "", text, known.get((asked.text, text)))
        for title, text in asked.texts(answerable=answerable).items()
    ]
    return tuple(sorted(found, key=lambda each: -each.score))


async def refuses(question: str, found: Sequence[Passage]) -> bool:
    prompt = Prompt(
        question=question, messages=(), max_tokens=500, temperature=0, passages=tuple(found), version="benchmark"
    )
    context = Context(correlation_id="benchmark", deadline=time.monotonic() + 60)
    deltas = [delta async for delta in Extractive().generate(prompt, context)]
    return deltas[-1].finish_reason == ABSTAINED


def refused(cases: Iterable[tuple[str, Sequence[Passage]]]) -> float:
    async def each() -> list[bool]:
        return [await refuses(question, found) for question, found in cases]

    return float(np.mean(asyncio.run(each())))


def fitted(rows: Floats, labels: Floats) -> Floats:
    """A logistic regression: one weight for each signal, and the bias last."""
    mean, spread = rows.mean(0), rows.std(0) + 1e-9
    scaled = np.c_[(rows - mean) / spread, np.ones(len(rows))]
    penalty = RIDGE * np.eye(scaled.shape[1])
    penalty[-1, -1] = 0
    weights = np.zeros(scaled.shape[1])
    for _ in range(30):
        likely = 1 / (1 + np.exp(-scaled @ weights))
        slope = scaled.T @ (labels - likely) - penalty @ weights
        weights = weights + np.linalg.solve((scaled.T * (likely * (1 - likely))) @ scaled + penalty, slope)
    plain: Floats = np.r_[weights[:-1] / spread, weights[-1] - (weights[:-1] / spread) @ mean]
    return plain


def held_out(yes: Floats, no: Floats, folds: int) -> tuple[float, float]:
    """Weights and threshold from the other folds: the share refused with and without the paragraphs that answer."""
    generator = np.random.default_rng(0)
    outcomes: list[tuple[float, float]] = []
    for _ in range(REPEATS):
        order = generator.permutation(len(yes))
        for fold in range(folds):
            test = order[fold::folds]
            train = np.setdiff1d(order, test)
            weights = fitted(np.r_[yes[train], no[train]], np.r_[np.ones(len(train)), np.zeros(len(train))])
            threshold = np.quantile(yes[train] @ weights[:-1], REFUSED)
            outcomes += [
                (float(a), float(b))
                for a, b in zip(yes[test] @ weights[:-1] < threshold, no[test] @ weights[:-1] < threshold, strict=True)
            ]
    return float(np.mean([a for a, _ in outcomes])), float(np.mean([b for _, b in outcomes]))


def quoted(asked: Asked, found: Sequence[Passage], chosen: Sequence[Quote]) -> set[tuple[str, int]]:
    """The sentences, as the file counts them, in which the quotes begin."""
    spots: set[tuple[str, int]] = set()
    for quote in chosen:
        title = found[quote.passage].title
        ends = itertools.accumulate(len(sentence) for sentence in asked.paragraphs[title])
        spots.add((title, next(number for number, end in enumerate(ends) if quote.start < end - 1)))
    return spots


def sentences(questions: Sequence[Asked], known: Cosines) -> dict[str, float]:
    rows: list[tuple[float, float, float, float]] = []
    held: list[bool] = []
    for asked in questions:
        found = passages(asked, known, answerable=True)
        chosen = quotes(asked.text, found)
        if not chosen:
            continue
        spots = quoted(asked, found, chosen)
        text = " ".join(found[quote.passage].text[quote.start : quote.end] for quote in chosen)
        right = len(spots & asked.facts)
        rows.append((right / len(spots), right / len(asked.facts), len(chosen), len(text)))
        if asked.answer not in ("yes", "no"):
            held.append(asked.answer.lower() in text.lower())
    precision, recall, count, length = np.mean(rows, axis=0)
    return {
        "precision": precision,
        "recall": recall,
        "holds the answer": float(np.mean(held)),
        "sentences": count,
        "characters": length,
    }


def answering(console: Console, folder: Path, model: MiniLM) -> None:
    questions = hotpot(folder)
    known = cosines(model, questions)
    console.print(f"[bold]{folder.name}[/]: {len(questions)} questions; refused with / without what answers them")
    for name, vectored, titled, cased in (
        ("as it is", True, True, True),
        ("without titles", True, False, True),
        ("without vectors", False, True, True),
        ("without both", False, False, True),
        ("in lower case", True, True, False),
    ):
        at = known if vectored else {}
        shares = [
            refused(
                (asked.text if cased else asked.text.lower(), passages(asked, at, answerable=each, titled=titled))
                for asked in questions
            )
            for each in (True, False)
        ]
        console.print(f"  {name:16} {shares[0]:6.1%} {shares[1]:6.1%}")
    yes, no = (
        np.array([signals(Wording(asked.text), passages(asked, known, answerable=each)) for asked in questions])
        for each in (True, False)
    )
    for folds in (2, 5):
        shares = list(held_out(yes, no, folds))
        console.print(f"  refitted, {folds} folds {shares[0]:5.1%} {shares[1]:6.1%}  (held out)")
    for name, value in sentences(questions, known).items():
        console.print(f"  {name:16} {value:8.2f}")
    cases = [(asked.text, passages(asked, known, answerable=True)) for asked in questions]
    began = time.process_time()
    refused(cases)
    console.print(f"  CPU a question   {(time.process_time() - began) / len(cases) * 1000:8.2f} ms")


def served(console: Console, folder: Path, models: Path) -> None:
    """The same through a server with its usual settings: each question in a collection of its own paragraphs, each of
    them a document, and again when those that answer it have been deleted."""
    questions = hotpot(folder)
    outcomes: list[tuple[bool, bool]] = []
    with TemporaryDirectory(prefix="anabranch-answering-") as data, room(Path(data), models) as asking:
        for number, asked in enumerate(questions):
            name = f"question-{number}"
            asking.call("POST", "/v1/collections", {"name": name})
            paragraphs = asked.texts(answerable=True)
            taken = asking.ingest(
                name,
                [
                    {"id": title, "title": title, "source": {"type": "text", "content": text}}
                    for title, text in paragraphs.items()
                ],
            )
            known = asking.ask(asked.text, collections=[name])
            carrying = {title for title, _ in asked.facts}
            for title, document in zip(paragraphs, taken, strict=True):
                if title in carrying:
                    asking.call("DELETE", f"/v1/documents/{document['id']}")
            unknown = asking.ask(asked.text, collections=[name])
            outcomes.append((known["refused"], unknown["refused"]))
    shares = np.mean(outcomes, axis=0)
    console.print(f"[bold]{folder.name}, served[/]: refused {shares[0]:.1%} with, {shares[1]:.1%} without what answers")
    for column, wrong in ((0, True), (1, False)):
        console.print(
            f"  {'refused' if wrong else 'answered'}: {[n for n, o in enumerate(outcomes) if o[column] is wrong]}"
        )


def foreign(console: Console, folders: Sequence[Path], model: MiniLM) -> None:
    """Every collection's questions to its own ten nearest documents, and to the ten nearest of the others."""
    read = {folder.name: collection(folder) for folder in folders}
    asking = {name: vectors(model, queries) for name, (queries, _) in read.items()}
    documents = {name: vectors(model, [text for _, text in corpus.values()]) for name, (_, corpus) in read.items()}
    for asker, holder in itertools.product(read, read):
        queries, corpus = read[asker][0], list(read[holder][1].values())
        near = asking[asker] @ documents[holder].T
        cases = [
            (query, [passage(corpus[at][0], corpus[at][1], float(row[at])) for at in np.argsort(-row)[:10]])
            for query, row in zip(queries, near, strict=True)
        ]
        console.print(f"  questions of {asker:12} to {holder:12} refused {refused(cases):6.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="a folder with questions.json, as HotpotQA has it")
    parser.add_argument(
        "--search", type=Path, nargs="*", default=[], help="folders of test collections, as BEIR has them"
    )
    parser.add_argument("--served", action="store_true", help="ask a running server instead of the generator alone")
    parser.add_argument("--models", type=Path, default=Path.home() / ".cache/anabranch/models")
    told = parser.parse_args()
    console = Console(highlight=False)
    if told.served:
        served(console, told.data, told.models)
        return
    model = MiniLM(told.models)
    if told.data:
        answering(console, told.data, model)
    if told.search:
        foreign(console, told.search, model)


if __name__ == "__main__":
    main()
