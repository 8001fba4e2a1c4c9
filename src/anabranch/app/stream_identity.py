"""Who may read a kept stream: its user, with a key whose rights are at least those that it was made with."""

import re
from urllib.parse import quote, unquote

import msgspec

from anabranch.domain.model import Value
from anabranch.knowledge.model import Caller

# Its text form: what the key may read besides what its user may, then the user, whose name may hold anything.
STORED = re.compile(
    r"(?:(operator)(?: |\Z))?(?:groups:([^ ]*)(?: |\Z))?(?:collections:([0-9,]*)(?: |\Z))?(?:user:(.*))?", re.DOTALL
)
SURROGATES = "surrogatepass"


class StreamIdentity(Value):
    """A user with the rights of one key, as far as they decide what its answers can quote."""

    user: str | None
    operator: bool = False
    groups: frozenset[str] = frozenset()
    collections: frozenset[int] | None = None

    @classmethod
    def of(cls, caller: Caller) -> "StreamIdentity | None":
        """That of a caller; guests have none."""
        if caller.user is None and not caller.operator:
            return None
        collections = caller.rights.collections
        return cls(
            user=caller.user,
            operator=caller.operator,
            groups=frozenset(caller.groups),
            collections=None if collections is None else frozenset(collections),
        )

    @property
    def owner(self) -> str:
        """The owner of planner sessions: a key that is restricted to some collections has sessions of its own."""
        return msgspec.structs.replace(self, operator=self.user is None, groups=frozenset()).stored

    @property
    def stored(self) -> str:
        parts = ["operator"] if self.operator else []
        if self.groups:
            parts.append(f"groups:{','.join(quote(one, safe='', errors=SURROGATES) for one in sorted(self.groups))}")
        if self.collections is not None:
            parts.append(f"collections:{','.join(map(str, sorted(self.collections)))}")
        if self.user is not None:
            parts.append(f"user:{self.user}")
        return " ".join(parts)

    def may_read(self, stored: str) -> bool:
        """Whether a stream that is stored with an identity is for this one."""
        if (found := STORED.fullmatch(stored)) is None:
            return False
        operator, groups, collections, user = found.groups()
        return (
            user == self.user
            and (self.operator or (operator is None and self.groups.issuperset(_unquoted(groups))))
            and (self.collections is None or (collections is not None and self.collections >= _keys(collections)))
        )


def _unquoted(groups: str | None) -> set[str]:
    return {unquote(one, errors=SURROGATES) for one in (groups or "").split(",") if one}


def _keys(collections: str) -> set[int]:
    return {int(one) for one in collections.split(",") if one}
