"""Resolves names to endpoints (configured, collections, on the hub, by URL), and endpoints to sources and models."""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, assert_never

import msgspec

from anabranch.app.knowledge_opener import KnowledgeOpener
from anabranch.configuration.settings import Settings
from anabranch.domain.contracts import Generator, Outbound, Source
from anabranch.domain.errors import InvalidQuestion, UpstreamError
from anabranch.domain.model import Endpoint
from anabranch.domain.rights import EVERY_GRANT, Grants
from anabranch.domain.signals import EndpointRole
from anabranch.knowledge.collection_names import matching
from anabranch.knowledge.model import EVERYTHING, Caller, Collection
from anabranch.models.remote import NO_HINTS, Hints, OpenAIModel, SpaceModel
from anabranch.network.addresses import parse
from anabranch.network.hub import HubClient
from anabranch.policies.observed_calls import ObservedGenerator, ObservedSource, Observer
from anabranch.policies.resilience import Resilience
from anabranch.sources.collection import CollectionSource
from anabranch.sources.space import SpaceSource

if TYPE_CHECKING:
    from anabranch.app.endpoint_catalog import EndpointCatalog
    from anabranch.app.mcp_servers import McpServers
    from anabranch.evidence.judge import Judge
    from anabranch.knowledge.knowledge import Knowledge

# The model that needs no service: it quotes sentences of the documents.
EXTRACTIVE = Endpoint(slug="extractive", kind="extractive", operator=True)
COLLECTIONS = Endpoint(slug=EVERYTHING, kind="collection", operator=True)
OPERATOR = Caller(operator=True)
# The name of the model that answers when a request names none.
DEFAULT = "default"
# Which setting of the default model to check, by what went wrong.
MODEL_SETTINGS: Hints = {
    401: "Check AGGREGATOR_MODEL_API_KEY.",
    403: "Check AGGREGATOR_MODEL_API_KEY.",
    404: "Check AGGREGATOR_MODEL_NAME and AGGREGATOR_MODEL_URL.",
    None: "Check AGGREGATOR_MODEL_URL.",
}
MAX_SHOWN = 100

Name = str | Endpoint


class EndpointResolver:
    def __init__(
        self,
        settings: Settings,
        knowledge: KnowledgeOpener,
        hub: HubClient,
        catalog: "EndpointCatalog",
        servers: "McpServers",
    ) -> None:
        self._catalog = catalog
        self._servers = servers
        self._knowledge = knowledge
        self._hub = hub
        # The model that answers when a request names none.
        self.model = settings.default_model or EXTRACTIVE
        own = {self.model.slug: self.model} if settings.model_url is not None else {}
        self._built_in = {EXTRACTIVE.slug: EXTRACTIVE, DEFAULT: self.model, **own}

    @property
    def _models(self) -> Mapping[str, Endpoint]:
        return {**self._built_in, **self._catalog.models}

    async def sources(
        self, question: str, names: Sequence[Name] | None, tokens: Mapping[str, str]
    ) -> tuple[Endpoint, ...]:
        """The named sources; without names, every source and every collection."""
        if names is None:
            return self.every(question, collections=bool(await self._collections()))
        return _disambiguated([await self._resolved(name, await self._known(name), tokens) for name in names])

    def every(self, question: str, *, collections: bool, grants: Grants = EVERY_GRANT) -> tuple[Endpoint, ...]:
        """What a question goes to that names nothing: the collections, every configured source, and the MCP servers
        that the routing rules select for it, of those that are granted. Without any, it still goes to the collections,
        which say what to do."""
        configured = (self._catalog.sources, self._servers.routed(question))
        others = [one for known in configured for one in grants.sources(known).values()] if grants.names else []
        return _disambiguated([*([COLLECTIONS] if collections or not others else []), *others])

    def configured(self, names: Sequence[str], grants: Grants = EVERY_GRANT) -> tuple[Endpoint, ...]:
        """Granted sources and MCP servers by the names that they have in the configuration."""
        known = self.known_sources(grants)
        if missing := [name for name in names if name not in known]:
            raise InvalidQuestion(f"There is no source {missing[0]!r}; configured are: {', '.join(known) or 'none'}.")
        return _disambiguated([known[name] for name in dict.fromkeys(names)])

    def known_sources(self, grants: Grants = EVERY_GRANT) -> Mapping[str, Endpoint]:
        """The granted ones of the configured sources and MCP servers, and the name that stands for all collections."""
        return grants.sources({EVERYTHING: COLLECTIONS, **self._servers.endpoints(), **self._catalog.sources})

    async def writer(self, name: Name | None, tokens: Mapping[str, str]) -> Endpoint:
        if name is None:
            return self.model
        return await self._resolved(name, self._models, tokens)

    def known_models(self, grants: Grants) -> Mapping[str, Endpoint]:
        """The one that quotes, which calls nothing, and the granted ones of the configuration, by name."""
        return {EXTRACTIVE.slug: EXTRACTIVE, **grants.models(self._models)}

    def named_model(self, name: str, grants: Grants, *, otherwise: str = "") -> Endpoint:
        """The model with this name, if it is granted. `otherwise` is what a caller can send instead of a name."""
        known = self.known_models(grants)
        if name not in known:
            shown = name if len(name) <= MAX_SHOWN else name[: MAX_SHOWN - 1] + "…"
            names = ", ".join(known)
            raise InvalidQuestion(f"There is no model {shown!r} that you may use; name one of: {names}{otherwise}.")
        return known[name]

    async def _known(self, name: Name) -> Mapping[str, Endpoint]:
        """What a name can mean without the hub: configured sources, MCP servers, collections."""
        if not isinstance(name, str) or name in self._catalog.sources:
            return self._catalog.sources
        found = await self._collections()
        names = [*(one.name for one in found), *([name] if matching(name, found, OPERATOR) else ())]
        return {**{one: collection_endpoint(one) for one in names}, **self.known_sources()}

    async def _collections(self) -> list[Collection]:
        return await (await self._knowledge()).chosen(OPERATOR, None) if self._knowledge.exists else []

    async def _resolved(self, name: Name, configured: Mapping[str, Endpoint], tokens: Mapping[str, str]) -> Endpoint:
        """A configured name, `URL/slug` (trusted like a configured one), or `owner/slug` on the hub."""
        if isinstance(name, Endpoint):
            return name
        if name in configured:
            return configured[name]
        if "://" in name:
            owner, _, address = name.partition("@") if "@" in name.partition("://")[0] else ("", "", name)
            url, _, slug = address.rstrip("/").rpartition("/")
            if not slug or url.endswith(":/"):
                raise InvalidQuestion(f"{name!r} names no endpoint: write URL/slug.")
            try:
                parse(url)
            except UpstreamError as error:
                raise InvalidQuestion(f"{name!r} cannot be asked. {error.message}") from None
            return Endpoint(slug=slug, url=url, owner=owner or None, operator=True)
        if name.count("/") == 1:
            found = await self._hub.find(name)
            guest = None if found.owner in tokens else await self._hub.guest_token(found.owner or "")
            return msgspec.structs.replace(found, token=guest)
        names = ", ".join(configured) or "none"
        raise InvalidQuestion(f"{name!r} is neither a configured name ({names}), nor owner/slug, nor URL/slug.")


