"""The evidence model and the claim model in ONNX Runtime: one shape, two sets of weights."""

import hashlib
import mmap
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view
from tokenizers import Encoding

from anabranch.domain.contracts import Clock, RunInThread
from anabranch.domain.errors import ConfigurationError
from anabranch.domain.evidence import AnswerSpan, Reading, Verdict
from anabranch.models import minilm
from anabranch.models.evidence_input import (
    CLAIM_START,
    JOINT,
    MAX_BEFORE,
    MAX_CLAIM,
    SINGLE,
    InputIds,
    PageIds,
    UnitIds,
    UnitPlace,
    laid_out,
)
from anabranch.models.reader_threads import MAX_INPUT_CHARS, Pages, ReaderThreads
from anabranch.text.plain_numbers import plain_numbers

FILE = Path(__file__).with_name("evidence.onnx")
CLAIMS_FILE = Path(__file__).with_name("claims.onnx")
# Of these files.
SHA256 = "ac4fb8c1f84684ad3a445045cb4f111017b7a1be82d86cd51cddb62772177337"
CLAIMS_SHA256 = "181108af5b171abbae572ca8efcb2665f5c44cb54261829e650f6709223dcf66"

MAX_ANSWER_TOKENS = 30

# The columns of the two outputs.
RELEVANCE, ANSWERABLE, CLAIM = 0, 1, slice(2, 5)
START, END, UNIT = range(3)
# Of a claim's tokens, the first column says whether they are wrong.
WRONG = START

Floats = npt.NDArray[np.float32]
Encode = Callable[[str], Encoding]


class EvidenceMissing(ConfigurationError):
    """The package's evidence model is missing or damaged."""

    def __init__(self, found: str) -> None:
        super().__init__(f"The evidence model {found}. Run: pip install --force-reinstall --no-deps anabranch")


class Tokenized(NamedTuple):
    """An input in tokens, and the encodings of its units' texts by page and unit."""

    laid: InputIds
    texts: dict[tuple[int, int], Encoding]


class OnnxReader:
    """A model of pages. An input is a run of its own: a batch is not faster on a CPU, needs padding, and would delay
    the first results."""

    def __init__(
        self, models: Path, file: Path, sha256: str, threads: int, clock: Clock | None, run: RunInThread | None
    ) -> None:
        """Load `file`, and the word table of the embedding model in the folder `models`; raises EvidenceMissing or
        ModelMissing."""
        model = _verified(file, sha256)
        embedder = minilm.read(models)
        self._vocabulary = minilm.vocabulary(embedder.tokenizer)
        self._words = WordTable(embedder.model)
        self._session = minilm.session(str(model))
        self._inputs = {each.name for each in self._session.get_inputs()}
        self._readers = ReaderThreads(threads, file.stem, clock, run)
        self.close = self._readers.close

    def _run(self, laid: InputIds) -> tuple[Floats, Floats]:
        """The outputs for the input as a whole, and for each of its tokens."""
        ids = np.array(laid.ids, np.int32)
        types = (np.arange(len(ids)) >= laid.pages_start).astype(np.int32)
        given = {"words": self._words[ids][None], "types": types[None], "mask": np.ones_like(types)[None]}
        feed = {name: value for name, value in given.items() if name in self._inputs}
        passage, tokens = self._session.run(["passage", "tokens"], feed)
        return passage[0], tokens[0]


