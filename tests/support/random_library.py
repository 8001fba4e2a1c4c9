"""A library of random documents and permissions that changes at random, and random questions to it. Two libraries with
the same seed do the same, wherever their records and their index are."""

from collections.abc import Mapping
from random import Random
from typing import Any, NamedTuple

from anabranch.domain.model import Filters, Query
from anabranch.domain.rights import Rights
from anabranch.knowledge.model import FOLLOWS_COLLECTION, Caller, Permissions
from support.knowledge_fixtures import OPERATOR, Workshop

OWNERS = (OPERATOR, Caller(user="alice"), Caller(user="bob"))
USERS = ("alice", "bob", "carol", "")
GROUPS = ("staff", "board", "alice")
WORDS = ("heron", "otter", "river", "mill", "bridge", "salt", "ink", "owl", "winter", "fish", "Berlin", "1851")
COLOURS = ("red", "blue")
DAYS = ("2021-03-01", "2022-03-01", "2023-03-01")
PARAGRAPHS = ("{}", "- {}\n- and more", "# {}\n\n{} again.\n")


class Asked(NamedTuple):
    """A question, and who asks it."""

    caller: Caller
    query: Query


class RandomLibrary:
    def __init__(self, shop: Workshop, seed: int) -> None:
        self._shop = shop
        self._random = Random(seed)
        self._collections: list[str] = []
        self._documents: list[str] = []

    async def fill(self, collections: int = 3, documents: int = 14) -> None:
        for number in range(collections):
            owner = self._random.choice(OWNERS)
            permissions = self._permissions()
            await self._shop.room.create_collection(owner, f"c{number}", default_permissions=permissions)
            self._collections.append(f"c{number}")
        for _ in range(documents):
            await self._add()

    async def change(self, times: int = 5) -> None:
        for _ in range(times):
            changes = (self._add, self._describe, self._describe, self._delete, self._change_collection, self._update)
            await self._random.choice(changes)()

    async def _update(self) -> None:
        """Update the index in the middle."""
        self._shop.writer.fold()

    async def clear(self) -> None:
        for name in self._collections:
            await self._shop.room.delete_collection(OPERATOR, name)

    def asked(self) -> Asked:
        random = self._random
        groups = tuple(random.sample(GROUPS, random.randint(0, 2)))
        user = random.choice((None, "alice", "bob", "carol"))
        caller = Caller(user=user, groups=groups if user else (), operator=random.random() < 0.1)
        return Asked(caller, Query(text=self._words(), limit=50, similarity_threshold=0.0, filters=self._filters()))

    async def restricted(self, caller: Caller) -> Caller:
        """The caller, sometimes with a key for some of the collections only."""
        if self._random.random() > 0.2:
            return caller
        chosen = self._random.sample(self._collections, self._random.randint(0, len(self._collections)))
        found = [(await self._shop.room.collection(OPERATOR, one)).collection.key for one in chosen]
        return Caller(user=caller.user, groups=caller.groups, rights=Rights(collections=tuple(sorted(found))))

    async def _add(self) -> None:
        random = self._random
        collection = random.choice(self._collections)
        owner = (await self._shop.room.collection(OPERATOR, collection)).collection.owner
        words = [self._words() for _ in range(random.randint(1, 3))]
        name = random.choice([f"d{len(self._documents)}", *self._documents])
        content = "\n\n".join(random.choice(PARAGRAPHS).replace("{}", one) for one in words)
        given = random.choice((None, FOLLOWS_COLLECTION, self._permissions()))
        await self._shop.put(
            f"{name} {content}",
            collection=collection,
            caller=Caller(user=owner) if owner else OPERATOR,
            permissions=given,
            filename="text.md",
            metadata=self._metadata(),
        )
        self._documents.append(name)

    async def _stored(self) -> list[str]:
        listed, _ = await self._shop.room.documents(OPERATOR, None, 0, 1_000)
        return [one.id for one in listed]

    async def _describe(self) -> None:
        if stored := await self._stored():
            change = self._random.choice(({"permissions": self._permissions()}, {"metadata": self._metadata()}, {}))
            given: dict[str, Any] = change or {"title": self._words()}
            await self._shop.room.describe(OPERATOR, self._random.choice(stored), **given)

    async def _delete(self) -> None:
        if stored := await self._stored():
            await self._shop.room.delete_document(OPERATOR, self._random.choice(stored))

    async def _change_collection(self) -> None:
        chosen = self._random.choice(self._collections)
        await self._shop.room.describe_collection(OPERATOR, chosen, permissions=self._permissions())

    def _words(self) -> str:
        return " ".join(self._random.choices(WORDS, k=self._random.randint(1, 4)))

    def _metadata(self) -> Mapping[str, Any]:
        random = self._random
        return {"colour": random.choice(COLOURS), "n": random.randint(1, 2), "tags": random.sample(WORDS[:3], 2)} | (
            {"created_date": random.choice(DAYS)} if random.random() < 0.7 else {}
        )

    def _permissions(self) -> Permissions:
        random = self._random
        users = tuple(one for one in random.sample(USERS, random.randint(0, 2)) if one)
        groups = tuple(random.sample(GROUPS, random.randint(0, 1)))
        restricted = Permissions(visibility="restricted", allowed_users=users, allowed_groups=groups)
        return random.choice((Permissions(visibility="public"), Permissions(visibility="private"), restricted))

    def _filters(self) -> Filters:
        random = self._random
        given: dict[str, Any] = {}
        if random.random() < 0.2:
            given["collections"] = tuple(random.sample(self._collections, random.randint(1, 2)))
        if random.random() < 0.2:
            given["metadata"] = random.choice(({"colour": "red"}, {"n": 1}, {"n": "2", "colour": "blue"}))
        if random.random() < 0.1:
            given["tags"] = (random.choice(WORDS[:3]),)
        if random.random() < 0.1:
            given["start"], given["end"] = sorted(random.choices(DAYS, k=2))
        if random.random() < 0.1:
            given["chunk_types"] = random.choice((("paragraph",), ("list",), ("heading", "paragraph")))
        return Filters(**given)
