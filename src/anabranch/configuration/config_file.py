"""Names that stand twice in one block of the file: to YAML the last one counts, and the others go without a word."""

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml

from anabranch.configuration.fields import mapping, meant, shown
from anabranch.configuration.setting_types import sort
from anabranch.domain.errors import ConfigurationError, UpstreamError
from anabranch.domain.model import Endpoint, EndpointKind
from anabranch.network.urls import parse

MERGE = "tag:yaml.org,2002:merge"
NULL = "tag:yaml.org,2002:null"
# What stands where a name should be may be a secret: only what is clearly a name is shown as one.
CLEARLY = re.compile(r"[A-Za-z0-9_][\w.-]{0,63}", re.ASCII)

Placed = tuple[yaml.Node, str]


def check_names(root: yaml.Node, path: Path) -> None:
    waiting: deque[Placed] = deque([(root, "")])
    seen: set[int] = set()
    while waiting:
        node, place = waiting.popleft()
        # With YAML's references a node can be in several places, or in itself.
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            waiting += _entries(node, place, path)
        elif isinstance(node, yaml.SequenceNode):
            waiting += [(one, f"{place}[{at}]") for at, one in enumerate(node.value)]


def _entries(node: yaml.MappingNode, place: str, path: Path) -> Iterator[Placed]:
    lines: dict[str, int] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == MERGE:
            continue
        clear = value.tag != NULL and CLEARLY.fullmatch(key.value)
        name = f"{place}.{key.value if clear else '…'}".removeprefix(".")
        line = key.start_mark.line + 1
        if key.value in lines:
            first = lines[key.value]
            where = f"lines {first} and {line}" if first != line else f"both times on line {line}"
            raise ConfigurationError(f"{path}: {name} is there twice ({where}).")
        lines[key.value] = line
        yield value, name


DEFAULT_FILE = Path("anabranch.yaml")
PUBLISHED = re.compile(r"[A-Za-z0-9][\w.-]{0,62}/[a-z0-9][a-z0-9-]{0,62}", re.ASCII)


class NamedEndpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An entry of `sources:` or `models:`. `token` may name a variable: `${VARIABLE}`; `publish` is the `owner/slug`
    under which others may ask a model of ours; `alternate` is a second URL of the same source."""

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
    mcpServers: Any = None  # noqa: N815  as every MCP client's file has it
    aggregator: Any = None


BLOCKS = File.__struct_fields__


class StringLoader(yaml.SafeLoader):
    """Leaves values as they were written: `22:22`, `0755`, `3.10`, `yes` and `2026-01-01` are texts."""

    yaml_implicit_resolvers = {
        first: [known for known in resolvers if known[0].endswith((":null", ":merge"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class ConfigFile(NamedTuple):
    """The file, and its `mcpServers:` once more as they were written."""

    path: Path
    file: File
    spelt: Any = None


def read(named: Path | None) -> ConfigFile:
    """The file that was named, or the one in this folder if there is one."""
    if named is None and not DEFAULT_FILE.is_file():
        return ConfigFile(DEFAULT_FILE, File())
    path = named or DEFAULT_FILE
    try:
        text = path.read_text(encoding="utf-8")
        file = msgspec.convert(_blocks(_loaded(text, path), path), File)
        spelt = yaml.load(text, StringLoader)["mcpServers"] if file.mcpServers else None  # noqa: S506  it is a SafeLoader
        return ConfigFile(path, file, spelt)
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
    except (ValueError, LookupError, AttributeError, RecursionError):
        # What the parser says of `2026-99-99`, `!!bool perhaps` and a thousand brackets.
        raise ConfigurationError(f"{path}: this is not YAML: a value is not of the type that it claims.") from None


def _loaded(text: str, path: Path) -> Any:
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        check_names(node, path)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _blocks(given: object, path: Path) -> dict[object, Any]:
    """By name; one without anything in it counts as not given."""
    if not isinstance(given, dict | None):
        raise ConfigurationError(f"{path}: the file takes blocks ({', '.join(BLOCKS)}), not {sort(given)}.")
    for name, block in (given or {}).items():
        if name not in BLOCKS:
            raise ConfigurationError(
                f"{path}: there is no block {shown(name)}{meant(name, BLOCKS)}; there are: {', '.join(BLOCKS)}."
            )
        mapping(block, f"{path}: {name}")
    return {name: block for name, block in (given or {}).items() if block is not None}


def endpoints(
    file: File, environment: Mapping[str, str], path: str
) -> tuple[dict[str, Endpoint], dict[str, Endpoint], dict[str, str]]:
    """The sources, the models, and under which `owner/slug` which of these models is published."""
    sources = {name: _entry(entry, f"{path}: sources.{name}") for name, entry in file.sources.items()}
    models = {name: _entry(entry, f"{path}: models.{name}") for name, entry in file.models.items()}
    published: dict[str, str] = {}
    for name, entry in models.items():
        if entry.alternate is not None:
            raise ConfigurationError(f"{path}: models.{name}.alternate: only sources have an alternate.")
        if entry.publish is None:
            continue
        if not PUBLISHED.fullmatch(entry.publish):
            raise ConfigurationError(
                f"{path}: models.{name}.publish takes owner/slug (the slug in lower case), not {entry.publish!r}."
            )
        if published.setdefault(entry.publish, name) != name:
            raise ConfigurationError(f"{path}: models.{name}.publish is {entry.publish!r}, and so is another's.")
    for name, entry in sources.items():
        if entry.publish is not None:
            raise ConfigurationError(f"{path}: sources.{name}.publish: only models and collections are published.")
    return (
        {n: _endpoint(e, ("space",), environment, f"{path}: sources.{n}") for n, e in sources.items()},
        {n: _endpoint(e, ("space", "openai"), environment, f"{path}: models.{n}") for n, e in models.items()},
        published,
    )


def _entry(given: object, where: str) -> NamedEndpoint:
    try:
        return msgspec.convert(given, NamedEndpoint)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{where}: {error}.") from None


def _endpoint(entry: NamedEndpoint, kinds: Sequence[str], environment: Mapping[str, str], where: str) -> Endpoint:
    if entry.kind not in kinds:
        raise ConfigurationError(f"{where}.kind takes {' or '.join(kinds)}, not {entry.kind!r}.")
    for field, url in (("url", entry.url), ("alternate", entry.alternate)):
        if url is not None:
            _check_url(url, f"{where}.{field}")
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
        alternate=entry.alternate,
    )


def _check_url(url: str, where: str) -> None:
    try:
        parse(url)
    except UpstreamError:
        raise ConfigurationError(
            f"{where} takes a URL that begins with http:// or https://{_shown_url(url)}."
        ) from None


def _shown_url(value: str) -> str:
    """The value that was given, unless a password may be in it."""
    return "" if "@" in value else f", not {value!r}"
