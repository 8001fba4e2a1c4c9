"""Constructs the configured embedder and reranker; local models load when they are first used."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from anabranch.configuration.settings import Settings
from anabranch.domain.contracts import Embedder, Outbound, Reranker
from anabranch.domain.model import Embedding, Endpoint
from anabranch.policies.resilience import Resilience
from anabranch.policies.retries import GuardedCalls
from anabranch.policies.upstreams import Role

if TYPE_CHECKING:
    from anabranch.models.minilm import MiniLM


TIMEOUT_S = 30.0


def embedder_for(
    settings: Settings, outbound: Outbound, *, threads: int = 1, resilience: Resilience | None = None
) -> Embedder:
    if settings.embedding_url is not None and settings.embedding_model is not None:
        from anabranch.models.openai_embeddings import OpenAIEmbeddings  # noqa: PLC0415

        return OpenAIEmbeddings(
            settings.embedding_url,
            settings.embedding_model,
            outbound,
            api_key=settings.embedding_api_key or "",
            window=settings.embedding_window,
            timeout_s=_timeout_s(settings, resilience),
            attempts=_attempts(resilience, "embeddings", settings.embedding_url, settings.embedding_model),
        )
    return LocalEmbedder(Path(settings.models_dir).expanduser(), threads)


def reranker_for(settings: Settings, outbound: Outbound, resilience: Resilience | None = None) -> Reranker | None:
    """The configured cross-encoder; None means the built-in late interaction."""
    if settings.reranker_path is None and settings.reranker_url is None:
        return None
    from anabranch.models.rerankers import OnnxCrossEncoder, RerankEndpoint  # noqa: PLC0415

    if settings.reranker_path is not None:
        return OnnxCrossEncoder(Path(settings.reranker_path).expanduser())
    assert settings.reranker_url is not None
    return RerankEndpoint(
        settings.reranker_url,
        outbound,
        form=settings.reranker_form,
        model=settings.reranker_model or "",
        api_key=settings.reranker_api_key or "",
        timeout_s=_timeout_s(settings, resilience),
        attempts=_attempts(resilience, "reranker", settings.reranker_url, settings.reranker_model),
    )


def _timeout_s(settings: Settings, resilience: Resilience | None) -> float:
    """Within a search, a server that hangs must time out while there is still time to search without it."""
    return TIMEOUT_S if resilience is None else min(TIMEOUT_S, settings.retrieval_timeout / 3)


def _attempts(resilience: Resilience | None, role: Role, url: str, model: str | None) -> GuardedCalls | None:
    """Questions call the server through a circuit breaker; the indexer waits for it."""
    if resilience is None:
        return None
    return resilience.attempts(Endpoint(slug=model or role, url=url, kind="openai", operator=True), role)


class LocalEmbedder:
    """all-MiniLM-L6-v2, loaded with the first text."""

    name = "all-MiniLM-L6-v2"
    dimensions = 384
    window = 254

    def __init__(self, folder: Path, threads: int) -> None:
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
        from anabranch.models.minilm import MiniLM  # noqa: PLC0415

        with self._loading:
            if self._model is None:
                self._model = MiniLM.load(self._folder, self._threads)
            return self._model
