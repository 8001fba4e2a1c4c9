"""Settings from the environment and the configuration file. Nothing else reads the environment."""

import os
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from anabranch.configuration import config_file, mcp_servers
from anabranch.configuration.config_file import (
    Address,
    Allowlist,
    Bytes,
    CacheTtl,
    CompactTokens,
    Count,
    Curve,
    DatabaseAddress,
    Delay,
    Few,
    Flag,
    Folder,
    IndexUrl,
    LogLevel,
    Number,
    Origins,
    Proxies,
    QueryTokens,
    RedisAddress,
    Seconds,
    Share,
    Subagents,
    Surfaces,
    Switch,
    Text,
    check_value,
    convert,
    did_you_mean,
    nearest,
    quoted_name,
    without_none,
)
from anabranch.configuration.extras import require
from anabranch.configuration.mcp_servers import aggregation
from anabranch.domain.errors import ConfigurationError
from anabranch.domain.mcp import Aggregation, McpServer
from anabranch.domain.model import Endpoint
from anabranch.network.addresses import Network, parse
from anabranch.network.redaction import PASSWORD_PARAMETERS, PASSWORDS, secret_parts


class TrackedEnvironment(dict[str, str]):
    """Records which variables were read."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__(environment)
        self.read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)


PREFIX = "AGGREGATOR_"
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+|null")
SWITCHED_SURFACES = ("chat", "query", "rag", "openai", "knowledge", "endpoints", "planner", "mcp", "page")
SECRET = (
    "model_api_key",
    "embedding_api_key",
    "reranker_api_key",
    "verifier_api_key",
    "backup_passphrase",
    "redis_url",
    "database_url",
    "index_url",
    "index_api_key",
    "otlp_headers",
)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Every setting, under the name of its variable without the prefix."""

    debug: Flag = False
    host: Text = "0.0.0.0"  # noqa: S104  spec 1's default; surfaces that hold data need a key there
    port: Annotated[int, Meta(ge=0, le=65535, description="a port from 0 (any free one) to 65535")] = 8001
    workers: Annotated[int, Meta(ge=1, le=1_000, description="a number of processes from 1 to 1,000")] = 1
    log_level: LogLevel = "INFO"
    log_format: Annotated[Literal["json", "console"], Meta(description="json or console")] = "json"
    retrieval_timeout: Seconds = 30.0
    generation_timeout: Seconds = 120.0
    total_timeout: Seconds = 180.0
    default_top_k: Count = 5
    max_top_k: Count = 20
    max_data_sources: Count = 10
    max_context_tokens: Count = 32_000
    max_request_bytes: Count = 4 * 1024 * 1024
    max_reply_bytes: Count = 4 * 1024 * 1024
    model_streaming_enabled: Flag = False
    heartbeat_interval: Seconds = 15.0
    drain_timeout: Seconds = 30.0
    shutdown_delay: Delay = 1.0
    chat_enabled: Flag = True
    query_enabled: Flag = True
    rag_enabled: Flag = True
    openai_enabled: Flag = True
    knowledge_enabled: Flag = True
    endpoints_enabled: Flag = True
    planner_enabled: Flag = True
    mcp_enabled: Flag = True
    page_enabled: Flag = True
    cors_origins: Origins = ("*",)
    syfthub_url: Address = "http://localhost:8000"
    auth: Annotated[Literal["auto", "none", "api_key", "jwt"], Meta(description="auto, none, api_key or jwt")] = "auto"
    endpoint_allowlist: Allowlist = ()
    endpoint_allowlist_public: Flag = False
    trusted_proxies: Proxies = ()
    syfthub_jwks_cache_ttl: Seconds = 3600.0
    jwt_audience: Text | None = None
    data_dir: Folder = "~/.local/share/anabranch"
    default_visibility: Annotated[Literal["private", "public"], Meta(description="private or public")] | None = None
    models_dir: Folder = "~/.cache/anabranch/models"
    max_document_bytes: Count = 50 * 1024 * 1024
    max_document_pages: Count = 2_000
    max_document_expansion: Count = 200 * 1024 * 1024
    parse_timeout: Seconds = 120.0
    query_context_tokens: QueryTokens = 4_000
    context: Annotated[Literal["full", "compact"], Meta(description="full or compact")] = "full"
    compact_tokens: CompactTokens = 1_500
    query_rewriting: Flag = False
    evidence: Switch = "auto"
    evidence_passages: Annotated[int, Meta(ge=1, le=25, description="a whole number from 1 to 25")] = 8
    verify: Switch = "auto"
    min_faithfulness: Share | None = None
    verifier_path: Text | None = None
    verifier_url: Address | None = None
    verifier_model: Text | None = None
    verifier_api_key: Text | None = None
    query_log_days: Annotated[int, Meta(ge=0, le=36_500, description="a number of days from 0 to 36,500")] = 30
    erase_after: Annotated[float, Meta(ge=0, le=2_592_000, description="seconds from 0 to 2,592,000")] = 86_400.0
    audit_days: Annotated[int, Meta(ge=1, le=36_500, description="a number of days from 1 to 36,500")] = 365
    audit_otlp: Flag = False
    index_verify_interval: Seconds = 86_400.0
    backup_passphrase: Text | None = None
    recordings_dir: Folder | None = None
    recordings_keep: Count = 100
    embedding_url: Address | None = None
    embedding_model: Text | None = None
    embedding_api_key: Text | None = None
    embedding_window: Count = 8_000
    embedding_threads: Count = 2
    embedding_topic_threshold: Share | None = None
    embedding_relevance: Curve | None = None
    reranker_path: Text | None = None
    reranker_url: Address | None = None
    reranker_model: Text | None = None
    reranker_api_key: Text | None = None
    reranker_form: Annotated[Literal["cohere", "tei"], Meta(description="cohere or tei")] = "cohere"
    model_url: Address | None = None
    model_name: Text | None = None
    model_api_key: Text | None = None
    model_fallback: Switch = "auto"
    database_url: DatabaseAddress | None = None
    index_url: IndexUrl | None = None
    index_api_key: Text | None = None
    index_shards: Annotated[int, Meta(ge=1, le=1_024, description="a number from 1 to 1,024")] = 1
    index_replicas: Annotated[int, Meta(ge=0, le=20, description="a number from 0 to 20")] = 1
    index_timeout: Seconds = 10.0
    redis_url: RedisAddress | None = None
    redis_timeout: Seconds = 0.2
    rate_limit: Number = 20
    rate_limit_window: Seconds = 300.0
    rate_limit_surfaces: Surfaces = ("rag_stream",)
    answer_cache_ttl: CacheTtl = 3_600.0
    embedding_cache_ttl: CacheTtl = 604_800.0
    cache_bytes: Count = 64 * 1024 * 1024
    max_running: Count = 8_192
    max_waiting: Number = 0
    caller_running: Count = 2_048
    caller_waiting: Number = 1_024
    computing_threads: Number = 0
    caller_uploads: Count = 16
    caller_upload_bytes: Bytes = 128 * 1024 * 1024
    max_upload_bytes: Bytes = 512 * 1024 * 1024
    caller_response_bytes: Bytes = 16 * 1024 * 1024
    max_response_bytes: Bytes = 256 * 1024 * 1024
    caller_steps: Count = 2_500
    caller_stream_readers: Count = 1_500
    caller_changes: Number = 3_000
    caller_connections: Number = 2_000
    max_connections: Number = 0
    caller_pending_documents: Count = 10_000
    caller_pending_bytes: Bytes = 1024 * 1024 * 1024
    caller_collections: Count = 1_000
    caller_documents: Count = 1_000_000
    caller_stored_bytes: Bytes = 20 * 1024 * 1024 * 1024
    caller_stream_memory: Bytes = 64 * 1024 * 1024
    model_retries: Few = 2
    retry_budget: Share = 0.2
    breaker_window: Seconds = 30.0
    breaker_calls: Count = 10
    breaker_rate: Share = 0.5
    breaker_pause: Seconds = 10.0
    stream_ttl: Seconds = 1_800.0
    stream_lease: Seconds = 10.0
    stream_events: Count = 20_000
    stream_bytes: Count = 16 * 1024 * 1024
    stream_memory: Count = 256 * 1024 * 1024
    stream_client_bytes: Count = 1024 * 1024
    planner_streaming: Flag = True
    planner_timeout: Seconds = 180.0
    planner_retries: Few = 2
    planner_steps: Count = 10_000
    planner_subagents: Subagents = ("documentation", "row_selection", "action", "voice", "safety", "other")
    analytics_file: Text | None = None
    analytics_otlp: Flag = False
    mmr_lambda: Share | None = None
    guard_threshold: Share | None = None
    metrics_public: Flag = False
    otlp_endpoint: Address | None = None
    otlp_headers: Text | None = None
    trace_share: Share = 1.0
    log_queries: Flag = False
    sources: dict[str, Endpoint] = {}
    models: dict[str, Endpoint] = {}
    published_models: dict[str, str] = {}
    mcp_servers: dict[str, McpServer] = {}
    aggregation: Aggregation = Aggregation()

    def __repr__(self) -> str:
        return f"Settings(host={self.host!r}, port={self.port!r})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("host", self.host), ("port", self.port)]

    @property
    def streams_kept(self) -> bool:
        """Whether every worker can read every stream: there is one worker, or a shared Redis."""
        return self.workers == 1 or self.redis_url is not None

    @property
    def switched_off(self) -> dict[str, str]:
        """The surfaces that the server does not have, and the variable of each."""
        flags = {surface: f"{surface}_enabled" for surface in SWITCHED_SURFACES}
        return {surface: PREFIX + flag.upper() for surface, flag in flags.items() if not getattr(self, flag)}

    @property
    def allowed_networks(self) -> tuple[Network, ...]:
        return tuple(ip_network(entry, strict=False) for entry in self.endpoint_allowlist if "://" not in entry)

    @property
    def allowed_origins(self) -> tuple[str, ...]:
        return tuple(parse(entry)[1] for entry in self.endpoint_allowlist if "://" in entry)

    @property
    def proxy_networks(self) -> tuple[Network, ...]:
        return tuple(ip_network(entry, strict=False) for entry in self.trusted_proxies)

    @property
    def default_model(self) -> Endpoint | None:
        """The model used when none is named: the one of the variables, else the first in the file."""
        if self.model_url is not None:
            return Endpoint(
                slug=self.model_name or "default",
                url=self.model_url,
                kind="openai",
                operator=True,
                token=self.model_api_key,
            )
        return next(iter(self.models.values()), None)


