"""Public names of a package that are imported at their first use."""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any


def lazy_names(package: str, modules: Sequence[str]) -> Callable[[str], Any]:
    """A `__getattr__` for `package`: it looks for each name of `__all__` in `modules`, cheapest module first."""

    def find(name: str) -> Any:
        namespace = vars(sys.modules[package])
        if name in namespace["__all__"]:
            for module in modules:
                found = vars(import_module(f"{package}.{module}"))
                if name in found:
                    return namespace.setdefault(name, found[name])
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
