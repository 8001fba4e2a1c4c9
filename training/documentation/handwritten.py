"""Questions that people wrote about the documentation, in the same form as those that are made from its structure.

    python -m training.documentation.handwritten --questions FILE... --sources DIR --out PATH

Each line of a file is a JSON object: `package`, `file` (in the package's folder), `question`, `evidence` (texts of the
file), `answer` (the shortest words of the first evidence, or empty) and `near` (a question that the section does not
answer, or empty).
"""

import argparse
import asyncio
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from anabranch.domain.contracts import Embedder
from anabranch.knowledge.chunking import chunk
from anabranch.knowledge.completing import MOST, completed
from anabranch.knowledge.model import Chunking
from anabranch.knowledge.parse.builder import ParseLimits
from anabranch.knowledge.parse.dispatch import parse
from anabranch.models.minilm import MiniLM
from anabranch.text.pages import page
from anabranch.text.units import units
from training.documentation.asking import Question
from training.documentation.dataset import Asked, save, written
from training.documentation.passages import Found, Passage, placed_units
from training.documentation.sources import PACKAGES
from training.documentation.structure import Leaf

KIND = "written"
READABLE = (".rst", ".txt", ".md")


async def passages_of(package: str, name: str, text: str, embedder: Embedder) -> list[Passage]:
    """The passages of a file; source code is read as text."""
    short = name.rpartition("/")[2]
    parsed = parse(text.encode(), short if short.endswith(READABLE) else f"{short}.txt", ParseLimits())
    if parsed.text != text:
        return []
    found: list[Passage] = []
    for piece in await chunk(parsed, Chunking(strategy="sentence"), embedder):
        # As search returns it: up to the end of a list, or of the code that it introduces.
        end = piece.start + completed(text[piece.start : piece.end], text[piece.end : piece.end + MOST + 1])
        part = text[piece.start : end]
        if inside := units(part):
            shown = page(short, piece.headers, part, inside)
            found.append(Passage(piece.start, part, inside, shown, f"docs:{package}/{name}", package))
    return found


def questions_of(row: dict[str, Any], text: str, passages: Sequence[Passage]) -> Iterator[Asked]:
    """The question, and the one that the section does not answer, if its evidence is found in one passage."""
    where = [(at, at + len(evidence)) for evidence in row["evidence"] if (at := text.find(evidence)) >= 0]
    leaves = tuple(Leaf(start, end, text[start:end]) for start, end in where)
    question = Question(row["question"], KIND, leaves, row["answer"] or None)
    found: Found | None = placed_units(question, passages, where)
    if found is None:
        return
    yield Asked(row["question"], KIND, found, answerable=True)
    if row["near"]:
        yield Asked(row["near"], f"near-{KIND}", found, answerable=False)


async def made(rows: Sequence[dict[str, Any]], sources: Path, embedder: Embedder) -> dict[str, Any]:
    folders = {package.name: package.folder for package in PACKAGES}
    files: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        files.setdefault((row["package"], row["file"]), []).append(row)
    asked: list[Asked] = []
    every: list[Passage] = []
    for (package, name), own in files.items():
        text = (sources / folders[package] / name).read_bytes().decode()
        passages = await passages_of(package, name, text, embedder)
        every += passages
        for row in own:
            asked += questions_of(row, text, passages)
    data = written({"Q": asked}, {"Q": every})
    for question in data["Q"]:
        question["k"] = question["k"].replace(f"docs:near-{KIND}", f"{KIND}:near").replace(f"docs:{KIND}", KIND)
    return data


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--questions", type=Path, nargs="+", required=True)
    options.add_argument("--sources", type=Path, required=True, help="folder of the unpacked source distributions")
    options.add_argument("--models", type=Path, default=Path("~/.cache/anabranch/models"))
    options.add_argument("--out", type=Path, required=True)
    told = options.parse_args()
    rows = [json.loads(line) for file in told.questions for line in file.read_text("utf-8").splitlines()]
    data = asyncio.run(made(rows, told.sources, MiniLM(told.models.expanduser(), threads=2)))
    save(data, told.out)
    print(
        f"{len(rows)} lines: {len(data['Q'])} questions, {sum(not one['a'] for one in data['Q'])} unanswerable, "
        f"{len(data['P'])} passages; sha256 {hashlib.sha256(told.out.read_bytes()).hexdigest()}"
    )


if __name__ == "__main__":
    main()