NEEDS = {
    "model_name": "model_url",
    "model_api_key": "model_url",
    "embedding_url": "embedding_model",
    "embedding_model": "embedding_url",
    "embedding_api_key": "embedding_url",
    "reranker_model": "reranker_url",
    "reranker_api_key": "reranker_url",
    "verifier_model": "verifier_url",
    "verifier_api_key": "verifier_url",
    "index_api_key": "index_url",
    "otlp_headers": "otlp_endpoint",
    "analytics_otlp": "otlp_endpoint",
    "audit_otlp": "otlp_endpoint",
}
CHECKS: Mapping[str, Callable[[str], object]] = {
    "endpoint_allowlist": lambda entry: parse(entry) if "://" in entry else ip_network(entry, strict=False),
    "cors_origins": lambda entry: entry == "*" or ORIGIN.fullmatch(entry),
    "trusted_proxies": lambda entry: ip_network(entry, strict=False),
    **dict.fromkeys(
        ("syfthub_url", "model_url", "embedding_url", "reranker_url", "verifier_url", "otlp_endpoint"), parse
    ),
}
TYPES = get_type_hints(Settings, include_extras=True)
# Names without our prefix: this one is the planner's switch (spec 2).
SPECIAL_NAMES = {"planner_streaming": "AI_ENABLE_AGGREGATOR_STREAMING"}
# Separate blocks of the file, without a variable.
BLOCKS = ("sources", "models", "published_models", "mcp_servers", "aggregation")
VARIABLES = {SPECIAL_NAMES.get(name, PREFIX + name.upper()): name for name in TYPES if name not in BLOCKS}


