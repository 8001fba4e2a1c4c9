"""Settings: the environment, the optional file, their defaults, and what is wrong with them, in a sentence."""

import os
import re
from collections.abc import Mapping
from ipaddress import ip_network
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from anabranch.domain.errors import ConfigurationError, UpstreamError
from anabranch.domain.model import Endpoint
from anabranch.runtime import configuration
from anabranch.runtime.addresses import Network
from anabranch.runtime.outbound import parse

PREFIX = "AGGREGATOR_"
SECRET = ("model_api_key", "embedding_api_key", "reranker_api_key", "redis_url", "otlp_headers")
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+|null")

Seconds = Annotated[float, Meta(gt=0, le=86_400, description="a number of seconds above 0, at most 86,400")]
Count = Annotated[int, Meta(ge=1, le=1_000_000_000, description="a whole number from 1 to 1,000,000,000")]
Port = Annotated[int, Meta(ge=0, le=65535, description="a port from 0 (any free one) to 65535")]
Workers = Annotated[int, Meta(ge=1, le=1_000, description="a number of processes from 1 to 1,000")]
Flag = Annotated[bool, Meta(description="true or false")]
LogLevel = Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR"], Meta(description="DEBUG, INFO, WARNING or ERROR")]
LogFormat = Annotated[Literal["json", "console"], Meta(description="json or console")]
Auth = Annotated[Literal["auto", "none", "api_key", "jwt"], Meta(description="auto, none, api_key or jwt")]
RerankerForm = Annotated[Literal["cohere", "tei"], Meta(description="cohere or tei")]
QueryTokens = Annotated[
    int,
    Meta(ge=2_000, le=1_000_000_000, description="a whole number from 2,000 (1,500 are set aside) to 1,000,000,000"),
]
Remembering = Annotated[
    float, Meta(ge=0, le=31_536_000, description="a number of seconds from 0 (off) to 31,536,000 (a year)")
]
Number = Annotated[int, Meta(ge=0, le=1_000_000_000, description="a whole number from 0 to 1,000,000,000")]
Few = Annotated[int, Meta(ge=0, le=10, description="a whole number from 0 to 10")]
Share = Annotated[float, Meta(ge=0, le=1, description="a number from 0 to 1")]
RedisAddress = Annotated[
    str,
    Meta(pattern=r"^(rediss?|unix)://.", description="a URL that begins with redis://, rediss:// or unix://"),
]
Subagents = Annotated[
    tuple[Literal["documentation", "row_selection", "action", "voice", "safety", "other"], ...],
    Meta(description="a list of documentation, row_selection, action, voice, safety and other"),
]
Surface = Literal["rag_stream", "chat", "query", "endpoints"]
Surfaces = Annotated[tuple[Surface, ...], Meta(description="a list of rag_stream, chat, query and endpoints")]
Days = Annotated[int, Meta(ge=0, le=36_500, description="a number of days from 0 to 36,500")]
Origins = Annotated[tuple[str, ...], Meta(description='a list such as ["https://app.example.com"], or ["*"] for all')]
Allowlist = Annotated[
    tuple[str, ...], Meta(description="a list of origins (http://host:port) and address blocks (10.0.0.0/8)")
]
Proxies = Annotated[tuple[str, ...], Meta(description="a list of addresses and address blocks (10.0.0.0/8)")]
Address = Annotated[str, Meta(description="a URL that begins with http:// or https://")]
Text = Annotated[str, Meta(description="a text")]
Folder = Annotated[str, Meta(min_length=1, description="a folder")]


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
VARIABLES = {
    GIVEN.get(name, PREFIX + name.upper()): name
    for name in TYPES
    if name not in ("sources", "models", "published_models")
}


