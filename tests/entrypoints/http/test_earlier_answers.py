"""Earlier answers that a model reads again, by their conversation or by their ids: on what its answer then rests, and
with which keys they are read."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from anabranch.domain.model import Message
from anabranch.testing import Space
from support.collection_server import Library, library, text

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("knowledge-api-2")]

RESTRICTED = {"visibility": "restricted", "allowed_users": ["bob"]}
FOR_STAFF = {"visibility": "restricted", "allowed_groups": ["staff"]}
CODE = "The harbour code is 4711."
QUESTION = "What is the harbour code, and what does the tank of the boat hold?"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def space() -> AsyncIterator[Space]:
    async with Space(everything=True) as opened:
        yield opened


def repeats(messages: Sequence[Message]) -> str:
    """A model that repeats what it has read about the harbour, from passages and earlier answers."""
    said = " ".join(one.content for one in messages if one.role != "system")
    return "The harbour code is 4711 [1]." if "4711" in said else "That is not known [1]."


@asynccontextmanager
async def harbour(
    folder: Path, models_dir: Path, space: Space, permissions: Any = RESTRICTED
) -> AsyncIterator[Library]:
    """Two collections of alice's: everybody may see one document, and the permissions say who may see the other."""
    space.model("parrot", reply=repeats)
    async with library(folder, models_dir, model_url=space.url, model_name="parrot") as there:
        for name, given, content in (
            ("codes", permissions, CODE),
            ("boats", {"visibility": "public"}, "The tank of the boat holds 20 l."),
        ):
            await there.collection(name, who="alice", default_permissions=given)
            await there.ingest(name, text(content, title=name, id=name), who="alice")
        yield there


async def hide(there: Library, hidden: str) -> None:
    documents = await there.good("GET", "/v1/documents", who="alice")
    (code,) = [one["id"] for one in documents["documents"] if one["title"] == "codes"]
    private: dict[str, Any] = {"visibility": "private"}
    method, path, body = {
        "document deleted": ("DELETE", f"/v1/documents/{code}", None),
        "document private": ("PATCH", f"/v1/documents/{code}", {"permissions": private}),
        "collection deleted": ("DELETE", "/v1/collections/codes", None),
        "collection private": ("PATCH", "/v1/collections/codes", {"default_permissions": private}),
    }[hidden]
    await there.good(method, path, body, who="alice")


@pytest.mark.parametrize("hidden", ["document deleted", "document private", "collection deleted", "collection private"])
async def test_a_later_turn_that_rests_on_a_hidden_document_is_withheld_and_not_read_again(
    tmp_path: Path, models_dir: Path, space: Space, hidden: str
) -> None:
    async with harbour(tmp_path, models_dir, space) as there:

        async def ask(collection: str) -> Any:
            return await there.ask(QUESTION, who="bob", conversation_id="talk", collections=[collection])

        first = await ask("codes")
        later = [await ask("boats") for _ in range(7)]
        assert all("4711" in one["answer"] for one in (first, *later))
        shared = f"/v1/queries/{later[-1]['query_id']}"
        await there.good("POST", f"{shared}/share", {"shared": True}, who="bob")
        assert [(await there.call("GET", shared, who=who)).status for who in ("alice", "carol")] == [200, 404]
        await hide(there, hidden)
        for one in (first, *later):
            entry = await there.good("GET", f"/v1/queries/{one['query_id']}", who="bob")
            assert (entry["answer"], entry["answer_withheld"]) == (None, True)
            assert "4711" not in json.dumps(entry)
        after = await ask("boats")
        entry = await there.good("GET", f"/v1/queries/{after['query_id']}", who="bob")
    assert "4711" not in after["answer"]
    assert (entry["answer"], entry["answer_withheld"]) == (after["answer"], False), "it was asked without these turns"