def load(environment: Mapping[str, str] = os.environ, file: Path | None = None) -> Settings:
    """Settings from the environment and the file; the environment wins. A wrong value is a ConfigurationError."""
    named = environment.get(PREFIX + "CONFIG")
    read = config_file.read(file or (Path(named) if named else None))
    path = read.path
    values: dict[str, Any] = {}
    for name, value in read.file.settings.items():
        if name not in VARIABLES.values():
            meant = did_you_mean(str(name).upper().removeprefix(PREFIX), VARIABLES.values())
            raise ConfigurationError(f"{path}: settings has no {quoted_name(name)}{meant}.")
        where = f"{path}: settings.{name}"
        expanded = config_file.expand_setting(value, environment, where)
        values[name] = converted(name, expanded, where, secret=expanded != value)
    for variable, name in VARIABLES.items():
        if _is_set(variable, environment):
            values[name] = converted(name, environment[variable], variable)
    sources, models, published = config_file.endpoints(read.file, environment, str(path))
    servers = mcp_servers.servers(read, environment)
    settings = Settings(
        **values,
        sources=sources,
        models=models,
        published_models=published,
        mcp_servers=servers,
        aggregation=aggregation(read, servers),
    )
    _check(settings)
    return settings


def add_missing(values: Mapping[str, str], environment: MutableMapping[str, str] = os.environ) -> list[str]:
    """Set the variables that the environment does not set; the names of those."""
    missing = [name for name in values if not _is_set(name, environment)]
    environment.update({name: values[name] for name in missing})
    return missing