def collection_endpoint(name: str) -> Endpoint:
    """The collection that a caller means by a name, an id or an address, which the search resolves for that caller."""
    return Endpoint(slug=name, kind="collection")


def _disambiguated(endpoints: Sequence[Endpoint]) -> tuple[Endpoint, ...]:
    """Endpoints without an owner that share a slug get an owner, for answers and citations: their configured name, or
    their address, which only requests that name it show."""
    count = Counter(endpoint.path for endpoint in endpoints)
    return tuple(
        msgspec.structs.replace(endpoint, owner=endpoint.name or endpoint.url.partition("://")[2])
        if count[endpoint.path] > 1 and endpoint.owner is None
        else endpoint
        for endpoint in endpoints
    )


class EndpointDirectory:
    """Builds the source or the model of an endpoint, with the policies for calls to it. Calls of the operator's own are
    noted."""

    def __init__(
        self,
        settings: Settings,
        outbound: Outbound,
        knowledge: "Callable[[], Awaitable[Knowledge | None]]",
        resilience: Resilience,
        servers: Callable[[Endpoint], Source],
        observer: Callable[[EndpointRole, Endpoint], Observer],
        judge: "Callable[[], Judge] | None" = None,
    ) -> None:
        self._servers = servers
        self._observer = observer
        self._judge = judge
        self._outbound = outbound
        self._knowledge = knowledge
        self._resilience = resilience
        self._streaming = settings.model_streaming_enabled
        self._model_of_settings = settings.default_model if settings.model_url is not None else None

    def source(self, endpoint: Endpoint) -> Source:
        source = self._source(endpoint)
        return ObservedSource(source, self._observer("source", endpoint)) if endpoint.operator else source

    def generator(self, endpoint: Endpoint, *, retried: bool = True) -> Generator:
        model = self._generator(endpoint, retried=retried)
        return ObservedGenerator(model, self._observer("model", endpoint)) if endpoint.operator else model

    def _source(self, endpoint: Endpoint) -> Source:
        if endpoint.kind == "collection":
            return CollectionSource(endpoint, self._knowledge)
        return self._resilience.source(endpoint, self._servers if endpoint.kind == "mcp" else self._space)

    def _space(self, endpoint: Endpoint) -> Source:
        return SpaceSource(endpoint, self._outbound)

    def _generator(self, endpoint: Endpoint, *, retried: bool) -> Generator:
        match endpoint.kind:
            case "space":
                model: Generator = SpaceModel(endpoint, self._outbound, streaming=self._streaming)
                return self._resilience.generator(endpoint, model, retried=retried)
            case "openai":
                hints = MODEL_SETTINGS if endpoint == self._model_of_settings else NO_HINTS
                own = OpenAIModel(endpoint, self._outbound, hints)
                return self._resilience.generator(endpoint, own, retried=retried)
            case "extractive" | "collection" | "mcp":
                from anabranch.models.extractive import Extractive  # noqa: PLC0415

                return Extractive(self._judge() if self._judge is not None else None)
            case _:
                assert_never(endpoint.kind)
