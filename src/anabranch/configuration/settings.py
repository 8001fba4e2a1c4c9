"""Settings from the environment and the configuration file. Nothing else reads the environment."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from ipaddress import ip_network
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from anabranch.configuration import config_file, mcp_servers
from anabranch.configuration.config_file import (
    Address,
    Allowlist,
    Auth,
    CacheTtl,
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
    RerankerForm,
    Seconds,
    Share,
    Subagents,
    Surfaces,
    Text,
    Workers,
    check_value,
    converted,
    is_list,
    plain,
)
from anabranch.configuration.extras import require
from anabranch.configuration.mcp_servers import aggregation
from anabranch.domain.errors import ConfigurationError
from anabranch.domain.mcp import Aggregation, McpServer
from anabranch.domain.model import Endpoint
from anabranch.network.addresses import Network, parse
from anabranch.network.redaction import PASSWORDS, secret_parts


class TrackedEnvironment(dict[str, str]):
    """Records which variables were read."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__(environment)
        self.read: set[str] = set()

    def get(self, name: str, otherwise: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, otherwise)


PREFIX = "AGGREGATOR_"
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+|null")
SECRET = ("model_api_key", "embedding_api_key", "reranker_api_key", "redis_url", "otlp_headers")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Every setting, under the name of its variable without the prefix."""

    debug: Flag = False
    host: Text = "0.0.0.0"  # noqa: S104  spec 1's default; surfaces that hold data need a key there
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
    answer_cache_ttl: CacheTtl = 3_600.0
    embedding_cache_ttl: CacheTtl = 604_800.0
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
        """Whether every worker can read every stream: there is one worker, or a shared Redis."""
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
        """The model used when none is named: the one of the variables, else the first in the file."""
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
CHECKS: Mapping[str, Callable[[str], object]] = {
    "endpoint_allowlist": lambda entry: parse(entry) if "://" in entry else ip_network(entry, strict=False),
    "cors_origins": lambda entry: entry == "*" or ORIGIN.fullmatch(entry),
    "trusted_proxies": lambda entry: ip_network(entry, strict=False),
    **dict.fromkeys(("syfthub_url", "model_url", "embedding_url", "reranker_url", "otlp_endpoint"), parse),
}
TYPES = get_type_hints(Settings, include_extras=True)
# Names without our prefix: this one is the planner's own switch (spec 2).
GIVEN = {"planner_streaming": "AI_ENABLE_AGGREGATOR_STREAMING"}
# Blocks of their own in the file.
BLOCKS = ("sources", "models", "published_models", "mcp_servers", "aggregation")
VARIABLES = {GIVEN.get(name, PREFIX + name.upper()): name for name in TYPES if name not in BLOCKS}


def load(environment: Mapping[str, str] | None = None, file: Path | None = None) -> Settings:
    """Settings from the environment and the file; the environment wins. A wrong value is a ConfigurationError."""
    environment = os.environ if environment is None else environment
    read = config_file.read(file or _named(environment))
    path, chosen = read.path, read.file
    values: dict[str, Any] = {}
    for name, value in chosen.settings.items():
        if name not in VARIABLES.values():
            raise ConfigurationError(f"{path}: settings has no {name!r}.")
        values[name] = _converted(name, value, f"{path}: settings.{name}")
    for variable, name in VARIABLES.items():
        if variable in environment and (environment[variable].strip() or name == "endpoint_allowlist"):
            values[name] = _converted(name, environment[variable], variable)
    sources, models, published = config_file.endpoints(chosen, environment, str(path))
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


def secrets_of(settings: Settings) -> Iterator[str]:
    """Every secret among the settings except those of MCP servers, which can change."""
    keys = (settings.model_api_key, settings.embedding_api_key, settings.reranker_api_key)
    tokens = (endpoint.token for endpoint in (*settings.sources.values(), *settings.models.values()))
    headers = (pair.partition("=")[2] for pair in (settings.otlp_headers or "").split(","))
    passwords = PASSWORDS.findall(settings.redis_url or "")
    for value in (*keys, *tokens, *headers, *passwords):
        yield from secret_parts(value or "")


def taken(environment: Mapping[str, str] | None = None, file: Path | None = None) -> list[str]:
    """The variables that the settings and the file read and that are set."""
    environment = os.environ if environment is None else environment
    tracked = TrackedEnvironment(environment)
    load(tracked, file)
    # CONFIG is an option, too, and PATH is set everywhere.
    known = {*tracked.read, *VARIABLES} - {PREFIX + "CONFIG", "PATH"}
    return sorted(name for name in known if environment.get(name, "").strip())


def unknown(environment: Mapping[str, str] | None = None) -> list[str]:
    """Variables with our prefix that are no settings, most likely misspelt."""
    environment = os.environ if environment is None else environment
    return sorted(
        name for name in environment if name.startswith(PREFIX) and name not in (*VARIABLES, PREFIX + "CONFIG")
    )


def _named(environment: Mapping[str, str]) -> Path | None:
    return Path(environment[PREFIX + "CONFIG"]) if environment.get(PREFIX + "CONFIG") else None


def _converted(name: str, value: object, where: str) -> Any:
    kind = TYPES[name]
    if isinstance(value, str):
        kind, value = plain(kind), value.strip()
        if is_list(kind):
            value = _listed(value)
        elif kind is LogLevel:
            value = value.upper()
    return converted(value, kind, where, secret=name in SECRET)


def _listed(text: str) -> object:
    """A JSON list, or names between commas."""
    if not text.startswith("["):
        return [part.strip() for part in text.split(",") if part.strip()]
    try:
        return msgspec.json.decode(text, type=list[object])
    except msgspec.DecodeError:
        return text  # which no list takes


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
    _check_pairs(settings)
    for name in ("data_dir", "models_dir"):
        folder = Path(getattr(settings, name)).expanduser()
        if folder.exists() and not folder.is_dir():
            raise ConfigurationError(f"{PREFIX}{name.upper()} takes a folder, and {str(folder)!r} is a file.")


def _check_pairs(settings: Settings) -> None:
    """Settings that need or exclude another."""
    for name, needed in NEEDS.items():
        if getattr(settings, name) is not None and getattr(settings, needed) is None:
            raise ConfigurationError(f"{PREFIX}{name.upper()} needs {PREFIX}{needed.upper()}, which is not set.")
    if settings.otlp_endpoint is not None:
        require("otel", f"{PREFIX}OTLP_ENDPOINT")
    if settings.reranker_path is not None:
        require("local-models", f"{PREFIX}RERANKER_PATH")
    if settings.analytics_otlp and settings.otlp_endpoint is None:
        raise ConfigurationError(f"{PREFIX}ANALYTICS_OTLP needs {PREFIX}OTLP_ENDPOINT, which is not set.")
    if settings.analytics_file and not Path(settings.analytics_file).expanduser().absolute().parent.is_dir():
        raise ConfigurationError(f"{PREFIX}ANALYTICS_FILE takes a file in a folder that exists.")
    if settings.reranker_path is not None and settings.reranker_url is not None:
        raise ConfigurationError(f"{PREFIX}RERANKER_PATH and {PREFIX}RERANKER_URL are both set; leave one of them out.")
