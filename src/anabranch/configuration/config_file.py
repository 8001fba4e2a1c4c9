"""Reads and checks the YAML configuration file."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import date
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
import yaml
from msgspec import Meta

from anabranch.domain.errors import ConfigurationError, UpstreamError
from anabranch.domain.model import Endpoint, EndpointKind
from anabranch.network.addresses import parse

VARIABLE = re.compile(r"\$\$\{|\$\{(?:env:)?(?P<name>[A-Za-z_]\w*)(?::-(?P<default>[^}]*))?\}|\$\{", re.ASCII)
MAX_NAME = 60
TYPE_NAMES = (
    (NoneType, "nothing"),
    (int | float, "a number"),
    (str, "a text"),
    (list | tuple, "a list"),
    (dict | set, "fields"),
    (date, "a date"),
)
# Python refuses to print whole numbers of thousands of digits.
HUGE = 10**30
Seconds = Annotated[float, Meta(gt=0, le=86_400, description="a number of seconds above 0, at most 86,400")]
Delay = Annotated[float, Meta(ge=0, le=3_600, description="a number of seconds from 0 to 3,600")]
Count = Annotated[int, Meta(ge=1, le=1_000_000_000, description="a whole number from 1 to 1,000,000,000")]
Bytes = Annotated[int, Meta(ge=1, le=2**50, description="a whole number from 1 to 1,125,899,906,842,624")]
Flag = Annotated[bool, Meta(description="true or false")]
FLAGS = {"on": True, "yes": True, "off": False, "no": False}
# Not quoted in YAML, on and off are true and false.
Switch = Annotated[Literal["on", "off", "auto"], Meta(description="on, off or auto")]
LogLevel = Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR"], Meta(description="DEBUG, INFO, WARNING or ERROR")]
QueryTokens = Annotated[
    int,
    Meta(ge=2_000, le=1_000_000_000, description="a whole number from 2,000 (1,500 are set aside) to 1,000,000,000"),
]
CompactTokens = Annotated[int, Meta(ge=500, le=1_000_000_000, description="a whole number from 500 to 1,000,000,000")]
CacheTtl = Annotated[
    float, Meta(ge=0, le=31_536_000, description="a number of seconds from 0 (off) to 31,536,000 (a year)")
]
Number = Annotated[int, Meta(ge=0, le=1_000_000_000, description="a whole number from 0 to 1,000,000,000")]
Few = Annotated[int, Meta(ge=0, le=10, description="a whole number from 0 to 10")]
Share = Annotated[float, Meta(ge=0, le=1, description="a number from 0 to 1")]
Factor = Annotated[float, Meta(ge=-1_000, le=1_000)]
Curve = Annotated[tuple[Factor, Factor, Factor], Meta(description="three numbers from -1,000 to 1,000: 5.4,2.0,-1.9")]
RedisAddress = Annotated[
    str,
    Meta(pattern=r"^(rediss?|unix)://.", description="a URL that begins with redis://, rediss:// or unix://"),
]
DatabaseAddress = Annotated[
    str,
    Meta(
        pattern=r"^postgres(ql)?://.",
        description="a URL that begins with postgresql://, such as postgresql://USER@HOST/NAME",
    ),
]
IndexUrl = Annotated[
    str,
    Meta(
        pattern=r"^https?://([^\s/@]+@)?[^\s/@,]+(,[^\s/@,]+)*(/[a-z0-9][a-z0-9_-]*)?/?$",
        description="a URL such as https://USER:PASSWORD@HOST:9200/NAME, with a name in lower case",
    ),
]
Subagents = Annotated[
    tuple[Literal["documentation", "row_selection", "action", "voice", "safety", "other"], ...],
    Meta(description="a list of documentation, row_selection, action, voice, safety and other"),
]
Surfaces = Annotated[
    tuple[Literal["rag_stream", "chat", "query", "openai", "endpoints", "mcp"], ...],
    Meta(description="a list of rag_stream, chat, query, openai, endpoints and mcp"),
]
Origins = Annotated[tuple[str, ...], Meta(description='a list such as ["https://app.example.com"], or ["*"] for all')]
Allowlist = Annotated[
    tuple[str, ...], Meta(description="a list of origins (http://host:port) and address blocks (10.0.0.0/8)")
]
Proxies = Annotated[tuple[str, ...], Meta(description="a list of addresses and address blocks (10.0.0.0/8)")]
Address = Annotated[str, Meta(description="a URL that begins with http:// or https://")]
Text = Annotated[str, Meta(description="a text")]
Folder = Annotated[str, Meta(min_length=1, description="a folder")]
Weight = Annotated[float, Meta(ge=0, le=1_000, description="a number from 0 to 1,000")]
Timeout = Annotated[float, Meta(gt=0, le=3_600, description="a number of seconds above 0, at most 3,600")]
Pattern = Annotated[str, Meta(min_length=1, description="a regular expression in quotes")]


class BlockFields:
    """The fields of a block; other names are refused, and one without a value counts as not given. With an
    `environment`, the variables in texts are expanded."""

    def __init__(
        self, given: object, where: str, known: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self.where = where
        self._given = require_mapping(given, where)
        self._environment = environment
        for name in self._given:
            if name not in known:
                raise ConfigurationError(f"{where} has no field {quoted_name(name)}{did_you_mean(name, known)}.")

    def __contains__(self, name: str) -> bool:
        return self._given.get(name) is not None

    def __getitem__(self, name: str) -> Any:
        return self._given.get(name)

    def at(self, name: str) -> str:
        return f"{self.where}.{name}"

    def value(self, name: str, kind: Any, default: Any = None) -> Any:
        return convert(self._given[name], kind, self.at(name)) if name in self else default

    def text(self, name: str) -> str | None:
        if name not in self:
            return None
        found = self.expand(self._given[name], self.at(name))
        if not found.strip():
            raise ConfigurationError(f"{self.at(name)} is empty.")
        return found

    def expand(self, value: object, where: str) -> str:
        """The value as text, with its variables expanded if there is an environment."""
        found = as_text(value, where)
        if self._environment is None:
            return found
        return _expand_variables(found, self._environment, where, "disable the server with enabled: false")


def require_mapping(given: object, where: str) -> Mapping[object, Any]:
    if not isinstance(given, dict | None):
        raise ConfigurationError(f"{where} takes fields (name: value), not {type_name(given)}.")
    return given or {}


def require_list(given: object, where: str, of: str) -> list[Any]:
    if not isinstance(given, list):
        raise ConfigurationError(f"{where} takes a list of {of}, not {type_name(given)}.")
    return given


def convert(value: object, kind: Any, where: str, *, secret: bool = False) -> Any:
    try:
        return msgspec.convert(value, kind, strict=False)
    except (msgspec.ValidationError, msgspec.DecodeError):
        raise _invalid(where, kind, value, secret=secret) from None


def convert_field(struct: type, name: str, text: str, where: str) -> Any:
    """The value of a field from text; `none` is no value. ConfigurationError, which names `where`, if it is wrong."""
    kind = without_none(get_type_hints(struct)[name])
    choices = ("on", "off") if kind is bool else get_args(kind) if get_origin(kind) is Literal else ()
    value = None if text.lower() == "none" else FLAGS.get(text.lower(), text) if kind is bool else text
    try:
        return msgspec.convert(value, get_type_hints(struct, include_extras=True)[name], strict=False)
    except msgspec.ValidationError as error:
        why = f"it takes {' or '.join(choices)}" if choices else error
        raise ConfigurationError(f"{where}={text} is not valid: {why}.") from None


def check_value(value: str, check: Callable[[str], object], kind: Any, where: str) -> None:
    """Raise a ConfigurationError if `check` returns nothing for the value, or raises."""
    with suppress(ValueError, UpstreamError):
        if check(value):
            return
    raise _invalid(where, kind, value)


def _invalid(where: str, kind: Any, value: object, *, secret: bool = False) -> ConfigurationError:
    metas = (meta for meta in get_args(without_none(kind)) if isinstance(meta, Meta))
    takes = next(meta.description for meta in metas if meta.description)
    return ConfigurationError(f"{where} takes {takes}{'' if secret else _not_value(_wrong_part(value, kind))}.")


def _wrong_part(value: object, kind: Any) -> object:
    """The first entry of a list that the type does not accept, or the value itself."""
    entry, *more = get_args(get_args(without_none(kind))[0]) or (None,)
    if isinstance(value, list) and more == [...]:
        for one in value:
            try:
                msgspec.convert(one, entry, strict=False)
            except (msgspec.ValidationError, msgspec.DecodeError):
                return one
    return value


def as_text(value: object, where: str) -> str:
    """A text, or a number or boolean as text. It may be a secret, so errors do not show it."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str | int | float):
        raise ConfigurationError(f"{where} takes a text, not {type_name(value)}.")
    try:
        found = str(value)
    except ValueError:  # a whole number of thousands of digits
        raise ConfigurationError(f"{where} takes a text, not a number of that size.") from None
    if "\0" in found or re.search("[\ud800-\udc7f\udd00-\udfff]", found):
        raise ConfigurationError(f"{where} contains an invalid character.")
    return found


