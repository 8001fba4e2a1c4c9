"""Optional dependencies: which modules each extra of the package brings, and the error when one is missing."""

from importlib.util import find_spec
from typing import Literal

from anabranch.domain.errors import ConfigurationError

Extra = Literal["encryption", "local-models", "mcp", "otel", "postgres"]
MODULES: dict[Extra, tuple[str, ...]] = {
    "encryption": ("pyrage",),
    "local-models": ("onnx", "onnxruntime", "safetensors", "tokenizers"),
    "mcp": ("mcp", "pydantic_core"),
    "postgres": ("psycopg",),
    "otel": ("opentelemetry", "opentelemetry.sdk", "opentelemetry.proto"),
}


def require(extra: Extra, needed_by: str) -> None:
    """Raise a ConfigurationError with the install command if a module of this extra is not installed."""
    for module in MODULES[extra]:
        if find_spec(module) is None:
            raise ConfigurationError(
                f"{needed_by} needs {module}, which is not installed: pip install 'anabranch[{extra}]'"
            )
