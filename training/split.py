"""Splits the training data: about 3% of the questions, with everything about their articles, are held out. The model
never sees them; the weights that combine it with rules are fitted on them.

    python -m training.split --data data.json.xz --out study.json.xz
"""

import argparse
import hashlib
import json
import lzma
from pathlib import Path
from typing import Any

SHARE = 0.03
# Sets with an answer that can be quoted, which are held out. Questions of the others are all for training.
SETS = ("squad1", "squad2", "nq", "hotpot", "2wiki", "bio", "covid", "policy", "boolq", "iirc")

Row = dict[str, Any]


def is_held(passages: list[Row], at: int) -> bool:
    """By the name of the article, so that its passages are on one side; where none is named, by passage."""
    group = passages[at]["g"]
    if ":" not in group and not group.startswith("covid"):
        group = f"{group}:{at}"
    number = int.from_bytes(hashlib.sha256(group.encode()).digest()[:8], "big")
    return number / 2**64 < SHARE


def split(passages: list[Row], questions: list[Row]) -> tuple[list[Row], list[Row]]:
    """The questions to train on and those held out. A question that only has a held-out article among its passages is
    left out of both: the model must not read the article. Sets that are not held out are all for training."""
    train, held = [], []
    for question in questions:
        own = [is_held(passages, number) for number in question["pos"]]
        if question["k"] in SETS and own and own[0]:
            held.append(question)
        elif question["k"] not in SETS or not any(own):
            near = [number for number in question.get("neg", []) if not is_held(passages, number)]
            train.append({**question, "neg": near})
    return train, held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the file of the study, data.json.xz")
    parser.add_argument("--out", type=Path, required=True)
    told = parser.parse_args()
    data = json.loads(lzma.decompress(told.data.read_bytes()))
    train, held = split(data["P"], data["Q"])
    written = json.dumps({**data, "Q": train, "held": held}, ensure_ascii=False, separators=(",", ":"))
    told.out.write_bytes(lzma.compress(written.encode(), preset=9))
    print(f"{len(train)} questions to train on, {len(held)} held out")


if __name__ == "__main__":
    main()