def expand_setting(value: object, environment: Mapping[str, str], where: str) -> object:
    """The value of a setting, with the variables in a text or in a list of texts expanded."""
    if isinstance(value, list):
        return [_expand_variables(one, environment, where) if isinstance(one, str) else one for one in value]
    return _expand_variables(value, environment, where) if isinstance(value, str) else value


def _expand_variables(given: str, environment: Mapping[str, str], where: str, otherwise: str = "") -> str:
    """The text with `${VARIABLE}` and `${VARIABLE:-default}` replaced from the environment. `otherwise` is what else
    can be done about a variable that is not set."""

    def expand(found: re.Match[str]) -> str:
        if found[0] == "$${":
            return "${"
        name = found["name"]
        if name is None:
            raise ConfigurationError(f"{where} has ${{ without a variable's name; write $${{ for a literal ${{.")
        value = environment.get(name) or found["default"]
        if value is None:
            ways = ("Set it", f"write ${{{name}:-default}}", *([otherwise] if otherwise else []))
            hint = f"{', '.join(ways[:-1])}, or {ways[-1]}"
            raise ConfigurationError(f"{where} is taken from {name}, which is not set. {hint}.")
        return value

    return VARIABLE.sub(expand, given)


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """` (did you mean NAME?)` with the nearest known name; empty if none is near."""
    near = nearest(name, known)
    return f" (did you mean {near}?)" if near else ""


