"""Shadow mode: where a step's results differ from the single answer of the old way, never what stands there."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from anabranch.domain.model import Value

MOST = 50
LONGEST_PATH = 200
Kind = Literal["missing", "extra", "different"]


class Difference(Value, gc=False):
    """`missing` is what only the old way has, `extra` what only the step has. The path is a JSON pointer that begins
    with the result key."""

    path: str
    kind: Kind

    def __str__(self) -> str:
        return f"{self.kind} {self.path}"


def differences(legacy: Mapping[str, msgspec.Raw], results: Mapping[str, msgspec.Raw]) -> tuple[Difference, ...]:
    """The first of them, in the order of their paths."""
    found: list[Difference] = []
    for key in sorted({*legacy, *results}):
        for difference in _under(key, legacy.get(key), results.get(key)):
            if len(found) == MOST:
                return tuple(found)
            found.append(difference)
    return tuple(found)


def _under(key: str, old: msgspec.Raw | None, new: msgspec.Raw | None) -> Iterator[Difference]:
    path = _below("", key)
    if old is None or new is None:
        yield Difference(path=path, kind="missing" if new is None else "extra")
        return
    if bytes(old) == bytes(new):
        return
    try:
        pair = msgspec.json.decode(old), msgspec.json.decode(new)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        yield Difference(path=path, kind="different")
        return
    yield from _between(path, *pair)


def _between(path: str, old: Any, new: Any) -> Iterator[Difference]:
    """Depth first and without recursion: how deep they go is up to whoever sent them."""
    todo: list[tuple[str, Any, Any]] = [(path, old, new)]
    while todo:
        at, left, right = todo.pop()
        if isinstance(left, dict) and isinstance(right, dict):
            below = sorted({*left, *right}, reverse=True)
            todo += [(_below(at, key), left.get(key, ABSENT), right.get(key, ABSENT)) for key in below]
        elif isinstance(left, list) and isinstance(right, list):
            for index in reversed(range(max(len(left), len(right)))):
                one = left[index] if index < len(left) else ABSENT
                other = right[index] if index < len(right) else ABSENT
                todo.append((_below(at, str(index)), one, other))
        elif left is ABSENT or right is ABSENT:
            yield Difference(path=at, kind="missing" if right is ABSENT else "extra")
        elif isinstance(left, bool) != isinstance(right, bool) or left != right:
            yield Difference(path=at, kind="different")


# Not None, which JSON has too.
ABSENT = object()


def _below(path: str, name: str) -> str:
    return f"{path}/{name.replace('~', '~0').replace('/', '~1')}"[:LONGEST_PATH]
