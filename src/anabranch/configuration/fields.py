"""A block of the file, field by field: a mistake is a sentence that names the field by its whole path."""

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import msgspec

from anabranch.configuration.setting_types import instead_of, sort, takes
from anabranch.domain.errors import ConfigurationError

VARIABLE = re.compile(r"\$\$\{|\$\{(?:env:)?(?P<name>[A-Za-z_]\w*)(?::-(?P<otherwise>[^}]*))?\}|\$\{", re.ASCII)
MAX_SHOWN = 60


class BlockFields:
    """The fields of a block that has none but these. One without a value counts as not given."""

    def __init__(self, given: object, where: str, known: Sequence[str]) -> None:
        self.where = where
        self._given = mapping(given, where)
        for name in self._given:
            if name not in known:
                raise ConfigurationError(f"{where} has no field {shown(name)}{meant(name, known)}.")

    def __contains__(self, name: str) -> bool:
        return self._given.get(name) is not None

    def __getitem__(self, name: str) -> Any:
        return self._given[name]

    def at(self, name: str) -> str:
        return f"{self.where}.{name}"

    def value(self, name: str, kind: Any, otherwise: Any = None) -> Any:
        return converted(self._given[name], kind, self.at(name)) if name in self else otherwise


def mapping(given: object, where: str) -> Mapping[object, Any]:
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise ConfigurationError(f"{where} takes fields (name: value), not {sort(given)}.")
    return given


def listed(given: object, where: str, of: str) -> list[Any]:
    if not isinstance(given, list):
        raise ConfigurationError(f"{where} takes a list of {of}, not {sort(given)}.")
    return given


def converted(value: object, kind: Any, where: str) -> Any:
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError:
        raise ConfigurationError(f"{where} takes {takes(kind)}{instead_of(value)}.") from None


def text(value: object, where: str) -> str:
    """A text, or the number or truth value that was meant as one. It may be a secret, so it is not shown."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str | int | float):
        raise ConfigurationError(f"{where} takes a text, not {sort(value)}.")
    try:
        found = str(value)
    except ValueError:  # a whole number of thousands of digits
        raise ConfigurationError(f"{where} takes a text, not a number of that size.") from None
    if "\0" in found or re.search("[\ud800-\udc7f\udd00-\udfff]", found):
        raise ConfigurationError(f"{where} has a character that no text has.")
    return found


def expanded(given: str, environment: Mapping[str, str], where: str) -> str:
    """The text, with what the environment has in place of `${VARIABLE}` and of `${VARIABLE:-another text}`."""

    def put(found: re.Match[str]) -> str:
        if found[0] == "$${":
            return "${"
        name = found["name"]
        if name is None:
            raise ConfigurationError(
                f"{where} has a ${{ with no variable's name after it; written $${{, it stays as it is."
            )
        value = environment.get(name) or found["otherwise"]
        if value is None:
            raise ConfigurationError(
                f"{where} is taken from {name}, which is not set. Set it, or write ${{{name}:-…}} with what to take "
                "otherwise, or switch the server off with enabled: false."
            )
        return value

    return VARIABLE.sub(put, given)


def meant(name: object, known: Iterable[str]) -> str:
    """The nearest of the names that there are, as a question in brackets; nothing, if none is near."""
    names = {_folded(one): one for one in known}
    near = get_close_matches(_folded(str(name)[:100]), names, n=1)
    return f" (did you mean {names[near[0]]}?)" if near else ""


def shown(name: object) -> str:
    if not isinstance(name, str):
        return sort(name)
    return repr(name if len(name) <= MAX_SHOWN else name[: MAX_SHOWN - 1] + "…")


def _folded(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")
