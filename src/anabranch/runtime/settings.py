"""Settings: the environment, the optional file, their defaults, and what is wrong with them, in a sentence."""

import os
import re
from collections.abc import Mapping
from ipaddress import ip_network
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from anabranch.domain.errors import ConfigurationError, UpstreamError
from anabranch.domain.model import Endpoint
from anabranch.domain.servers import Aggregation, McpServer
from anabranch.runtime import configuration, mcpservers
from anabranch.runtime.addresses import Network
from anabranch.runtime.aggregation import aggregation
from anabranch.runtime.kinds import (
    Address,
    Allowlist,
    Auth,
    Count,
    Days,
    Few,
    Flag,
    Folder,
    LogFormat,
    LogLevel,
    Number,
    Origins,
    Port,
    Proxies,
    QueryTokens,
    RedisAddress,
    Remembering,
    RerankerForm,
    Seconds,
    Share,
    Subagents,
    Surfaces,
    Text,
    Workers,
    instead_of,
    is_list,
    plain,
    takes,
)
from anabranch.runtime.outbound import parse
from anabranch.runtime.variables import Watched

PREFIX = "AGGREGATOR_"
SECRET = ("model_api_key", "embedding_api_key", "reranker_api_key", "redis_url", "otlp_headers")
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+|null")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Every setting, under the name of its variable without the prefix."""

    debug: Flag = False
    host: Text = "0.0.0.0"  # noqa: S104  spec 1's default; surfaces that hold data ask for a key there
    port: Port = 8001
    workers: Workers = 1
    log_level: LogLevel = "INFO"
    log_format: LogFormat = "json"
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
    cors_origins: Origins = ("*",)
    syfthub_url: Address = "http://localhost:8000"
    auth: Auth = "auto"
    endpoint_allowlist: Allowlist = ()
    endpoint_allowlist_public: Flag = False
    trusted_proxies: Proxies = ()
    syfthub_jwks_cache_ttl: Seconds = 3600.0
    jwt_audience: Text | None = None
    data_dir: Folder = "~/.local/share/anabranch"
    models_dir: Folder = "~/.cache/anabranch/models"
    max_document_bytes: Count = 50 * 1024 * 1024
    max_document_pages: Count = 2_000
    max_document_expansion: Count = 200 * 1024 * 1024
    parse_timeout: Seconds = 120.0
    query_context_tokens: QueryTokens = 4_000
    query_rewriting: Flag = True
    query_log_days: Days = 30
    embedding_url: Address | None = None
    embedding_model: Text | None = None
    embedding_api_key: Text | None = None
    embedding_window: Count = 8_000
    embedding_threads: Count = 2
    reranker_path: Text | None = None
    reranker_url: Address | None = None
    reranker_model: Text | None = None
    reranker_api_key: Text | None = None
    reranker_form: RerankerForm = "cohere"
    model_url: Address | None = None
    model_name: Text | None = None
    model_api_key: Text | None = None
    redis_url: RedisAddress | None = None
    redis_timeout: Seconds = 0.2
    rate_limit: Number = 20
    rate_limit_window: Seconds = 300.0
    rate_limit_surfaces: Surfaces = ("rag_stream",)
    answer_cache_ttl: Remembering = 3_600.0
    embedding_cache_ttl: Remembering = 604_800.0
    cache_bytes: Count = 64 * 1024 * 1024
    max_running: Count = 8_192
    max_waiting: Number = 0
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
        """Whether every worker can find every stream: there is one worker, or a Redis that they share."""
        return self.workers == 1 or self.redis_url is not None

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
        """The model that `ask` uses when none is named: the variable's, else the only or first one in the file."""
        if self.model_url is not None:
            name = self.model_name or "default"
            return Endpoint(slug=name, url=self.model_url, kind="openai", operator=True, token=self.model_api_key)
        return next(iter(self.models.values()), None)


NEEDS = {
    "model_name": "model_url",
    "model_api_key": "model_url",
    "embedding_url": "embedding_model",
    "embedding_model": "embedding_url",
    "embedding_api_key": "embedding_url",
    "reranker_model": "reranker_url",
    "reranker_api_key": "reranker_url",
    "otlp_headers": "otlp_endpoint",
}
TYPES = get_type_hints(Settings, include_extras=True)
# Names that others have given: spec 2's switch is set where its planner is.
GIVEN = {"planner_streaming": "AI_ENABLE_AGGREGATOR_STREAMING"}
# What stands in blocks of its own in the file.
BLOCKS = ("sources", "models", "published_models", "mcp_servers", "aggregation")
VARIABLES = {GIVEN.get(name, PREFIX + name.upper()): name for name in TYPES if name not in BLOCKS}


