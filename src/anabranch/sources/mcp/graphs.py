"""Replies that are a piece of a knowledge graph: what ties a thing to others is said of the thing itself."""

from collections.abc import Mapping
from itertools import islice
from typing import Any

from anabranch.sources.mcp.fields import line, plain

MAX_THINGS = 1_000
MAX_TIES = 5_000
MAX_EACH = 100
MAX_NAME = 300

FROM = ("from", "source")
TO = ("to", "target")
HOW = ("relationtype", "relation", "type", "predicate", "label")


def tied(given: Mapping[str, Any]) -> list[Any] | None:
    """The things in `{"entities": […], "relations": […]}`, each with its relations as sentences among what is known of
    it; only the sentences where no things are there. None where it is no such reply."""
    named = {plain(name): value for name, value in islice(given.items(), MAX_EACH)}
    things, relations = named.get("entities"), named.get("relations")
    if not isinstance(things, list) or not isinstance(relations, list):
        return None
    ties: dict[str, dict[str, None]] = {}
    sentences: dict[str, None] = {}
    for relation in relations[:MAX_TIES]:
        if isinstance(relation, dict) and (read := _read(relation)) is not None:
            begin, how, end = read
            sentence = f"{begin} {how} {end}"
            sentences[sentence] = None
            for name in (begin, end):
                if len(of_name := ties.setdefault(name, {})) < MAX_EACH:
                    of_name[sentence] = None
    return [_with(thing, ties) for thing in things[:MAX_THINGS]] if things else list(sentences)


def _read(relation: Mapping[str, Any]) -> tuple[str, str, str] | None:
    named = {plain(name): value for name, value in islice(relation.items(), MAX_EACH)}
    parts = [
        next((line(said, MAX_NAME) for name in names if isinstance(said := named.get(name), str)), "")
        for names in (FROM, HOW, TO)
    ]
    begin, how, end = parts
    return (begin, how.replace("_", " "), end) if all(parts) else None


def _with(thing: Any, ties: Mapping[str, Mapping[str, None]]) -> Any:
    name = thing.get("name") if isinstance(thing, dict) else None
    known = ties.get(line(name, MAX_NAME)) if isinstance(name, str) else None
    if known is None:
        return thing
    observed = thing.get("observations")
    before = observed if isinstance(observed, list) else [observed]
    return {**thing, "observations": [*before, *known]}
