"""Weights in files: 16 bits, in parts that are small enough to be sent."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

Weights = dict[str, npt.NDArray[np.float32]]

# What the model says about a passage, and about each token.
PASSAGE = ("relevance", "answerable", "supported", "unknown", "contradicted")
TOKENS = ("start", "end", "unit")

PART_BYTES = 14_000_000


class WeightsMissing(Exception):
    """There are no weights in the folder."""


def write(folder: Path, weights: Mapping[str, npt.NDArray[np.generic]]) -> list[Path]:
    """The parts are complete under their names at all times: each is replaced with one rename."""
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[dict[str, npt.NDArray[np.float16]]] = [{}]
    for name in sorted(weights):
        value = weights[name].astype(np.float16)
        if sum(other.nbytes for other in parts[-1].values()) + value.nbytes > PART_BYTES:
            parts.append({})
        parts[-1][name] = value
    written = []
    for number, part in enumerate(parts):
        path, scratch = folder / f"weights-{number}.npz", folder / f"scratch-{number}.npz"
        np.savez(scratch, **part)  # type: ignore[arg-type]  # names are not keyword arguments of savez
        scratch.replace(path)
        written.append(path)
    return written


def read(folder: Path) -> Weights:
    paths = sorted(folder.glob("weights-*.npz"))
    if not paths:
        raise WeightsMissing(f"{folder} has no weights-*.npz.")
    found: Weights = {}
    for path in paths:
        with np.load(path) as part:
            found |= {name: part[name].astype(np.float32) for name in part.files}
    return found


def layers(weights: Mapping[str, object]) -> int:
    """How many layers the encoder has."""
    return 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("encoder.layer."))