def load(environment: Mapping[str, str] | None = None, file: Path | None = None) -> Settings:
    """Settings from the environment and the file; the environment wins. A wrong value is a ConfigurationError."""
    environment = os.environ if environment is None else environment
    read = configuration.read(file or _named(environment))
    path, chosen = read.path, read.file
    values: dict[str, Any] = {}
    for name, value in chosen.settings.items():
        if name not in VARIABLES.values():
            raise ConfigurationError(f"{path}: settings has no {name!r}.")
        values[name] = _converted(name, value, f"{path}: settings.{name}")
    for variable, name in VARIABLES.items():
        if variable in environment and (environment[variable].strip() or name == "endpoint_allowlist"):
            values[name] = _converted(name, environment[variable], variable)
    sources, models, published = configuration.endpoints(chosen, environment, str(path))
    servers = mcpservers.servers(read, environment)
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


def taken(environment: Mapping[str, str] | None = None, file: Path | None = None) -> list[str]:
    """The variables that the settings and the file take values from: where those are missing, it is another service."""
    environment = os.environ if environment is None else environment
    watched = Watched(environment)
    load(watched, file)
    # The one is an option as well, and the other every program has, wherever it is started.
    known = {*watched.asked, *VARIABLES} - {PREFIX + "CONFIG", "PATH"}
    return sorted(name for name in known if environment.get(name, "").strip())


def unknown(environment: Mapping[str, str] | None = None) -> list[str]:
    """Variables with our prefix that mean nothing, most likely misspelt."""
    environment = os.environ if environment is None else environment
    return sorted(
        name for name in environment if name.startswith(PREFIX) and name not in (*VARIABLES, PREFIX + "CONFIG")
    )


def _named(environment: Mapping[str, str]) -> Path | None:
    return Path(environment[PREFIX + "CONFIG"]) if environment.get(PREFIX + "CONFIG") else None


def _converted(name: str, value: object, where: str) -> Any:
    kind = plain(TYPES[name]) if isinstance(value, str) else TYPES[name]
    try:
        if is_list(kind) and isinstance(value, str):
            value = _listed(value)
        text = value.strip() if isinstance(value, str) else value
        return msgspec.convert(text.upper() if kind is LogLevel and isinstance(text, str) else text, kind, strict=False)
    except (msgspec.ValidationError, msgspec.DecodeError):
        shown = "" if name in SECRET else instead_of(value)
        raise ConfigurationError(f"{where} takes {takes(kind)}{shown}.") from None


def _listed(text: str) -> list[object]:
    """A JSON list, or names between commas."""
    text = text.strip()
    if text.startswith("["):
        return msgspec.json.decode(text, type=list[object])
    return [part.strip() for part in text.split(",") if part.strip()]


def _check(settings: Settings) -> None:
    """What a type alone cannot say."""
    for name in ("endpoint_allowlist", "trusted_proxies"):
        for entry in getattr(settings, name):
            try:
                parse(entry) if "://" in entry and name == "endpoint_allowlist" else ip_network(entry, strict=False)
            except (ValueError, UpstreamError):
                raise ConfigurationError(
                    f"{PREFIX}{name.upper()} takes {takes(TYPES[name])}{instead_of(entry)}."
                ) from None
    for origin in settings.cors_origins:
        if origin != "*" and not ORIGIN.fullmatch(origin):
            raise ConfigurationError(f"{PREFIX}CORS_ORIGINS takes {takes(TYPES['cors_origins'])}{instead_of(origin)}.")
    for name in ("syfthub_url", "model_url", "embedding_url", "reranker_url", "otlp_endpoint"):
        if (url := getattr(settings, name)) is not None:
            try:
                parse(url)
            except UpstreamError:
                raise ConfigurationError(
                    f"{PREFIX}{name.upper()} takes {takes(TYPES[name])}{instead_of(url)}."
                ) from None
    if settings.default_top_k > settings.max_top_k:
        raise ConfigurationError(
            f"{PREFIX}DEFAULT_TOP_K takes at most {settings.max_top_k} (MAX_TOP_K), not {settings.default_top_k}."
        )
    _check_pairs(settings)
    for name in ("data_dir", "models_dir"):
        folder = Path(getattr(settings, name)).expanduser()
        if folder.exists() and not folder.is_dir():
            raise ConfigurationError(f"{PREFIX}{name.upper()} takes a folder, and {str(folder)!r} is a file.")


def _check_pairs(settings: Settings) -> None:
    """What goes only with something else, or only without it."""
    for name, needed in NEEDS.items():
        if getattr(settings, name) is not None and getattr(settings, needed) is None:
            raise ConfigurationError(f"{PREFIX}{name.upper()} needs {PREFIX}{needed.upper()}, which is not set.")
    if settings.analytics_otlp and settings.otlp_endpoint is None:
        raise ConfigurationError(f"{PREFIX}ANALYTICS_OTLP needs {PREFIX}OTLP_ENDPOINT, which is not set.")
    if settings.analytics_file and not Path(settings.analytics_file).expanduser().absolute().parent.is_dir():
        raise ConfigurationError(f"{PREFIX}ANALYTICS_FILE takes a file in a folder that exists.")
    if settings.reranker_path is not None and settings.reranker_url is not None:
        raise ConfigurationError(f"{PREFIX}RERANKER_PATH and {PREFIX}RERANKER_URL are both set; leave one of them out.")