def load(environment: Mapping[str, str] | None = None, file: Path | None = None) -> Settings:
    """Settings from the environment and the file; the environment wins. A wrong value is a ConfigurationError."""
    environment = os.environ if environment is None else environment
    path, chosen = configuration.read(file or _named(environment))
    values: dict[str, Any] = {}
    for name, value in chosen.settings.items():
        if name not in VARIABLES.values():
            raise ConfigurationError(f"{path}: settings has no {name!r}.")
        values[name] = _converted(name, value, f"{path}: settings.{name}")
    for variable, name in VARIABLES.items():
        if variable in environment and (environment[variable].strip() or name == "endpoint_allowlist"):
            values[name] = _converted(name, environment[variable], variable)
    sources, models, published = configuration.endpoints(chosen, environment, str(path))
    settings = Settings(**values, sources=sources, models=models, published_models=published)
    _check(settings)
    return settings


def unknown(environment: Mapping[str, str] | None = None) -> list[str]:
    """Variables with our prefix that mean nothing, most likely misspelt."""
    environment = os.environ if environment is None else environment
    return sorted(
        name for name in environment if name.startswith(PREFIX) and name not in (*VARIABLES, PREFIX + "CONFIG")
    )


def _named(environment: Mapping[str, str]) -> Path | None:
    return Path(environment[PREFIX + "CONFIG"]) if environment.get(PREFIX + "CONFIG") else None


def _converted(name: str, value: object, where: str) -> Any:
    kind = _plain(TYPES[name]) if isinstance(value, str) else TYPES[name]
    try:
        if _is_list(kind) and isinstance(value, str):
            value = _listed(value)
        text = value.strip() if isinstance(value, str) else value
        return msgspec.convert(text.upper() if kind is LogLevel and isinstance(text, str) else text, kind, strict=False)
    except (msgspec.ValidationError, msgspec.DecodeError):
        shown = "" if name in SECRET else _instead_of(value)
        raise ConfigurationError(f"{where} takes {_takes(kind)}{shown}.") from None


def _instead_of(value: object) -> str:
    """The value that was given, unless a password may be in it."""
    return "" if "@" in str(value) else f", not {value!r}"


def _listed(text: str) -> list[object]:
    """A JSON list, or names between commas."""
    text = text.strip()
    if text.startswith("["):
        return msgspec.json.decode(text, type=list[object])
    return [part.strip() for part in text.split(",") if part.strip()]


def _plain(kind: Any) -> Any:
    """The kind itself, without `| None`."""
    if get_origin(kind) is UnionType or type(None) in get_args(kind):
        return next(part for part in get_args(kind) if part is not type(None))
    return kind


def _is_list(kind: Any) -> bool:
    return get_origin(get_args(_plain(kind))[0]) is tuple


def _takes(kind: Any) -> str:
    return next(meta.description for meta in get_args(_plain(kind)) if isinstance(meta, Meta) and meta.description)


def _check(settings: Settings) -> None:
    """What a type alone cannot say."""
    for name in ("endpoint_allowlist", "trusted_proxies"):
        for entry in getattr(settings, name):
            try:
                parse(entry) if "://" in entry and name == "endpoint_allowlist" else ip_network(entry, strict=False)
            except (ValueError, UpstreamError):
                raise ConfigurationError(
                    f"{PREFIX}{name.upper()} takes {_takes(TYPES[name])}{_instead_of(entry)}."
                ) from None
    for origin in settings.cors_origins:
        if origin != "*" and not ORIGIN.fullmatch(origin):
            raise ConfigurationError(
                f"{PREFIX}CORS_ORIGINS takes {_takes(TYPES['cors_origins'])}{_instead_of(origin)}."
            )
    for name in ("syfthub_url", "model_url", "embedding_url", "reranker_url", "otlp_endpoint"):
        if (url := getattr(settings, name)) is not None:
            try:
                parse(url)
            except UpstreamError:
                raise ConfigurationError(
                    f"{PREFIX}{name.upper()} takes {_takes(TYPES[name])}{_instead_of(url)}."
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
