"""A tiny model with the evidence model's interface: it knows only which tokens are similar to the question's."""

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper


class ModelFile(NamedTuple):
    file: Path
    sha256: str


def word_overlap_model(folder: Path) -> ModelFile:
    """Relevance and support are the mean similarity of the pages' tokens to their nearest token of the question."""
    file = folder / "evidence.onnx"
    content = _model()
    file.write_bytes(content)
    return ModelFile(file, hashlib.sha256(content).hexdigest())


def _node(kind: str, inputs: str, output: str, **attributes: object) -> NodeProto:
    return helper.make_node(kind, inputs.split(), [output], **attributes)  # type: ignore[arg-type]


def _model() -> bytes:
    nodes = [
        _node("Cast", "types", "pages", to=TensorProto.FLOAT),
        _node("Cast", "mask", "there", to=TensorProto.FLOAT),
        _node("Mul", "pages there", "page.tokens"),
        _node("Sub", "there page.tokens", "question.tokens"),
        _node("LpNormalization", "words", "directions", axis=-1, p=2),
        _node("Transpose", "directions", "turned", perm=[0, 2, 1]),
        _node("MatMul", "directions turned", "similar"),
        _node("Unsqueeze", "question.tokens axis1", "question.row"),
        _node("Mul", "similar question.row", "similar.question"),
        _node("ReduceMax", "similar.question axis2", "nearest", keepdims=1),
        _node("MatMul", "nearest token.columns", "tokens"),
        _node("Unsqueeze", "page.tokens axis1", "page.row"),
        _node("MatMul", "page.row nearest", "total"),
        _node("ReduceSum", "page.row axis2", "count", keepdims=1),
        _node("Max", "count one", "count.least"),
        _node("Div", "total count.least", "mean"),
        _node("MatMul", "mean passage.columns", "passage.row"),
        _node("Squeeze", "passage.row axis1", "passage"),
    ]
    weights = {
        "axis1": np.array([1]),
        "axis2": np.array([2]),
        "one": np.array(1, np.float32),
        "token.columns": np.array([[9.0, 8.0, 7.0]], np.float32),
        "passage.columns": np.array([[10.0, 5.0, 3.0, 0.0, -3.0]], np.float32),
    }
    graph = helper.make_graph(
        nodes,
        "word-overlap",
        [
            helper.make_tensor_value_info("words", TensorProto.FLOAT, ["texts", "tokens", 384]),
            helper.make_tensor_value_info("types", TensorProto.INT32, ["texts", "tokens"]),
            helper.make_tensor_value_info("mask", TensorProto.INT32, ["texts", "tokens"]),
        ],
        [
            helper.make_tensor_value_info("passage", TensorProto.FLOAT, ["texts", 5]),
            helper.make_tensor_value_info("tokens", TensorProto.FLOAT, ["texts", "tokens", 3]),
        ],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    return bytes(model.SerializeToString())