def _is_set(variable: str, environment: Mapping[str, str]) -> bool:
    """An empty variable counts as not set, except for the allow-list, which may be empty."""
    given = environment.get(variable)
    return given is not None and bool(given.strip() or variable == PREFIX + "ENDPOINT_ALLOWLIST")


def secrets_of(settings: Settings) -> Iterator[str]:
    """Every secret among the settings except those of MCP servers, which can change."""
    keys = (
        settings.model_api_key,
        settings.embedding_api_key,
        settings.reranker_api_key,
        settings.verifier_api_key,
        settings.backup_passphrase,
        settings.index_api_key,
    )
    tokens = (endpoint.token for endpoint in (*settings.sources.values(), *settings.models.values()))
    addresses = f"{settings.redis_url} {settings.database_url} {settings.index_url}"
    passwords = (*PASSWORDS.findall(addresses), *PASSWORD_PARAMETERS.findall(addresses))
    headers = (pair.partition("=")[2] for pair in (settings.otlp_headers or "").split(","))
    for value in (*keys, *tokens, *headers, *passwords):
        yield from secret_parts(value or "")


def compared(settings: Settings) -> dict[str, str]:
    """The value of each setting by its variable. Of secrets it is whether they are set, of the blocks of the file
    which names they have."""
    fields = VARIABLES | {block: block for block in BLOCKS}
    values = {name: (field, getattr(settings, field)) for name, field in fields.items()}
    return {name: repr(value is not None if field in SECRET else value) for name, (field, value) in values.items()}


def variables_in_use(environment: Mapping[str, str] = os.environ, file: Path | None = None) -> list[str]:
    """The variables that are set and that the settings or the file read."""
    tracked = TrackedEnvironment(environment)
    load(tracked, file)
    # CONFIG is an option, too, and PATH is set everywhere.
    known = {*tracked.read, *VARIABLES} - {PREFIX + "CONFIG", "PATH"}
    return sorted(name for name in known if environment.get(name, "").strip())


