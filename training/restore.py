"""Reads the weights of a released 8-bit file back, to train it further: `training.train --start`.

    python -m training.restore --model src/anabranch/models/claims.onnx --out weights

The rounding to 8 bits stays in them; everything else is as it was trained."""

import argparse
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from anabranch.models.minilm_graph import DIMENSIONS, DIP, Floats
from training import weights as files

# The parts of a layer in the graph, with their names in MiniLM's files and the norm that they read.
PARTS = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "dense": "attention.output.dense",
    "wide": "intermediate.dense",
    "narrow": "output.dense",
}


def restored(held: Mapping[str, Floats]) -> files.Weights:
    """From the initializers of the graph, by name."""
    types = held["types.table"]
    found = {
        "embeddings.position_embeddings.weight": held["positions.16"],
        "embeddings.token_type_embeddings.weight": types,
        "embeddings.LayerNorm.weight": held["embedded.gamma"],
        "embeddings.LayerNorm.bias": held["embedded.beta"],
    }
    for layer, output in (("pool", "pool.sum"), ("passage", "passage"), ("tokens", "tokens")):
        found[f"{layer}.weight"] = held[f"{output}.weight.16"].T
        found[f"{layer}.bias"] = held[f"{output}.bias"]
    count = sum(name.endswith(".query.weight") for name in held)
    for number in range(count):
        found |= _layer(held, number, f"layer{number - 1}.output" if number else "embedded")
    return {name: np.ascontiguousarray(value, np.float32) for name, value in found.items()}


def _layer(held: Mapping[str, Floats], number: int, before: str) -> dict[str, Floats]:
    name, layer = f"layer{number}", f"encoder.layer.{number}"
    reads = dict.fromkeys(("query", "key", "value"), before) | {"wide": f"{name}.attention"}
    found = {}
    for part, theirs in PARTS.items():
        weight = held[f"{name}.{part}.weight"].astype(np.float32).T * held[f"{name}.{part}.scales"][:, None]
        found[f"{layer}.{theirs}.weight"] = weight * held.get(f"{reads.get(part)}.smoothing", np.float32(1))
    for place, part in enumerate(("query", "key", "value")):
        found[f"{layer}.{PARTS[part]}.bias"] = held[f"{name}.biases"][place * DIMENSIONS : (place + 1) * DIMENSIONS]
    found[f"{layer}.{PARTS['dense']}.bias"] = held[f"{name}.attention.bias"]
    found[f"{layer}.{PARTS['wide']}.bias"] = held[f"{name}.wide.bias"]
    narrow = f"{layer}.{PARTS['narrow']}"
    found[f"{narrow}.bias"] = held[f"{name}.output.bias"] + DIP * found[f"{narrow}.weight"].sum(axis=1)
    for part, theirs in (("attention", "attention.output.LayerNorm"), ("output", "output.LayerNorm")):
        found[f"{layer}.{theirs}.weight"] = held[f"{name}.{part}.gamma"]
        found[f"{layer}.{theirs}.bias"] = held[f"{name}.{part}.beta"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a file that training.export wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for the weights")
    arguments = parser.parse_args()
    graph = onnx.load(str(arguments.model)).graph
    written = files.write(
        arguments.out, restored({each.name: numpy_helper.to_array(each) for each in graph.initializer})
    )
    print(f"{arguments.out}: {', '.join(path.name for path in written)}")


if __name__ == "__main__":
    main()
