"""Measures a trained model: in full precision with PyTorch, or the exported 8-bit file as the product runs it."""

import argparse
import json
import lzma
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from anabranch.models.evidence_input import JOINT, SINGLE, InputIds, PageIds, laid_out
from training.inputs import ALONE, Batch, Floats, Reader, WordTable, batches, padded, plain_tokenizer
from training.text import normal, overlap

LONGEST_ANSWER = 30
CLAIM_SETS = ("snli", "mnli", "fever", "fm2", "feversym", "wice")
# Of these it is only known whether a claim is supported.
TWO_WAY = {"feversym", "wice"}
# Answerable questions that may be refused, where it is measured how many others are refused then.
REFUSED = 0.08
JOINT_TOKENS, JOINT_PAGES, JOINT_UNITS = 430, 8, 3

Row = dict[str, Any]
Result = dict[str, float]


class Scores(NamedTuple):
    """What the model says of one input. `best` is the span's score above "no answer"; `span` its unit's place among the
    input's units, and its first and last token in that unit."""

    passage: Floats
    units: Floats
    best: float
    span: tuple[int, int, int]


class Runner(Protocol):
    def __call__(self, batch: Batch) -> tuple[Floats, Floats]:
        """The outputs `passage` and `tokens` of a batch."""


class Model:
    def __init__(self, run: Runner, reader: Reader, batch_tokens: int) -> None:
        self.reader = reader
        self._run = run
        self._batch_tokens = batch_tokens

    def scores(self, inputs: Sequence[InputIds]) -> list[Scores]:
        found: dict[int, Scores] = {}
        for numbers in batches(inputs, self._batch_tokens):
            passages, tokens = self._run(padded([inputs[number] for number in numbers]))
            for row, number in enumerate(numbers):
                found[number] = _scores(inputs[number], passages[row], tokens[row])
        return [found[number] for number in range(len(inputs))]

    def passages(self, inputs: Sequence[InputIds]) -> list[Floats]:
        """Only what is said of whole inputs, which is faster."""
        found: dict[int, Floats] = {}
        for numbers in batches(inputs, self._batch_tokens):
            found |= zip(numbers, self._run(padded([inputs[number] for number in numbers]))[0], strict=True)
        return [found[number] for number in range(len(inputs))]

    def question(self, question: str, title: str, units: Sequence[str], before: Sequence[str] = ()) -> InputIds:
        return laid_out(self.reader.ids(question), [self.reader.page(title, units, before)], SINGLE)


def _scores(input_ids: InputIds, passage: Floats, tokens: Floats) -> Scores:
    units = np.array([tokens[place.marker, 2] for place in input_ids.places], np.float32)
    best, span = -np.inf, (0, 0, 0)
    for number, place in enumerate(input_ids.places):
        start, end = tokens[place.marker + 1 : place.end, 0], tokens[place.marker + 1 : place.end, 1]
        if not len(start):
            continue
        pairs = start[:, None] + end[None, :]
        at = np.arange(len(start))
        apart = at[None, :] - at[:, None]
        pairs = np.where((apart >= 0) & (apart < LONGEST_ANSWER), pairs, -np.inf)
        first, last = np.unravel_index(pairs.argmax(), pairs.shape)
        if pairs[first, last] > best:
            best, span = float(pairs[first, last]), (number, int(first), int(last))
    return Scores(passage, units, best - float(tokens[0, 0] + tokens[0, 1]), span)


def torch_model(base: Path, folder: Path) -> Model:
    import torch  # noqa: PLC0415  not needed for an exported model

    from training import weights  # noqa: PLC0415
    from training.model import trained_model  # noqa: PLC0415

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with np.load(base) as held:
        model = trained_model({name: held[name] for name in ("words", "scales")}, weights.read(folder))
        reader = Reader(plain_tokenizer(bytes(held["tokenizer"])))
    model.to(device).eval()

    def run(batch: Batch) -> tuple[Floats, Floats]:
        ids, types, mask = (torch.from_numpy(each).to(device) for each in batch)
        with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            output = model(ids, types.float(), mask)
        return output.passage.cpu().numpy(), output.tokens.cpu().numpy()

    return Model(run, reader, 65_536 if device == "cuda" else 2048)


