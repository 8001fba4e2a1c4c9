"""Everything that a question can go to, with its health: what GET /v1/sources lists."""

from datetime import UTC, datetime
from typing import Literal

from msgspec.structs import replace

from anabranch.app.endpoint_catalog import EndpointCatalog
from anabranch.app.endpoint_resolver import COLLECTIONS, EXTRACTIVE
from anabranch.app.knowledge_opener import KnowledgeOpener
from anabranch.app.mcp_servers import McpServers, endpoint_of
from anabranch.domain.errors import UpstreamError
from anabranch.domain.mcp import McpServer, ServerHealth
from anabranch.domain.model import Endpoint, Value
from anabranch.domain.rights import ALL, Grants, grant_of_model
from anabranch.domain.signals import BreakerState, EndpointRole
from anabranch.knowledge.collection_names import unambiguous
from anabranch.knowledge.model import Caller
from anabranch.network.addresses import parse
from anabranch.policies.breaker import Upstreams
from anabranch.telemetry.endpoint_history import CallHistory, EndpointHistory
from anabranch.text.untrusted import visible

# The health of a source is that of its last minutes with calls.
RECENT_MINUTES = 10
FAILING = 0.5
MAX_TITLE = 200
PAUSED = "It has failed too often and is not called for a while."
NOT_USED = "anabranch.yaml has an entry with this name, which is used instead."

SourceHealth = Literal["ok", "degraded", "failing", "unknown", "circuit_open", "disabled"]
SourceKind = Literal["collection", "space", "mcp", "model"]
ModelKind = Literal["openai", "space", "extractive"]
ConfiguredIn = Literal["file", "page", "collection", "built_in"]


class HistoryMinute(Value):
    """The calls of one minute; `minute` is its start. Percentiles are of at most the last 32 calls."""

    minute: datetime
    calls: int
    errors: int
    p50_ms: int
    p95_ms: int


class ListedSource(Value):
    """A collection, a configured source, an MCP server or a model. `configured` says where: in anabranch.yaml or the
    environment (`file`), over this API (`page`), as a collection, or not at all (`built_in`). `health` is one word and
    `health_text` a sentence. `origin`, `has_secret` and what all callers' calls add up to (`last_error`, the times,
    `calls`, `errors`, `history`) are for operators only; others get null. `calls` and `errors` are those of `history`,
    which has the minutes with calls of the last hour, oldest first. Collections are searched together: their history
    is that of `collections`. `default`: the model that answers if a request names none."""

    name: str
    kind: SourceKind
    title: str
    owner: str | None
    slug: str
    configured: ConfiguredIn
    health: SourceHealth
    health_text: str
    origin: str | None = None
    removable: bool = False
    default: bool = False
    has_secret: bool = False
    circuit: BreakerState = "closed"
    last_error: str | None = None
    last_error_at: datetime | None = None
    last_used_at: datetime | None = None
    calls: int | None = None
    errors: int | None = None
    tool: str | None = None
    documents: int | None = None
    model_kind: ModelKind | None = None
    history: tuple[HistoryMinute, ...] | None = None


class Viewer(Value):
    """Who looks: `grants` are what this caller may use of what the operator has configured."""

    caller: Caller
    grants: Grants


