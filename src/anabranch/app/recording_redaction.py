"""Removes secrets from a recording: known ones in any field and in a model's stream, and passwords in addresses."""

import re
from functools import cache
from types import UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgspec

from anabranch.domain.model import Context, Question
from anabranch.domain.recording import ModelCall, TimedDelta
from anabranch.network import redaction

T = TypeVar("T")
CREDENTIALS = re.compile(r"(?<=://)[^/?#\s\"\\]+(?=@)")


class Redaction:
    """Replaces each secret by as many stars, so that offsets in texts stay valid. `found`: there was one."""

    def __init__(self, question: Question, context: Context) -> None:
        self.found = False
        self._forms = redaction.all_forms(question, context)

    def removed(self, text: str) -> str:
        clean = text
        for form in self._forms:
            if form in clean:
                clean = clean.replace(form, "*" * len(form))
        clean = CREDENTIALS.sub(lambda match: "*" * len(match[0]), clean)
        self.found = self.found or clean != text
        return clean

    def removed_from(self, value: T) -> T:
        """The value, with all texts in it cleared that are not of a fixed set."""
        return cast("T", self._removed(value))

    def _removed(self, value: Any) -> Any:
        match value:
            case msgspec.Raw():
                return msgspec.Raw(self.removed(bytes(value).decode()).encode())
            case ModelCall():
                return self._removed_from_fields(msgspec.structs.replace(value, stream=self._joined(value.stream)))
            case msgspec.Struct():
                return self._removed_from_fields(value)
            case str() if type(value) is str:
                return self.removed(value)
            case tuple() | list():
                return type(value)(map(self._removed, value))
            case dict():
                return {self._removed(key): self._removed(one) for key, one in value.items()}
            case _:
                return value

    def _removed_from_fields(self, value: msgspec.Struct) -> msgspec.Struct:
        names = _free_fields(type(value))
        return msgspec.structs.replace(value, **{name: self._removed(getattr(value, name)) for name in names})

    def _joined(self, stream: tuple[TimedDelta, ...]) -> tuple[TimedDelta, ...]:
        """The stream, cleared as one text: a model writes a secret in pieces, of which none is the secret."""
        clean = self.removed("".join(timed.delta.text for timed in stream))
        found, end = list[TimedDelta](), 0
        for timed in stream:
            start, end = end, end + len(timed.delta.text)
            delta = msgspec.structs.replace(timed.delta, text=clean[start:end])
            found.append(msgspec.structs.replace(timed, delta=delta))
        return tuple(found)


@cache
def _free_fields(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """The fields that can hold any text: a value of a fixed set is no secret, even if it is equal to one."""
    return tuple(name for name, hint in get_type_hints(kind).items() if not _is_fixed(hint))


def _is_fixed(hint: Any) -> bool:
    if get_origin(hint) in (Union, UnionType):
        return all(one is type(None) or _is_fixed(one) for one in get_args(hint))
    return get_origin(hint) is Literal