def onnx_model(base: Path, path: Path, threads: int) -> Model:
    import onnxruntime  # noqa: PLC0415  not needed for trained weights

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    with np.load(base) as held:
        table = WordTable(held["words"], held["scales"])
        reader = Reader(plain_tokenizer(bytes(held["tokenizer"])))

    def run(batch: Batch) -> tuple[Floats, Floats]:
        passage, tokens = session.run(["passage", "tokens"], table.feed(batch))
        return passage, tokens

    return Model(run, reader, ALONE)


# Measures.


def auc(right: Sequence[float] | Floats, wrong: Sequence[float] | Floats) -> float:
    """How often a right one has the higher score; equal scores count half."""
    left, other = np.asarray(right), np.sort(np.asarray(wrong))
    below = np.searchsorted(other, left, "left") + np.searchsorted(other, left, "right")
    return float(below.sum() / 2 / (len(left) * len(other))) if len(left) and len(other) else float("nan")


def refusal(right: Sequence[float], wrong: Sequence[float]) -> Result:
    threshold = np.quantile(right, REFUSED)
    return {
        "auc": auc(right, wrong),
        "refused unanswerable at 8%": float((np.asarray(wrong) < threshold).mean()),
        "refused answerable at 0": float((np.asarray(right) < 0).mean()),
        "refused unanswerable at 0": float((np.asarray(wrong) < 0).mean()),
    }


def probability(score: Floats | float) -> Any:
    return 1 / (1 + np.exp(-np.asarray(score)))


def squad(model: Model, rows: Sequence[Row], *, lower: bool = False) -> Result:
    questions = [row["q"].lower() if lower else row["q"] for row in rows]
    found = model.scores([model.question(q, row["t"], row["s"]) for q, row in zip(questions, rows, strict=True)])
    has = np.array([bool(row["a"]) for row in rows])
    said = [_words(model, row["s"], scores) for row, scores in zip(rows, found, strict=True)]
    exact = np.array(
        [max((normal(s) == normal(a) for a in row["a"]), default=False) for s, row in zip(said, rows, strict=True)]
    )
    words = np.array([max((overlap(s, a) for a in row["a"]), default=0.0) for s, row in zip(said, rows, strict=True)])
    answerable = np.array([scores.passage[1] for scores in found])
    both = answerable + 0.5 * np.array([scores.best for scores in found])
    result = {
        "answerable F1": float(words[has].mean()),
        "answerable EM": float(exact[has].mean()),
        "AUC": auc(answerable[has], answerable[~has]),
        "AUC with span": auc(both[has], both[~has]),
        "F1 at 0": float(np.where(answerable > 0, np.where(has, words, 0), ~has).mean()),
    }
    result["F1"], result["EM"] = max(
        (
            float(np.where(both > threshold, np.where(has, words, 0), ~has).mean()),
            float(np.where(both > threshold, np.where(has, exact, 0), ~has).mean()),
        )
        for threshold in np.quantile(both, np.linspace(0, 1, 101))
    )
    best = [row["s"][int(scores.units.argmax())] for row, scores in zip(rows, found, strict=True)]
    holds = [any(normal(a) in normal(unit) for a in row["a"]) for unit, row in zip(best, rows, strict=True) if row["a"]]
    return {**result, "best unit has the answer": float(np.mean(holds))}


def _words(model: Model, units: Sequence[str], scores: Scores) -> str:
    unit, first, last = scores.span
    offsets = model.reader.offsets(units[unit])
    return units[unit][offsets[first][0] : offsets[last][1]] if offsets else ""


