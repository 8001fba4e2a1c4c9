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


def test_training_writes_weights_that_can_be_exported(
    tmp_path: Path, models_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, data, out = tmp_path / "base.npz", tmp_path / "data.json.xz", tmp_path / "out"
    random = np.random.default_rng(1)
    table = {"words": random.integers(-127, 128, (30522, 384)).astype(np.int8), "scales": np.full((30522, 1), 0.0005)}
    tokenizer = np.frombuffer((models_dir / NAME / TOKENIZER).read_bytes(), np.uint8)
    np.savez(base, tokenizer=tokenizer, **table, **some_weights(1))  # type: ignore[arg-type]
    data.write_bytes(lzma.compress(json.dumps(questions()).encode()))
    options = {"--data": data, "--base": base, "--out": out, "--steps": 30, "--tokens": 256, "--lr": 3e-4}
    options |= {"--layers": 0, "--workers": 0, "--minutes": 600, "--sample": 20, "--seed": 3}
    command = [str(word) for pair in options.items() for word in pair]
    train.main([*command, "--quantize-aware"])
    record = json.loads((out / "training.json").read_text())
    assert record["steps"] == 30
    said = capsys.readouterr().out
    assert "30 steps" in said
    written = weights.read(out)
    assert weights.layers(written) == 1
    assert {name for name in written if name.startswith("reach.")} == {"reach.embedded", "reach.layer0.attention"}
    assert len(export.quantized_model(written, export.reach_held(written))) > 1_000_000


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
