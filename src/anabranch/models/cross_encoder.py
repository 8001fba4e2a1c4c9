"""A model that reads two texts together, in ONNX Runtime."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

from anabranch.domain.errors import ConfigurationError
from anabranch.models.minilm import padded, session
from anabranch.models.onnx_folder import model_files

MAX_PAIR_TOKENS = 512
KNOWN_INPUTS = {"input_ids", "attention_mask", "token_type_ids"}
PADS = ("[PAD]", "<pad>")


class CrossEncoder:
    """A loaded model and its tokenizer. ConfigurationError, which names `what`, if they cannot be used."""

    def __init__(self, path: Path, what: str, *, threads: int = 1, max_tokens: int = MAX_PAIR_TOKENS) -> None:
        model, tokenizer = model_files(path, what)
        try:
            self._tokenizer = Tokenizer.from_file(str(tokenizer))
            self._session = session(str(model), threads)
        except Exception as error:  # both libraries raise bare exceptions for a file that they cannot read
            raise ConfigurationError(f"The {what} in {path} cannot be loaded: {error}") from error
        self._inputs = {
            each.name: np.int32 if each.type == "tensor(int32)" else np.int64 for each in self._session.get_inputs()
        }
        if "input_ids" not in self._inputs or self._inputs.keys() - KNOWN_INPUTS:
            raise ConfigurationError(
                f"The {what} in {path} is not a cross-encoder: its inputs are {', '.join(sorted(self._inputs))}."
            )
        self._output = self._session.get_outputs()[0].name
        self._tokenizer.no_padding()
        # "[SEP]" in a document is text, not a special token.
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.enable_truncation(min(MAX_PAIR_TOKENS, max_tokens), strategy="longest_first")
        self._pad = next((pad for each in PADS if (pad := self._tokenizer.token_to_id(each)) is not None), 0)

    def encode(self, first: str, second: str) -> Encoding:
        """The tokens of a pair, of which the longer text is truncated."""
        return self._tokenizer.encode(first, second)

    def logits(self, pairs: Sequence[Encoding]) -> npt.NDArray[np.float64]:
        """The model's output for a batch."""
        ids, mask = padded([np.array(pair.ids, np.int32) for pair in pairs], self._pad)
        types, _ = padded([np.array(pair.type_ids, np.int32) for pair in pairs])
        given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
        feed = {name: given[name].astype(kind) for name, kind in self._inputs.items()}
        return np.asarray(self._session.run([self._output], feed)[0], np.float64)