class Candidate(NamedTuple):
    """A unit of one of several passages, with its score."""

    passage: Any
    unit: int
    score: float


def five(model: Model, rows: Sequence[Row], passages: dict[str, Any]) -> Result:
    """Five passages, of which one or two have the evidence: which units are quoted, and whether the question is refused
    with five others."""
    asked = []
    for number, row in enumerate(rows):
        gold = [int(key) for key in row["gold"]]
        shown = gold + row["near"][: 5 - len(gold)]
        asked += [(number, each) for each in dict.fromkeys(shown + row["near"][:5])]
    found = model.scores([model.question(rows[n]["q"], *passages[str(p)]) for n, p in asked])
    scores = dict(zip(asked, found, strict=True))
    right, wrong, first, ranked = [], [], [], []
    for number, row in enumerate(rows):
        gold = [int(key) for key in row["gold"]]
        shown = gold + row["near"][: 5 - len(gold)]
        right.append(max(float(scores[number, each].passage[1]) for each in shown))
        wrong += [max(float(scores[number, each].passage[1]) for each in row["near"][:5])] if row["near"] else []
        first.append(max(shown, key=lambda each: scores[number, each].passage[0]) in gold)
        ranked.append(_ranked([(each, scores[number, each]) for each in shown]))
    evidence = [{(int(key), unit) for key, units in row["gold"].items() for unit in units} for row in rows]
    return {
        **refusal(right, wrong),
        "right passage first": float(np.mean(first)),
        **_quoted(ranked, evidence),
    }


def _ranked(passages: Sequence[tuple[Any, Scores]]) -> list[Candidate]:
    candidates = [
        Candidate(name, unit, float(probability(score) * probability(scores.passage[0])))
        for name, scores in passages
        for unit, score in enumerate(scores.units)
    ]
    return sorted(candidates, key=lambda candidate: -candidate.score)


def _quoted(ranked: Sequence[Sequence[Candidate]], evidence: Sequence[set[tuple[Any, int]]]) -> Result:
    """Precision, recall and F1 of the best unit, of the best two, and of those above a half, one to four."""
    result = {}
    rules: dict[str, Callable[[Sequence[Candidate]], Sequence[Candidate]]] = {
        "best": lambda candidates: candidates[:1],
        "best two": lambda candidates: candidates[:2],
        "above half": lambda candidates: [each for each in candidates[:4] if each.score > 0.5] or candidates[:1],
    }
    for name, rule in rules.items():
        rows = []
        for candidates, right in zip(ranked, evidence, strict=True):
            chosen = {(each.passage, each.unit) for each in rule(candidates)}
            same = len(chosen & right)
            rows.append((same / len(chosen), same / len(right), 2 * same / (len(chosen) + len(right)), same > 0))
        for measure, value in zip(("P", "R", "F1", "hit"), np.mean(rows, axis=0), strict=True):
            result[f"{name}: {measure}"] = float(value)
    return result


def hotpot(model: Model, rows: Sequence[Row]) -> Result:
    """Two-hop questions: supporting sentences of ten paragraphs, by paragraph and read together; and whether the
    question is refused without the right paragraphs."""
    alone = [_alone(model, row, row["context"]) for row in rows]
    others = [
        _alone(model, row, [page for page in row["context"] if page[0] not in {t for t, _ in row["supporting_facts"]}])
        for row in rows
    ]
    evidence = [{(title, unit) for title, unit in row["supporting_facts"]} for row in rows]
    together = [_jointly(model, row, found) for row, found in zip(rows, alone, strict=True)]
    foreign = [_jointly(model, row, found) for row, found in zip(rows, others, strict=True)]
    single = [_ranked([(title, scores) for title, _, scores in found]) for found in alone]
    both = [_combined(joint[0], each) for joint, each in zip(together, single, strict=True)]
    right = [joint[1] for joint in together]
    wrong = [joint[1] for joint in foreign]
    return {
        **{f"alone, {name}": value for name, value in _quoted(single, evidence).items()},
        **{f"joint, {name}": value for name, value in _quoted([joint[0] for joint in together], evidence).items()},
        **{f"both, {name}": value for name, value in _quoted(both, evidence).items()},
        **refusal(right, wrong),
    }


