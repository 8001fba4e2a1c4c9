"""The kinds of values that settings and the file's blocks take, each with its bounds and what to say about them."""

from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin

from msgspec import Meta

# Whole numbers of thousands of digits cannot even be shown.
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


def plain(kind: Any) -> Any:
    """The kind itself, without `| None`."""
    if get_origin(kind) is UnionType or type(None) in get_args(kind):
        return next(part for part in get_args(kind) if part is not type(None))
    return kind


def is_list(kind: Any) -> bool:
    return get_origin(get_args(plain(kind))[0]) is tuple


def takes(kind: Any) -> str:
    """In words."""
    return next(meta.description for meta in get_args(plain(kind)) if isinstance(meta, Meta) and meta.description)


def instead_of(value: object) -> str:
    """The value that was given, unless a password may be in it; of what may have no end, only the sort."""
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
    """What sort of thing it is: the thing itself may be a secret, or without end."""
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
