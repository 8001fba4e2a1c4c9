"""Documents as a caller sees them, stored or not stored yet: a page of a list, or one by its id, file name or title."""

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from anabranch.domain.errors import Conflict, NotFound
from anabranch.domain.model import Value
from anabranch.knowledge.index.catalog import Catalog
from anabranch.knowledge.model import Caller, DocumentStatus, StoredDocument
from anabranch.knowledge.records import attributes, collections, documents, open_items
from anabranch.knowledge.records.database import Session, is_id
from anabranch.knowledge.records.open_items import ITEM_KEYS, OpenName

MAX_CANDIDATES = 10
# A similar name is searched among so many documents, and if it is not longer than this: each comparison is quadratic.
MAX_SIMILAR = 300
MAX_SIMILAR_NAME = 100
# How similar, of 100, and how many are shown.
MIN_SIMILARITY = 70
MAX_HINTS = 3
# So many open items are searched for a name.
MAX_OPEN = 10_000
MAX_NAME = 500
MAX_SHOWN = 200


class ListFilter(Value):
    """Which documents a list has. Without a `status`: those of which a version is stored."""

    collection: int | None = None
    status: DocumentStatus | Literal["all"] | None = None
    connector_id: str | None = None


def page(
    db: Session, catalog: Catalog, caller: Caller, wanted: ListFilter, after: int, limit: int
) -> tuple[list[StoredDocument], int]:
    """The documents after a key, stored ones first, and how many there are in total. There may be fewer than the limit,
    although others follow, if they have much metadata."""
    found: list[StoredDocument] = []
    total = 0
    if wanted.status in (None, "all", "completed"):
        found, total = _stored_page(db, catalog, caller, wanted, after, limit)
    if wanted.status in (None, "completed"):
        return found, total
    items, open_total = open_items.listed(
        db,
        caller,
        collection=wanted.collection,
        status=None if wanted.status == "all" else wanted.status,
        connector_id=wanted.connector_id,
        unstored=wanted.status == "all",
        after=max(0, after - ITEM_KEYS),
        limit=limit - len(found),
    )
    stored = documents.visible_by_ids(db, caller, [item.document_id for item in items])
    by_id = {one.id: one for one in stored}
    for item in items:
        one = by_id.get(item.document_id)
        found.append(item.document if one is None else item.over(one, key=ITEM_KEYS + item.key))
    return found, total + open_total


def _stored_page(
    db: Session, catalog: Catalog, caller: Caller, wanted: ListFilter, after: int, limit: int
) -> tuple[list[StoredDocument], int]:
    permitted = catalog.permitted(caller)
    if wanted.connector_id is not None:
        permitted &= catalog.with_attribute(db, attributes.CONNECTOR, attributes.comparable(wanted.connector_id))
    if wanted.status == "completed":
        permitted[open_items.stored_documents(db, caller)] = False
    keys = catalog.keys(wanted.collection, permitted)
    begin = int(np.searchsorted(keys, after, side="right"))
    some = documents.first_of(db, keys[begin : begin + limit].tolist())
    return with_states(db, caller, documents.by_keys(db, some)), len(keys)


def with_states(db: Session, caller: Caller, stored: Iterable[StoredDocument]) -> list[StoredDocument]:
    """The documents, each with the state of a newer version that is not stored yet, if the caller owns it."""
    listed = list(stored)
    newer = open_items.by_documents(db, caller, [one.id for one in listed])
    return [newer[one.id].over(one) if one.id in newer else one for one in listed]


def find(db: Session, caller: Caller, name: str) -> StoredDocument:
    """The document with this id, else file name, else title, else either of them ignoring case. What has the form of an
    id is no name: it would stand for another document once that one is hidden or deleted. NotFound if the caller can
    see none, Conflict if several have the name."""
    for one in documents.visible_by_ids(db, caller, [name]):
        return with_states(db, caller, [one])[0]
    for item in open_items.by_documents(db, caller, [name]).values():
        return item.document
    if is_id(name):
        raise NotFound(f"There is no document {name!r}.")
    if len(name) <= MAX_NAME and (matches := _stored_matches(db, caller, name) or _open_matches(db, caller, name)):
        return with_states(db, caller, [_only(db, name, matches)])[0]
    raise NotFound(f"There is no document {name[:MAX_SHOWN]!r}.")


