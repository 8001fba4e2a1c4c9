"""From what a person asks, and of whom, to a Question."""

from collections.abc import Mapping, Sequence

from anabranch.app.endpoint_resolver import EndpointResolver
from anabranch.configuration.settings import Settings
from anabranch.domain.model import Endpoint, Message, Question, Until


class QuestionBuilder:
    def __init__(self, settings: Settings, names: EndpointResolver) -> None:
        self._settings = settings
        self._names = names

    @property
    def model(self) -> Endpoint:
        return self._names.model

    def rewrites(self, model: Endpoint) -> bool:
        return self._settings.query_rewriting and model.kind != "extractive"

    def configured(self, names: Sequence[str]) -> tuple[Endpoint, ...]:
        return self._names.configured(names)

    async def question(
        self,
        question: str,
        sources: Sequence[str | Endpoint] | None,
        model: str | Endpoint | None,
        history: Sequence[Message],
        tokens: Mapping[str, str] | None,
        top_k: int | None,
        until: Until,
    ) -> Question:
        known = tokens or {}
        chosen = await self._names.sources(sources, known)
        writer = await self._names.writer(model, known)
        return Question(
            text=question,
            sources=chosen,
            model=writer,
            history=tuple(history),
            top_k=self._settings.default_top_k if top_k is None else top_k,
            # Among our own, the ranking decides; what others hold to be worth sending is up to a threshold.
            similarity_threshold=0.0 if chosen and all(one.kind == "collection" for one in chosen) else 0.5,
            until=until,
            refuse=True,
            rewrite=self.rewrites(writer) and any(endpoint.kind == "collection" for endpoint in chosen),
            diversity=self._settings.mmr_lambda,
            threshold=self._settings.guard_threshold,
        )