class SourceListing:
    def __init__(
        self,
        catalog: EndpointCatalog,
        servers: McpServers,
        knowledge: KnowledgeOpener,
        upstreams: Upstreams,
        default_model: Endpoint,
    ) -> None:
        self._catalog = catalog
        self._servers = servers
        self._knowledge = knowledge
        self._upstreams = upstreams
        self._default_model = default_model

    async def sources(self, viewer: Viewer, history: EndpointHistory) -> list[ListedSource]:
        """All that this caller may use: collections, sources, MCP servers, models."""
        found = await self._collections(viewer, history)
        sources = viewer.grants.sources(self._catalog.sources)
        found += [self._space(name, one, viewer, history) for name, one in sources.items()]
        health = {one.name: one for one in self._servers.health()}
        found += [
            self._server(server, health[name], viewer, history)
            for name, server in self._servers.configured.items()
            if name in health and viewer.grants.server(name)
        ]
        found += self._models(viewer, history)
        return [*found, *(self._unused() if viewer.grants.permits(ALL) else ())]

    async def _collections(self, viewer: Viewer, history: EndpointHistory) -> list[ListedSource]:
        found = []
        if self._knowledge.exists:
            found = await (await self._knowledge()).collections(viewer.caller)
        known = [one.collection for one in found]
        documents = sum(one.documents for one in found)
        together = self._called(
            COLLECTIONS.slug, "collection", COLLECTIONS, "built_in", viewer, history.of("source", COLLECTIONS)
        )
        return [
            replace(together, title="All collections", documents=documents),
            *(
                ListedSource(
                    name=unambiguous(one.collection, known, viewer.caller),
                    kind="collection",
                    # The owner is shown beside it: no mark of writing direction moves one into the other.
                    title=visible(one.collection.description or one.collection.name)[:MAX_TITLE],
                    owner=one.collection.owner or None,
                    slug=one.collection.name,
                    configured="collection",
                    health=together.health if together.health in ("failing", "degraded") else "ok",
                    health_text=_counted(one.documents),
                    documents=one.documents,
                )
                for one in found
            ),
        ]

    def _space(self, name: str, endpoint: Endpoint, viewer: Viewer, history: EndpointHistory) -> ListedSource:
        return self._called(name, "space", endpoint, self._where(name), viewer, history.of("source", endpoint))

    def _server(
        self, server: McpServer, health: ServerHealth, viewer: Viewer, history: EndpointHistory
    ) -> ListedSource:
        endpoint = endpoint_of(server.name)
        listed = self._called(
            server.name, "mcp", endpoint, self._where(server.name), viewer, history.of("source", endpoint)
        )
        operator = viewer.caller.operator
        listed = replace(
            listed,
            title=(server.description or server.name)[:MAX_TITLE],
            origin=_origin(server.url or "") if operator else None,
            has_secret=operator and bool(server.headers or server.env),
            tool=health.tool,
        )
        error = listed.last_error or (health.error if operator else None)
        if health.state == "disabled":
            return replace(listed, health="disabled", health_text="It is disabled in the configuration.")
        if health.state == "failed":
            return replace(listed, health="failing", health_text="It is not connected.", last_error=error)
        if health.state != "ready":
            return replace(listed, health="unknown", health_text="It is not connected yet.")
        return replace(listed, health="ok", health_text="It is connected.") if listed.health == "unknown" else listed

    def _models(self, viewer: Viewer, history: EndpointHistory) -> list[ListedSource]:
        default, models = self._default_model, dict(self._catalog.models)
        if default.kind != "extractive" and default not in models.values():
            models = {default.slug: default, **models}  # of AGGREGATOR_MODEL_URL
        return [
            *(
                self._model(name, one, self._where(name), viewer, history)
                for name, one in models.items()
                if viewer.grants.permits(grant_of_model(name))
            ),
            replace(
                self._model(EXTRACTIVE.slug, EXTRACTIVE, "built_in", viewer, history),
                title="Quotes sentences of the documents",
                health="ok",
                health_text="It needs no service.",
            ),
        ]

    def _model(
        self, name: str, endpoint: Endpoint, where: ConfiguredIn, viewer: Viewer, history: EndpointHistory
    ) -> ListedSource:
        listed = self._called(name, "model", endpoint, where, viewer, history.of("model", endpoint))
        return replace(listed, default=endpoint == self._default_model, model_kind=endpoint.kind)

    def _unused(self) -> list[ListedSource]:
        """Added ones whose names the file has, too."""
        added = self._catalog.added
        kinds: dict[str, SourceKind] = {
            **dict.fromkeys(added.sources, "space"),
            **dict.fromkeys(added.models, "model"),
            **dict.fromkeys(added.servers, "mcp"),
        }
        return [
            ListedSource(
                name=name,
                kind=kind,
                title=name,
                owner=None,
                slug=name,
                configured="page",
                health="disabled",
                health_text=NOT_USED,
                removable=True,
            )
            for name, kind in kinds.items()
            if not self._catalog.is_added(name)
        ]

    def _where(self, name: str) -> ConfiguredIn:
        return "page" if self._catalog.is_added(name) else "file"

    def _called(
        self,
        name: str,
        kind: SourceKind,
        endpoint: Endpoint,
        where: ConfiguredIn,
        viewer: Viewer,
        calls: CallHistory,
    ) -> ListedSource:
        role: EndpointRole = "model" if kind == "model" else "source"
        circuit = self._upstreams.state(endpoint, role)
        operator = viewer.caller.operator
        health, text = _health(calls, circuit) if operator else _health_for_others(calls, circuit)
        listed = ListedSource(
            name=name,
            kind=kind,
            title=name,
            owner=endpoint.owner,
            slug=endpoint.slug,
            configured=where,
            health=health,
            health_text=text,
            removable=where == "page",
            circuit=circuit,
        )
        if not operator:
            return listed
        return replace(
            listed,
            origin=_origin(endpoint.url),
            has_secret=endpoint.token is not None,
            last_error=calls.last_error,
            last_error_at=_time(calls.last_error_at),
            last_used_at=_time(calls.last_used),
            calls=calls.calls,
            errors=calls.errors,
            history=tuple(
                HistoryMinute(
                    minute=datetime.fromtimestamp(one.minute, UTC),
                    calls=one.calls,
                    errors=one.errors,
                    p50_ms=one.p50_ms,
                    p95_ms=one.p95_ms,
                )
                for one in calls.minutes
            ),
        )


def _health(calls: CallHistory, circuit: BreakerState) -> tuple[SourceHealth, str]:
    total, failed = _recent(calls)
    if circuit == "open":
        return "circuit_open", PAUSED
    if not total:
        return "unknown", "It was not called in the last hour."
    if not failed:
        return "ok", f"All of the last {total} calls succeeded." if total > 1 else "The last call succeeded."
    text = f"{failed} of the last {total} calls failed." if total > 1 else "The last call failed."
    return ("failing" if failed / total >= FAILING else "degraded"), text


def _health_for_others(calls: CallHistory, circuit: BreakerState) -> tuple[SourceHealth, str]:
    """The same for callers who must not learn how much, and whether, others ask."""
    total, failed = _recent(calls)
    if circuit == "open":
        return "circuit_open", PAUSED
    if not failed:
        return "ok", "No recent call has failed."
    if failed / total >= FAILING:
        return "failing", "Recent calls have failed."
    return "degraded", "Some recent calls have failed."


def _recent(calls: CallHistory) -> tuple[int, int]:
    """How many calls there were lately, and how many of them failed."""
    recent = calls.minutes[-RECENT_MINUTES:]
    return sum(one.calls for one in recent), sum(one.errors for one in recent)


def _origin(url: str) -> str | None:
    """Scheme, host and port: a path may contain a secret."""
    try:
        return parse(url)[1] if url else None
    except UpstreamError:
        return None


def _time(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(round(seconds), UTC)


def _counted(documents: int) -> str:
    return f"It has {documents:,} document{'' if documents == 1 else 's'}."
