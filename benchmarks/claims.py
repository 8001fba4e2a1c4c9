"""How well sentences are checked: claims that people wrote about passages, right, changed in one thing, and beyond what
the passage says.

    python -m benchmarks.claims observe --claims FILE... --passages FILE... --out FILE [--model FILE]
    python -m benchmarks.claims report FILE...
    python -m benchmarks.claims marks --claims FILE... --passages FILE... [--model FILE]

`observe` puts each claim to the product: ten passages, its own and the nine nearest to it of the file, the units that
the product chooses, its models and its exact checks. `report` says what the fitted weights make of it. `marks` writes
answers of three claims each, with right, wrong and missing citation marks, and measures the citations before and after
verification. training/written_claims.py describes the files; a passage may also have a `set`, and a claim `reworded`.
"""

import argparse
import asyncio
import hashlib
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple

from anabranch.domain.contracts import SystemClock
from anabranch.domain.events import AnswerEvent, Token
from anabranch.domain.evidence import ClaimChecker
from anabranch.domain.model import Citation, Passage
from anabranch.evidence.claim_weights import ClaimFeatures
from anabranch.evidence.claims import ReadPassages, best_of, features, finding, in_claim
from anabranch.models.evidence import CLAIMS_FILE, OnnxClaims
from anabranch.pipeline.cite import cite
from anabranch.pipeline.verify import Verifier
from anabranch.text.sentences import Span
from anabranch.text.words import terms

Kind = Literal["claim", "wrong", "beyond"]
KINDS: tuple[Kind, ...] = ("claim", "wrong", "beyond")
PASSAGES = 10
MODELS = Path("~/.cache/anabranch/models")
# Sentences of an answer with marks, and the share of the marks that are wrong.
SENTENCES, WRONG_MARKS = 3, 1 / 3


class Triple(NamedTuple):
    """A claim, its wrong and its unsupported form, the passages that it is looked for in, and where its words are."""

    texts: Mapping[Kind, str]
    change: str
    domain: str
    reworded: bool
    passages: tuple[Passage, ...]
    own: int
    evidence: tuple[Span, ...]
    group: str


class Observed(NamedTuple):
    """One form of a triple. `found`: the product compared it with words that it depends on."""

    kind: Kind
    change: str
    domain: str
    reworded: bool
    features: ClaimFeatures | None
    verdict: str
    support: float
    contradicted: float
    found: bool
    cpu_ms: float
    group: str


def triples(claims: Sequence[Path], passages: Sequence[Path]) -> Iterator[Triple]:
    rows = {row["id"]: row for row in _lines(passages)}
    words = {name: frozenset(terms(" ".join(row["sentences"]))) for name, row in rows.items()}
    read = {name: _passage(row) for name, row in rows.items()}
    for claim in _lines(claims):
        name = claim["id"]
        near = sorted(
            (other for other in rows if other != name and rows[other]["title"] != rows[name]["title"]),
            key=lambda other: -len(words[name] & words[other]) / (30 + len(words[other])),
        )[: PASSAGES - 1]
        order = [name, *near]
        Random(name).shuffle(order)
        _, spans = read[name]
        yield Triple(
            texts={kind: claim[kind] for kind in KINDS},
            change=claim["change"],
            domain=rows[name].get("set", ""),
            reworded=claim.get("reworded", True),
            passages=tuple(read[other][0] for other in order),
            own=order.index(name),
            evidence=tuple(spans[number] for number in sorted(set(claim["of"]))),
            group=name,
        )


def _passage(row: dict[str, Any]) -> tuple[Passage, list[Span]]:
    spans: list[Span] = []
    text = ""
    for sentence in row["sentences"]:
        text += " " if text else ""
        spans.append((len(text), len(text) + len(sentence)))
        text += sentence
    return Passage(source=row["id"], title=row["title"], text=text, score=1.0), spans


def _lines(files: Sequence[Path]) -> Iterator[dict[str, Any]]:
    for file in files:
        yield from map(json.loads, filter(str.strip, file.read_text("utf-8").splitlines()))


