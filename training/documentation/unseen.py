"""Leaves the documents of other questions out of the data, so that these questions can be used for fitting.

    python -m training.documentation.unseen --data docs.json.xz --questions benchmarks/questions/development.json \\
        --out unseen.json.xz
"""

import argparse
import hashlib
import json
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from training.documentation.sources import PACKAGES

Row = dict[str, Any]


def files(questions: Row) -> Iterator[tuple[str, str]]:
    """The package, as it is named in the data, and the path of each document. The user guide of pandas is from another
    distribution of the package."""
    names = {package.folder.rpartition("-")[0]: package.name for package in PACKAGES}
    for name, package in questions["packages"].items():
        distribution = name.removesuffix(" user guide").lower()
        for file in package["files"]:
            yield names.get(distribution, distribution).lower(), f"/{file.lower()}"


def without(data: Row, questions: Row) -> Row:
    """The data without questions about these documents, and without their passages as near ones."""
    named = list(files(questions))

    def is_named(group: str) -> bool:
        package, _, path = group.removeprefix("held:").removeprefix("docs:").lower().partition("/")
        return any(package == name and file.endswith(f"/{path}") for name, file in named)

    left_out = [is_named(passage["g"]) for passage in data["P"]]
    return {**data, **{part: kept(data[part], left_out.__getitem__) for part in ("Q", "held")}}


def kept(questions: list[Row], is_left_out: Callable[[int], bool]) -> list[Row]:
    return [
        {**question, "neg": [near for near in question.get("neg", []) if not is_left_out(near)]}
        for question in questions
        if not any(map(is_left_out, question["pos"]))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    told = parser.parse_args()
    data = json.loads(lzma.decompress(told.data.read_bytes()))
    found = without(data, json.loads(told.questions.read_text("utf-8")))
    encoded = lzma.compress(json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode(), preset=6)
    told.out.write_bytes(encoded)
    print(
        f"{len(found['Q'])} of {len(data['Q'])} questions, {len(found['held'])} of {len(data['held'])} held out; "
        f"sha256 {hashlib.sha256(encoded).hexdigest()}"
    )


if __name__ == "__main__":
    main()
