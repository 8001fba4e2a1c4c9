"""An environment that remembers which of its variables were asked for."""

from collections.abc import Mapping
from typing import Any


class Watched(dict[str, str]):
    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__(environment)
        self.asked: set[str] = set()

    def get(self, name: str, otherwise: Any = None) -> Any:
        self.asked.add(name)
        return super().get(name, otherwise)