class OnnxEvidence(OnnxReader):
    """An Evidence."""

    def __init__(
        self,
        models: Path,
        *,
        threads: int = 1,
        file: Path = FILE,
        sha256: str = SHA256,
        clock: Clock | None = None,
        run: RunInThread | None = None,
    ) -> None:
        super().__init__(models, file, sha256, threads, clock, run)

    async def read(
        self, question: str, inputs: Sequence[Pages], *, until: float | None = None
    ) -> Sequence[Reading | None]:
        return await self._readers.each(partial(self._read, question, cache(self._vocabulary.encoding)), inputs, until)

    def _read(self, question: str, encode: Encode, pages: Pages) -> Reading:
        tokenized = _tokenized(question, pages, encode)
        passage, tokens = self._run(tokenized.laid)
        units: list[list[float]] = [[] for _ in pages]
        for place in tokenized.laid.places:
            units[place.page].append(float(tokens[place.marker, UNIT]))
        return Reading(
            relevance=float(passage[RELEVANCE]),
            answerable=float(passage[ANSWERABLE]),
            units=tuple(map(tuple, units)),
            answer=self._answer(tokenized, tokens),
        )

    def _answer(self, tokenized: Tokenized, tokens: Floats) -> AnswerSpan | None:
        laid = tokenized.laid
        # The model may prefer half a word; an answer is whole words.
        continues = self._vocabulary.continues_word(np.array(laid.ids, np.int32))
        start = np.where(continues, -np.inf, tokens[:, START])
        end = np.where(np.append(continues[1:], False), -np.inf, tokens[:, END])
        best = best_span(start, end, laid.places)
        if best is None:
            return None
        place, first, last = best
        offsets = tokenized.texts[place.page, place.unit].offsets
        return AnswerSpan(
            page=place.page,
            unit=place.unit,
            start=offsets[first - place.marker - 1][0],
            end=offsets[last - place.marker - 1][1],
            score=float(start[first] + end[last] - tokens[0, START] - tokens[0, END]),
        )


class OnnxClaims(OnnxReader):
    """A ClaimChecker."""

    def __init__(
        self,
        models: Path,
        *,
        threads: int = 1,
        file: Path = CLAIMS_FILE,
        sha256: str = CLAIMS_SHA256,
        clock: Clock | None = None,
        run: RunInThread | None = None,
    ) -> None:
        super().__init__(models, file, sha256, threads, clock, run)

    async def check(
        self, claim: str, inputs: Sequence[Pages], *, until: float | None = None
    ) -> Sequence[Verdict | None]:
        return await self._readers.each(partial(self._check, claim, cache(self._vocabulary.encoding)), inputs, until)

    def _check(self, claim: str, encode: Encode, pages: Pages) -> Verdict:
        """Numbers are read in one form: the model takes 1,250 and 1250 for different ones."""
        said, places = plain_numbers(claim[:MAX_INPUT_CHARS])
        laid = _tokenized(said, pages, lambda text: encode(plain_numbers(text)[0]), claim=True).laid
        passage, tokens = self._run(laid)
        odds = np.exp(passage[CLAIM].astype(np.float64) - passage[CLAIM].max())
        supported, unknown, contradicted = (odds / odds.sum()).tolist()
        return Verdict(
            supported=supported,
            unknown=unknown,
            contradicted=contradicted,
            units=tuple(float(tokens[place.marker, UNIT]) for place in laid.places if place.page == 0),
            words=tuple(
                (places[start], places[end], odds) for start, end, odds in self._wrong(encode(said), laid, tokens)
            ),
            whole=len(claim) <= MAX_INPUT_CHARS and len(encode(said).ids) <= MAX_CLAIM,
        )

    def _wrong(self, claim: Encoding, laid: InputIds, tokens: Floats) -> tuple[tuple[int, int, float], ...]:
        """Whole words: the highest of their tokens."""
        last = laid.pages_start - 1
        ids = np.array(laid.ids[CLAIM_START:last], np.int32)
        scores = tokens[CLAIM_START:last, WRONG].tolist()
        words: list[tuple[int, int, float]] = []
        continued = self._vocabulary.continues_word(ids)
        for continues, (start, end), score in zip(continued, claim.offsets, scores, strict=False):
            if continues and words:
                begin, _, highest = words[-1]
                words[-1] = begin, end, max(highest, score)
            else:
                words.append((start, end, score))
        return tuple(words)


def _verified(file: Path, sha256: str) -> Path:
    try:
        with file.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256")
    except OSError as error:
        raise EvidenceMissing(f"is not in this installation: {file} cannot be read") from error
    if digest.hexdigest() != sha256:
        raise EvidenceMissing(f"is damaged: {file} is not the file of this version")
    return file


