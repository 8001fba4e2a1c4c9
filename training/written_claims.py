"""Claims that people wrote about passages, in the form of the training data.

    python -m training.written_claims --claims FILE... --passages FILE... --out PATH

Each line of a passages file is a JSON object: `id`, `title` and `sentences`; of a claims file: `id` of its passage,
`claim`, `of` (the numbers of the sentences that support it), `wrong` (the claim with one thing changed, so that the
passage says something else; or several such claims, each as a list of what is changed and the claim) and `beyond`
(what the passage neither says nor denies).
"""

import argparse
import hashlib
import json
from collections.abc import Iterator
from difflib import SequenceMatcher
from pathlib import Path
from random import Random
from typing import Any

from training.documentation.dataset import save

KIND = "claims"
SUPPORTED, UNKNOWN, CONTRADICTED = 0, 1, 2
# A statement that is as similar to the claim is the claim with something added.
ADDED = 0.5


def rows_of(claim: dict[str, Any], passage: dict[str, Any], rng: Random) -> Iterator[list[Any]]:
    """Each claim with the sentences that it needs, with some more around them, and with the whole passage; the right
    one also with a passage from which they are left out."""
    sentences, needed = passage["sentences"], sorted(set(claim["of"]))
    title = passage["title"]
    every = range(len(sentences))
    around = {near for number in needed for near in (number - 1, number + 1) if near in every}
    some = sorted({*needed, *rng.sample(sorted(around), min(len(around), rng.choice((1, 2))))})
    rest = [number for number in every if number not in needed]
    added = SequenceMatcher(None, claim["claim"].split(), claim["beyond"].split(), autojunk=False).ratio() >= ADDED
    original = claim["claim"] if added else None
    few = sorted(rng.sample(rest, min(len(rest), rng.choice((1, 2, 3)))))
    for shown in dict.fromkeys(map(tuple, (needed, some, every))):
        evidence = [sentences[number] for number in shown]
        decide = [shown.index(number) for number in needed]
        yield [claim["claim"], evidence, SUPPORTED, KIND, title, decide, claim["claim"]]
        for wrong in _wrongs(claim):
            yield [wrong, evidence, CONTRADICTED, KIND, title, decide, claim["claim"]]
        yield [claim["beyond"], evidence, UNKNOWN, KIND, title, None, original]
    for shown in dict.fromkeys(map(tuple, (few, rest))):
        if shown:
            yield [claim["claim"], [sentences[number] for number in shown], UNKNOWN, KIND, title, [], None]


def _wrongs(claim: dict[str, Any]) -> list[str]:
    wrong = claim["wrong"]
    return [wrong] if isinstance(wrong, str) else [text for _, text in wrong]


def _lines(files: list[Path]) -> Iterator[dict[str, Any]]:
    for file in files:
        yield from map(json.loads, filter(str.strip, file.read_text("utf-8").splitlines()))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--claims", type=Path, nargs="+", required=True)
    options.add_argument("--passages", type=Path, nargs="+", required=True)
    options.add_argument("--out", type=Path, required=True)
    told = options.parse_args()
    passages = {row["id"]: row for row in _lines(told.passages)}
    claims = list(_lines(told.claims))
    rng = Random(1)
    rows = [row for claim in claims for row in rows_of(claim, passages[claim["id"]], rng)]
    save({"P": [], "Q": [], "C": rows}, told.out)
    print(f"{len(claims)} claims: {len(rows)} examples; sha256 {hashlib.sha256(told.out.read_bytes()).hexdigest()}")


if __name__ == "__main__":
    main()
