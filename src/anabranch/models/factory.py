"""Constructs the configured embedder, reranker, evidence model and verifier; local models load when they are first
used."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from anabranch.configuration.extras import require
from anabranch.configuration.settings import Settings
from anabranch.domain.contracts import Clock, Embedder, Outbound, Reranker, RunInThread, Telemetry
from anabranch.domain.errors import ConfigurationError, UpstreamError
from anabranch.domain.evidence import ClaimChecker, Evidence, EvidencePage, Reading, Verdict
from anabranch.domain.model import Calibration, Embedding, Endpoint
from anabranch.domain.signals import EvidenceUnavailable
from anabranch.models.calibration import MINILM, calibration_for
from anabranch.models.remote import ModelServer, OpenAIEmbeddings, api_url
from anabranch.policies.breaker import Role
from anabranch.policies.cache import CachedClaims, CachedEvidence
from anabranch.policies.resilience import Resilience

if TYPE_CHECKING:
    from anabranch.models.evidence import OnnxClaims, OnnxEvidence
    from anabranch.models.minilm import MiniLM


class Closing(Protocol):
    async def close(self) -> None: ...


class ClosingChecker(ClaimChecker, Closing, Protocol):
    pass


Model = TypeVar("Model", bound=Closing)

TIMEOUT_S = 30.0
# Less than the limit of a check, so that the circuit breaker learns of it.
VERIFIER_TIMEOUT_S = 2.5
# What a server says in its errors may be different each time.
MAX_NOTED = 20


def embedder_for(
    settings: Settings,
    outbound: Outbound,
    *,
    threads: int = 1,
    resilience: Resilience | None = None,
    run: RunInThread = asyncio.to_thread,
) -> Embedder:
    """The configured embedder; a local one runs its model with `run`."""
    if settings.embedding_url is not None and settings.embedding_model is not None:
        slug, base, key = settings.embedding_model, settings.embedding_url, settings.embedding_api_key
        endpoint = Endpoint(slug=slug, url=base, kind="openai", operator=True, token=key)
        server = _server("embeddings", api_url(base, "/embeddings"), endpoint, settings, outbound, resilience)
        return OpenAIEmbeddings(server, slug, calibration_for(settings), settings.embedding_window)
    return LocalEmbedder(Path(settings.models_dir).expanduser(), threads, calibration_for(settings), run)


def reranker_for(
    settings: Settings,
    outbound: Outbound,
    resilience: Resilience | None = None,
    run: RunInThread = asyncio.to_thread,
) -> Reranker | None:
    """The configured cross-encoder; None means the built-in late interaction."""
    if settings.reranker_path is None and settings.reranker_url is None:
        return None
    from anabranch.models.rerankers import OnnxCrossEncoder, RerankEndpoint, rerank_url  # noqa: PLC0415

    if settings.reranker_path is not None:
        return OnnxCrossEncoder(Path(settings.reranker_path).expanduser(), run=run)
    assert settings.reranker_url is not None
    slug, base, key = settings.reranker_model or "reranker", settings.reranker_url, settings.reranker_api_key
    endpoint = Endpoint(slug=slug, url=base, kind="openai", operator=True, token=key)
    url = rerank_url(base, settings.reranker_form)
    server = _server("reranker", url, endpoint, settings, outbound, resilience)
    return RerankEndpoint(server, settings.reranker_form, settings.reranker_model or "")


@asynccontextmanager
async def evidence_for(
    settings: Settings, clock: Clock, telemetry: Telemetry, run: RunInThread | None = None
) -> AsyncIterator[Evidence | None]:
    """The evidence model with its cache, unless it is off. With `auto` it is used where an answer is quoted, and for
    compact prompts; nothing is loaded before."""
    if settings.evidence == "off":
        yield None
        return
    folder, required = Path(settings.models_dir), settings.evidence == "on"
    local = LocalEvidence(folder, settings.embedding_threads, telemetry, required=required, run=run)
    try:
        yield CachedEvidence(local, clock, telemetry)
    finally:
        await local.close()


@asynccontextmanager
async def claims_for(
    settings: Settings,
    clock: Clock,
    telemetry: Telemetry,
    external: "ExternalClaims | None" = None,
    run: RunInThread | None = None,
) -> AsyncIterator[ClaimChecker]:
    """The external model, else the claim model of this package, with its cache; nothing is loaded before it is used. If
    verification is off, nothing is checked."""
    if settings.verify == "off":
        yield NoClaims()
        return
    folder, required = Path(settings.models_dir), settings.verify == "on"
    checker = external or LocalClaims(folder, settings.embedding_threads, telemetry, required=required, run=run)
    try:
        yield CachedClaims(checker, clock, telemetry)
    finally:
        await checker.close()


def verifier_for(
    settings: Settings,
    outbound: Outbound,
    clock: Clock,
    telemetry: Telemetry,
    resilience: Resilience,
    run: RunInThread,
) -> "ExternalClaims | None":
    """The configured model that checks claims; None means the claim model of this package. ConfigurationError if it is
    not in its folder."""
    if settings.verify == "off" or (settings.verifier_path is None and settings.verifier_url is None):
        return None
    from anabranch.models.nli import NliEndpoint, OnnxNli, predict_url, read_folder  # noqa: PLC0415  most have none

    if settings.verifier_path is not None:
        path = Path(settings.verifier_path).expanduser()
        read_folder(path)
        return ExternalClaims(partial(OnnxNli, path, threads=settings.embedding_threads, run=run), telemetry)
    assert settings.verifier_url is not None
    slug, base, key = settings.verifier_model or "verifier", settings.verifier_url, settings.verifier_api_key
    endpoint = Endpoint(slug=slug, url=base, kind="openai", operator=True, token=key)
    server = _server("verifier", predict_url(base), endpoint, settings, outbound, resilience, VERIFIER_TIMEOUT_S)
    return ExternalClaims(partial(NliEndpoint, server, settings.verifier_model or "", clock), telemetry)


def check_evidence(settings: Settings) -> None:
    """Raise ConfigurationError if the evidence model or verification is `on`, and their word vectors are not
    installed; or if the verifier is not in its folder."""
    folder = Path(settings.models_dir).expanduser()
    external = settings.verifier_path or settings.verifier_url
    checking = settings.verify == "on" and not external
    needing = "EVIDENCE" if settings.evidence == "on" else "VERIFY" if checking else None
    if needing and not (folder / LocalEmbedder.name).is_dir():
        raise ConfigurationError(
            f"AGGREGATOR_{needing}=on needs the embedding model {LocalEmbedder.name}, which is not installed in "
            f"{folder}. Run: anabranch models install"
        )
    if settings.verifier_path is not None and settings.verify != "off":
        from anabranch.models.nli import read_folder  # noqa: PLC0415  most have none

        read_folder(Path(settings.verifier_path).expanduser())


def _server(
    role: Role,
    url: str,
    endpoint: Endpoint,
    settings: Settings,
    outbound: Outbound,
    resilience: Resilience | None,
    most_s: float = TIMEOUT_S,
) -> ModelServer:
    """A client for one model server. Questions call it through a circuit breaker, with a time-out that leaves time to
    search without it; the indexer, which has no `resilience`, waits for it."""
    return ModelServer(
        url,
        outbound,
        api_key=endpoint.token or "",
        timeout_s=most_s if resilience is None else min(most_s, settings.retrieval_timeout / 3),
        guard=None if resilience is None else resilience.guard(endpoint, role),
    )


class LocalEmbedder:
    """all-MiniLM-L6-v2, loaded with the first text."""

    name = "all-MiniLM-L6-v2"
    dimensions = 384
    window = 254

    def __init__(
        self, folder: Path, threads: int, calibration: Calibration = MINILM, run: RunInThread = asyncio.to_thread
    ) -> None:
        self.calibration = calibration
        self._run = run
        self._folder = folder
        self._threads = threads
        self._loading = threading.Lock()
        self._model: MiniLM | None = None

    def tokens(self, text: str) -> Sequence[tuple[int, int]]:
        return self.loaded().tokens(text)

    async def embed(self, texts: Sequence[str]) -> Sequence[Embedding]:
        model = self._model if self._model is not None else await asyncio.to_thread(self.loaded)
        return await model.embed(texts)

    def loaded(self) -> "MiniLM":
        require("local-models", f"The embedding model {self.name} (or set AGGREGATOR_EMBEDDING_URL)")
        from anabranch.models.minilm import MiniLM  # noqa: PLC0415

        with self._loading:
            if self._model is None:
                self._model = MiniLM(self._folder, self._threads, self._run)
            return self._model


class LocalReader(Generic[Model]):
    """A model of this package, loaded when it is first asked. If it cannot be loaded, it says nothing, unless it is
    `required`; the next call tries again, because the embedding model may have been installed."""

    def __init__(self, load: Callable[[], Model], telemetry: Telemetry, *, required: bool) -> None:
        self._load = load
        self._telemetry = telemetry
        self._required = required
        self._noted: set[str] = set()
        self._loading = threading.Lock()
        self._model: Model | None = None

    async def close(self) -> None:
        if self._model is not None:
            await self._model.close()

    async def available(self) -> Model | None:
        if self._model is not None:
            return self._model
        try:
            return await asyncio.to_thread(self.loaded)
        except ConfigurationError as error:
            if self._required:
                raise
            self.note(error.message)
            return None

    def note(self, reason: str) -> None:
        """Report why the model is not used, once for each reason."""
        if reason not in self._noted and len(self._noted) < MAX_NOTED:
            self._noted.add(reason)
            self._telemetry.noted(EvidenceUnavailable(reason=reason))

    def loaded(self) -> Model:
        with self._loading:
            if self._model is None:
                self._model = self._load()
            return self._model


class LocalEvidence:
    """The evidence model of this package."""

    def __init__(
        self, folder: Path, threads: int, telemetry: Telemetry, *, required: bool, run: RunInThread | None = None
    ) -> None:
        load = partial(_evidence_model, folder.expanduser(), threads, run)
        self._model = LocalReader(load, telemetry, required=required)
        self.loaded, self.close = self._model.loaded, self._model.close

    async def read(
        self, question: str, inputs: Sequence[tuple[EvidencePage, ...]], *, until: float | None = None
    ) -> Sequence[Reading | None]:
        model = await self._model.available()
        return [None] * len(inputs) if model is None else await model.read(question, inputs, until=until)


class NoClaims:
    """A ClaimChecker that checks nothing."""

    async def check(
        self,
        claim: str,  # noqa: ARG002
        inputs: Sequence[tuple[EvidencePage, ...]],
        *,
        until: float | None = None,  # noqa: ARG002
    ) -> Sequence[Verdict | None]:
        return [None] * len(inputs)


class LocalClaims:
    """The claim model of this package."""

    def __init__(
        self, folder: Path, threads: int, telemetry: Telemetry, *, required: bool, run: RunInThread | None = None
    ) -> None:
        load = partial(_claim_model, folder.expanduser(), threads, run)
        self._model = LocalReader(load, telemetry, required=required)
        self.loaded, self.close = self._model.loaded, self._model.close

    async def check(
        self, claim: str, inputs: Sequence[tuple[EvidencePage, ...]], *, until: float | None = None
    ) -> Sequence[Verdict | None]:
        model = await self._model.available()
        return [None] * len(inputs) if model is None else await model.check(claim, inputs, until=until)


class ExternalClaims:
    """A ClaimChecker of the operator's. An answer does not depend on it: if it fails, nothing is checked."""

    def __init__(self, load: Callable[[], ClosingChecker], telemetry: Telemetry) -> None:
        self._model = LocalReader(load, telemetry, required=False)
        self.close = self._model.close

    async def check(
        self, claim: str, inputs: Sequence[tuple[EvidencePage, ...]], *, until: float | None = None
    ) -> Sequence[Verdict | None]:
        try:
            model = await self._model.available()
            if model is not None:
                return await model.check(claim, inputs, until=until)
        except (ConfigurationError, UpstreamError) as error:
            self._model.note(error.message)
        return [None] * len(inputs)


def _evidence_model(folder: Path, threads: int, run: RunInThread | None) -> "OnnxEvidence":
    require("local-models", "The evidence model (or set AGGREGATOR_EVIDENCE=off)")
    from anabranch.models.evidence import OnnxEvidence  # noqa: PLC0415

    return OnnxEvidence(folder, threads=threads, run=run)


def _claim_model(folder: Path, threads: int, run: RunInThread | None) -> "OnnxClaims":
    require("local-models", "The claim model (or set AGGREGATOR_VERIFY=off)")
    from anabranch.models.evidence import OnnxClaims  # noqa: PLC0415

    return OnnxClaims(folder, threads=threads, run=run)
