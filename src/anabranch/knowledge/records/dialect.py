"""Translates the SQL of the records, which is written once and in SQLite's dialect, for PostgreSQL."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

# Strings, quoted names and comments stay as they are; casts (`::`) are no placeholders.
_TOKEN = re.compile(
    r"""(?P<kept>'(?:[^']|'')*'|"[^"]*"|--[^\n]*|::)"""
    r"""|(?P<nocase>(?P<column>[\w.]+)\s=\s(?P<same>\?|:\w+)\sCOLLATE\sNOCASE)"""
    r"""|length\(CAST\((?P<measured>\w+)\sAS\sBLOB\)\)"""
    r"""|(?P<null>(?:\?|:\w+)(?=\sIS\s(?:NOT\s)?NULL\b))"""
    r"""|(?P<value>\?|:[A-Za-z]\w*)"""
    r"""|(?P<user>\buser\b)""",
    re.VERBOSE,
)


class Slot(NamedTuple):
    """Which value a placeholder stands for, by its position or name, or whether that value is null."""

    of: int | str
    is_null: bool


class Translated(NamedTuple):
    """A statement for PostgreSQL with placeholders `$1`, `$2`, …, and what stands for each."""

    sql: str
    slots: tuple[Slot, ...]

    def values(self, given: Sequence[Any] | Mapping[str, Any]) -> list[Any]:
        # PostgreSQL cannot know the type of a value of which only is asked whether it is null.
        found: Any = given  # its keys are those of the placeholders: all positions or all names
        return [("t" if found[of] is None else "f") if is_null else found[of] for of, is_null in self.slots]


@lru_cache(maxsize=2_000)
def translated(sql: str) -> Translated:
    """A statement for PostgreSQL. What needs no translation are functions of the same name in the schema there."""
    slots: list[Slot] = []
    positions = 0

    def slot(name: str, *, is_null: bool = False) -> str:
        nonlocal positions
        if name == "?":
            slots.append(Slot(positions, is_null))
            positions += 1
        else:
            slots.append(Slot(name[1:], is_null))
        return f"${len(slots)}"

    def replaced(found: re.Match[str]) -> str:
        if found["kept"]:
            return found["kept"]
        if found["nocase"]:
            return f'lower({found["column"]}) = lower({slot(found["same"])} COLLATE "C")'
        if found["measured"]:
            return f"octet_length({found['measured']})"
        if found["null"]:
            return f"nullif(CAST({slot(found['null'], is_null=True)} AS boolean), TRUE)"
        return slot(found["value"]) if found["value"] else '"user"'

    return Translated(_TOKEN.sub(replaced, sql), tuple(slots))
