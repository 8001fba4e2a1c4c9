"""python -m training.documentation --out PATH: makes the questions about technical documentation."""

import argparse
import asyncio
import hashlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

from anabranch.knowledge.model import Chunking
from anabranch.models.minilm import MiniLM
from training.documentation.dataset import HELD, asked, chosen, report, save, written
from training.documentation.passages import Prepared, prepared
from training.documentation.sources import Document, documents, fetched

# The share of documents that are kept for fitting and calibration.
HELD_OUT = 0.08


def is_held(document: Document, seed: int) -> bool:
    """By document, not by question: passages of a held-out document are never trained on."""
    digest = hashlib.sha256(f"{seed} {document.package} {document.name}".encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT * 2**32


async def all_prepared(found: Sequence[Document], embedder: MiniLM, chunking: Chunking, seed: int) -> list[Prepared]:
    ready = []
    for number, document in enumerate(found):
        held = HELD if is_held(document, seed) else ""
        group = f"{held}docs:{document.package}/{document.name}"
        ready.append(await prepared(document, group, chunking, embedder, Random(f"{seed} {group}")))
        if number % 100 == 99:
            print(f"{number + 1} of {len(found)} documents", flush=True)
    return ready


def make(sources: Path, models: Path, out: Path, chunking: Chunking, seed: int) -> None:
    ready = asyncio.run(all_prepared(list(documents(sources)), MiniLM(models, threads=2), chunking, seed))
    random = Random(seed)
    parts = {}
    passages = {}
    for name, held in (("Q", False), ("held", True)):
        mine = [each for each in ready if is_held(each.document, seed) is held]
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
