"""Texts to the model's inputs, as the product does it, for evaluation and export."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from anabranch.models.evidence_input import InputIds, PageIds, UnitIds

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

# Two units of work that are read together have about the same length: the rest is padding.
BATCH_TOKENS = 16_384
# So few that each input is a batch of its own.
ALONE = 1


class Batch(NamedTuple):
    """All int32 [texts, tokens]. `types` is 1 from the first token of the pages, `mask` is 0 for padding."""

    ids: Ints
    types: Ints
    mask: Ints


class WordTable(NamedTuple):
    """The embedder's word vectors, in 8 bits with a scale for each word."""

    words: npt.NDArray[np.int8]
    scales: Floats

    def vectors(self, ids: Ints) -> Floats:
        return self.words[ids] * self.scales[ids]

    def feed(self, batch: Batch) -> dict[str, Floats | Ints]:
        """The inputs of an exported model, which has no padding: the batch's inputs have one length."""
        return {"words": self.vectors(batch.ids), "types": batch.types}


class Reader:
    """Tokenizes pages. The same text is tokenized once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}

    def ids(self, text: str) -> list[int]:
        if text not in self._known:
            self._known[text] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return self._known[text]

    def page(self, title: str, units: Sequence[str], before: Sequence[str] = ()) -> PageIds:
        leads = before or [""] * len(units)
        return PageIds(
            self.ids(title),
            [UnitIds(self.ids(lead), self.ids(unit)) for lead, unit in zip(leads, units, strict=True)],
        )

    def offsets(self, text: str) -> list[tuple[int, int]]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).offsets)


def plain_tokenizer(content: bytes) -> Tokenizer:
    """From the bytes of a tokenizer.json."""
    tokenizer = Tokenizer.from_str(content.decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # "[SEP]" in a document is text, not a special token.
    tokenizer.encode_special_tokens = True
    return tokenizer


def padded(inputs: Sequence[InputIds]) -> Batch:
    length = max(len(each.ids) for each in inputs)
    batch = Batch(*(np.zeros((len(inputs), length), np.int32) for _ in range(3)))
    for row, each in enumerate(inputs):
        batch.ids[row, : len(each.ids)] = each.ids
        batch.types[row, each.pages_start : len(each.ids)] = 1
        batch.mask[row, : len(each.ids)] = 1
    return batch


def batches(inputs: Sequence[InputIds], most_tokens: int = BATCH_TOKENS) -> Iterator[list[int]]:
    """The numbers of inputs that are read together, shortest first."""
    batch: list[int] = []
    for number in sorted(range(len(inputs)), key=lambda number: len(inputs[number].ids)):
        if batch and (len(batch) + 1) * len(inputs[number].ids) > most_tokens:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch
