"""Types of settings and of the file's fields, their validation, and the errors that name field, value and remedy."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from anabranch.domain.errors import ConfigurationError, UpstreamError

VARIABLE = re.compile(r"\$\$\{|\$\{(?:env:)?(?P<name>[A-Za-z_]\w*)(?::-(?P<otherwise>[^}]*))?\}|\$\{", re.ASCII)
MAX_SHOWN = 60


# Python refuses to print whole numbers of thousands of digits.
HUGE = 10**30
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
CacheTtl = Annotated[
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
Surface = Literal["rag_stream", "chat", "query", "endpoints", "mcp"]
Surfaces = Annotated[tuple[Surface, ...], Meta(description="a list of rag_stream, chat, query, endpoints and mcp")]
Days = Annotated[int, Meta(ge=0, le=36_500, description="a number of days from 0 to 36,500")]
Origins = Annotated[tuple[str, ...], Meta(description='a list such as ["https://app.example.com"], or ["*"] for all')]
Allowlist = Annotated[
    tuple[str, ...], Meta(description="a list of origins (http://host:port) and address blocks (10.0.0.0/8)")
]
Proxies = Annotated[tuple[str, ...], Meta(description="a list of addresses and address blocks (10.0.0.0/8)")]
Address = Annotated[str, Meta(description="a URL that begins with http:// or https://")]
Text = Annotated[str, Meta(description="a text")]
Folder = Annotated[str, Meta(min_length=1, description="a folder")]
Weight = Annotated[float, Meta(ge=0, le=1_000, description="a number from 0 to 1,000")]
HalfLife = Annotated[float, Meta(gt=0, le=36_500, description="a number of days above 0, at most 36,500")]
Timeout = Annotated[float, Meta(gt=0, le=3_600, description="a number of seconds above 0, at most 3,600")]
Pattern = Annotated[str, Meta(min_length=1, description="a regular expression in quotes")]
Results = Annotated[int, Meta(ge=10, le=100, description="a whole number from 10 to 100")]


class BlockFields:
    """The fields of a block; other names are refused, and one without a value counts as not given."""

    def __init__(self, given: object, where: str, known: Sequence[str]) -> None:
        self.where = where
        self._given = mapping(given, where)
        for name in self._given:
            if name not in known:
                raise ConfigurationError(f"{where} has no field {shown(name)}{meant(name, known)}.")

    def __contains__(self, name: str) -> bool:
        return self._given.get(name) is not None

    def __getitem__(self, name: str) -> Any:
        return self._given[name]

    def at(self, name: str) -> str:
        return f"{self.where}.{name}"

    def value(self, name: str, kind: Any, otherwise: Any = None) -> Any:
        return converted(self._given[name], kind, self.at(name)) if name in self else otherwise


def mapping(given: object, where: str) -> Mapping[object, Any]:
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise ConfigurationError(f"{where} takes fields (name: value), not {sort(given)}.")
    return given


def listed(given: object, where: str, of: str) -> list[Any]:
    if not isinstance(given, list):
        raise ConfigurationError(f"{where} takes a list of {of}, not {sort(given)}.")
    return given


def converted(value: object, kind: Any, where: str, *, secret: bool = False) -> Any:
    try:
        return msgspec.convert(value, kind, strict=False)
    except (msgspec.ValidationError, msgspec.DecodeError):
        raise _refused(where, kind, value, secret=secret) from None


def check_value(value: str, check: Callable[[str], object], kind: Any, where: str) -> None:
    """Raise a ConfigurationError if `check` returns nothing for the value, or raises."""
    try:
        accepted = check(value)
    except (ValueError, UpstreamError):
        accepted = None
    if not accepted:
        raise _refused(where, kind, value)


def _refused(where: str, kind: Any, value: object, *, secret: bool = False) -> ConfigurationError:
    return ConfigurationError(f"{where} takes {takes(kind)}{'' if secret else instead_of(value)}.")


def text(value: object, where: str) -> str:
    """A text, or a number or boolean as text. It may be a secret, so errors do not show it."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str | int | float):
        raise ConfigurationError(f"{where} takes a text, not {sort(value)}.")
    try:
        found = str(value)
    except ValueError:  # a whole number of thousands of digits
        raise ConfigurationError(f"{where} takes a text, not a number of that size.") from None
    if "\0" in found or re.search("[\ud800-\udc7f\udd00-\udfff]", found):
        raise ConfigurationError(f"{where} has a character that no text has.")
    return found


def expanded(given: str, environment: Mapping[str, str], where: str) -> str:
    """The text with `${VARIABLE}` and `${VARIABLE:-default}` replaced from the environment."""

    def put(found: re.Match[str]) -> str:
        if found[0] == "$${":
            return "${"
        name = found["name"]
        if name is None:
            raise ConfigurationError(
                f"{where} has a ${{ with no variable's name after it; written $${{, it stays as it is."
            )
        value = environment.get(name) or found["otherwise"]
        if value is None:
            raise ConfigurationError(
                f"{where} is taken from {name}, which is not set. Set it, or write ${{{name}:-…}} with what to take "
                "otherwise, or switch the server off with enabled: false."
            )
        return value

    return VARIABLE.sub(put, given)


def meant(name: object, known: Iterable[str]) -> str:
    """` (did you mean NAME?)` with the nearest known name; empty if none is near."""
    names = {_folded(one): one for one in known}
    near = get_close_matches(_folded(str(name)[:100]), names, n=1)
    return f" (did you mean {names[near[0]]}?)" if near else ""


def shown(name: object) -> str:
    if not isinstance(name, str):
        return sort(name)
    return repr(name if len(name) <= MAX_SHOWN else name[: MAX_SHOWN - 1] + "…")


def _folded(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def plain(kind: Any) -> Any:
    """The type without `| None`."""
    if get_origin(kind) is UnionType or type(None) in get_args(kind):
        return next(part for part in get_args(kind) if part is not type(None))
    return kind


def is_list(kind: Any) -> bool:
    return get_origin(get_args(plain(kind))[0]) is tuple


def takes(kind: Any) -> str:
    """The description of a type."""
    return next(meta.description for meta in get_args(plain(kind)) if isinstance(meta, Meta) and meta.description)


def instead_of(value: object) -> str:
    """`, not VALUE`: without the value if a password may be in it, and only the type of what may be very large."""
    match value:
        case str():
            return "" if "@" in value else f", not {value!r}"
        case float():
            return f", not {value}"
        case int() if not isinstance(value, bool):
            return f", not {value}" if abs(value) < HUGE else ", not a number of that size"
        case _:
            return f", not {sort(value)}"


def sort(value: object) -> str:
    """The name of the value's type: the value itself may be a secret, or very large."""
    match value:
        case None:
            return "nothing"
        case bool():
            return str(value).lower()
        case int() | float():
            return "a number"
        case str():
            return "a text"
        case list() | tuple():
            return "a list"
        case dict() | set():
            return "fields"
        case _:
            return "a date" if hasattr(value, "isoformat") else "bytes"
