"""Which documents a caller may see is looked up, and does not get slower with the permissions of others."""

import asyncio
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.knowledge.index.permission_classes import MIN_UNUSED, CollectionReaders, PermissionClasses
from anabranch.knowledge.model import FOLLOWS_COLLECTION, Caller, Collection, CollectionSettings, Permissions
from support.knowledge_fixtures import ALICE, BOB, workshop

NAMES = st.sampled_from(["", "alice", "bob", "carol"])
GROUPS = st.lists(st.sampled_from(["staff", "board", "alice"]), max_size=2).map(tuple)
PERMISSIONS = st.one_of(
    st.sampled_from([Permissions(visibility="public"), Permissions(visibility="private")]),
    st.builds(
        Permissions,
        visibility=st.just("restricted"),
        allowed_users=st.lists(NAMES, max_size=2).map(tuple),
        allowed_groups=GROUPS,
    ),
)
DOCUMENTS = st.lists(
    st.tuples(NAMES, st.one_of(PERMISSIONS, st.just(FOLLOWS_COLLECTION)), st.integers(1, 3)), min_size=1, max_size=12
)
CALLERS = st.builds(Caller, user=st.one_of(st.none(), NAMES.filter(bool)), groups=GROUPS, operator=st.booleans())


def collection(key: int, owner: str, permissions: Permissions) -> Collection:
    chosen = CollectionSettings(embedding_model="fake", default_permissions=permissions)
    return Collection(key=key, id=str(key), owner=owner, name="plans", description="", settings=chosen, created_at=0.0)


@settings(max_examples=200, deadline=None)
@given(documents=DOCUMENTS, caller=CALLERS, theirs=st.tuples(NAMES, PERMISSIONS))
def test_a_class_permits_whom_its_permissions_permit(
    documents: list[tuple[str, Permissions, int]], caller: Caller, theirs: tuple[str, Permissions]
) -> None:
    collections = {1: collection(1, *theirs), 2: collection(2, "bob", Permissions(visibility="private"))}
    classes = PermissionClasses()
    numbers = [classes.number(*one) for one in documents]
    readers = CollectionReaders()
    for one in collections.values():
        readers.add(one)
    readable = readers.permitting(caller)
    assert readable == {key for key, one in collections.items() if one.permits(caller)}
    permitted = classes.permitted(caller, readable)
    for (owner, permissions, where), number in zip(documents, numbers, strict=True):
        followed = collections.get(where) if permissions == FOLLOWS_COLLECTION else None
        expected = permissions.permits(caller, owner) or (followed is not None and followed.permits(caller))
        assert permitted[number] == expected, (owner, permissions, where)
    readers.remove(collections[1])
    assert readers.permitting(caller) == readable - {1}


def test_classes_that_no_document_has_are_forgotten() -> None:
    classes = PermissionClasses()
    numbers = np.zeros(3, np.int32)
    alive = np.array([True, False, True])
    alice, bob = Caller(user="alice"), Caller(user="bob")
    numbers[2] = classes.number("alice", Permissions(visibility="private"), 1)
    for change in range(5 * MIN_UNUSED):
        shared = Permissions(visibility="restricted", allowed_users=(f"user {change}", "bob"))
        numbers[0] = classes.number("mallory", shared, 1)
        classes.renumber(numbers, alive)
        assert len(classes) <= MIN_UNUSED + 5
    assert classes.permitted(bob)[numbers].tolist()[::2] == [True, False]
    assert classes.permitted(alice)[numbers].tolist()[::2] == [False, True]


async def test_callers_read_while_others_change_permissions(tmp_path: Path) -> None:
    async with workshop(tmp_path) as shop:
        await shop.collection("hers", ALICE)
        await shop.collection("his", BOB)
        await shop.put("Herons eat fish.", collection="hers", caller=ALICE)
        await shop.put("Otters eat fish.", collection="his", caller=BOB)

        async def change(some: int) -> None:
            for number in range(some * 100, some * 100 + 60):
                shared = Permissions(visibility="restricted", allowed_users=(f"user {number}",))
                await shop.room.describe(ALICE, "Herons", permissions=shared)

        changes = asyncio.gather(*map(change, range(4)))
        while not changes.done():
            pages = [shop.room.documents(BOB, "his", 0, 2) for _ in range(4)]
            assert [total for _, total in await asyncio.gather(*pages)] == [1] * 4
        await changes
