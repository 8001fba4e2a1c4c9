"""Names of collections: which are allowed, and which collection a name stands for."""

from collections.abc import Sequence

from anabranch.domain.errors import Conflict, InvalidQuestion
from anabranch.domain.model import COLLECTION_ADDRESS
from anabranch.knowledge.lookalikes import check_lookalikes
from anabranch.knowledge.model import EVERYTHING, Caller, Collection
from anabranch.knowledge.records.database import is_id
from anabranch.text.normal_forms import normal_form

MAX_NAME = 100
MAX_CHOICES = 10


def checked_name(name: str) -> str:
    """The name for a new collection, composed (NFC); InvalidQuestion if it could be taken for another one."""
    name = normal_form(name.strip(), "NFC")
    if not 1 <= len(name) <= MAX_NAME:
        raise InvalidQuestion(f"name must have 1 to {MAX_NAME} characters.")
    if name == EVERYTHING:
        raise InvalidQuestion(f"The name {EVERYTHING!r} stands for all collections; choose another one.")
    if name.casefold().replace("\u0131", "i").startswith(COLLECTION_ADDRESS):
        raise InvalidQuestion(f"name must not begin with {COLLECTION_ADDRESS!r}: the addresses of collections do.")
    if is_id(name):
        raise InvalidQuestion("name must not have the form of an id: it could be taken for that of another collection.")
    check_lookalikes(name)
    return name


def matching(name: str, visible: Sequence[Collection], caller: Caller) -> list[Collection]:
    """The collection with this id, else address, else name; of several with the name the caller's own, else all. What
    is written as an address with an owner, or as an id, is never a name: whoever may choose a name could stand in for
    that owner, or for a collection that is hidden or deleted."""
    written = {name, normal_form(name, "NFC")}
    bare = {
        one.removeprefix(COLLECTION_ADDRESS)
        for one in written
        if not (one.startswith(COLLECTION_ADDRESS) and "/" in one)
    }
    has_own = caller.operator or caller.user is not None
    named = [one for one in visible if one.name in bare and not is_id(one.name)]
    return (
        [one for one in visible if one.id in bare]
        or [one for one in visible if one.address in written]
        or [one for one in named if has_own and one.owner == caller.owner]
        or named
    )


def only(name: str, visible: Sequence[Collection], caller: Caller) -> Collection | None:
    """The collection that a name stands for; Conflict, with the choices, if it is ambiguous."""
    found = matching(name, visible, caller)
    if len(found) < 2:
        return found[0] if found else None
    choices = sorted(unambiguous(one, visible, caller) for one in found)
    more = f", or one of {len(choices) - MAX_CHOICES} more" if len(choices) > MAX_CHOICES else ""
    raise Conflict(f"Several collections are named {name!r}; use {' or '.join(choices[:MAX_CHOICES])}{more}.")


def unambiguous(one: Collection, visible: Sequence[Collection], caller: Caller, prefix: str = "") -> str:
    """The shortest name by which a caller gets this collection: its name behind the prefix, its address, or its id."""
    names = (prefix + one.name, one.address)
    return next((name for name in names if matching(name, visible, caller) == [one]), prefix + one.id)