def _alone(model: Model, row: Row, pages: Sequence[Any]) -> list[tuple[str, list[str], Scores]]:
    shown = [(title, units) for title, units in pages if "".join(units).strip()]
    found = model.scores([model.question(row["question"], title, units) for title, units in shown])
    return [(title, units, scores) for (title, units), scores in zip(shown, found, strict=True)]


def _jointly(model: Model, row: Row, found: Sequence[tuple[str, list[str], Scores]]) -> tuple[list[Candidate], float]:
    """The best units of the best paragraphs in one input: their scores, and how answerable the question is."""
    pages: list[PageIds] = []
    names: list[tuple[str, list[int]]] = []
    size = 0
    for title, units, scores in sorted(found, key=lambda each: -each[2].passage[0])[:JOINT_PAGES]:
        kept = sorted(np.argsort(-scores.units)[:JOINT_UNITS].tolist())
        page = model.reader.page(title, [units[unit] for unit in kept])
        size += len(page.title) + sum(len(unit.text) + 1 for unit in page.units)
        if pages and size > JOINT_TOKENS:
            break
        pages.append(page)
        names.append((title, kept))
    input_ids = laid_out(model.reader.ids(row["question"]), pages, JOINT)
    [scores] = model.scores([input_ids])
    candidates = [
        Candidate(names[place.page][0], names[place.page][1][place.unit], float(probability(score)))
        for place, score in zip(input_ids.places, scores.units, strict=True)
    ]
    return sorted(candidates, key=lambda each: -each.score), float(scores.passage[1])


def _combined(joint: Sequence[Candidate], alone: Sequence[Candidate]) -> list[Candidate]:
    by_unit = {(each.passage, each.unit): each.score for each in alone}
    both = [each._replace(score=(each.score + 0.5 * by_unit.get((each.passage, each.unit), 0)) / 1.5) for each in joint]
    return sorted(both, key=lambda each: -each.score)


def claims(model: Model, rows: Sequence[Any], name: str) -> Result:
    inputs = []
    for text, evidence, _, _, *title in rows:
        page = model.reader.page(title[0] if title else "", [evidence])
        inputs.append(laid_out(model.reader.ids(text), [page], JOINT, claim=True))
    found = np.array([scores.passage[2:] for scores in model.scores(inputs)])
    label = np.array([row[2] for row in rows])
    supported = found[:, 0] - np.logaddexp(found[:, 1], found[:, 2])
    result = {"AUC supported": auc(supported[label == 0], supported[label != 0])}
    if name in TWO_WAY:
        return {"accuracy": float(((supported > 0) == (label == 0)).mean()), **result}
    return {"accuracy": float((found.argmax(1) == label).mean()), **result}