def unknown(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables with our prefix that are no settings, most likely misspelt, and the nearest setting of each."""
    known = (*VARIABLES, PREFIX + "CONFIG")
    names = sorted(name for name in environment if name.startswith(PREFIX) and name not in known)
    near = {name: nearest(name.removeprefix(PREFIX), (one.removeprefix(PREFIX) for one in known)) for name in names}
    return {name: f"did you mean {PREFIX}{meant}?" if meant else "" for name, meant in near.items()}


def converted(name: str, value: object, where: str, *, secret: bool = False) -> Any:
    """The value of a setting. ConfigurationError, which names `where`, if it is wrong."""
    kind = TYPES[name]
    if isinstance(value, str):
        kind, value = without_none(kind), value.strip()
        if get_origin(get_args(kind)[0]) is tuple:
            value = _split(value)
        elif kind is LogLevel:
            value = value.upper()
    elif kind is Switch and isinstance(value, bool):
        value = "on" if value else "off"
    return convert(value, kind, where, secret=secret or name in SECRET)


def _split(text: str) -> object:
    """A JSON list, or names between commas. Text that is no JSON list stays text, which no list setting accepts."""
    if not text.startswith("["):
        return [part.strip() for part in text.split(",") if part.strip()]
    with suppress(msgspec.DecodeError):
        return msgspec.json.decode(text, type=list[object])
    return text


def _check(settings: Settings) -> None:
    """The checks that a type alone cannot express."""
    for name, check in CHECKS.items():
        given = getattr(settings, name)
        for value in given if isinstance(given, tuple) else (given,):
            if value is not None:
                check_value(value, check, TYPES[name], PREFIX + name.upper())
    if settings.default_top_k > settings.max_top_k:
        raise ConfigurationError(
            f"{PREFIX}DEFAULT_TOP_K takes at most {settings.max_top_k} (MAX_TOP_K), not {settings.default_top_k}."
        )
    for name in ("data_dir", "models_dir", "recordings_dir"):
        if getattr(settings, name) is None:
            continue
        folder = Path(getattr(settings, name)).expanduser().absolute()
        with suppress(PermissionError):  # whether it may be read is seen when it is needed
            existing = next(place for place in (folder, *folder.parents) if place.exists())
            if not existing.is_dir():
                raise ConfigurationError(f"{PREFIX}{name.upper()} takes a folder, and {str(existing)!r} is a file.")
    for name, needed in NEEDS.items():
        if getattr(settings, name) not in (None, False) and getattr(settings, needed) is None:
            raise ConfigurationError(f"{PREFIX}{name.upper()} needs {PREFIX}{needed.upper()}, which is not set.")
    _check_extras(settings)
    if settings.analytics_file and not Path(settings.analytics_file).expanduser().absolute().parent.is_dir():
        raise ConfigurationError(f"{PREFIX}ANALYTICS_FILE takes a file in a folder that exists.")
    for name in ("RERANKER", "VERIFIER"):
        path, url = (getattr(settings, f"{name}_{place}".lower()) for place in ("PATH", "URL"))
        if path is not None and url is not None:
            raise ConfigurationError(f"{PREFIX}{name}_PATH and {PREFIX}{name}_URL are both set; leave one of them out.")


def _check_extras(settings: Settings) -> None:
    if settings.otlp_endpoint is not None:
        require("otel", f"{PREFIX}OTLP_ENDPOINT")
    if settings.reranker_path is not None:
        require("local-models", f"{PREFIX}RERANKER_PATH")
    if settings.verifier_path is not None:
        require("local-models", f"{PREFIX}VERIFIER_PATH")
    if settings.evidence == "on":
        require("local-models", f"{PREFIX}EVIDENCE=on")
    if settings.verify == "on" and settings.verifier_url is None:
        require("local-models", f"{PREFIX}VERIFY=on")
