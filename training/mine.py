"""Finds near passages that a trained model takes for right, to be drawn more often in the next training.

A passage that the model finds more answerable than the right one is left out: it is likely that it does answer."""

import json
from pathlib import Path

from training.corpus import Corpus


class OtherData(Exception):
    """The mined passages belong to other data."""


def mined(path: Path, corpus: Corpus) -> dict[int, tuple[int, ...]]:
    """Hard near passages by question."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if list(found["data_sha256"].items()) != list(corpus.sha256.items()):
        raise OtherData(f"{path} was made from other data, or from files in another order.")
    return {int(question): tuple(passages) for question, passages in found["hard"].items()}
