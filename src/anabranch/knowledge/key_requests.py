"""Creates, rotates and revokes API keys as requested: by the same rules for the command line and for HTTP."""

import math
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from anabranch.domain.errors import Conflict, InvalidQuestion, NotFound
from anabranch.domain.model import Value
from anabranch.domain.rights import ALL, NO_GRANT, PLANNER, SCOPES, Grants, Rights, Scope
from anabranch.knowledge.collection_names import matching
from anabranch.knowledge.lookalikes import check_lookalikes
from anabranch.knowledge.model import Caller
from anabranch.knowledge.records import collections, keys, queries
from anabranch.knowledge.records.database import Session
from anabranch.text.normal_forms import normal_form

# A limit of a key on all of its requests within AGGREGATOR_RATE_LIMIT_WINDOW.
REQUESTS = "requests"
MAX_NAME = 200
MAX_NOTE = 500
MAX_LISTED = 100
MAX_OVERLAP_S = 30 * 86_400
GRANT = re.compile(r"(?:source|mcp|model):.{1,200}", re.DOTALL)


class KeyRequest(Value):
    """What a new key is to be. None is the default: of `scopes` all but `admin`, which only operators have; of
    `collections` (ids or names) all that the user may see; of `grants` none, for operators all."""

    user: str
    groups: tuple[str, ...] = ()
    operator: bool = False
    note: str = ""
    expires_at: float | None = None
    scopes: tuple[Scope, ...] | None = None
    collections: tuple[str, ...] | None = None
    grants: tuple[str, ...] | None = None
    limits: Mapping[str, float] = {}


def create(db: Session, request: KeyRequest, limits: Collection[str]) -> tuple[keys.ApiKey, str]:
    """A new key and its secret; `limits` are the names of the limits that there are."""
    user, *groups = _checked_names(db, (request.user, *request.groups))
    if len(request.note) > MAX_NOTE:
        raise InvalidQuestion(f"The note has {len(request.note):,} characters; it may have {MAX_NOTE}.")
    _check_expiry(request.expires_at)
    _check_limits(request.limits, (REQUESTS, *limits))
    restricted = request.collections is not None or request.grants is not None
    rights = Rights(
        scopes=_scopes(request, restricted=restricted),
        collections=None if request.collections is None else _collections(db, user, request.collections),
        grants=_grants(request.grants, operator=request.operator),
        limits=request.limits,
    )
    return keys.create(
        db,
        user=user,
        groups=tuple(groups),
        operator=request.operator,
        note=request.note.strip(),
        rights=rights,
        expires_at=request.expires_at,
    )


def rotate(db: Session, name: str, overlap_s: float, expires_at: float | None) -> tuple[keys.ApiKey, str]:
    """A new secret for the key with this id, or of this user; the one before it is valid until the overlap ends."""
    if not 0 <= overlap_s <= MAX_OVERLAP_S:
        raise InvalidQuestion(f"The overlap is {overlap_s:g} s; it may be from 0 to {MAX_OVERLAP_S:,} s (30 days).")
    _check_expiry(expires_at)
    rotated = keys.rotate(db, find(db, name).id, overlap_s, expires_at)
    if rotated is None:
        raise NotFound(f"There is no valid key {name!r} that could be rotated.")
    return rotated


def revoke(db: Session, name: str) -> keys.ApiKey:
    """Revoke the key with this id, or of this user."""
    found = find(db, name)
    if not keys.revoke(db, found.id):
        raise NotFound(f"There is no key {name!r} that could be revoked.")
    return found


def find(db: Session, name: str) -> keys.ApiKey:
    """The key with this id, else the only valid one of the user with this name."""
    listed, now, written = keys.listed(db), time.time(), {name, normal_form(name, "NFC")}
    if by_id := [key for key in listed if key.id == name]:
        return by_id[0]
    of_user = [key for key in listed if key.user in written and key.is_valid(now)]
    if not of_user:
        raise NotFound(f"There is no key {name!r}: it has no such id, and no user of this name has a valid key.")
    if len(of_user) > 1:
        raise Conflict(f"{name!r} has several keys; use an id: {', '.join(key.id for key in of_user)}.")
    return of_user[0]


