"""Claims that people wrote about passages, in the form of the training data.

    python -m training.written_claims --claims FILE... --passages FILE... --out PATH

Each line of a passages file is a JSON object: `id`, `title` and `sentences`; of a claims file: `id` of its passage,
`claim`, `of` (the numbers of the sentences that support it), `wrong` (the claim with one thing changed, so that the
passage says something else) and `beyond` (what the passage neither says nor denies).
"""

import argparse
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from training.documentation.dataset import save

KIND = "claims"
SUPPORTED, UNKNOWN, CONTRADICTED = 0, 1, 2


def rows_of(claim: dict[str, Any], passage: dict[str, Any]) -> Iterator[list[Any]]:
    """Each claim with the sentences that it needs, and with the whole passage; the right one also with a passage from
    which they are left out."""
    sentences, needed = passage["sentences"], sorted(set(claim["of"]))
    title = passage["title"]
    whole = " ".join(sentences)
    own = " ".join(sentences[number] for number in needed)
    for evidence in dict.fromkeys((own, whole)):
        yield [claim["claim"], evidence, SUPPORTED, KIND, title]
        yield [claim["wrong"], evidence, CONTRADICTED, KIND, title]
        yield [claim["beyond"], evidence, UNKNOWN, KIND, title]
    if rest := " ".join(one for number, one in enumerate(sentences) if number not in needed):
        yield [claim["claim"], rest, UNKNOWN, KIND, title]


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
    rows = [row for claim in claims for row in rows_of(claim, passages[claim["id"]])]
    save({"P": [], "Q": [], "C": rows}, told.out)
    print(f"{len(claims)} claims: {len(rows)} examples; sha256 {hashlib.sha256(told.out.read_bytes()).hexdigest()}")


if __name__ == "__main__":
    main()
