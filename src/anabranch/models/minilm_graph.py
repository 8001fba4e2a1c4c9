"""MiniLM's encoder as an ONNX graph, in full precision or in 8 bits. A model adds its own inputs and outputs."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

HEADS = 12
DIMENSIONS = 384
EPSILON = 1e-12
FUSED = "com.microsoft"

# The share of the difference between channels that moves from activations into weights (SmoothQuant).
SMOOTHING = 0.8
# Processors without VNNI add two products of 8 bits in 16 bits: 255 times this still fits.
PAIR_LIMIT = 127.5
# The minimum of GELU.
DIP = 0.17

Floats = npt.NDArray[np.float32]
Weights = Mapping[str, Floats]


def norms(layers: int) -> tuple[str, ...]:
    """The layer norm outputs that feed matrix products: all but the last."""
    return ("embedded", *(f"layer{n}.{part}" for n in range(layers) for part in ("attention", "output")))[:-1]


class Graph:
    """Collects nodes and their weights, of an encoder with this many layers. The last hidden state is named `last`.
    `padding` says whether texts of different lengths are read together: then the graph has an input `mask`, int32
    [texts, tokens]. It is also the form of embedders that are installed, whose bytes must not change; the other form
    has the nodes that ONNX Runtime computes fastest, and positions in 16 bits."""

    def __init__(self, weights: Weights, layers: int, last: str = "tokens", *, padding: bool = True) -> None:
        self.weights = weights
        self.layers = layers
        self.last = last
        self.padding = padding
        self.nodes: list[onnx.NodeProto] = []
        self.held: list[onnx.TensorProto] = []

    def weight(self, name: str, value: npt.NDArray[np.generic]) -> str:
        self.held.append(numpy_helper.from_array(np.asarray(value, order="C"), name))
        return name

    def short(self, name: str, value: Floats) -> str:
        """A weight stored in 16 bits; ONNX Runtime widens it once, at load."""
        return self.node("Cast", [self.weight(f"{name}.16", value.astype(np.float16))], name, to=TensorProto.FLOAT)

    def node(self, kind: str, inputs: list[str], output: str, *, domain: str = "", **attributes: Any) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [output], name=output, domain=domain, **attributes))
        return output

    def product(self, name: str, operand: str, layer: str) -> tuple[str, Floats]:
        """The operand times a layer's weights, without the bias, and the bias to add."""
        weight = self.weight(f"{name}.weight", self.weights[f"{layer}.weight"].T)
        return self.node("MatMul", [operand, weight], name), self.weights[f"{layer}.bias"]

    def norm(self, name: str, value: str, skip: str, layer: str, bias: Floats | None = None) -> str:
        scaling = [
            self.weight(f"{name}.gamma", self.weights[f"{layer}.weight"]),
            self.weight(f"{name}.beta", self.weights[f"{layer}.bias"]),
        ]
        biases = [] if bias is None else [self.weight(f"{name}.bias", bias)]
        output = self.last if name == f"layer{self.layers - 1}.output" else name
        if self.padding:
            inputs = [value, skip, *scaling, *biases]
            return self.node("SkipLayerNormalization", inputs, output, domain=FUSED, epsilon=EPSILON)
        for number, term in enumerate((*biases, skip)):
            value = self.node("Add", [value, term], f"{name}.sum{number}")
        return self.node("LayerNormalization", [value, *scaling], output, epsilon=EPSILON)

    def finished(
        self, name: str, inputs: Sequence[onnx.ValueInfoProto], outputs: Sequence[onnx.ValueInfoProto]
    ) -> bytes:
        """The bytes are the same for the same weights."""
        model = helper.make_model(
            helper.make_graph(self.nodes, name, inputs, outputs, self.held),
            opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid(FUSED, 1)],
            ir_version=10,
        )
        return bytes(model.SerializeToString(deterministic=True))