def _checked_names(db: Session, names: Sequence[str]) -> list[str]:
    """The names for a user and groups. New ones are composed (NFC), and none could be taken for another one; those that
    are in use stay as they are."""
    if len(names) > 1 + MAX_LISTED:
        raise InvalidQuestion(f"A user can have {MAX_LISTED} groups at most.")
    known = {name for key in keys.listed(db) for name in (key.user, *key.groups)}
    known.update(one.owner for one in collections.listed(db))
    return [_checked_name(written_name(name.strip(), known.__contains__), known) for name in names]


def _checked_name(name: str, known: Collection[str]) -> str:
    if not name:
        raise InvalidQuestion("A user and a group need a name that is not blank.")
    if len(name) > MAX_NAME:
        raise InvalidQuestion(f"The name of a user or a group can have {MAX_NAME} characters at most.")
    if name == queries.GUEST:
        raise InvalidQuestion(f"{name!r} cannot be the name of a user or a group: it is reserved.")
    if name not in known:
        check_lookalikes(name, "The name of a user or a group")
    return name


def written_name(name: str, is_known: Callable[[str], bool]) -> str:
    """How the records write the name of a user or a group: as it is given, if they know it so, else composed (NFC) and
    without white space around it."""
    return name if is_known(name) else normal_form(name.strip(), "NFC")


def _check_expiry(expires_at: float | None) -> None:
    if expires_at is not None and expires_at <= time.time():
        raise InvalidQuestion("The key would have expired already; choose a time that is still to come.")


def _check_limits(given: Mapping[str, float], known: Collection[str]) -> None:
    for name, number in given.items():
        if name not in known:
            raise InvalidQuestion(f"There is no limit {name[:MAX_NAME]!r}; there are: {', '.join(known)}.")
        if not math.isfinite(number) or number < 0 or (name == REQUESTS and number < 1):
            least = "1" if name == REQUESTS else "0"
            raise InvalidQuestion(f"The limit {name} is {number:g}; it must be a number from {least} on.")


def _scopes(request: KeyRequest, *, restricted: bool) -> tuple[Scope, ...]:
    may_administer = request.operator and not restricted
    wanted = request.scopes
    if wanted is None:
        return tuple(one for one in SCOPES if one != "admin" or may_administer)
    if not wanted:
        raise InvalidQuestion(f"A key needs a scope: {', '.join(SCOPES)}.")
    if "admin" in wanted and not request.operator:
        raise InvalidQuestion("The scope admin is for the keys of operators; make this an operator's key, too.")
    if "admin" in wanted and restricted:
        raise InvalidQuestion(
            "A key with the scope admin can make any other key, so restricting it to collections or grants would be "
            "of no use. Leave out admin, or the restrictions."
        )
    return tuple(one for one in SCOPES if one in wanted)


def _grants(wanted: tuple[str, ...] | None, *, operator: bool) -> Grants | None:
    if wanted is None:
        return None if operator else NO_GRANT
    if len(wanted) > MAX_LISTED:
        raise InvalidQuestion(f"A key can have {MAX_LISTED} grants at most; {ALL} grants everything.")
    for one in wanted:
        if one not in (ALL, PLANNER) and (GRANT.fullmatch(one) is None or not one.isprintable()):
            raise InvalidQuestion(
                f"{one[:MAX_NAME]!r} is no grant; there are source:NAME, mcp:NAME, model:NAME, {PLANNER} and {ALL}."
            )
    return Grants(names=tuple(dict.fromkeys(wanted)))


def _collections(db: Session, user: str, names: Sequence[str]) -> tuple[int, ...]:
    """The collections with these ids, addresses or names; of several with one name, the user's own."""
    if not 0 < len(names) <= MAX_LISTED:
        raise InvalidQuestion(f"Name 1 to {MAX_LISTED} collections, or none to restrict nothing.")
    listed, found = collections.listed(db), []
    for name in names:
        chosen = matching(name, listed, Caller(user=user))
        if not chosen:
            raise NotFound(f"There is no collection {name[:MAX_NAME]!r}.")
        if len(chosen) > 1:
            ids = ", ".join(f"{one.id} of {one.owner or 'the operator'}" for one in chosen)
            raise Conflict(f"Several collections are named {name!r}; use an id: {ids}.")
        found.append(chosen[0].key)
    return tuple(dict.fromkeys(found))
