"""Constructs the configured embedder, reranker and evidence model; local models load when they are first used."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from anabranch.configuration.extras import require
from anabranch.configuration.settings import Settings
from anabranch.domain.contracts import Clock, Embedder, Outbound, Reranker, Telemetry
from anabranch.domain.errors import ConfigurationError
from anabranch.domain.evidence import Evidence, EvidencePage, Reading, Verdict
from anabranch.domain.model import Calibration, Embedding, Endpoint
from anabranch.domain.signals import EvidenceUnavailable
from anabranch.models.calibration import MINILM, calibration_for
from anabranch.models.remote import ModelServer, OpenAIEmbeddings, api_url
from anabranch.policies.breaker import Role
from anabranch.policies.cache import CachedEvidence
from anabranch.policies.resilience import Resilience

if TYPE_CHECKING:
    from anabranch.models.evidence import OnnxEvidence
    from anabranch.models.minilm import MiniLM


TIMEOUT_S = 30.0


def embedder_for(
    settings: Settings, outbound: Outbound, *, threads: int = 1, resilience: Resilience | None = None
) -> Embedder:
    if settings.embedding_url is not None and settings.embedding_model is not None:
        slug, base, key = settings.embedding_model, settings.embedding_url, settings.embedding_api_key
        endpoint = Endpoint(slug=slug, url=base, kind="openai", operator=True, token=key)
        server = _server("embeddings", api_url(base, "/embeddings"), endpoint, settings, outbound, resilience)
        return OpenAIEmbeddings(server, slug, calibration_for(settings), settings.embedding_window)
    return LocalEmbedder(Path(settings.models_dir).expanduser(), threads, calibration_for(settings))


def reranker_for(settings: Settings, outbound: Outbound, resilience: Resilience | None = None) -> Reranker | None:
    """The configured cross-encoder; None means the built-in late interaction."""
    if settings.reranker_path is None and settings.reranker_url is None:
        return None
    from anabranch.models.rerankers import OnnxCrossEncoder, RerankEndpoint, rerank_url  # noqa: PLC0415

    if settings.reranker_path is not None:
        return OnnxCrossEncoder(Path(settings.reranker_path).expanduser())
    assert settings.reranker_url is not None
    slug, base, key = settings.reranker_model or "reranker", settings.reranker_url, settings.reranker_api_key
    endpoint = Endpoint(slug=slug, url=base, kind="openai", operator=True, token=key)
    url = rerank_url(base, settings.reranker_form)
    server = _server("reranker", url, endpoint, settings, outbound, resilience)
    return RerankEndpoint(server, settings.reranker_form, settings.reranker_model or "")


@asynccontextmanager
async def evidence_for(settings: Settings, clock: Clock, telemetry: Telemetry) -> AsyncIterator[Evidence | None]:
    """The evidence model with its cache, unless it is off. With `auto` it is used where an answer is quoted, and for
    compact prompts; nothing is loaded before."""
    if settings.evidence == "off":
        yield None
        return
    folder, required = Path(settings.models_dir), settings.evidence == "on"
    local = LocalEvidence(folder, settings.embedding_threads, telemetry, required=required)
    try:
        yield CachedEvidence(local, clock, telemetry)
    finally:
        await local.close()


def check_evidence(settings: Settings) -> None:
    """Raise ConfigurationError if the evidence model is `on` and its word vectors are not installed."""
    folder = Path(settings.models_dir).expanduser()
    if settings.evidence == "on" and not (folder / LocalEmbedder.name).is_dir():
        raise ConfigurationError(
            f"AGGREGATOR_EVIDENCE=on needs the embedding model {LocalEmbedder.name}, which is not installed in "
            f"{folder}. Run: anabranch models install"
        )


def _server(
    role: Role, url: str, endpoint: Endpoint, settings: Settings, outbound: Outbound, resilience: Resilience | None
) -> ModelServer:
    """A client for one model server. Questions call it through a circuit breaker, with a time-out that leaves time to
    search without it; the indexer, which has no `resilience`, waits for it."""
    return ModelServer(
        url,
        outbound,
        api_key=endpoint.token or "",
        timeout_s=TIMEOUT_S if resilience is None else min(TIMEOUT_S, settings.retrieval_timeout / 3),
        guard=None if resilience is None else resilience.guard(endpoint, role),
    )


class LocalEmbedder:
    """all-MiniLM-L6-v2, loaded with the first text."""

    name = "all-MiniLM-L6-v2"
    dimensions = 384
    window = 254

    def __init__(self, folder: Path, threads: int, calibration: Calibration = MINILM) -> None:
        self.calibration = calibration
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
                self._model = MiniLM(self._folder, self._threads)
            return self._model


class LocalEvidence:
    """The evidence model of this package, loaded with the first question. If it cannot be loaded, it reads nothing,
    unless it is `required`; the next question tries again, because the embedding model may have been installed."""

    def __init__(self, folder: Path, threads: int, telemetry: Telemetry, *, required: bool) -> None:
        self._folder = folder.expanduser()
        self._threads = threads
        self._telemetry = telemetry
        self._required = required
        self._noted = ""
        self._loading = threading.Lock()
        self._model: OnnxEvidence | None = None

    async def read(
        self, question: str, inputs: Sequence[tuple[EvidencePage, ...]], *, until: float | None = None
    ) -> Sequence[Reading | None]:
        model = await self._available()
        return [None] * len(inputs) if model is None else await model.read(question, inputs, until=until)

    async def check(
        self, claim: str, inputs: Sequence[tuple[EvidencePage, ...]], *, until: float | None = None
    ) -> Sequence[Verdict | None]:
        model = await self._available()
        return [None] * len(inputs) if model is None else await model.check(claim, inputs, until=until)

    async def close(self) -> None:
        if self._model is not None:
            await self._model.close()

    async def _available(self) -> "OnnxEvidence | None":
        if self._model is not None:
            return self._model
        try:
            return await asyncio.to_thread(self.loaded)
        except ConfigurationError as error:
            if self._required:
                raise
            if error.message != self._noted:
                self._noted = error.message
                self._telemetry.noted(EvidenceUnavailable(reason=error.message))
            return None

    def loaded(self) -> "OnnxEvidence":
        require("local-models", "The evidence model (or set AGGREGATOR_EVIDENCE=off)")
        from anabranch.models.evidence import OnnxEvidence  # noqa: PLC0415

        with self._loading:
            if self._model is None:
                self._model = OnnxEvidence(self._folder, threads=self._threads)
            return self._model
