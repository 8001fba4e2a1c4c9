"""Models of natural language inference as claim checkers: a local ONNX model, or a server that classifies pairs. The
premise is the text of the pages, the hypothesis is the claim. Imports no model library before one is used."""

import asyncio
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec

from anabranch.domain.contracts import Clock, RunInThread, SystemClock
from anabranch.domain.errors import ConfigurationError, FailureKind, UpstreamError, UpstreamTimedOut
from anabranch.domain.evidence import Verdict
from anabranch.domain.model import Value
from anabranch.models.onnx_folder import CONFIG, model_files
from anabranch.models.reader_threads import MAX_INPUT_CHARS, Pages, ReaderThreads, within_limits
from anabranch.models.remote import UNDECODABLE, ModelServer, api_url

WHAT = "verifier"
MAX_CONFIG_BYTES = 1024 * 1024
MAX_LABELS = 8
SHOWN_LABEL = 40
LEAST_TOKENS, MAX_TOKENS = 32, 512
# The default batch limit of text-embeddings-inference.
BATCH = 32
# A check that takes longer fails; the limit is less than an answer waits for its last checks. After a failure the
# server is left alone for a while, so that the sentences of one answer do not wait for it one after the other.
LIMIT_S, PAUSE_S = 3.0, 5.0
# The sum of the scores of one pair may differ from 1 by rounding.
ROUNDING = 0.02

Said = Literal["supported", "unknown", "contradicted"]
# What models call them, in lower case and with "_" between words.
LABELS: Mapping[str, Said] = {
    **dict.fromkeys(("entailment", "entails", "entailed", "supported", "supports", "consistent"), "supported"),
    **dict.fromkeys(("neutral", "unknown", "not_entailment", "not_entailed", "not_enough_info"), "unknown"),
    **dict.fromkeys(("not_supported", "unsupported", "inconsistent", "hallucinated"), "unknown"),
    **dict.fromkeys(("contradiction", "contradicts", "contradicted", "refuted", "refutes"), "contradicted"),
}
EXPECTED = "entailment, neutral and contradiction, or entailment and not_entailment"
# There is no text, or nothing is claimed.
NOTHING = Verdict(supported=0.0, unknown=1.0, contradicted=0.0)


class NliConfig(Value):
    """What is read of a model's config.json."""

    id2label: Annotated[dict[int, str], msgspec.Meta(min_length=2, max_length=MAX_LABELS)]
    max_position_embeddings: int | None = None


class NliFolder(NamedTuple):
    """What the model's outputs mean, in their order, and how many tokens it reads."""

    labels: tuple[Said, ...]
    max_tokens: int = MAX_TOKENS


class Prediction(Value):
    label: str
    score: Annotated[float, msgspec.Meta(ge=0, le=1)]


def read_folder(path: Path) -> NliFolder:
    """The labels of a local model. ConfigurationError if files are missing, or the labels are not those of NLI."""
    model, tokenizer = model_files(path, WHAT)
    places = (model.parent / CONFIG, tokenizer.parent / CONFIG)
    file = next((place for place in places if place.is_file()), places[0])
    try:
        with file.open("rb") as content:
            config = msgspec.json.decode(content.read(MAX_CONFIG_BYTES), type=NliConfig, strict=False)
    except FileNotFoundError:
        raise ConfigurationError(f"There is no {WHAT} in {path}: it needs {CONFIG} beside model.onnx.") from None
    except (OSError, *UNDECODABLE) as error:
        raise ConfigurationError(f"The {WHAT} cannot be used: {file} cannot be read ({error}).") from error
    names = [config.id2label.get(number, "") for number in range(len(config.id2label))]
    labels = [_said(name) for name in names]
    known = tuple(label for label in labels if label is not None)
    if len(known) < len(labels) or "supported" not in known or set(known) == {"supported"}:
        raise ConfigurationError(
            f"The {WHAT} cannot be used: id2label in {file} has {_shown(names)}. It must have {EXPECTED}."
        )
    return NliFolder(known, max(LEAST_TOKENS, config.max_position_embeddings or MAX_TOKENS))


class OnnxNli:
    """A ClaimChecker on this machine: `path` is a folder with model.onnx, tokenizer.json and config.json."""

    def __init__(
        self, path: Path, *, threads: int = 1, clock: Clock | None = None, run: RunInThread | None = None
    ) -> None:
        folder = read_folder(path)
        from anabranch.models.cross_encoder import CrossEncoder  # noqa: PLC0415  it loads ONNX Runtime

        self._path = path
        self._labels = folder.labels
        self._model = CrossEncoder(path, WHAT, max_tokens=folder.max_tokens)
        self._verdict("A claim.", "A text.")
        self._readers = ReaderThreads(threads, WHAT, clock, run)
        self.close = self._readers.close

    async def check(
        self, claim: str, inputs: Sequence[Pages], *, until: float | None = None
    ) -> Sequence[Verdict | None]:
        return await self._readers.each(partial(self._check, hypothesis(claim)), inputs, until)

    def _check(self, claim: str, pages: Pages) -> Verdict:
        text = premise(pages)
        return self._verdict(claim, text) if claim and text else NOTHING

    def _verdict(self, claim: str, text: str) -> Verdict:
        try:
            logits = self._model.logits([self._model.encode(text, claim)]).ravel().tolist()
        except Exception as error:  # both libraries raise bare exceptions
            raise ConfigurationError(f"The {WHAT} in {self._path} cannot read a pair of texts: {error}") from error
        if len(logits) != len(self._labels):
            labels = f"{CONFIG} has {len(self._labels)} labels"
            raise ConfigurationError(f"The {WHAT} in {self._path} returned {len(logits)} numbers, but {labels}.")
        if not all(map(math.isfinite, logits)):
            raise ConfigurationError(f"The {WHAT} in {self._path} returned a number that is not finite.")
        odds = [math.exp(logit - max(logits)) for logit in logits]
        return _verdict(zip(self._labels, (one / sum(odds) for one in odds), strict=True))