def _tokenized(head: str, pages: Pages, encode: Encode, *, claim: bool = False) -> Tokenized:
    """What fits is tokenized, and not much more: a page may have any number of units of any length."""
    limit = SINGLE if len(pages) == 1 else JOINT
    chars, tokens = MAX_INPUT_CHARS, limit
    texts: dict[tuple[int, int], Encoding] = {}
    found: list[PageIds] = []
    for number, page in enumerate(pages):
        if chars <= 0 or tokens <= 0:
            break
        units: list[UnitIds] = []
        for index, unit in enumerate(page.units):
            if chars <= 0 or tokens <= 0:
                break
            before, text = unit.before[:chars], unit.text[:chars]
            texts[number, index] = encode(text)
            units.append(UnitIds(encode(before).ids[:MAX_BEFORE], texts[number, index].ids))
            chars -= len(before) + len(text)
            tokens -= 1 + len(units[-1].before) + len(units[-1].text)
        found.append(PageIds(encode(page.title[:MAX_INPUT_CHARS]).ids, units))
        tokens -= 1
    return Tokenized(laid_out(encode(head[:MAX_INPUT_CHARS]).ids, found, limit, claim=claim), texts)


def best_span(
    start: npt.NDArray[np.float64], end: npt.NDArray[np.float64], places: Sequence[UnitPlace]
) -> tuple[UnitPlace, int, int] | None:
    """The place of the best answer, and its first and last token: in one unit, at most MAX_ANSWER_TOKENS."""
    owner = np.full(len(start), -1)
    for number, place in enumerate(places):
        owner[place.marker + 1 : place.end] = number
    beyond = (0, MAX_ANSWER_TOKENS - 1)
    ends = sliding_window_view(np.pad(end, beyond, constant_values=-np.inf), MAX_ANSWER_TOKENS)
    owners = sliding_window_view(np.pad(owner, beyond, constant_values=-1), MAX_ANSWER_TOKENS)
    inside = (owners == owner[:, None]) & (owner[:, None] >= 0)
    scores = np.where(inside, start[:, None] + ends, -np.inf)
    first, more = (int(index) for index in np.unravel_index(scores.argmax(), scores.shape))
    return (places[owner[first]], first, first + more) if scores[first, more] > -np.inf else None


# Numbers of fields in ONNX's protobuf messages.
MODEL_GRAPH, GRAPH_INITIALIZER, TENSOR_NAME, TENSOR_BYTES = 7, 5, 8, 9


class WordTable:
    """The embedding model's word vectors: 8 bits with a scale for each word, mapped from its file, so that they take no
    memory of their own. Importing onnx only to find them would take longer than to load the evidence model."""

    def __init__(self, model: Path) -> None:
        """`model` is verified: it is not checked here."""
        with model.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        found = dict(_tensors(content))
        self._scales = np.frombuffer(content[found[b"words.scales"]], np.float32)[:, None]
        size = len(self._scales) * minilm.MiniLM.dimensions
        words = np.frombuffer(content, np.int8, size, found[b"words"].start)
        self._words = words.reshape(-1, minilm.MiniLM.dimensions)

    def __getitem__(self, ids: npt.NDArray[np.int32]) -> Floats:
        return self._words[ids] * self._scales[ids]


def _tensors(model: mmap.mmap) -> Iterator[tuple[bytes, slice]]:
    """The names of an ONNX model's weights, and where their bytes are."""
    for graph in _fields(model, slice(0, len(model)), MODEL_GRAPH):
        for tensor in _fields(model, graph, GRAPH_INITIALIZER):
            for name in _fields(model, tensor, TENSOR_NAME):
                for values in _fields(model, tensor, TENSOR_BYTES):
                    yield model[name], values


def _fields(message: mmap.mmap, within: slice, wanted: int) -> Iterator[slice]:
    """Where the contents of a protobuf message's fields of this number are; they are all length-delimited."""
    at = within.start
    while at < within.stop:
        tag, at = _varint(message, at)
        match tag & 7:
            case 0:
                _, at = _varint(message, at)
            case 2:
                length, at = _varint(message, at)
                if tag >> 3 == wanted:
                    yield slice(at, at + length)
                at += length
            case kind:
                at += {1: 8, 5: 4}[kind]


def _varint(message: mmap.mmap, at: int) -> tuple[int, int]:
    """The number at this place, and the place behind it."""
    value = shift = 0
    while True:
        value |= (message[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if message[at - 1] < 128:
            return value, at
