"""Builds every Question and its Context: one method per use case, from values that an entrypoint has validated."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from anabranch.app.endpoint_resolver import COLLECTIONS, EXTRACTIVE, EndpointResolver
from anabranch.configuration.settings import Settings
from anabranch.domain.contracts import Clock
from anabranch.domain.model import (
    AGGREGATE,
    ASK,
    CHAT,
    DEFENDED_CHAT,
    PUBLISHED,
    QUERY,
    RAG,
    AnswerPolicy,
    Context,
    Endpoint,
    EvidenceUse,
    Filters,
    Message,
    Profile,
    Question,
    Until,
    Value,
)
from anabranch.domain.ranking import Ranking
from anabranch.pipeline.prompt import QUERY_SYSTEM
from anabranch.telemetry.log import new_correlation_id

T = TypeVar("T")

TOP_K, RAG_TOP_K = 10, 5
# Spec 4's defaults, where neither the request nor the settings set a value.
RAG_THRESHOLD = 0.55
RAG_DIVERSITY = 0.5
# The profiles whose questions fall back to quotes unless the settings say otherwise: `ask`, /v1/query and MCP. The
# others keep the errors of their specifications.
FALLS_BACK = (ASK.name, QUERY.name)
DEFAULTS = Question(text="")


class SearchScope(Value):
    """What a question to the collections searches: `sources` by endpoint, the collections narrowed by `filters`."""

    sources: tuple[Endpoint, ...] = (COLLECTIONS,)
    filters: Filters = Filters()


class Options(Value):
    """What a request may set; None is the default of its use case, for `diversity` UNSET (None disables it)."""

    top_k: int | None = None
    similarity_threshold: float | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    system_prompt: str | None = None
    rerank: bool = True
    fresh: bool = False
    threshold: float | None = None
    diversity: float | msgspec.UnsetType | None = msgspec.UNSET
    language: str | None = None
    answer_in: str | None = None
    evidence: EvidenceUse | None = None
    fallback: bool | None = None
    explain: bool = False
    defence: bool = False
    verify: bool | None = None
    answer_policy: AnswerPolicy = "all"
    stop: tuple[str, ...] = ()


class Questions:
    def __init__(self, settings: Settings, names: EndpointResolver, clock: Clock, surface: str) -> None:
        self._settings = settings
        self._names = names
        self._clock = clock
        self._surface = surface
        self.model = names.model
        self.configured = names.configured
        self.known_sources = names.known_sources
        self.every = names.every
        self.named_model = names.named_model
        self.known_models = names.known_models

    def context(
        self,
        *,
        correlation_id: str | None = None,
        surface: str | None = None,
        address: str | None = None,
        user_id: str | None = None,
        groups: tuple[str, ...] = (),
        operator: bool = False,
        collections: tuple[int, ...] | None = None,
        tokens: Mapping[str, str] | None = None,
        transactions: Mapping[str, str] | None = None,
        credential: str | None = None,
        bearer: str | None = None,
        traceparent: str | None = None,
        tracestate: str | None = None,
        streaming: bool = False,
        local_operator: bool = False,
    ) -> Context:
        """The Context of a question that is asked now: its deadline is the total time-out."""
        return Context(
            correlation_id=correlation_id or new_correlation_id(),
            deadline=self._clock.monotonic() + self._settings.total_timeout,
            surface=surface or self._surface,
            address=address,
            user_id=user_id,
            groups=groups,
            operator=operator,
            collections=collections,
            tokens=tokens or {},
            transactions=transactions or {},
            credential=credential,
            bearer=bearer,
            traceparent=traceparent,
            tracestate=tracestate,
            streaming=streaming,
            local_operator=local_operator,
        )

    def chat(
        self,
        text: str,
        sources: tuple[Endpoint, ...],
        model: Endpoint | None,
        history: tuple[Message, ...],
        options: Options,
    ) -> Question:
        """Spec 1: sources and model as the caller names them; without a model, only retrieval. A model is also called
        when nothing was found; the extractive one has nothing to quote then, and the answer says what is missing."""
        return Question(
            text=text,
            sources=sources,
            model=model,
            history=history,
            top_k=_or(options.top_k, self._settings.default_top_k),
            similarity_threshold=_or(options.similarity_threshold, DEFAULTS.similarity_threshold),
            max_tokens=_or(options.max_tokens, DEFAULTS.max_tokens),
            temperature=_or(options.temperature, DEFAULTS.temperature),
            system_prompt=options.system_prompt,
            profile=DEFENDED_CHAT if options.defence else CHAT,
            until=Until.GENERATE if model is not None else Until.MERGE,
            refuse=model is EXTRACTIVE,
            diversity=self._settings.mmr_lambda,
            threshold=self._settings.guard_threshold,
            evidence=_or(options.evidence, "off"),
            fallback=self._fallback(CHAT, model, options.fallback),
            verify=self._verifies(CHAT, options.verify, options.answer_policy),
            answer_policy=options.answer_policy,
        )

    def query(
        self,
        text: str,
        scope: SearchScope,
        history: tuple[Message, ...],
        options: Options,
        model: Endpoint | None = None,
    ) -> Question:
        """Spec 5: an answer from the collections and from configured sources, by the default model unless another one
        is given."""
        return self._from_collections(QUERY, text, scope, history, options, TOP_K, model)

    def completion(
        self,
        text: str,
        scope: SearchScope,
        history: tuple[Message, ...],
        options: Options,
        model: Endpoint | None,
    ) -> Question:
        """OpenAI's API: as `query`. The caller's system prompt follows ours: the answer still comes from the passages,
        and cites them. A model that quotes reads no history."""
        if options.system_prompt:
            options = msgspec.structs.replace(options, system_prompt=f"{QUERY_SYSTEM}\n\n{options.system_prompt}")
        if (model or self.model).kind == EXTRACTIVE.kind:
            history, options = (), msgspec.structs.replace(options, system_prompt=None, temperature=None)
        return self.query(text, scope, history, options, model)

    def rag(self, text: str, scope: SearchScope, history: tuple[Message, ...], options: Options) -> Question:
        """Spec 4: as `query`, with a guardrail and varied passages unless the request says otherwise."""
        question = self._from_collections(RAG, text, scope, history, options, RAG_TOP_K)
        diversity = options.diversity
        if diversity is msgspec.UNSET:
            diversity = _or(question.diversity, RAG_DIVERSITY)
        return msgspec.structs.replace(
            question,
            threshold=_or(options.threshold, _or(question.threshold, RAG_THRESHOLD)),
            diversity=diversity,
            language=options.language,
            answer_in=options.answer_in,
        )

    def published_search(self, text: str, collection: str, limit: int | None, threshold: float | None) -> Question:
        """A published collection, searched for another node."""
        return Question(
            text=text,
            sources=(Endpoint(slug=collection, kind="collection", operator=True),),
            until=Until.MERGE,
            profile=PUBLISHED,
            top_k=min(limit or self._settings.default_top_k, self._settings.max_top_k),
            similarity_threshold=_or(threshold, 0.0),
        )

    def search_tool(self, text: str, filters: Filters, limit: int) -> Question:
        """The MCP tool `search`: passages of collections, no answer."""
        return Question(
            text=text,
            sources=(COLLECTIONS,),
            top_k=limit,
            similarity_threshold=0.0,
            until=Until.MERGE,
            profile=QUERY,
            filters=filters,
            diversity=self._settings.mmr_lambda,
        )

    def ask_tool(self, text: str, scope: SearchScope, options: Options, model: Endpoint | None = None) -> Question:
        """The MCP tool `ask`."""
        options = msgspec.structs.replace(options, similarity_threshold=_threshold(scope.sources))
        return self._from_collections(QUERY, text, scope, (), options, TOP_K, model)

    def documentation(self) -> Question:
        """The template of the documentation subagent's questions: those of `query`, without a text. The planner sees
        a failed model, unless the settings say otherwise, and decides what to do."""
        options = Options(fallback=self._settings.model_fallback == "on")
        return self._from_collections(QUERY, "", SearchScope(), (), options, TOP_K)

    async def library(
        self,
        text: str,
        sources: Sequence[str | Endpoint] | None,
        model: str | Endpoint | None,
        history: Sequence[Message],
        tokens: Mapping[str, str] | None,
        top_k: int | None,
        until: Until,
        fallback: bool | None = None,
        *,
        explain: bool = False,
        verify: bool | None = None,
        answer_policy: AnswerPolicy = "all",
    ) -> Question:
        """`Anabranch.ask` and `anabranch ask`: sources and model by any name that the resolver knows."""
        chosen = await self._names.sources(text, sources, tokens or {})
        writer = await self._names.writer(model, tokens or {})
        return Question(
            text=text,
            profile=ASK,
            sources=chosen,
            model=writer,
            history=tuple(history),
            top_k=_or(top_k, self._top_k(writer)),
            similarity_threshold=_threshold(chosen),
            until=until,
            refuse=True,
            rewrite=self._rewrites(writer) and any(endpoint.kind == "collection" for endpoint in chosen),
            diversity=self._settings.mmr_lambda,
            threshold=self._settings.guard_threshold,
            evidence=self._evidence(writer),
            fallback=self._fallback(ASK, writer, fallback),
            verify=self._verifies(ASK, verify, answer_policy),
            answer_policy=answer_policy,
            explain=explain,
        )

    def _from_collections(
        self,
        profile: Profile,
        text: str,
        scope: SearchScope,
        history: tuple[Message, ...],
        options: Options,
        default_top_k: int,
        model: Endpoint | None = None,
    ) -> Question:
        model = model or self.model
        return Question(
            text=text,
            sources=scope.sources,
            model=model,
            history=history,
            top_k=_or(options.top_k, min(default_top_k, self._settings.max_top_k)),
            similarity_threshold=_or(options.similarity_threshold, 0.0),
            max_tokens=_or(options.max_tokens, DEFAULTS.max_tokens),
            temperature=_or(options.temperature, 0.0),
            system_prompt=options.system_prompt,
            profile=profile,
            refuse=True,
            filters=scope.filters,
            rerank=options.rerank,
            rewrite=self._rewrites(model) and COLLECTIONS in scope.sources,
            diversity=self._settings.mmr_lambda,
            threshold=self._settings.guard_threshold,
            fresh=options.fresh,
            evidence=_or(options.evidence, self._evidence(model)),
            fallback=self._fallback(profile, model, options.fallback),
            verify=self._verifies(profile, options.verify, options.answer_policy),
            answer_policy=options.answer_policy,
            explain=options.explain,
            stop=options.stop,
        )

    def _top_k(self, model: Endpoint) -> int:
        """Quotes are chosen from more passages than a language model gets."""
        quoted = min(TOP_K, self._settings.max_top_k) if self._evidence(model) == "rank" else 0
        return max(self._settings.default_top_k, quoted)

    def _evidence(self, model: Endpoint) -> EvidenceUse:
        """Whether passages are ordered by evidence where the request does not say."""
        setting = self._settings.evidence
        return "rank" if setting == "on" or (setting == "auto" and model.kind == "extractive") else "off"

    def _fallback(self, profile: Profile, model: Endpoint | None, wanted: bool | None) -> Endpoint | None:
        """What answers if the model fails before its first token: as the request says, else as the settings say."""
        chosen = self._settings.model_fallback
        if wanted is None:
            wanted = chosen == "on" or (chosen == "auto" and profile.name in FALLS_BACK)
        return EXTRACTIVE if wanted and model is not None and model.kind != EXTRACTIVE.kind else None

    def _verifies(self, profile: Profile, wanted: bool | None, policy: AnswerPolicy) -> bool:
        """Whether the sentences of an answer are checked: as the request says, else as the settings say. A strict
        answer needs it."""
        chosen = self._settings.verify
        default = chosen == "on" or (chosen == "auto" and profile.name != CHAT.name)
        return policy == "strict" or _or(wanted, default)

    def _rewrites(self, model: Endpoint) -> bool:
        """Whether a question is rewritten before the search: an extractive model cannot."""
        return self._settings.query_rewriting and model.kind != "extractive"


def relayed(text: str, model: Endpoint, messages: tuple[Message, ...], options: Options) -> Question:
    """A published model: it gets the messages as they were sent, without retrieval."""
    return Question(
        text=text,
        model=model,
        history=messages,
        top_k=1,
        max_tokens=options.max_tokens or DEFAULTS.max_tokens,
        temperature=_or(options.temperature, DEFAULTS.temperature),
    )


def aggregate(text: str, sources: tuple[Endpoint, ...], ranking: Ranking, timeout_s: float) -> Question:
    """Spec 3: results of MCP servers, ranked and deduplicated."""
    return Question(
        text=text,
        sources=sources,
        top_k=ranking.limit,
        similarity_threshold=0.0,
        until=Until.MERGE,
        profile=AGGREGATE,
        ranking=ranking,
        patience_s=timeout_s,
    )


def _threshold(sources: Sequence[Endpoint]) -> float:
    """Collections and MCP servers are ranked here; what SyftAI-Space sources return must pass a threshold."""
    return DEFAULTS.similarity_threshold if any(one.kind == "space" for one in sources) else 0.0


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
