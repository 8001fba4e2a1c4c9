"""What a tool's input schema says about its arguments, read with patience: it is a stranger's JSON."""

import math
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

MAX_PROPERTIES = 200
MAX_PARTS = 12
DEPTH = 6

SPOKEN_RANGE = re.compile(r"\b([0-9]{1,6}) ?(?:-|\u2013|to) ?([0-9]{1,6})\b")
SPOKEN_MOST = re.compile(r"\b(?:max(?:imum)?|at most|up to)(?: is| of|[:=])? ?([0-9]{1,6})\b", re.IGNORECASE)


class Property:
    """One argument of a tool; `parts` are the schemas that it is put together from."""

    def __init__(self, given: object, root: Mapping[str, Any]) -> None:
        self.parts = tuple(islice(_parts(given, root), MAX_PARTS))

    @property
    def kinds(self) -> frozenset[str]:
        """The JSON types that it may have, as far as it says; none at all means any."""
        kinds: set[str] = set()
        for part in self.parts:
            named = part.get("type")
            kinds.update(kind for kind in (named if isinstance(named, list) else [named]) if isinstance(kind, str))
        return frozenset(kinds)

    @property
    def takes_words(self) -> bool:
        is_free = not any("enum" in part or "const" in part or "format" in part for part in self.parts)
        return is_free and ("string" in self.kinds or not self.kinds)

    @property
    def takes_count(self) -> bool:
        is_free = not any("enum" in part or "const" in part for part in self.parts)
        return is_free and bool(self.kinds & {"integer", "number"})

    @property
    def description(self) -> str:
        said = (part.get(name) for part in self.parts for name in ("title", "description"))
        return " ".join(text[:1_000] for text in said if isinstance(text, str))

    def fixed(self) -> tuple[Any, ...]:
        """What it is where nobody says: its default or its only value; empty where it has none."""
        for part in self.parts:
            for name in ("default", "const"):
                if name in part:
                    return (part[name],)
            if isinstance(only := part.get("enum"), list) and len(only) == 1:
                return (only[0],)
        return ()

    def bounds(self) -> tuple[int | None, int | None]:
        """The least and the most that a count may be, by the schema, else by what its description says."""
        least = [math.ceil(bound) for bound in self._bounds("minimum")]
        least += [math.floor(bound) + 1 for bound in self._bounds("exclusiveMinimum")]
        most = [math.floor(bound) for bound in self._bounds("maximum")]
        most += [math.ceil(bound) - 1 for bound in self._bounds("exclusiveMaximum")]
        if not most and (spoken := SPOKEN_RANGE.search(self.description)):
            most = [int(spoken[2])] if int(spoken[1]) < int(spoken[2]) else []
        if not most and (spoken := SPOKEN_MOST.search(self.description)):
            most = [int(spoken[1])]
        return max(least, default=None), min(most, default=None)

    def _bounds(self, name: str) -> Iterator[float]:
        for part in self.parts:
            bound = part.get(name)
            if isinstance(bound, int | float) and not isinstance(bound, bool) and abs(bound) < 10**15:
                yield bound


def properties(schema: Mapping[str, Any]) -> dict[str, Property]:
    found: dict[str, Property] = {}
    for part in islice(_parts(schema, schema), MAX_PARTS):
        named = part.get("properties")
        for name, given in islice(named.items(), MAX_PROPERTIES) if isinstance(named, dict) else ():
            if isinstance(name, str) and name not in found and len(found) < MAX_PROPERTIES:
                found[name] = Property(given, schema)
    return found


def required(schema: Mapping[str, Any]) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for part in islice(_parts(schema, schema, all_of_it=True), MAX_PARTS):
        names = part.get("required")
        found.update(
            dict.fromkeys(name for name in (names if isinstance(names, list) else ()) if isinstance(name, str))
        )
    return tuple(found)


def unwrapped(schema: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """Tools that take one object take their arguments inside it: its name, and its schema in place of theirs."""
    known = properties(schema)
    if len(known) == 1:
        ((name, only),) = known.items()
        inner = next((part for part in only.parts if isinstance(part.get("properties"), dict)), None)
        if inner is not None:
            return name, {key: schema[key] for key in ("$defs", "definitions") if key in schema} | inner
    return None, schema


def is_closed(schema: Mapping[str, Any]) -> bool:
    """No other arguments than those that it lists."""
    return schema.get("additionalProperties") is False


def _parts(
    given: object, root: Mapping[str, Any], *, all_of_it: bool = False, depth: int = 0
) -> Iterator[dict[str, Any]]:
    """A schema, what it refers to and what it is put together from; with `all_of_it` only what holds in every case."""
    if not isinstance(given, dict) or depth > DEPTH:
        return
    yield given
    if isinstance(reference := given.get("$ref"), str):
        yield from _parts(_referred(reference, root), root, all_of_it=all_of_it, depth=depth + 1)
    for name in ("allOf",) if all_of_it else ("allOf", "anyOf", "oneOf"):
        choices = given.get(name)
        for choice in choices[:MAX_PARTS] if isinstance(choices, list) else ():
            yield from _parts(choice, root, all_of_it=all_of_it, depth=depth + 1)


def _referred(reference: str, root: Mapping[str, Any]) -> object:
    value: object = root
    for name in reference.removeprefix("#").split("/")[:10]:
        if name:
            value = value.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(value, dict) else None
    return value