class QuantizedGraph(Graph):
    """Products in 8 bits: each row of the left side and each column of the right side has its own scale. `reach` says
    how far from zero each channel of the norms goes in ordinary text."""

    def __init__(
        self,
        weights: Weights,
        layers: int,
        reach: Mapping[str, Floats],
        last: str = "tokens",
        *,
        padding: bool = True,
    ) -> None:
        super().__init__(weights, layers, last, padding=padding)
        self._smooth = {name: smoothing(reach[name]) for name in norms(layers)}
        self._rows: dict[str, tuple[str, str, str]] = {}
        self.weight("one", np.array(1, np.float32))
        self.weight("last", np.array([-1]))
        for name, zero, steps in (("signed", 128, 127), ("unsigned", 0, 255)):
            self.weight(f"{name}.zero", np.array(zero, np.uint8))
            self.weight(f"{name}.step", np.array(1 / steps, np.float32))
        self.weight("dip", np.array(DIP, np.float32))

    def product(self, name: str, operand: str, layer: str) -> tuple[str, Floats]:
        weight, bias = self.weights[f"{layer}.weight"], self.weights[f"{layer}.bias"]
        if operand.endswith(".gelu"):
            bias = bias - DIP * weight.sum(axis=1)
        weight = weight * self._smooth.get(operand, np.float32(1))
        scales = column_scales(weight)
        rows, row_scales, zero = self._quantized(operand)
        inputs = [
            rows,
            self.weight(f"{name}.weight", np.rint(weight / scales[:, None]).astype(np.int8).T),
            "one",
            self.weight(f"{name}.scales", scales),
            zero,
        ]
        if self.padding:
            inputs.append(self.weight(f"{name}.zeros", np.zeros(len(scales), np.int8)))
        whole = self.node("MatMulIntegerToFloat", inputs, f"{name}.whole", domain=FUSED)
        return self.node("Mul", [whole, row_scales], name), bias

    def _quantized(self, operand: str) -> tuple[str, str, str]:
        """The rows in 8 bits, their scales and zero points. Three products share the rows of one norm."""
        if operand not in self._rows:
            if operand.endswith(".gelu"):
                kind, value = "unsigned", self.node("Add", [operand, "dip"], f"{operand}.raised")
                size = value
            else:
                kind, value = "signed", operand
                if operand in self._smooth:
                    inverse = self.weight(f"{operand}.smoothing", 1 / self._smooth[operand])
                    value = self.node("Mul", [operand, inverse], f"{operand}.smooth")
                size = self.node("Abs", [value], f"{operand}.size")
            largest = self.node("ReduceMax", [size, "last"], f"{operand}.largest", keepdims=1)
            scale = self.node("Mul", [largest, f"{kind}.step"], f"{operand}.scale")
            scaled = self.node("Div", [value, scale], f"{operand}.scaled")
            rows = self.node("QuantizeLinear", [scaled, "one", f"{kind}.zero"], f"{operand}.8")
            self._rows[operand] = rows, scale, f"{kind}.zero"
        return self._rows[operand]


def smoothing(reach: Floats) -> Floats:
    """Divisors of the channels, multiplied into the weights, so that outlier channels do not set the scales."""
    reach = np.maximum(reach, np.float32(1e-3))
    return np.asarray((reach / np.exp(np.log(reach).mean())) ** np.float32(SMOOTHING), np.float32)


def column_scales(weight: Floats) -> Floats:
    pairs = weight.reshape(len(weight), -1, 2)
    together = np.abs(pairs.sum(axis=2)) * (pairs.prod(axis=2) > 0)
    return np.asarray(np.maximum(np.abs(weight).max(axis=1) / 127, together.max(axis=1) / PAIR_LIMIT), np.float32)


def encoded(graph: Graph, tokens: str, words: str, positions: Floats) -> str:
    """The last hidden state of word vectors [texts, tokens, DIMENSIONS] and a table of positions. `tokens` is an input
    of the graph, [texts, tokens], which says how many there are."""
    for number in range(3):
        graph.weight(f"axis{number}", np.array([number]))
    graph.node("Shape", [tokens], "shape")
    graph.node("Slice", ["shape", "axis1", "axis2"], "length")
    table = graph.weight("positions", positions) if graph.padding else graph.short("positions", positions)
    graph.node("Slice", [table, "axis0", "length"], "positions.found")
    graph.node("Unsqueeze", ["positions.found", "axis0"], "positions.each")
    hidden = graph.norm("embedded", words, "positions.each", "embeddings.LayerNorm")
    for number in range(graph.layers):
        hidden = _layer(graph, number, hidden)
    return hidden


def _layer(graph: Graph, number: int, hidden: str) -> str:
    name, layer = f"layer{number}", f"encoder.layer.{number}"
    parts = [
        graph.product(f"{name}.{part}", hidden, f"{layer}.attention.self.{part}") for part in ("query", "key", "value")
    ]
    inputs = [
        *(part for part, _ in parts),
        graph.weight(f"{name}.biases", np.concatenate([bias for _, bias in parts])),
        *(["mask"] if graph.padding else []),
    ]
    attended = graph.node("MultiHeadAttention", inputs, f"{name}.attended", domain=FUSED, num_heads=HEADS)
    attended, bias = graph.product(f"{name}.dense", attended, f"{layer}.attention.output.dense")
    hidden = graph.norm(f"{name}.attention", attended, hidden, f"{layer}.attention.output.LayerNorm", bias)
    wide, bias = graph.product(f"{name}.wide", hidden, f"{layer}.intermediate.dense")
    wide = graph.node("BiasGelu", [wide, graph.weight(f"{name}.wide.bias", bias)], f"{name}.gelu", domain=FUSED)
    narrow, bias = graph.product(f"{name}.narrow", wide, f"{layer}.output.dense")
    return graph.norm(f"{name}.output", narrow, hidden, f"{layer}.output.LayerNorm", bias)


def of_tokens(name: str, width: int = DIMENSIONS) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["texts", "length", width])


def of_texts(name: str, width: int = DIMENSIONS) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["texts", width])


def numbers(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.INT32, ["texts", "length"])