async def observed(triple: Triple, checker: ClaimChecker) -> list[Observed]:
    read = ReadPassages(triple.passages)
    found = []
    for kind in KINDS:
        claim = triple.texts[kind]
        began = time.process_time()
        copied = read.copied(claim)
        chosen = read.candidates(claim) if copied is None else []
        results, seen = [], []
        for candidate in chosen:
            _, asked, differing = read.comparison(claim, candidate)
            (verdict,) = await checker.check(asked.text, [(read.page(candidate),)])
            verdict = in_claim(verdict, asked)
            seen.append((features(candidate, verdict, differing), verdict.contradicted if verdict else 0.0))
            results.append(finding(claim, read, candidate, verdict, differing))
            if results[-1].verdict == "supported":
                break
        best = best_of(results)
        quotes = [copied] if copied is not None else [quote for one in results for quote in one.quotes]
        place = results.index(best) if best in results else 0
        found.append(
            Observed(
                kind=kind,
                change=triple.change,
                domain=triple.domain,
                reworded=triple.reworded,
                features=seen[place][0] if seen else None,
                verdict="supported" if copied is not None else best.verdict,
                support=1.0 if copied is not None else best.support,
                contradicted=seen[place][1] if seen else 0.0,
                found=any(one.passage == triple.own and _overlaps(one.span, triple.evidence) for one in quotes),
                cpu_ms=(time.process_time() - began) * 1000,
                group=triple.group,
            )
        )
    return found


def _overlaps(span: Span, spans: Sequence[Span]) -> bool:
    return any(span[0] < end and start < span[1] for start, end in spans)


def kept(file: Path) -> list[Observed]:
    """What `observe` wrote."""
    rows = (Observed(*row) for row in json.loads(file.read_text("utf-8")))
    return [row._replace(features=row.features and ClaimFeatures(*row.features)) for row in rows]


# --- what is reported


def report(rows: Sequence[Observed]) -> None:
    right = [row for row in rows if row.kind == "claim"]
    print(f"{len(right)} claims; CPU {sum(row.cpu_ms for row in rows) / len(rows):.1f} ms each")
    print(f"{'':28}{'claims':>8}{'supported':>12}{'partly':>9}{'unsupported':>13}{'contradicted':>14}")
    for name, some in _groups(rows):
        shares = [sum(row.verdict == verdict for row in some) / len(some) for verdict in VERDICTS]
        cells = "".join(f"{share:>{width}.1%}" for share, width in zip(shares, (12, 9, 13, 14), strict=True))
        print(f"{name:28}{len(some):>8}{cells}")
    said = [row for row in rows if row.verdict == "supported"]
    precision = sum(row.kind == "claim" for row in said) / max(1, len(said))
    recall = sum(row.kind == "claim" for row in said) / max(1, len(right))
    quoted = sum(row.found for row in right if row.verdict == "supported") / max(
        1, sum(r.verdict == "supported" for r in right)
    )
    print(f"called supported: precision {precision:.1%}, recall {recall:.1%}; quotes that are right {quoted:.1%}")


VERDICTS = ("supported", "partly", "unsupported", "contradicted")


def _groups(rows: Sequence[Observed]) -> Iterator[tuple[str, list[Observed]]]:
    for kind, name in (("claim", "right"), ("wrong", "changed"), ("beyond", "beyond the passage")):
        some = [row for row in rows if row.kind == kind]
        yield name, some
        if kind == "claim":
            for reworded in (True, False):
                if own := [row for row in some if row.reworded is reworded]:
                    yield "  reworded" if reworded else "  near the wording", own
        parts: dict[str, list[Observed]] = defaultdict(list)
        for row in some:
            parts[row.change if kind == "wrong" else row.domain].append(row)
        for part in sorted(parts):
            if kind != "beyond":
                yield f"  {part}", parts[part]


# --- citation marks


class Marked(NamedTuple):
    """An answer of several claims, and for each the passage and the words that support it."""

    text: str
    passages: tuple[Passage, ...]
    gold: tuple[tuple[Span, int, tuple[Span, ...]], ...]
    wrong: frozenset[int]


