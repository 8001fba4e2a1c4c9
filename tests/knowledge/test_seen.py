"""The digest that keys cached answers: never equal for callers, or moments, that may find something else."""

import asyncio
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.domain.model import Filters
from anabranch.knowledge.model import Caller, Permissions
from support.examples import FACTOR
from support.knowledge_fixtures import ALICE, BOB, GUEST, OPERATOR, Workshop, workshop
from support.random_library import RandomLibrary

PRIVATE = Permissions(visibility="private")
MOMENTS, QUESTIONS = 4, 20


async def found_by_digest(shop: Workshop, seed: int) -> None:
    """Whatever has the same digest finds the same documents, in the same version."""
    library = RandomLibrary(shop, seed)
    await library.fill()
    known: dict[str, frozenset[tuple[str, str, float]]] = {}
    asked = [library.asked() for _ in range(QUESTIONS)]
    for _ in range(MOMENTS):
        for caller, query in [(await library.restricted(one.caller), one.query) for one in asked]:
            seen = await shop.room.seen(query.filters, caller)
            hits = await shop.room.find(query, caller)
            assert hits.seen == seen
            ids = {one.document_id for one in hits.passages if one.document_id is not None}
            stored = [await shop.room.document(caller, one) for one in sorted(ids)]
            found = frozenset((one.id, one.title, one.updated_at) for one in stored)
            assert known.setdefault(seen, found) == found
        await library.change()
    await library.clear()


def test_equal_digests_find_equal_documents(tmp_path: Path) -> None:
    @settings(max_examples=round(10 * FACTOR), deadline=None, database=None)
    @given(seed=st.integers(0, 2**32))
    def check(seed: int) -> None:
        runner.run(found_by_digest(shop, seed))

    with asyncio.Runner() as runner:
        opened = workshop(tmp_path)
        shop = runner.run(opened.__aenter__())
        check()
        runner.run(opened.__aexit__(None, None, None))


async def test_callers_who_may_find_the_same_have_the_same_digest(tmp_path: Path) -> None:
    async with workshop(tmp_path) as shop, workshop(tmp_path) as other:
        await shop.collection()
        await shop.put("Herons eat fish.")
        everything = Filters()
        guest = await shop.room.seen(everything, GUEST)
        assert {await one.room.seen(everything, caller) for one in (shop, other) for caller in (ALICE, GUEST)} == {
            guest
        }
        await shop.put("Otters eat fish.", permissions=Permissions(visibility="restricted", allowed_users=("bob",)))
        alice, bob, nobody, operator = [await shop.room.seen(everything, one) for one in (ALICE, BOB, GUEST, OPERATOR)]
        assert alice == nobody != guest
        assert bob == operator != alice
        assert alice != await shop.room.seen(Filters(tags=("fish",)), ALICE)


async def test_every_change_changes_the_digest_in_every_process(tmp_path: Path) -> None:
    async with workshop(tmp_path) as shop, workshop(tmp_path) as other:
        await shop.collection()
        await shop.put("Herons eat fish.", "Otters eat fish.")
        listed, _ = await shop.room.documents(OPERATOR, None, 0, 10)
        digests = [await other.room.seen(Filters(), BOB)]

        async def changed(caller: Caller = BOB) -> None:
            digests.append(await shop.room.seen(Filters(), caller))
            assert await other.room.seen(Filters(), caller) == digests[-1]

        await shop.room.describe(OPERATOR, listed[0].id, metadata={"n": 1})
        await changed()
        await shop.room.describe(OPERATOR, listed[0].id, permissions=PRIVATE)
        await changed()
        await shop.room.delete_document(OPERATOR, listed[1].id)
        await changed()
        await shop.put("Otters eat fish.")
        await changed()
        await shop.room.describe_collection(OPERATOR, "notes", permissions=PRIVATE)
        await changed()
        assert len(set(digests)) == len(digests)
        async with workshop(tmp_path) as later:  # one that begins now has not read the changes one by one
            assert await later.room.seen(Filters(), OPERATOR) == await shop.room.seen(Filters(), OPERATOR)
