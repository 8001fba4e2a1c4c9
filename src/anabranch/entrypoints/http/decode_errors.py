"""The message for a request that does not decode: the field, and what it takes, from the type of the request."""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

PROBLEM = re.compile(
    r"(?:Invalid enum value (?P<value>.+)|Invalid RFC3339 .*|Expected `.*`, got `(?P<got>\w+)`|"
    r"Expected `str` matching regex (?P<pattern>.*))"
    r" - at `\$\.?(?P<path>[^`]+)`",
    re.DOTALL,
)
PATH = re.compile(r" - at `\$\.?([^`]+)`$")
STEP = re.compile(r"\.?(\w+)|\[[^\]]*\]")
GOT = {"str": "a text", "int": "a number", "float": "a number", "bool": "true or false", "null": "null"}
GOT |= {"array": "a list", "object": "an object"}
MAX_SHOWN = 100
# By the name of the type in msgspec.inspect, which loads only when it is needed.
WORDS = {
    "DictType": "an object",
    "DateType": "a day such as 2026-01-31",
    "DateTimeType": "a time such as 2026-01-31T09:00:00Z",
    "BoolType": "true or false",
    "IntType": "a whole number",
    "FloatType": "a number",
    "StrType": "a text",
}


def field_of(error: str) -> str:
    """The path of the value that an error of msgspec is about; empty if it is about the whole request."""
    found = PATH.search(error)
    return "" if found is None else found[1]


def explain(error: str, kind: Any) -> str:
    return f"The request is not valid: {described(error, kind)}"


def described(error: str, kind: Any) -> str:
    """What is wrong with the value of a field, and what the field takes. Other errors stay as they are."""
    found = PROBLEM.fullmatch(error)
    if found is None or not kind:
        return error
    words = _described if found["pattern"] else _takes
    takes = " or ".join(dict.fromkeys(words(_at(kind, found["path"]))))
    if not takes:
        return error
    given = found["value"] or GOT.get(found["got"] or "", "")
    shown = given if len(given) <= MAX_SHOWN else given[: MAX_SHOWN - 1] + "…"
    return f"{found['path']} takes {takes}{f', not {shown}' if shown else ''}."


def _at(kind: Any, path: str) -> Iterable[Any]:
    """The types of the value at a path such as `documents[0].source.type`."""
    from msgspec import inspect  # noqa: PLC0415  only requests that are refused need it

    types: list[Any] = [inspect.type_info(kind)]
    for step in STEP.finditer(path):
        types = [inner for one in _members(types) for inner in _inside(one, step[1])]
    return types


def _members(types: Iterable[Any]) -> Iterator[Any]:
    """The types, without unions and annotations."""
    from msgspec import inspect  # noqa: PLC0415

    for one in types:
        if isinstance(one, inspect.UnionType):
            yield from _members(one.types)
        elif isinstance(one, inspect.Metadata):
            yield from _members([one.type])
        else:
            yield one


def _inside(kind: Any, name: str | None) -> Iterator[Any]:
    """The type of a field, or without a name of the values in a list or an object."""
    if name is not None:
        yield from (field.type for field in getattr(kind, "fields", ()) if field.encode_name == name)
    elif (inner := getattr(kind, "item_type", None) or getattr(kind, "value_type", None)) is not None:
        yield inner


def _takes(types: Iterable[Any]) -> Iterator[str]:
    """What each type takes, in words; or its example, if it has one."""
    from msgspec import inspect  # noqa: PLC0415

    for one in types:
        match one:
            case inspect.UnionType():
                yield from _takes(one.types)
            case inspect.Metadata():
                examples = (one.extra_json_schema or {}).get("examples")
                yield from [f"an object such as {json.dumps(examples[0])}"] if examples else _takes([one.type])
            case inspect.LiteralType():
                yield _listed([json.dumps(value) for value in one.values])
            case inspect.ListType() | inspect.VarTupleType():
                yield f"a list: [{' or '.join(_takes([one.item_type]))}, …]"
            case inspect.StructType():
                yield _object(one)
            case _ if words := WORDS.get(type(one).__name__):
                yield words


def _described(types: Iterable[Any]) -> Iterator[str]:
    """The descriptions of types: nobody reads the regular expression of a text."""
    from msgspec import inspect  # noqa: PLC0415

    for one in types:
        if isinstance(one, inspect.UnionType):
            yield from _described(one.types)
        elif isinstance(one, inspect.Metadata) and (text := (one.extra_json_schema or {}).get("description")):
            yield text


def _listed(words: list[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _object(kind: Any) -> str:
    """An object, with its required fields, or with the names of all."""
    required = [field.encode_name for field in kind.fields if field.required]
    names = ", ".join(f'"{name}"' for name in required or [field.encode_name for field in kind.fields])
    return f"an object with {names}" if required else f"an object with some of {names}"
