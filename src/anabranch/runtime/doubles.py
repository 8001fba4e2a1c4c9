"""Names that stand twice in one block of the file: to YAML the last one counts, and the others go without a word."""

import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import yaml

from anabranch.domain.errors import ConfigurationError

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