def documentation(model: Model, data: Row, *, lower: bool = False) -> Result:
    """The held-out questions: where the right unit is among those of its passage, and among those of the near passages
    too; and whether answerable questions can be told from the others."""
    asked, inputs = [], []
    for number, row in enumerate(data["held"]):
        text = row["q"].lower() if lower else row["q"]
        for passage in dict.fromkeys([*row["pos"], *(row.get("neg") or [])[:4]]):
            page = data["P"][passage]
            cut = row.get("cut") or () if passage in row["pos"] else ()
            kept = [unit for unit in range(len(page["s"])) if unit not in cut]
            if kept:
                before = page.get("b") or [""] * len(page["s"])
                units = [page["s"][unit] for unit in kept]
                inputs.append(model.question(text, page["t"], units, [before[unit] for unit in kept]))
                asked.append((number, passage))
    found = dict(zip(asked, model.scores(inputs), strict=True))
    ranks: dict[str, list[int]] = {"own passage": [], "five passages": []}
    right: list[float] = []
    wrong: list[float] = []
    for number, row in enumerate(data["held"]):
        own = [(passage, found[number, passage]) for passage in row["pos"] if (number, passage) in found]
        near = [(p, found[number, p]) for p in (row.get("neg") or [])[:4] if (number, p) in found]
        if not own:
            continue
        (right if row["a"] else wrong).append(max(float(scores.passage[1]) for _, scores in own))
        evidence = {(int(passage), unit) for passage, units in (row.get("sup") or {}).items() for unit in units}
        if row["a"] and evidence:
            for name, shown in (("own passage", own), ("five passages", own + near)):
                order = [(each.passage, each.unit) for each in _ranked(shown)]
                ranks[name].append(next((at for at, unit in enumerate(order) if unit in evidence), len(order)))
    result = {
        f"{name}: hit@{at}": float(np.mean(np.array(places) < at)) for name, places in ranks.items() for at in (1, 3)
    }
    return {**result, **refusal(right, wrong)}


def evaluated(model: Model, arguments: argparse.Namespace) -> dict[str, Result]:
    evals = json.loads(lzma.decompress(arguments.evals.read_bytes()))
    tasks: dict[str, Callable[[], Result]] = {
        "squad2": lambda: squad(model, _some(evals["squad2"], arguments.sample)),
        "squad2, lower case": lambda: squad(model, _some(evals["squad2"], arguments.sample), lower=True),
        "five SQuAD passages": lambda: five(model, _some(evals["sq5"], arguments.sample), evals["P2"]),
        "five BioASQ passages": lambda: five(model, _some(evals["bio5"], arguments.sample), evals["P2"]),
    }
    for name in CLAIM_SETS:
        tasks[f"claims, {name}"] = lambda name=name: claims(model, _some(evals[name], arguments.sample), name)  # type: ignore[misc]
    if arguments.hotpot:
        rows = json.loads(arguments.hotpot.read_text(encoding="utf-8"))
        tasks["hotpotqa"] = lambda: hotpot(model, _some(rows, arguments.sample))
    if arguments.data:
        data = json.loads(lzma.decompress(arguments.data.read_bytes()))
        data["held"] = _some(data["held"], arguments.sample)
        tasks["documentation"] = lambda: documentation(model, data)
        tasks["documentation, lower case"] = lambda: documentation(model, data, lower=True)
    results = {}
    for name, task in tasks.items():
        if any(name.startswith(each) for each in arguments.only or [name]):
            began = time.monotonic()
            results[name] = {measure: round(value, 4) for measure, value in task().items()}
            print(f"{name} ({time.monotonic() - began:.0f} s)", flush=True)
            for measure, value in results[name].items():
                print(f"    {measure:36} {value:.3f}", flush=True)
    return results


def _some(rows: Sequence[Any], count: int | None) -> Sequence[Any]:
    return rows[:: max(1, len(rows) // count)][:count] if count else rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--weights", type=Path, help="the folder that training wrote")
    what.add_argument("--onnx", type=Path, help="the file that export wrote")
    add("--base", type=Path, required=True, help="what training.base wrote")
    add("--evals", type=Path, required=True)
    add("--hotpot", type=Path, help="hotpotqa-100/questions.json")
    add("--data", type=Path, help="a file of training data with held-out questions")
    add("--out", type=Path, help="also write the results as JSON")
    add("--only", nargs="+", help="only measures whose names begin so, such as squad2 claims")
    add("--sample", type=int, help="of each set only so many")
    add("--threads", type=int, default=1, help="of the exported model")
    arguments = parser.parse_args()
    if arguments.weights:
        model = torch_model(arguments.base, arguments.weights)
    else:
        model = onnx_model(arguments.base, arguments.onnx, arguments.threads)
    results = evaluated(model, arguments)
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
