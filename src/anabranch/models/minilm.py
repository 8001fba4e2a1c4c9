"""MiniLM embeddings in ONNX Runtime."""

import asyncio
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

# Nothing about its users leaves this process: ONNX Runtime would send usage data.
os.putenv("ORT_DISABLE_TELEMETRY", "1")
import onnxruntime as ort
from tokenizers import Encoding, Tokenizer

from anabranch.domain.contracts import RunInThread
from anabranch.domain.errors import ConfigurationError
from anabranch.domain.model import Embedding, Value
from anabranch.models.calibration import MINILM
from anabranch.text.words import STOPWORDS

# Larger batches save nothing, and are slower for long texts.
BATCH_TOKENS = 512
ERRORS_ONLY = 3

Ids = npt.NDArray[np.int32]


def session(model: bytes | str, threads: int = 1) -> ort.InferenceSession:
    """A session for a model, given as a path, or as bytes, which it keeps."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = ERRORS_ONLY
    # Memory patterns are kept per batch shape, and there are thousands of shapes.
    options.enable_mem_pattern = False
    # Idle threads must not spin.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Batches of text indexes, shortest texts first, up to BATCH_TOKENS with padding."""
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[number] > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def padded(texts: Sequence[Ids], pad: int = 0) -> tuple[Ids, Ids]:
    """The ids of all texts in one padded array, and its attention mask."""
    ids = np.full((len(texts), max(map(len, texts))), pad, np.int32)
    mask = np.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = text
        mask[row, : len(text)] = 1
    return ids, mask


NAME = "all-MiniLM-L6-v2"
MODEL = "model.onnx"
TOKENIZER = "tokenizer.json"
MANIFEST = "MANIFEST"
# The version of the graph that this code expects. Here and not in install.py, so that loading needs no builder.
GRAPH = 1

BEGIN, END = 101, 102
# Characters that fill the window of any ordinary text; the rest is not tokenized.
MAX_CHARS = 65_536
# How many texts are tokenized and sorted at a time.
SORTED_TEXTS = 256
SURROGATES = re.compile("[\ud800-\udfff]")


class ModelMissing(ConfigurationError):
    """The model's files are missing, damaged, or of another version."""

    def __init__(self, found: str) -> None:
        super().__init__(f"The embedding model {NAME} {found}. Run: anabranch models install")


class ModelManifest(Value):
    """The manifest of an installation. `mean` is the mean vector of tokens that carry meaning."""

    name: str
    graph: int
    sha256: dict[str, str]
    mean: tuple[float, ...]


class Files(Value):
    manifest: ModelManifest
    model: Path
    tokenizer: bytes


def read(folder: Path) -> Files:
    """The installed files, verified."""
    place = folder / NAME
    try:
        manifest = msgspec.json.decode((place / MANIFEST).read_bytes(), type=ModelManifest)
        tokenizer = (place / TOKENIZER).read_bytes()
        with (place / MODEL).open("rb") as model:
            digest = hashlib.file_digest(model, "sha256")
    except FileNotFoundError as error:
        raise ModelMissing(f"is not installed in {folder}") from error
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelMissing(f"in {folder} cannot be read") from error
    if (manifest.name, manifest.graph, len(manifest.mean)) != (NAME, GRAPH, MiniLM.dimensions):
        raise ModelMissing(f"in {folder} was installed by another version of Anabranch")
    for name, found in ((MODEL, digest), (TOKENIZER, hashlib.sha256(tokenizer))):
        if found.hexdigest() != manifest.sha256.get(name):
            raise ModelMissing(f"in {folder} is damaged: {name} is not what was installed")
    return Files(manifest=manifest, model=place / MODEL, tokenizer=tokenizer)