class NliEndpoint:
    """A ClaimChecker on a configured server, in the format of /predict of Hugging Face's text-embeddings-inference.
    UpstreamError if it cannot be asked, or its reply cannot be used."""

    def __init__(
        self, server: ModelServer, model: str = "", clock: Clock | None = None, limit_s: float = LIMIT_S
    ) -> None:
        self._server = server
        self._limit_s = limit_s
        self._model = {"model": model} if model else {}
        self._clock = clock or SystemClock()
        self._resumes = -math.inf

    async def close(self) -> None:
        pass

    async def check(
        self, claim: str, inputs: Sequence[Pages], *, until: float | None = None
    ) -> Sequence[Verdict | None]:
        found: list[Verdict | None] = [None] * len(inputs)
        now = self._clock.monotonic()
        if (until is not None and now >= until) or now < self._resumes:
            return found
        sent = hypothesis(claim)
        asked: list[tuple[int, str]] = []
        for number, pages in enumerate(within_limits(inputs)):
            text = premise(pages)
            if sent and text:
                asked.append((number, text))
            else:
                found[number] = NOTHING
        for start in range(0, len(asked), BATCH):
            batch = asked[start : start + BATCH]
            verdicts = await self._asked([(text, sent) for _, text in batch], until)
            for (number, _), verdict in zip(batch, verdicts, strict=False):
                found[number] = verdict
        return found

    async def _asked(self, pairs: Sequence[tuple[str, str]], until: float | None) -> list[Verdict]:
        """The verdicts; none if the time is over."""
        limit_s = self._limit_s
        left_s = limit_s if until is None else until - self._clock.monotonic()
        if left_s <= 0:
            return []
        try:
            async with asyncio.timeout(min(limit_s, left_s)):
                body = await self._server.post({"inputs": pairs, "truncate": True, **self._model})
        except TimeoutError:
            if left_s < limit_s:
                return []
            raise self._failure(UpstreamTimedOut(f"It took more than {limit_s:g} s.", FailureKind.DOWN)) from None
        except UpstreamError as error:
            raise self._failure(error) from error
        return _predicted(body, len(pairs))

    def _failure(self, error: UpstreamError) -> UpstreamError:
        if error.failure_kind.temporary:
            self._resumes = self._clock.monotonic() + PAUSE_S
        return UpstreamError(
            f"The {WHAT} (AGGREGATOR_VERIFIER_URL) cannot be asked: {error.message}", error.failure_kind
        )


def predict_url(base: str) -> str:
    """text-embeddings-inference has no version in its URL."""
    return api_url(base, "/predict", ("",))


def hypothesis(claim: str) -> str:
    """A claim as a model reads it."""
    return _sendable(claim[:MAX_INPUT_CHARS])


def premise(pages: Pages) -> str:
    """The text of pages, each below its title, as much as is read."""
    found: list[str] = []
    left = MAX_INPUT_CHARS
    for text in _texts(pages):
        if left <= 0:
            break
        found.append(text[:left])
        left -= len(text)
    return "\n".join(line for line in map(_sendable, found) if line)


def _texts(pages: Pages) -> Iterator[str]:
    for page in pages:
        yield page.title
        for unit in page.units:
            yield unit.before
            yield unit.text


def _sendable(text: str) -> str:
    """Without line breaks, and without surrogates, which are no text in JSON."""
    return " ".join(text.encode(errors="replace").decode().split())


def _said(label: str) -> Said | None:
    return LABELS.get(re.sub(r"[\W_]+", "_", label.lower()).strip("_"))


def _shown(labels: Sequence[str]) -> str:
    return "the labels " + ", ".join(repr(label[:SHOWN_LABEL]) for label in labels[:MAX_LABELS])


def _predicted(body: bytes, count: int) -> list[Verdict]:
    try:
        replies = msgspec.json.decode(body, type=list[list[Prediction]])
    except UNDECODABLE as error:
        raise _unusable("is not a list of labels and scores for each pair") from error
    if len(replies) != count:
        raise _unusable(f"has results for {len(replies)} pairs, not for the {count} that it was asked about")
    return [_judged(predictions) for predictions in replies]


def _judged(predictions: Sequence[Prediction]) -> Verdict:
    names = [one.label for one in predictions]
    said = [label for label in map(_said, names) if label is not None]
    if not names or len(said) < len(names) or len(set(names)) < len(names):
        raise _unusable(f"has {_shown(names)}, and they must be {EXPECTED}")
    if sum(one.score for one in predictions) > 1 + ROUNDING:
        raise _unusable("has scores that are not the probabilities of one choice")
    return _verdict(zip(said, (one.score for one in predictions), strict=True))


def _unusable(why: str) -> UpstreamError:
    return UpstreamError(f"The {WHAT} (AGGREGATOR_VERIFIER_URL) cannot be used: its reply {why}.", FailureKind.UNUSABLE)


def _verdict(shares: Iterator[tuple[Said, float]]) -> Verdict:
    """What is missing to 1 is unknown: a server may give the best labels only."""
    sums: dict[Said, float] = {"supported": 0.0, "unknown": 0.0, "contradicted": 0.0}
    for said, share in shares:
        sums[said] += share
    sums["unknown"] += max(0.0, 1 - sum(sums.values()))
    whole = sum(sums.values())
    return Verdict(
        supported=sums["supported"] / whole,
        unknown=sums["unknown"] / whole,
        contradicted=sums["contradicted"] / whole,
    )
