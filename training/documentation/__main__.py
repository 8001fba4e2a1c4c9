"""python -m training.documentation --out PATH: makes the questions about technical documentation."""

import argparse
import asyncio
import hashlib
import tempfile
from collections import Counter
from collections.abc import Sequence, Set
from pathlib import Path
from random import Random

from anabranch.knowledge.model import Chunking
from anabranch.models.minilm import MiniLM
from training.documentation.dataset import HELD, asked, chosen, report, save, written
from training.documentation.passages import Prepared, prepared
from training.documentation.sources import Document, documents, fetched

# The share of the text that is kept for fitting and calibration.
HELD_OUT = 0.08


def held_out(found: Sequence[Document], seed: int) -> set[Document]:
    """Documents of every package, in an order drawn by the seed. Not questions: no passage of a held-out document is
    trained on."""
    room = Counter[str]()
    for document in found:
        room[document.package] += int(HELD_OUT * len(document.text))
    held = set()
    for document in sorted(
        found, key=lambda each: hashlib.sha256(f"{seed} {each.package} {each.name}".encode()).digest()
    ):
        if len(document.text) <= room[document.package]:
            room[document.package] -= len(document.text)
            held.add(document)
    return held


async def all_prepared(
    found: Sequence[Document], held: Set[Document], embedder: MiniLM, chunking: Chunking, seed: int
) -> list[Prepared]:
    ready = []
    for number, document in enumerate(found):
        group = f"{HELD if document in held else ''}docs:{document.package}/{document.name}"
        ready.append(await prepared(document, group, chunking, embedder, Random(f"{seed} {group}")))
        if number % 100 == 99:
            print(f"{number + 1} of {len(found)} documents", flush=True)
    return ready


def make(sources: Path, models: Path, out: Path, chunking: Chunking, seed: int) -> None:
    found = list(documents(sources))
    held = held_out(found, seed)
    ready = asyncio.run(all_prepared(found, held, MiniLM(models, threads=2), chunking, seed))
    random = Random(seed)
    parts = {}
    passages = {}
    for name, is_held in (("Q", False), ("held", True)):
        mine = [each for each in ready if (each.document in held) is is_held]
        parts[name] = asked(chosen(mine, random), random)
        passages[name] = [passage for each in mine for passage in each.passages]
    save(written(parts, passages), out)
    print("\n".join(report(parts)))
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB, sha256 {hashlib.sha256(out.read_bytes()).hexdigest()}")


def main() -> None:
    options = argparse.ArgumentParser(prog="python -m training.documentation", description=__doc__)
    options.add_argument("--out", type=Path, required=True, help="the file to write (.json.xz)")
    options.add_argument("--sources", type=Path, help="folder of the unpacked source distributions")
    options.add_argument(
        "--models", type=Path, default=Path("~/.cache/anabranch/models"), help="folder of the embedder"
    )
    options.add_argument("--chunking", choices=("sentence", "semantic"), default="sentence")
    options.add_argument("--seed", type=int, default=1)
    told = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        sources = told.sources or fetched(Path(scratch))
        make(sources, told.models.expanduser(), told.out, Chunking(strategy=told.chunking), told.seed)


if __name__ == "__main__":
    main()