class Vocabulary:
    """Tokenizes texts, and says which tokens carry meaning."""

    def __init__(self, tokenizer: bytes) -> None:
        self._tokenizer = Tokenizer.from_str(tokenizer.decode())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # "[SEP]" in a document is text, not a special token.
        self._tokenizer.encode_special_tokens = True
        pieces = self._tokenizer.get_vocab()
        self._stops, self._continues, self._has_letters = (np.zeros(len(pieces), np.bool_) for _ in range(3))
        for piece, number in pieces.items():
            self._stops[number] = piece in STOPWORDS
            self._continues[number] = piece.startswith("##")
            # Special tokens are in brackets.
            self._has_letters[number] = not (piece[0] == "[" and piece[-1] == "]") and any(map(str.isalnum, piece))

    def offsets(self, text: str) -> list[tuple[int, int]]:
        return list(self.encoding(text).offsets)

    def ids(self, text: str, window: int) -> Ids:
        """The ids with start and end tokens, truncated to the window."""
        return np.array([BEGIN, *self.encoding(text[:MAX_CHARS]).ids[:window], END], np.int32)

    def meaningful(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """False for punctuation, special tokens and stop words. A piece is a stop word only if its word ends with
        it."""
        found = self._has_letters[ids]
        found[:-1] &= ~self._stops[ids[:-1]] | self._continues[ids[1:]]
        return found

    def continues_word(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """True for the second and later pieces of a word."""
        return self._continues[ids]

    def encoding(self, text: str) -> Encoding:
        """Without start and end tokens. A surrogate is replaced by one character, so offsets fit the text."""
        try:
            return self._tokenizer.encode(text, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):
            return self._tokenizer.encode(SURROGATES.sub("\ufffd", text), add_special_tokens=False)


@lru_cache(maxsize=1)
def vocabulary(tokenizer: bytes) -> Vocabulary:
    """The models of a process share it: it takes 12 MB."""
    return Vocabulary(tokenizer)


class MiniLM:
    """An Embedder. The model reads 256 tokens, two of them special: the window is the rest, and longer texts are
    truncated. A text's vectors do not depend on the rest of its batch."""

    name = NAME
    dimensions = 384
    window = 254
    calibration = MINILM

    def __init__(self, folder: Path, threads: int = 1, run: RunInThread = asyncio.to_thread) -> None:
        """Load from the folder of `install`; raises ModelMissing. `run` runs a batch in a thread."""
        files = read(folder)
        self._vocabulary = vocabulary(files.tokenizer)
        self._mean = np.array(files.manifest.mean, np.float32)
        # One batch per thread: several threads on one batch would synchronize in every layer.
        self._session = session(str(files.model))
        self._threads = threads
        self._run = run

    def tokens(self, text: str) -> Sequence[tuple[int, int]]:
        return self._vocabulary.offsets(text)

    async def embed(self, texts: Sequence[str]) -> Sequence[Embedding]:
        """Runs in a thread, in slices, so that the event loop is not blocked and cancellation is prompt."""
        found: list[Embedding] = []
        while len(found) < len(texts):
            found += await self._embed(texts[len(found) : len(found) + SORTED_TEXTS])
        return found

    async def _embed(self, texts: Sequence[str]) -> list[Embedding]:
        ids = await self._run(lambda: [self._vocabulary.ids(text, self.window) for text in texts])
        found: dict[int, Embedding] = {}
        waiting = batches([len(each) for each in ids])

        async def work() -> None:
            for batch in waiting:
                embedded = await self._run(self._embed_batch, [ids[number] for number in batch])
                found.update(zip(batch, embedded, strict=True))

        await asyncio.gather(*(work() for _ in range(self._threads)))
        return [found[number] for number in range(len(ids))]

    def _embed_batch(self, batch: list[Ids]) -> list[Embedding]:
        ids, mask = padded(batch)
        sentences, tokens = self._session.run(["sentence", "tokens"], {"ids": ids, "mask": mask})
        return [
            Embedding(
                vector=sentence.tobytes(),
                tokens=np.packbits(rows[: len(text)][self._vocabulary.meaningful(text)] > self._mean, axis=1).tobytes(),
            )
            for text, sentence, rows in zip(batch, sentences, tokens, strict=True)
        ]
