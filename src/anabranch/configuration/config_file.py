"""anabranch.yaml: its blocks, and the sources and models that it names."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml

from anabranch.configuration.fields import Address, check_value, mapping, meant, shown, sort
from anabranch.domain.errors import ConfigurationError
from anabranch.domain.model import Endpoint, EndpointKind
from anabranch.network.urls import parse

MERGE = "tag:yaml.org,2002:merge"
NULL = "tag:yaml.org,2002:null"
# A misplaced secret may stand where a key should be: only what is clearly a name is shown.
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


class UniqueKeyLoader(yaml.SafeLoader):
    """Rejects duplicate keys, of which YAML would keep the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == MERGE:
                continue
            if key.value in lines:
                name = f" {key.value}" if value.tag != NULL and CLEAR_NAME.fullmatch(key.value) else ""
                problem = f"the key{name} is already on line {lines[key.value]}"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            lines[key.value] = key.start_mark.line + 1
        return node


class StringLoader(yaml.SafeLoader):
    """Leaves values as they are written: `22:22`, `0755`, `3.10`, `yes` and `2026-01-01` are strings."""

    yaml_implicit_resolvers = {
        first: [known for known in resolvers if known[0].endswith((":null", ":merge"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class ConfigFile(NamedTuple):
    """The file; `spelt` is its `mcpServers:` with all values as strings."""

    path: Path
    file: File
    spelt: Any = None


def read(named: Path | None) -> ConfigFile:
    """The named file, or anabranch.yaml of the working directory if it exists."""
    if named is None and not DEFAULT_FILE.is_file():
        return ConfigFile(DEFAULT_FILE, File())
    path = named or DEFAULT_FILE
    try:
        text = path.read_text(encoding="utf-8")
        file = msgspec.convert(_blocks(yaml.load(text, UniqueKeyLoader), path), File)  # noqa: S506  a SafeLoader
        spelt = yaml.load(text, StringLoader)["mcpServers"] if file.mcpServers else None  # noqa: S506  a SafeLoader
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
        # Raised by the parser for `2026-99-99`, `!!bool perhaps` and a thousand brackets.
        raise ConfigurationError(f"{path}: this is not YAML: a value is not of the type that it claims.") from None


def _blocks(given: object, path: Path) -> dict[object, Any]:
    """The blocks by name; an empty one counts as not given."""
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
    """The sources, the models, and the published models by `owner/slug`."""
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
            check_value(url, parse, Address, f"{where}.{field}")
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
