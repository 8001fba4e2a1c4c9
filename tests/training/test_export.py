"""The exported model: what its inputs and outputs are, and that 8 bits say what the weights say."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest

from anabranch.models import install
from anabranch.models.evidence_input import InputIds
from anabranch.models.minilm import NAME, TOKENIZER, session
from anabranch.models.minilm_graph import norms
from training import export, weights
from training.inputs import Floats, Reader, WordTable, padded, plain_tokenizer
from training.weights import PASSAGE, TOKENS, Weights

WORDS, WIDTH, WIDE = 1100, 384, 1536
LAYERS = 2
# The nodes, inputs, outputs and names of weights of an embedder with minilm.GRAPH 1.
EMBEDDER_GRAPH = "f7ebdad6dc0fcb2622d4d7546073ce2d868dd7efbc317bd89eca36a03244ad11"


def some_weights(layers: int = LAYERS) -> Weights:
    """Small random numbers of the right shapes, that 16 bits can hold."""
    random = np.random.default_rng(5)
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.position_embeddings.weight": (512, WIDTH),
        "embeddings.token_type_embeddings.weight": (2, WIDTH),
        "pool.weight": (WIDTH, WIDTH),
        "pool.bias": (WIDTH,),
        "passage.weight": (len(PASSAGE), WIDTH),
        "passage.bias": (len(PASSAGE),),
        "tokens.weight": (len(TOKENS), WIDTH),
        "tokens.bias": (len(TOKENS),),
    }
    norms = ["embeddings.LayerNorm"]
    for number in range(layers):
        layer = f"encoder.layer.{number}"
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
        for name, (rows, columns) in {
            "attention.self.query": (WIDTH, WIDTH),
            "attention.self.key": (WIDTH, WIDTH),
            "attention.self.value": (WIDTH, WIDTH),
            "attention.output.dense": (WIDTH, WIDTH),
            "intermediate.dense": (WIDE, WIDTH),
            "output.dense": (WIDTH, WIDE),
        }.items():
            shapes |= {f"{layer}.{name}.weight": (rows, columns), f"{layer}.{name}.bias": (rows,)}
    found = {
        name: (random.standard_normal(shape) * 0.05).astype(np.float16).astype(np.float32)
        for name, shape in shapes.items()
    }
    found["embeddings.token_type_embeddings.weight"][0] = 0
    for name in norms:
        found |= {f"{name}.weight": np.ones(WIDTH, np.float32), f"{name}.bias": np.zeros(WIDTH, np.float32)}
    return found


def some_words() -> WordTable:
    random = np.random.default_rng(6)
    return WordTable(
        random.integers(-127, 128, (WORDS, WIDTH)).astype(np.int8), np.full((WORDS, 1), 0.0005, np.float32)
    )


def some_inputs() -> list[InputIds]:
    random = np.random.default_rng(7)
    return [InputIds(random.integers(3, WORDS, length).tolist(), length // 3, []) for length in (9, 20, 33, 57)]


def quantized(values: Weights, inputs: Sequence[InputIds], table: WordTable) -> bytes:
    return export.quantized_model(values, export.reach_of(export.float_model(values), inputs, table))


def test_the_exported_model_takes_words_and_says_something_of_passages_and_tokens() -> None:
    model = session(quantized(some_weights(), some_inputs(), some_words()))
    assert {each.name: each.type for each in model.get_inputs()} == {
        "words": "tensor(float)",
        "types": "tensor(int32)",
    }
    assert {each.name: each.shape[-1] for each in model.get_outputs()} == {"passage": 5, "tokens": 3}


def test_8_bits_say_what_full_precision_says() -> None:
    values, inputs, table = some_weights(), some_inputs(), some_words()
    whole = export.scores(export.float_model(values), inputs, table)
    short = export.scores(quantized(values, inputs, table), inputs, table)
    for left, right in zip(whole, short, strict=True):
        assert np.corrcoef(left.ravel(), right.ravel())[0, 1] > 0.99
    assert len(export.agreement(whole, short)) == len(PASSAGE) + len(TOKENS)


def test_the_same_weights_give_the_same_bytes() -> None:
    values, inputs, table = some_weights(1), some_inputs(), some_words()
    assert quantized(values, inputs, table) == quantized(values, inputs, table)


def test_an_input_is_judged_alike_alone_and_in_a_batch() -> None:
    values, table = some_weights(), some_words()
    inputs = [InputIds(each.ids[:9], 3, []) for each in some_inputs()]
    model = session(quantized(values, inputs, table))

    def passages(rows: list[InputIds]) -> Floats:
        return np.asarray(model.run(["passage"], table.feed(padded(rows)))[0], np.float32)

    together = passages(inputs)
    alone = np.concatenate([passages([each]) for each in inputs])
    assert np.abs(together - alone).max() < 1e-5


def test_the_embedder_that_shares_the_builder_keeps_its_graph() -> None:
    """Another graph needs another number in minilm.GRAPH: then everyone has to install the embedder again."""
    values = {**some_weights(6), "embeddings.word_embeddings.weight": np.ones((WORDS, WIDTH), np.float32)}
    reach = dict.fromkeys(norms(6), np.ones(WIDTH, np.float32))
    graph = onnx.load_from_string(install.quantized_model(values, reach)).graph
    graph_hash = hashlib.sha256()
    for part in (*graph.node, *graph.input, *graph.output):
        graph_hash.update(part.SerializeToString(deterministic=True))
    graph_hash.update(" ".join(each.name for each in graph.initializer).encode())
    assert graph_hash.hexdigest() == EMBEDDER_GRAPH


def test_the_text_for_calibration_becomes_questions_and_claims(models_dir: Path) -> None:
    reader = Reader(plain_tokenizer((models_dir / NAME / TOKENIZER).read_bytes()))
    inputs = export.calibration_inputs(reader)
    assert len(inputs) > 40
    assert all(each.places and len(each.ids) <= 384 for each in inputs)
    table = export.word_table(models_dir)
    assert table.vectors(np.array([[101, 102]], np.int32)).shape == (1, 2, WIDTH)


def test_weights_come_back_from_their_parts(tmp_path: Path) -> None:
    big = np.arange(4_000_000, dtype=np.float32) % 1000
    written = weights.write(tmp_path, {"a": big, "b": big, "c": big[:10]})
    assert [path.name for path in written] == ["weights-0.npz", "weights-1.npz"]
    found = weights.read(tmp_path)
    assert set(found) == {"a", "b", "c"}
    assert np.array_equal(found["b"], big)
    with pytest.raises(weights.WeightsMissing, match="has no weights"):
        weights.read(tmp_path / "none")
