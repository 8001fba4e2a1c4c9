"""Settings: the environment, the optional file, their defaults, and what is wrong with them, in a sentence."""

import os
import re
from collections.abc import Mapping, Sequence
from ipaddress import ip_network
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import yaml
from msgspec import Meta

from anabranch.domain.errors import ConfigurationError, UpstreamError
from anabranch.domain.model import Endpoint, EndpointKind
from anabranch.runtime.addresses import Network
from anabranch.runtime.outbound import parse

PREFIX = "AGGREGATOR_"
SECRET = ("model_api_key",)
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+|null")
DEFAULT_FILE = Path("anabranch.yaml")

Seconds = Annotated[float, Meta(gt=0, le=86_400, description="a number of seconds above 0, at most 86,400")]
Count = Annotated[int, Meta(ge=1, le=1_000_000_000, description="a whole number from 1 to 1,000,000,000")]
Port = Annotated[int, Meta(ge=0, le=65535, description="a port from 0 (any free one) to 65535")]
Flag = Annotated[bool, Meta(description="true or false")]
LogLevel = Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR"], Meta(description="DEBUG, INFO, WARNING or ERROR")]
LogFormat = Annotated[Literal["json", "console"], Meta(description="json or console")]
Auth = Annotated[Literal["auto", "none"], Meta(description="auto or none")]
Origins = Annotated[tuple[str, ...], Meta(description='a list such as ["https://app.example.com"], or ["*"] for all')]
Allowlist = Annotated[
    tuple[str, ...], Meta(description="a list of origins (http://host:port) and address blocks (10.0.0.0/8)")
]
Proxies = Annotated[tuple[str, ...], Meta(description="a list of addresses and address blocks (10.0.0.0/8)")]
Address = Annotated[str, Meta(description="a URL that begins with http:// or https://")]
Text = Annotated[str, Meta(description="a text")]
Folder = Annotated[str, Meta(min_length=1, description="a folder")]


class NamedEndpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An entry of `sources:` or `models:`. `token` may name a variable: `${VARIABLE}`."""

    url: str
    slug: str
    kind: EndpointKind = "space"
    owner: str | None = None
    tenant: str | None = None
    token: str | None = None


class File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """anabranch.yaml."""

    settings: dict[str, Any] = {}
    sources: dict[str, Any] = {}
    models: dict[str, Any] = {}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Every setting, under the name of its variable without the prefix."""

    debug: Flag = False
    host: Text = "0.0.0.0"  # noqa: S104  spec 1's default; surfaces that hold data ask for a key there
    port: Port = 8001
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
    data_dir: Folder = "~/.local/share/anabranch"
    model_url: Address | None = None
    model_name: Text | None = None
    model_api_key: Text | None = None
    sources: dict[str, Endpoint] = {}
    models: dict[str, Endpoint] = {}

    def __repr__(self) -> str:
        return f"Settings(host={self.host!r}, port={self.port!r})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("host", self.host), ("port", self.port)]

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


TYPES = get_type_hints(Settings, include_extras=True)
VARIABLES = {PREFIX + name.upper(): name for name in TYPES if name not in ("sources", "models")}


def load(environment: Mapping[str, str] | None = None, file: Path | None = None) -> Settings:
    """Settings from the environment and the file; the environment wins. A wrong value is a ConfigurationError."""
    environment = os.environ if environment is None else environment
    path, chosen = _read(file, environment)
    values: dict[str, Any] = {}
    for name, value in chosen.settings.items():
        if name not in VARIABLES.values():
            raise ConfigurationError(f"{path}: settings has no {name!r}.")
        values[name] = _converted(name, value, f"{path}: settings.{name}")
    for variable, name in VARIABLES.items():
        if variable in environment and (environment[variable].strip() or name == "endpoint_allowlist"):
            values[name] = _converted(name, environment[variable], variable)
    settings = Settings(
        **values,
        sources={
            name: _endpoint(entry, ("space",), environment, f"{path}: sources.{name}")
            for name, entry in chosen.sources.items()
        },
        models={
            name: _endpoint(entry, ("space", "openai"), environment, f"{path}: models.{name}")
            for name, entry in chosen.models.items()
        },
    )
    _check(settings)
    return settings


def unknown(environment: Mapping[str, str] | None = None) -> list[str]:
    """Variables with our prefix that mean nothing, most likely misspelt."""
    environment = os.environ if environment is None else environment
    return sorted(
        name for name in environment if name.startswith(PREFIX) and name not in (*VARIABLES, PREFIX + "CONFIG")
    )


def _read(file: Path | None, environment: Mapping[str, str]) -> tuple[Path, File]:
    named = file or (Path(environment[PREFIX + "CONFIG"]) if environment.get(PREFIX + "CONFIG") else None)
    if named is None and not DEFAULT_FILE.is_file():
        return DEFAULT_FILE, File()
    path = named or DEFAULT_FILE
    try:
        return path, msgspec.convert(yaml.safe_load(path.read_text(encoding="utf-8")) or {}, File)
    except OSError as error:
        raise ConfigurationError(f"{path}: the file cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path}: this is not a text file.") from None
    except yaml.YAMLError as error:
        # Not the whole error: it quotes the line, and there may be a secret on it.
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1}: {getattr(error, 'problem', '')})" if mark else ""
        raise ConfigurationError(f"{path}: this is not YAML{where}.") from None
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{path}: {error}.") from None


def _endpoint(given: object, kinds: Sequence[str], environment: Mapping[str, str], where: str) -> Endpoint:
    try:
        entry = msgspec.convert(given, NamedEndpoint)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{where}: {error}.") from None
    if entry.kind not in kinds:
        raise ConfigurationError(f"{where}.kind takes {' or '.join(kinds)}, not {entry.kind!r}.")
    try:
        parse(entry.url)
    except UpstreamError:
        raise ConfigurationError(f"{where}.url takes {_takes(TYPES['syfthub_url'])}{_instead_of(entry.url)}.") from None
    token = entry.token
    if token is not None and token.startswith("${") and token.endswith("}"):
        variable = token[2:-1]
        token = environment.get(variable)
        if not token:
            raise ConfigurationError(f"{where}.token is taken from {variable}, which is not set.")
    return Endpoint(
        slug=entry.slug,
        url=entry.url,
        owner=entry.owner,
        tenant=entry.tenant,
        kind=entry.kind,
        operator=True,
        token=token,
    )


def _converted(name: str, value: object, where: str) -> Any:
    kind = TYPES[name]
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
    for name in ("syfthub_url", "model_url"):
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
    for name in ("model_name", "model_api_key"):
        if getattr(settings, name) is not None and settings.model_url is None:
            raise ConfigurationError(f"{PREFIX}{name.upper()} needs {PREFIX}MODEL_URL, which is not set.")
    folder = Path(settings.data_dir).expanduser()
    if folder.exists() and not folder.is_dir():
        raise ConfigurationError(f"{PREFIX}DATA_DIR takes a folder, and {settings.data_dir!r} is a file.")