def nearest(name: object, known: Iterable[str]) -> str:
    """The known name that is most similar; empty if none is near."""
    names = {_normalized(one): one for one in known}
    near = get_close_matches(_normalized(str(name)[:100]), names, n=1)
    return names[near[0]] if near else ""


def quoted_name(name: object) -> str:
    if not isinstance(name, str):
        return type_name(name)
    return repr(name if len(name) <= MAX_NAME else name[: MAX_NAME - 1] + "…")


def _normalized(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def without_none(kind: Any) -> Any:
    """The type without `| None`."""
    if get_origin(kind) is UnionType or type(None) in get_args(kind):
        return next(part for part in get_args(kind) if part is not type(None))
    return kind


def _not_value(value: object) -> str:
    """`, not VALUE`: without the value if a password may be in it, and only the type of what may be very large."""
    if isinstance(value, str):
        return "" if "@" in value else f", not {value!r}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f", not {type_name(value)}"
    return f", not {value}" if isinstance(value, float) or abs(value) < HUGE else ", not a number of that size"


def type_name(value: object) -> str:
    """The name of the value's type: the value itself may be a secret, or very large."""
    if isinstance(value, bool):
        return str(value).lower()
    return next((name for kind, name in TYPE_NAMES if isinstance(value, kind)), "bytes")


MERGE = "tag:yaml.org,2002:merge"
NULL = "tag:yaml.org,2002:null"
# A misplaced secret may be in the place of a key: errors show only what is clearly a name.
CLEAR_NAME = re.compile(r"[A-Za-z0-9_][\w.-]{0,63}", re.ASCII)
DEFAULT_FILE = Path("anabranch.yaml")
PUBLISHED = re.compile(r"[A-Za-z0-9][\w.-]{0,62}/[a-z0-9][a-z0-9-]{0,62}", re.ASCII)


class NamedEndpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An entry of `sources:` or `models:`. `token` may name a variable, `${VARIABLE}`; `publish` is the `owner/slug`
    under which a model is published; `alternate` is a second URL of the same source."""

    url: str
    slug: str
    kind: EndpointKind = "space"
    owner: str | None = None
    tenant: str | None = None
    token: str | None = None
    publish: str | None = None
    alternate: str | None = None


class File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """anabranch.yaml."""

    settings: dict[str, Any] = {}
    sources: dict[str, Any] = {}
    models: dict[str, Any] = {}
    mcpServers: Any = None  # noqa: N815  the name in every MCP client's file
    aggregator: Any = None


BLOCKS = File.__struct_fields__


class DuplicateKey(yaml.YAMLError):
    """A key that occurs twice in one block."""


class UniqueKeyLoader(yaml.SafeLoader):
    """Rejects duplicate keys, of which YAML would keep the last."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._path: list[str] = []

    def compose_node(self, parent: Any, index: Any) -> Any:
        """`index` is the place in a list, or the key of a value."""
        step = f".{_clear_name(index)}" if isinstance(index, yaml.ScalarNode) else ""
        self._path.append(f"[{index}]" if isinstance(index, int) else step)
        try:
            return super().compose_node(parent, index)
        finally:
            self._path.pop()

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == MERGE:
                continue
            line, first = key.start_mark.line + 1, lines.get(key.value)
            if first is not None:
                name = "".join((*self._path, ".", "…" if value.tag == NULL else _clear_name(key))).removeprefix(".")
                where = f"lines {first} and {line}" if first != line else f"both times on line {line}"
                raise DuplicateKey(f"{name} is there twice ({where})")
            lines[key.value] = line
        return node


def _clear_name(key: yaml.ScalarNode) -> str:
    """A key, unless it may be a secret."""
    return key.value if CLEAR_NAME.fullmatch(key.value) else "…"


class StringLoader(yaml.SafeLoader):
    """Leaves values as they are written: `22:22`, `0755`, `3.10`, `yes` and `2026-01-01` are strings."""

    yaml_implicit_resolvers = {
        first: [known for known in resolvers if known[0].endswith((":null", ":merge"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class ConfigFile(NamedTuple):
    """The file; `server_texts` is its `mcpServers:` with all values as strings."""

    path: Path
    file: File
    server_texts: Any = None


def read(named: Path | None) -> ConfigFile:
    """The named file, or anabranch.yaml of the working directory if it exists."""
    if named is None and not DEFAULT_FILE.is_file():
        return ConfigFile(DEFAULT_FILE, File())
    path = named or DEFAULT_FILE
    try:
        text = path.read_text(encoding="utf-8")
        file = msgspec.convert(_blocks(yaml.load(text, UniqueKeyLoader), path), File)  # noqa: S506  a SafeLoader
        texts = yaml.load(text, StringLoader)["mcpServers"] if file.mcpServers else None  # noqa: S506  a SafeLoader
        return ConfigFile(path, file, texts)
    except OSError as error:
        raise ConfigurationError(f"{path}: the file cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path}: this is not a text file.") from None
    except DuplicateKey as error:
        raise ConfigurationError(f"{path}: {error}.") from None
    except yaml.YAMLError as error:
        # Not the whole error: it quotes the line, and there may be a secret on it.
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", "") or ""
        problem = "a tab; indent with spaces" if r"'\t'" in problem else problem
        where = f" (line {mark.line + 1}: {problem})" if mark else ""
        raise ConfigurationError(f"{path}: this is not YAML{where}.") from None
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{path}: {error}.") from None
    except (ValueError, LookupError, AttributeError, RecursionError):
        # Raised by the parser for `2026-99-99`, `!!bool perhaps` and a thousand brackets.
        raise ConfigurationError(f"{path}: this is not YAML: a value is not of the type that it claims.") from None


def _blocks(given: object, path: Path) -> dict[object, Any]:
    """The blocks by name; an empty one counts as not given."""
    if not isinstance(given, dict | None):
        raise ConfigurationError(f"{path}: the file takes blocks ({', '.join(BLOCKS)}), not {type_name(given)}.")
    for name, block in (given or {}).items():
        if name not in BLOCKS:
            raise ConfigurationError(
                f"{path}: there is no block {quoted_name(name)}{did_you_mean(name, BLOCKS)}; "
                f"there are: {', '.join(BLOCKS)}. Settings such as port belong under settings."
            )
        require_mapping(block, f"{path}: {name}")
    return {name: block for name, block in (given or {}).items() if block is not None}


def endpoints(
    file: File, environment: Mapping[str, str], path: str
) -> tuple[dict[str, Endpoint], dict[str, Endpoint], dict[str, str]]:
    """The sources, the models, and the published models by `owner/slug`."""
    sources = {
        name: _endpoint(name, entry, ("space",), environment, f"{path}: sources.{name}")
        for name, entry in file.sources.items()
    }
    models = {
        name: _endpoint(name, entry, ("space", "openai"), environment, f"{path}: models.{name}")
        for name, entry in file.models.items()
    }
    published: dict[str, str] = {}
    for name, (endpoint, publish) in models.items():
        if endpoint.alternate is not None:
            raise ConfigurationError(f"{path}: models.{name}.alternate: only sources have an alternate.")
        if publish is None:
            continue
        if not PUBLISHED.fullmatch(publish):
            raise ConfigurationError(
                f"{path}: models.{name}.publish takes owner/slug (the slug in lower case), not {publish!r}."
            )
        if published.setdefault(publish, name) != name:
            raise ConfigurationError(f"{path}: models.{name}.publish is {publish!r}, which another model has, too.")
    for name, (_, publish) in sources.items():
        if publish is not None:
            raise ConfigurationError(f"{path}: sources.{name}.publish: only models and collections are published.")
    return (
        {name: endpoint for name, (endpoint, _) in sources.items()},
        {name: endpoint for name, (endpoint, _) in models.items()},
        published,
    )


def _endpoint(
    name: str, given: object, kinds: Sequence[str], environment: Mapping[str, str], where: str
) -> tuple[Endpoint, str | None]:
    """The endpoint, and the path that it is published as."""
    fields = BlockFields(given, where, NamedEndpoint.__struct_fields__)
    found = {field: fields[field] for field in NamedEndpoint.__struct_fields__ if field in fields}
    for field, value in found.items():
        if not isinstance(value, str):
            raise ConfigurationError(f"{fields.at(field)} takes a text, not {type_name(value)}; put it in quotes.")
    for field in ("url", "slug"):
        if field not in found:
            raise ConfigurationError(f"{where} needs the field {field!r}.")
    entry = NamedEndpoint(**found)
    if entry.kind not in kinds:
        raise ConfigurationError(f"{where}.kind takes {' or '.join(kinds)}, not {entry.kind!r}.")
    for field, url in (("url", entry.url), ("alternate", entry.alternate)):
        if url is not None:
            check_value(url, parse, Address, f"{where}.{field}")
    token = entry.token
    if token is not None and token.startswith("${") and token.endswith("}"):
        variable = token[2:-1]
        token = environment.get(variable)
        if not token:
            raise ConfigurationError(f"{where}.token is taken from {variable}, which is not set.")
    kept = {field: getattr(entry, field) for field in ("slug", "url", "owner", "tenant", "kind", "alternate")}
    return Endpoint(**kept, name=name, operator=True, token=token), entry.publish