async def respond(there: Library, who: str, collection: str, *items: str, **more: Any) -> Any:
    """A response to the question, with earlier answers before it."""
    referenced = [{"type": "item_reference", "id": one} for one in items]
    said = {"model": f"collection:{collection}", "input": [*referenced, {"role": "user", "content": QUESTION}]}
    return await there.good("POST", "/v1/responses", {**said, **more}, who=who)


def item(response: Any) -> str:
    return str(response["output"][0]["id"])


@pytest.mark.parametrize("hidden", ["document deleted", "document private"])
async def test_an_answer_that_has_read_another_one_by_its_id_rests_on_its_documents(
    tmp_path: Path, models_dir: Path, space: Space, hidden: str
) -> None:
    async with harbour(tmp_path, models_dir, space) as there:
        first = await respond(there, "bob", "codes")
        second = await respond(there, "bob", "boats", item(first))
        third = await respond(there, "bob", "boats", item(second))
        paths = [f"/v1/queries/{one['anabranch']['query_id']}" for one in (second, third)]
        for one, path in zip((second, third), paths, strict=True):
            assert "4711" in one["output"][0]["content"][0]["text"]
            await there.good("POST", f"{path}/share", {"shared": True}, who="bob")
            assert [(await there.call("GET", path, who=who)).status for who in ("alice", "carol")] == [200, 404]
        await hide(there, hidden)
        for path in paths:
            entry = await there.good("GET", path, who="bob")
            assert (entry["answer"], entry["answer_withheld"]) == (None, True)
        after = await respond(there, "bob", "boats", item(first), item(second), item(third))
        entry = await there.good("GET", f"/v1/queries/{after['anabranch']['query_id']}", who="bob")
    assert "4711" not in json.dumps(after), "withheld answers are not read again"
    assert not entry["answer_withheld"]


async def test_an_answer_is_read_by_its_id_together_with_the_conversation(
    tmp_path: Path, models_dir: Path, space: Space
) -> None:
    """What the question rests on is what either rests on."""
    async with harbour(tmp_path, models_dir, space) as there:
        first = await respond(there, "bob", "codes")
        other = await respond(there, "bob", "boats")
        both = await respond(there, "bob", "boats", item(first), previous_response_id=other["id"])
        path = f"/v1/queries/{both['anabranch']['query_id']}"
        await hide(there, "document private")
        assert (await there.good("GET", path, who="bob"))["answer_withheld"]


async def test_a_key_reads_no_answers_that_were_given_to_a_key_of_the_user_with_more_groups(
    tmp_path: Path, models_dir: Path, space: Space
) -> None:
    """They can quote a version of a document that it had no right to."""
    async with harbour(tmp_path, models_dir, space, FOR_STAFF) as there:
        for name, groups in (("staff", ["staff"]), ("plain", [])):
            made = await there.good("POST", "/v1/keys", {"user": "dora", "groups": groups}, who="root")
            there.secrets[name] = made["key"]
        first = await respond(there, "staff", "codes")
        assert "4711" in json.dumps(first)
        said = first["anabranch"]
        published = text("The harbour code has no number.", title="codes", id="codes")
        await there.ingest("codes", {**published, "permissions": {"visibility": "public"}}, who="alice")
        path, talk = f"/v1/queries/{said['query_id']}", {"conversation_id": said["conversation_id"]}
        assert (await there.call("GET", path, who="plain")).status == 404
        assert (await there.good("GET", "/v1/queries", who="plain"))["queries"] == []
        assert "4711" not in json.dumps(await there.ask(QUESTION, who="plain", collections=["boats"], **talk))
        by_id = {"model": "all", "input": [{"type": "item_reference", "id": item(first)}]}
        for body in (by_id, {"model": "all", "input": QUESTION, "previous_response_id": first["id"]}):
            assert (await there.call("POST", "/v1/responses", body, who="plain")).status == 400
        assert "4711" in (await there.good("GET", path, who="staff"))["answer"], "it was asked with this key"
        assert "4711" in json.dumps(await there.ask(QUESTION, who="staff", collections=["boats"], **talk))
