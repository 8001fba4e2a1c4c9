"""Reading the weights of a released model back."""

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from anabranch.models.evidence import CLAIMS_FILE
from training.restore import restored
from training.weights import layers


def _held(file: Path) -> dict[str, np.ndarray]:
    return {each.name: numpy_helper.to_array(each) for each in onnx.load(str(file)).graph.initializer}


def test_restored_weights_round_to_those_of_the_file() -> None:
    held = _held(CLAIMS_FILE)
    found = restored(held)
    assert layers(found) == 6
    assert all(np.isfinite(value).all() for value in found.values())
    smooth = 1 / held["layer2.output.smoothing"]
    weight = found["encoder.layer.3.attention.self.query.weight"] * smooth
    scaled = np.rint(weight / held["layer3.query.scales"][:, None])
    assert np.array_equal(scaled.T, held["layer3.query.weight"])
