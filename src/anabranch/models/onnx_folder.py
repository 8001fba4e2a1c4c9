"""The files of a text model that the operator gives, in the layout of Hugging Face. Imports no model library, so that a
start can check them."""

from pathlib import Path

from anabranch.domain.errors import ConfigurationError

CONFIG = "config.json"


def model_files(path: Path, what: str) -> tuple[Path, Path]:
    """The model and its tokenizer: `path` is an .onnx file, or a folder with one. ConfigurationError, which names
    `what`, if they are not there."""
    models = [path] if path.suffix == ".onnx" else [path / "model.onnx", path / "onnx" / "model.onnx"]
    for model in models:
        for tokenizer in (model.parent / "tokenizer.json", model.parent.parent / "tokenizer.json"):
            if model.is_file() and tokenizer.is_file():
                return model, tokenizer
    raise ConfigurationError(f"There is no {what} in {path}: it needs model.onnx, and tokenizer.json beside it.")
