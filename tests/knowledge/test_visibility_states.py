"""Who sees what, on every surface, against a model of the rules that knows nothing of the code: collections, documents,
permissions and groups change in any order, and after each change some caller looks."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar, TypeVar
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from support.collection_server import PATIENCE_S, PEOPLE, Library, library, text
from support.embedding_server import model_server
from support.examples import FACTOR
from support.mcp_tool_client import client

T = TypeVar("T")

EXAMPLES = max(6, round(15 * FACTOR))
STEPS = 14 if FACTOR <= 1 else 40
QUESTION = "Which animal is it?"
# One word each that no other document has.
ANIMALS = ("badger", "heron", "lynx", "otter", "raven", "stoat", "viper", "wren")
PLACES = ("bank of a cold river", "roof of the old mill", "edge of a dark wood", "field behind our school")
TEXTS = [f"A {animal} lives near the {PLACES[at % 4]} since {1950 + 7 * at}." for at, animal in enumerate(ANIMALS)]
CALLERS = (*PEOPLE, "root")
NAMES = ("notes", "plans", "bob/notes")


@dataclass(frozen=True)
class Rights:
    """Who may see something besides its owner."""

    visibility: str
    users: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()

    @property
    def body(self) -> dict[str, Any]:
        return {"visibility": self.visibility, "allowed_users": self.users, "allowed_groups": self.groups}

    def include(self, who: str) -> bool:
        if self.visibility == "restricted":
            return who in self.users or any(group in self.groups for group in PEOPLE.get(who, ()))
        return self.visibility == "public"


PRIVATE = Rights("private")
rights = st.sampled_from(
    [
        PRIVATE,
        Rights("public"),
        Rights("restricted", users=("bob",)),
        Rights("restricted", groups=("staff",)),
        Rights("restricted", users=("carol",), groups=("nobody",)),
    ]
)
callers = st.sampled_from(CALLERS)


@dataclass
class Shelf:
    """A collection of the model."""

    id: str
    owner: str
    name: str
    rights: Rights
    slug: str | None = None

    @property
    def address(self) -> str:
        return f"collection:{self.owner}/{self.name.replace('/', '%2F')}"


@dataclass
class Paper:
    """A document of the model; without rights it follows its collection."""

    id: str
    owner: str
    title: str
    shelf: Shelf
    rights: Rights | None


@dataclass
class Rules:
    """What the documentation promises, in as few words as possible."""

    shelves: list[Shelf] = field(default_factory=list)
    papers: list[Paper] = field(default_factory=list)

    def reads(self, who: str | None, shelf: Shelf) -> bool:
        return who in ("root", shelf.owner) or shelf.rights.include(who or "")

    def sees(self, who: str | None, paper: Paper) -> bool:
        if who in ("root", paper.owner):
            return True
        return paper.rights.include(who or "") if paper.rights else self.reads(who, paper.shelf)

    def papers_of(self, who: str | None, shelf: Shelf | None = None) -> set[str]:
        return {one.title for one in self.papers if shelf in (None, one.shelf) and self.sees(who, one)}

    def shelves_of(self, who: str) -> list[Shelf]:
        return [one for one in self.shelves if self.reads(who, one) or self.papers_of(who, one)]

    def meant(self, who: str, name: str) -> list[Shelf]:
        """What a name stands for: nothing, one collection, or several."""
        visible = self.shelves_of(who)
        if exact := [one for one in visible if name in (one.id, one.address)]:
            return exact
        if name.startswith("collection:") and "/" in name:
            return []
        named = [one for one in visible if name.removeprefix("collection:") == one.name]
        return [one for one in named if one.owner == who] or named


class Visibility(RuleBasedStateMachine):
    shop: ClassVar[Library]
    loop: ClassVar[asyncio.AbstractEventLoop]

    def __init__(self) -> None:
        super().__init__()
        self.model = Rules()
        self.asked: list[tuple[str, str, set[str]]] = []
        self.spare = list(range(len(TEXTS)))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE_S)

    def call(self, method: str, path: str, body: Any = None, *, who: str) -> tuple[int, Any]:
        reply = self.run(self.shop.call(method, path, body, who=who))
        return reply.status, reply.body

    # --- what changes

    @initialize(owner=st.sampled_from(["alice", "bob"]), given=st.none() | rights)
    def begin(self, owner: str, given: Rights | None) -> None:
        for left in self.call("GET", "/v1/collections", who="root")[1]["collections"]:  # by a failed example
            self.call("DELETE", f"/v1/collections/{left['id']}", who="root")
        self.create(owner, "notes", given)
        self.create("bob" if owner == "alice" else "alice", "notes", Rights("public"))
        self.ingest(self.model.shelves[0], owner, None)

    @rule(who=callers, name=st.sampled_from(NAMES), given=st.none() | rights)
    def create(self, who: str, name: str, given: Rights | None) -> None:
        body = {"name": name, "settings": {"default_permissions": given.body} if given else {}}
        status, made = self.call("POST", "/v1/collections", body, who=who)
        if any((one.owner, one.name) == (who, name) for one in self.model.shelves):
            assert status == 409, made
        else:
            assert (status, made["owner"]) == (201, who), made
            self.model.shelves.append(Shelf(made["id"], who, name, given or PRIVATE))

    @precondition(lambda self: self.spare and self.model.shelves)
    @rule(data=st.data(), who=callers, given=st.none() | rights)
    def add_document(self, data: st.DataObject, who: str, given: Rights | None) -> None:
        self.ingest(data.draw(st.sampled_from(self.model.shelves)), who, given)

    def ingest(self, shelf: Shelf, who: str, given: Rights | None) -> None:
        at = self.spare[0]
        document = text(TEXTS[at], title=ANIMALS[at], **({"permissions": given.body} if given else {}))
        body = {"collection_id": shelf.id, "documents": [document]}
        status, accepted = self.call("POST", "/v1/ingest", body, who=who)
        if who not in ("root", shelf.owner):
            assert status == (403 if shelf in self.model.shelves_of(who) else 404), accepted
            return
        self.spare.pop(0)
        [item] = self.run(self.shop.job(accepted["job_id"], who=who))["documents"]
        assert item["status"] == "completed", item
        self.model.papers.append(Paper(item["id"], who, ANIMALS[at], shelf, given))

    @precondition(lambda self: self.model.papers)
    @rule(data=st.data(), who=callers, given=st.none() | rights)
    def change_document(self, data: st.DataObject, who: str, given: Rights | None) -> None:
        paper = data.draw(st.sampled_from(self.model.papers))
        body = {"permissions": given.body if given else {"visibility": "collection"}}
        status, said = self.call("PATCH", f"/v1/documents/{paper.id}", body, who=who)
        if who in ("root", paper.owner):
            assert status == 200, said
            paper.rights = given
        else:
            assert status == (403 if self.model.sees(who, paper) else 404), said

    @precondition(lambda self: self.model.shelves)
    @rule(data=st.data(), who=callers, given=rights)
    def change_collection(self, data: st.DataObject, who: str, given: Rights) -> None:
        shelf = data.draw(st.sampled_from(self.model.shelves))
        status, said = self.call("PATCH", f"/v1/collections/{shelf.id}", {"default_permissions": given.body}, who=who)
        if who in ("root", shelf.owner):
            assert status == 200, said
            shelf.rights = given
        else:
            assert status == (403 if shelf in self.model.shelves_of(who) else 404), said

    @precondition(lambda self: self.model.papers)
    @rule(data=st.data(), who=callers)
    def delete_document(self, data: st.DataObject, who: str) -> None:
        paper = data.draw(st.sampled_from(self.model.papers))
        status, said = self.call("DELETE", f"/v1/documents/{paper.id}", who=who)
        if who in ("root", paper.owner):
            assert status == 200, said
            self.model.papers.remove(paper)
        else:
            assert status == (403 if self.model.sees(who, paper) else 404), said

    @precondition(lambda self: len(self.model.shelves) > 1)
    @rule(data=st.data())
    def delete_collection(self, data: st.DataObject) -> None:
        self.remove(data.draw(st.sampled_from(self.model.shelves)))

    def remove(self, shelf: Shelf) -> None:
        assert self.call("DELETE", f"/v1/collections/{shelf.id}", who="root")[0] == 200
        self.model.shelves.remove(shelf)
        self.model.papers = [one for one in self.model.papers if one.shelf is not shelf]

    @precondition(lambda self: any(one.slug is None for one in self.model.shelves))
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        shelf = data.draw(st.sampled_from([one for one in self.model.shelves if one.slug is None]))
        slug = f"s{shelf.id[-12:]}"
        status, said = self.call("PUT", f"/v1/collections/{shelf.id}/endpoint", {"as": f"root/{slug}"}, who="root")
        assert status == 200, said
        shelf.slug = slug

    # --- what is seen

    @rule(who=callers, name=st.sampled_from([*NAMES, "collection:notes", "collection:alice/notes", "nothing"]))
    def name_a_collection(self, who: str, name: str) -> None:
        meant = self.model.meant(who, name)
        expected = 404 if not meant else 200 if len(meant) == 1 else 409
        status, found = self.call("GET", f"/v1/collections/{quote(name, safe='')}", who=who)
        assert status == expected, (found, meant)
        queried, answer = self.call("POST", "/v1/query", {"query": QUESTION, "collections": [name]}, who=who)
        assert queried == expected, answer
        if expected == 200:
            assert found["id"] == meant[0].id
            assert {one["title"] for one in answer["sources"]} == self.model.papers_of(who, meant[0])
        if expected == 409:
            assert all(one.address in found["message"] or one.id in found["message"] for one in meant)
            hidden = [one for one in self.model.shelves if one not in self.model.shelves_of(who)]
            assert not any(one.id in found["message"] or one.address in found["message"] for one in hidden)

    @rule(who=callers)
    def ask(self, who: str) -> None:
        status, answer = self.call("POST", "/v1/query", {"query": QUESTION, "settings": {"top_k": 20}}, who=who)
        assert status == 200, answer
        seen = self.model.papers_of(who)
        assert {one["title"] for one in answer["sources"]} == seen
        owners = {one.title: one.shelf.owner for one in self.model.papers}
        assert all(one["owner"] == owners[one["title"]] for one in answer["sources"])
        self.check_text(answer, seen)
        self.asked.append((who, answer["query_id"], {one["document_id"] for one in answer["sources"]}))

    @rule(who=callers)
    def list_and_get(self, who: str) -> None:
        shelves = self.model.shelves_of(who)
        _, listed = self.call("GET", "/v1/collections", who=who)
        counts = {one["id"]: one["document_count"] for one in listed["collections"]}
        assert counts == {one.id: len(self.model.papers_of(who, one)) for one in shelves}
        _, page = self.call("GET", "/v1/documents", who=who)
        assert {one["title"] for one in page["documents"]} == self.model.papers_of(who)
        assert page["total"] == len(self.model.papers_of(who))
        for paper in self.model.papers:
            for name in (paper.id, paper.title):
                status, found = self.call("GET", f"/v1/documents/{name}", who=who)
                assert status == (200 if self.model.sees(who, paper) else 404), found
                assert self.model.sees(who, paper) or paper.id == name or paper.id not in str(found)

    @rule(who=callers)
    def list_sources_and_models(self, who: str) -> None:
        shelves = self.model.shelves_of(who)
        _, listed = self.call("GET", "/v1/sources", who=who)
        named = [one for one in listed["sources"] if one["configured"] == "collection"]
        assert [self.model.meant(who, one["name"]) for one in named] == [[one] for one in shelves]
        _, models = self.call("GET", "/v1/models", who=who)
        ids = [one["id"] for one in models["data"] if one["id"].startswith("collection:")]
        assert [self.model.meant(who, one) or [one.removeprefix("collection:")] for one in ids] == [
            [one] if self.model.meant(who, name) else [one.id] for one, name in zip(shelves, ids, strict=True)
        ]

    @rule(who=callers)
    def stream_and_chat(self, who: str) -> None:
        seen = self.model.papers_of(who)
        status, streamed = self.call("POST", "/rag/stream", {"query": QUESTION, "top_k": 8, "threshold": 0}, who=who)
        assert status == 200, streamed
        self.check_text(streamed, seen)
        for shelf in self.model.shelves:
            sources = [{"slug": shelf.address}]
            body = {"prompt": QUESTION, "data_sources": sources, "top_k": 20, "similarity_threshold": 0}
            _, answer = self.call("POST", "/api/v1/chat", body, who=who)
            assert set(answer["sources"]) == self.model.papers_of(who, shelf), answer
            self.check_text(answer, seen)

    @precondition(lambda self: any(one.slug for one in self.model.shelves))
    @rule(who=callers)
    def ask_published(self, who: str) -> None:
        for shelf in self.model.shelves:
            if shelf.slug is None:
                continue
            body, path = {"messages": QUESTION, "limit": 20}, f"/api/v1/endpoints/root/{shelf.slug}/query"
            for caller, headers in ((who, {}), (None, {})):
                reply = self.run(self.shop.call("POST", path, body, who=caller, headers=headers))
                found = {one["content"] for one in reply.body["references"]["documents"]}
                expected = self.model.papers_of(caller, shelf)
                assert found == {TEXTS[ANIMALS.index(one)] for one in expected}, (caller, shelf)

    @rule(who=callers)
    def use_tools(self, who: str) -> None:
        async def search() -> Any:
            async with client(self.shop, who=who) as tools:
                everything = await tools.call_tool("search", {"query": QUESTION, "limit": 20})
                asked = await tools.call_tool("ask", {"question": QUESTION})
                return everything.structured_content, asked.structured_content

        found, asked = self.run(search())
        assert {one["title"] for one in found["results"]} == self.model.papers_of(who)
        self.check_text(asked, self.model.papers_of(who))

    @precondition(lambda self: self.asked)
    @rule(who=callers)
    def export_questions(self, who: str) -> None:
        """What the log of questions tells is what its reader may see now."""
        for asker, query, found in self.asked[-3:]:
            status, entry = self.call("GET", f"/v1/queries/{query}", who=who)
            assert status == (200 if who in ("root", asker) else 404), entry
            if status == 200:
                seen = {one.id: one.title for one in self.model.papers if self.model.sees(who, one)}
                assert entry["answer_withheld"] == bool(found - seen.keys())
                self.check_text({**entry, "query": ""}, {seen[one] for one in found & seen.keys()})

    def check_text(self, said: Any, seen: set[str]) -> None:
        """No word of a document that is hidden."""
        assert {one for one in ANIMALS if one in str(said)} <= seen

    def teardown(self) -> None:
        for who in CALLERS if self.model.shelves else ():
            self.list_and_get(who)
            self.ask(who)


@asynccontextmanager
async def shop(folder: Path, models_dir: Path) -> AsyncIterator[Library]:
    async with model_server() as models:
        embedding = {"embedding_url": models.url, "embedding_model": "fake-128"}
        async with library(
            folder, models_dir, default_visibility=None, verify="off", rate_limit=0, **embedding
        ) as opened:
            yield opened


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[type[Visibility]]:
    """The server runs in a thread: it must not stand still while the next steps are chosen."""
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever)
    thread.start()
    opening, Visibility.loop = shop(tmp_path / "data", tmp_path / "models"), loop
    Visibility.shop = asyncio.run_coroutine_threadsafe(opening.__aenter__(), loop).result(PATIENCE_S)
    yield Visibility
    asyncio.run_coroutine_threadsafe(opening.__aexit__(None, None, None), loop).result(PATIENCE_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.mark.timeout(900)
def test_what_a_caller_sees_is_what_the_rules_say(machine: type[Visibility]) -> None:
    profile = settings(
        max_examples=EXAMPLES,
        phases=(Phase.generate,),
        stateful_step_count=STEPS,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=profile)
