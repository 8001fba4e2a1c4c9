"""The model in PyTorch computes what the exported graph computes. Skipped where PyTorch is missing."""

import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anabranch.models.minilm import NAME, TOKENIZER
from training import export, weights
from training.inputs import Floats, padded

torch = pytest.importorskip("torch")
# Two threads that wait for each other are slow on a busy machine.
torch.set_num_threads(1)
from test_export import LAYERS, some_inputs, some_weights, some_words  # noqa: E402

from training import train  # noqa: E402
from training.model import EvidenceModel, calibrate, trained_model  # noqa: E402


def model(layers: int = LAYERS) -> EvidenceModel:
    words = some_words()
    evidence = trained_model({"words": words.words, "scales": words.scales}, some_weights(layers))
    evidence.eval()
    return evidence


def outputs(evidence: EvidenceModel) -> tuple[Floats, Floats]:
    """As training.export.scores gives them."""
    batch = padded(some_inputs())
    with torch.no_grad():
        found = evidence(*(torch.from_numpy(each) for each in batch))
    return found.passage.numpy(), found.tokens.numpy()[batch.mask > 0]


def test_pytorch_and_the_exported_graph_agree() -> None:
    whole = export.scores(export.float_model(some_weights()), some_inputs(), some_words())
    for left, right in zip(whole, outputs(model()), strict=True):
        assert np.abs(left - right).max() < 1e-4


def test_imitated_8_bits_are_nearer_to_the_8_bit_graph_than_full_precision() -> None:
    # With one layer: in a second one of random weights, rounding the other way grows.
    values, inputs, table = some_weights(1), some_inputs(), some_words()
    reach = export.reach_of(export.float_model(values), inputs, table)
    short = export.scores(export.quantized_model(values, reach), inputs, table)
    evidence = model(1)
    whole = outputs(evidence)
    calibrate(evidence, {name: torch.from_numpy(value) for name, value in reach.items()})
    for graph, imitated, full in zip(short, outputs(evidence), whole, strict=True):
        assert np.abs(graph - imitated).mean() < np.abs(graph - full).mean() / 3


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> list[str]:
    """Of a training with a small model and eight questions."""
    folder = tmp_path_factory.mktemp("training")
    base, data = folder / "base.npz", folder / "data.json.xz"
    random = np.random.default_rng(1)
    table = {"words": random.integers(-127, 128, (30522, 384)).astype(np.int8), "scales": np.full((30522, 1), 0.0005)}
    tokenizer = np.frombuffer((models_dir / NAME / TOKENIZER).read_bytes(), np.uint8)
    np.savez(base, tokenizer=tokenizer, **table, **some_weights(1))  # type: ignore[arg-type]
    data.write_bytes(lzma.compress(json.dumps(questions()).encode()))
    given = {"--data": data, "--base": base, "--tokens": 256, "--lr": 3e-4, "--layers": 0, "--minutes": 600}
    return [str(word) for pair in {**given, "--sample": 20, "--seed": 3}.items() for word in pair]


def test_training_writes_weights_that_can_be_exported(options: list[str], tmp_path: Path) -> None:
    train.main([*options, "--steps", "30", "--workers", "0", "--quantize-aware", "--out", str(tmp_path)])
    assert json.loads((tmp_path / "training.json").read_text())["steps"] == 30
    written = weights.read(tmp_path)
    assert weights.layers(written) == 1
    assert {name for name in written if name.startswith("reach.")} == {"reach.embedded", "reach.layer0.attention"}
    assert len(export.quantized_model(written, export.reach_held(written))) > 1_000_000


def test_two_runs_with_one_seed_write_the_same_weights(options: list[str], tmp_path: Path) -> None:
    for workers in ("0", "1"):
        train.main([*options, "--steps", "6", "--workers", workers, "--out", str(tmp_path / workers)])
    left, right = (weights.read(tmp_path / workers) for workers in ("0", "1"))
    assert all(np.array_equal(left[name], right[name]) for name in left)


def test_a_training_is_continued_where_it_paused(options: list[str], tmp_path: Path) -> None:
    again = [*options, "--steps", "4", "--workers", "0", "--out", str(tmp_path), "--state", str(tmp_path / "state")]
    train.main([*again, "--pause", "0"])
    assert json.loads((tmp_path / "training.json").read_text())["steps"] == 0
    train.main(again)
    assert json.loads((tmp_path / "training.json").read_text())["steps"] == 4


def questions() -> dict[str, Any]:
    passages = [
        {"t": f"Shop {n}", "s": [f"The shop opens at {n}. ", "It sells bread."], "g": "squad1:x"} for n in range(1, 9)
    ]
    rows = [
        {
            "q": f"When does shop {n + 1} open?",
            "pos": [n],
            "sup": {str(n): [0]},
            "ans": [n, 18, str(n + 1)],
            "a": 1,
            "neg": [(n + 1) % 8, (n + 2) % 8, (n + 3) % 8],
            "k": "squad1",
        }
        for n in range(8)
    ]
    return {"P": passages, "Q": rows, "C": [["It sells bread.", "It sells bread.", 0, "fever"]]}