def find_only(db: Session, caller: Caller, name: str) -> StoredDocument:
    """The document with this id, else the only one that has this file name or title, ignoring case. Conflict if several
    have it: for what cannot be undone, no kind of name comes before another."""
    if len(name) <= MAX_NAME and not is_id(name) and not _has_id(db, caller, name):
        stored = _stored_matches(db, caller, name, exact=False)
        opened = [item.document for item in _open_named(db, caller, name, exact=False).values()]
        matches = {one.id: one for one in (*opened, *stored)}
        if len(matches) > 1:
            _only(db, name, [*matches.values()])
    return find(db, caller, name)


def _has_id(db: Session, caller: Caller, name: str) -> bool:
    return bool(documents.visible_by_ids(db, caller, [name]) or open_items.by_documents(db, caller, [name]))


def find_failed(db: Session, caller: Caller, name: str) -> open_items.OpenItem:
    """The failed document with this id or name, among those that the caller owns. If there is none: Conflict for a
    document that has not failed, else NotFound."""
    for item in open_items.by_documents(db, caller, [name]).values():
        if item.status == "failed":
            return item
    if not is_id(name) and (failed := _open_named(db, caller, name, status="failed")):
        return failed[_only(db, name, [item.document for item in failed.values()]).id]
    found = find(db, caller, name)
    raise Conflict(f"{found.title!r} is {found.status}; only a document that has failed can be retried.")


def _stored_matches(db: Session, caller: Caller, name: str, *, exact: bool = True) -> list[StoredDocument]:
    """The stored documents with this file name, else with this title, else with either of them ignoring case; one more
    than an error shows. Without `exact`, the last at once."""
    limit = MAX_CANDIDATES + 1
    for column in documents.NAME_COLUMNS if exact else ():
        if found := documents.named(db, caller, column, name, limit):
            return found
    either = [
        one
        for column in documents.NAME_COLUMNS
        for one in documents.named(db, caller, column, name, limit, ignore_case=True)
    ]
    return list({one.id: one for one in either}.values())[:limit]


def _open_matches(db: Session, caller: Caller, name: str) -> list[StoredDocument]:
    return [item.document for item in _open_named(db, caller, name).values()]


def _open_named(
    db: Session, caller: Caller, name: str, status: DocumentStatus | None = None, *, exact: bool = True
) -> dict[str, open_items.OpenItem]:
    """As `_stored_matches`, among the caller's open items. Only those that match are read whole: the metadata of all
    could be gigabytes."""
    by_filename, by_title, ignoring_case = [], [], []
    folded = name.casefold()
    for one in open_items.names(db, caller, MAX_OPEN, status):
        if one.filename == name:
            by_filename.append(one)
        if one.title == name:
            by_title.append(one)
        if folded in ((one.filename or "").casefold(), one.title.casefold()):
            ignoring_case.append(one)
    matches: list[OpenName] = (exact and (by_filename or by_title)) or ignoring_case
    return open_items.by_documents(db, caller, [one.document_id for one in matches[: MAX_CANDIDATES + 1]])


def _only(db: Session, name: str, matches: Sequence[StoredDocument]) -> StoredDocument:
    if len(matches) == 1:
        return matches[0]
    names = {one.key: one.name for one in collections.listed(db)}
    shown = [
        f"{one.id} ({', '.join(repr(told) for told in (one.filename, one.title) if told)} in "
        f"{names.get(one.collection, '')!r})"
        for one in matches[:MAX_CANDIDATES]
    ]
    more = f", and more than {MAX_CANDIDATES} in all" if len(matches) > MAX_CANDIDATES else ""
    raise Conflict(f"Several documents are named {name!r}; use an id: {', '.join(shown)}{more}.")


def similar(db: Session, catalog: Catalog, caller: Caller, name: str) -> str:
    """A hint at documents with a similar name, among the newest that the caller can see; none for what is an id."""
    if len(name) > MAX_SIMILAR_NAME or is_id(name):
        return ""
    from rapidfuzz import fuzz, process  # noqa: PLC0415  few requests need it

    newest = catalog.keys(None, catalog.permitted(caller))[-MAX_SIMILAR:]
    names = documents.names_of(db, newest.tolist())
    by_folded = {known.casefold(): known for known in names if len(known) <= MAX_SIMILAR_NAME}
    close = process.extract(
        name.casefold(), list(by_folded), scorer=fuzz.ratio, limit=MAX_HINTS, score_cutoff=MIN_SIMILARITY
    )
    return f" Did you mean {' or '.join(repr(by_folded[one]) for one, *_ in close)}?" if close else ""