def answers(some: Sequence[Triple], marks: Literal["none", "third", "right"]) -> Iterator[Marked]:
    """Three claims each, over their own passages and the nearest ones of the first."""
    rng = Random(7)
    for at in range(0, len(some) - SENTENCES + 1, SENTENCES):
        group = some[at : at + SENTENCES]
        pool = {one.passages[one.own].source: one.passages[one.own] for one in group}
        for other in group[0].passages:
            if len(pool) < PASSAGES:
                pool.setdefault(other.source, other)
        passages = tuple(rng.sample(list(pool.values()), len(pool)))
        numbers = {passage.source: number for number, passage in enumerate(passages)}
        text, gold, wrong = "", [], set()
        for place, one in enumerate(group):
            own = numbers[one.group]
            start = len(text)
            claim = one.texts["claim"].strip().rstrip(".!")
            named = own
            if marks == "third" and rng.random() < WRONG_MARKS:
                named = rng.choice([number for number in range(len(passages)) if number != own])
                wrong.add(place)
            text += claim + (f" [{named + 1}]." if marks != "none" else ".")
            gold.append(((start, len(text)), own, one.evidence))
            text += " "
        yield Marked(text.strip(), passages, tuple(gold), frozenset(wrong))


async def verified(answer: Marked, checker: ClaimChecker) -> tuple[Citation, ...]:
    async def nowhere(_: AnswerEvent) -> None:
        return

    verifying = Verifier(checker, SystemClock()).verifying(
        answer.passages, nowhere, strict=False, streaming=True, deadline=time.monotonic() + 60, language=None
    )
    async with verifying:
        for word in answer.text.split(" "):
            await verifying.emit(Token(text=f"{word} "))
        return (await verifying.finish()).citations


def score(answer: Marked, citations: Sequence[Citation]) -> tuple[int, int, int, int, int]:
    """Citations that name the right passage, that quote the right words, all; sentences with a right quote; and wrong
    marks whose sentence is now cited rightly."""
    named = quoted = 0
    done: set[int] = set()
    for one in citations:
        for place, ((start, end), own, evidence) in enumerate(answer.gold):
            if start <= one.start <= end:
                named += one.passage == own
                if one.passage == own and _overlaps((one.passage_start, one.passage_end), evidence):
                    quoted += 1
                    done.add(place)
                break
    return named, quoted, len(citations), len(done), len(done & answer.wrong)


async def report_marks(some: Sequence[Triple], checker: ClaimChecker) -> None:
    print(f"{'':28}{'passage right':>15}{'words right':>13}{'sentences cited':>17}{'corrected right':>17}")
    for marks in ("none", "third", "right"):
        sums = {"before": [0] * 5, "after": [0] * 5}
        sentences = wrong = 0
        for answer in answers(some, marks):
            sentences += len(answer.gold)
            wrong += len(answer.wrong)
            for name, citations in (
                ("before", cite(answer.text, answer.passages)),
                ("after", await verified(answer, checker)),
            ):
                sums[name] = [a + b for a, b in zip(sums[name], score(answer, citations), strict=True)]
        for name, (named, quoted, every, done, mended) in sums.items():
            cells = f"{named / max(1, every):>15.1%}{quoted / max(1, every):>13.1%}{done / sentences:>17.1%}"
            print(f"{f'marks {marks}, {name}':28}{cells}" + (f"{mended / wrong:>17.1%}" if wrong else ""))


# --- the command


def _checker(told: argparse.Namespace) -> OnnxClaims:
    sha256 = hashlib.sha256(told.model.read_bytes()).hexdigest()
    return OnnxClaims(told.models.expanduser(), threads=1, file=told.model, sha256=sha256)


async def _observe(told: argparse.Namespace) -> None:
    checker = _checker(told)
    rows: list[Observed] = []
    for number, triple in enumerate(triples(told.claims, told.passages)):
        rows += await observed(triple, checker)
        if number % 100 == 99:
            print(f"{number + 1} claims", file=sys.stderr)
    told.out.write_text(json.dumps(rows), encoding="utf-8")
    report(rows)


async def _marks(told: argparse.Namespace) -> None:
    await report_marks(list(triples(told.claims, told.passages)), _checker(told))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("observe", "marks"):
        one = commands.add_parser(name)
        one.add_argument("--claims", type=Path, nargs="+", required=True)
        one.add_argument("--passages", type=Path, nargs="+", required=True)
        one.add_argument("--model", type=Path, default=CLAIMS_FILE)
        one.add_argument("--models", type=Path, default=MODELS)
        if name == "observe":
            one.add_argument("--out", type=Path, required=True)
    commands.add_parser("report").add_argument("files", type=Path, nargs="+")
    told = parser.parse_args()
    if told.command == "report":
        report([row for file in told.files for row in kept(file)])
    else:
        asyncio.run((_observe if told.command == "observe" else _marks)(told))


if __name__ == "__main__":
    main()
