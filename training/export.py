"""Writes trained weights as the 8-bit ONNX file that the product loads.

Inputs: `words`, float [texts, tokens, 384], each token's row of the embedder's word table, which is therefore not in
this file; `types`, 1 from the first token of the pages, int32 [texts, tokens]. Texts that are read together have one
length: there is no padding. Outputs: `passage` [texts, 5] and `tokens` [texts, tokens, 3], log-odds and logits as
training/weights.py names them."""

import argparse
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from anabranch.models import install
from anabranch.models.evidence_input import SINGLE, InputIds, laid_out
from anabranch.models.minilm import MODEL, NAME, TOKENIZER, session
from anabranch.models.minilm_graph import Floats, Graph, QuantizedGraph, encoded, norms, numbers, of_texts, of_tokens
from training import weights as files
from training.inputs import Reader, WordTable, padded, plain_tokenizer
from training.weights import PASSAGE, TOKENS

HIDDEN = "hidden"
REACH = "reach."
MOST_BYTES = 13_000_000
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


def float_model(weights: files.Weights) -> bytes:
    """In full precision; also gives the norms, for calibration."""
    graph = Graph(weights, files.layers(weights), HIDDEN, padding=False)
    return _evidence(graph, norms(graph.layers))


def quantized_model(weights: files.Weights, reach: Mapping[str, Floats]) -> bytes:
    return _evidence(QuantizedGraph(weights, files.layers(weights), reach, HIDDEN, padding=False), ())


def _evidence(graph: Graph, extra: tuple[str, ...]) -> bytes:
    weights = graph.weights
    segments = weights["embeddings.token_type_embeddings.weight"]
    table = graph.weight("types.table", np.stack([np.zeros_like(segments[0]), segments[1] - segments[0]]))
    graph.node("Gather", [table, "types"], "types.found")
    graph.node("Add", ["words", "types.found"], "words.found")
    positions = weights["embeddings.position_embeddings.weight"] + segments[0]
    encoded(graph, "types", "words.found", positions)
    _head(graph, "tokens", HIDDEN, "tokens")
    graph.node("Gather", [HIDDEN, graph.weight("zero", np.array(0))], "first", axis=1)
    _head(graph, "pool", "first", "pool.sum")
    graph.node("Tanh", ["pool.sum"], "pooled")
    _head(graph, "passage", "pooled", "passage")
    outputs = [of_texts("passage", len(PASSAGE)), of_tokens("tokens", len(TOKENS)), *map(of_tokens, extra)]
    return graph.finished("evidence", [of_tokens("words"), numbers("types")], outputs)


def _head(graph: Graph, layer: str, operand: str, output: str) -> None:
    weight = graph.short(f"{output}.weight", graph.weights[f"{layer}.weight"].T)
    graph.node("MatMul", [operand, weight], f"{output}.product")
    graph.node("Add", [f"{output}.product", graph.weight(f"{output}.bias", graph.weights[f"{layer}.bias"])], output)


def word_table(model_folder: Path) -> WordTable:
    """The table of the installed embedder."""
    held = {each.name: each for each in onnx.load(str(model_folder / NAME / MODEL)).graph.initializer}
    return WordTable(numpy_helper.to_array(held["words"]), numpy_helper.to_array(held["words.scales"]))


def calibration_inputs(reader: Reader) -> list[InputIds]:
    """The text that ships for calibrating the embedder: each sentence asked of its own paragraph and of the next one,
    and claimed."""
    text = Path(install.__file__).with_name("calibration.txt").read_text(encoding="utf-8")
    paragraphs = [SENTENCE_END.split(paragraph.strip()) for paragraph in text.split("\n\n")]
    inputs = []
    for number, sentences in enumerate(paragraphs):
        title = " ".join(sentences[0].split()[:5])
        for units in (sentences, paragraphs[(number + 1) % len(paragraphs)]):
            page = reader.page(title, units)
            for claim in (False, True):
                head = reader.ids(sentences[number % len(sentences)])
                inputs.append(laid_out(head, [page], SINGLE, claim=claim))
    return inputs


def reach_of(model: bytes, inputs: Sequence[InputIds], table: WordTable) -> dict[str, Floats]:
    """How far from zero each channel of the norms goes in these inputs."""
    running = session(model)
    names = [each.name for each in running.get_outputs()][2:]
    reach = {name: np.zeros(table.words.shape[1], np.float32) for name in names}
    for each in inputs:
        for name, values in zip(names, running.run(names, table.feed(padded([each]))), strict=True):
            reach[name] = np.maximum(reach[name], np.abs(values[0]).max(axis=0))
    return reach


def reach_held(weights: files.Weights) -> dict[str, Floats]:
    """What quantization-aware training was calibrated with; empty if there was none."""
    return {name.removeprefix(REACH): value for name, value in weights.items() if name.startswith(REACH)}


def scores(model: bytes, inputs: Sequence[InputIds], table: WordTable) -> tuple[Floats, Floats]:
    """What the model says of each input, and of each token."""
    running = session(model)
    found = [running.run(["passage", "tokens"], table.feed(padded([each]))) for each in inputs]
    return np.concatenate([passage for passage, _ in found]), np.concatenate([tokens[0] for _, tokens in found])


def agreement(whole: tuple[Floats, Floats], short: tuple[Floats, Floats]) -> list[str]:
    """One line for each output: the correlation of two models, and their mean difference."""
    lines = []
    for names, left, right in zip((PASSAGE, TOKENS), whole, short, strict=True):
        for column, name in enumerate(names):
            same = np.corrcoef(left[:, column], right[:, column])[0, 1]
            apart = np.abs(left[:, column] - right[:, column]).mean()
            lines.append(
                f"{name:13} correlation {same:.4f}, mean difference {apart:.3f}, spread {left[:, column].std():.2f}"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True, help="the folder that training wrote")
    parser.add_argument("--model-folder", type=Path, default=Path("~/.cache/anabranch/models"))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    folder = arguments.model_folder.expanduser()
    table = word_table(folder)
    inputs = calibration_inputs(Reader(plain_tokenizer((folder / NAME / TOKENIZER).read_bytes())))
    weights = files.read(arguments.weights)
    whole = float_model(weights)
    short = quantized_model(weights, reach_held(weights) or reach_of(whole, inputs, table))
    if len(short) > MOST_BYTES:
        parser.exit(1, f"The model has {len(short):,} bytes; at most {MOST_BYTES:,} are allowed.\n")
    arguments.out.write_bytes(short)
    print(f"{arguments.out}: {len(short):,} bytes, sha256 {hashlib.sha256(short).hexdigest()}")
    print("\n".join(agreement(scores(whole, inputs, table), scores(short, inputs, table))))


if __name__ == "__main__":
    main()
