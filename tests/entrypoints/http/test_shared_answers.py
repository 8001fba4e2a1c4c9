"""Answers that their askers share: what is kept of them, who may read them, and what others learn."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from support.collection_server import Library, library, text

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("shared-answers")]

OPEN = "The reading room opens at nine. It closes at six on every day but Sunday."
STAFF = "The staff door opens with the number 4711."
ASKED = "When does the reading room open?"
ABOUT_STAFF = "Which number opens the staff door?"
FOR_STAFF = {"visibility": "restricted", "allowed_groups": ["staff"]}
ELSEWHERE = {"X-Forwarded-For": "203.0.113.9"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shelf(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> AsyncIterator[Library]:
    async with library(tmp_path_factory.mktemp("data"), models_dir) as opened:
        await opened.collection("rooms")
        await opened.collection("doors")
        await opened.ingest("rooms", text(OPEN, title="Rooms"))
        await opened.ingest("doors", text(STAFF, title="Doors", permissions=FOR_STAFF))
        yield opened


async def asked(shelf: Library, question: str, collection: str, who: str | None, **more: Any) -> Any:
    answer = await shelf.ask(question, who=who, collections=[collection], **more)
    assert not answer["refused"]
    return answer


async def share(shelf: Library, query: str, who: str | None, shared: Any = True) -> int:
    return (await shelf.call("POST", f"/v1/queries/{query}/share", {"shared": shared}, who=who)).status


async def status(shelf: Library, query: str, who: str | None, **more: Any) -> int:
    return (await shelf.call("GET", f"/v1/queries/{query}", who=who, **more)).status


async def test_the_log_keeps_the_sentences_and_the_places_of_citations(shelf: Library) -> None:
    answer = await asked(shelf, ASKED, "rooms", "bob", verify=True)
    logged = await shelf.good("GET", f"/v1/queries/{answer['query_id']}", who="bob")
    assert logged["sentences"] == answer["sentences"] != []
    assert (logged["shared"], logged["may_share"]) == (False, True)
    [kept], [cited] = logged["citations"], answer["citations"]
    assert kept == {name: cited[name] for name in kept}
    assert OPEN[kept["start_char"] : kept["end_char"]] == kept["quoted_text"]


async def test_an_answer_that_was_not_checked_has_no_sentences(shelf: Library) -> None:
    answer = await asked(shelf, "When does the room close?", "rooms", "bob", verify=False)
    assert "sentences" not in await shelf.good("GET", f"/v1/queries/{answer['query_id']}", who="bob")


async def test_who_knows_the_id_reads_a_shared_answer(shelf: Library) -> None:
    query = (await asked(shelf, ASKED, "rooms", "alice", conversation_id="secret-talk"))["query_id"]
    rated = {"query_id": query, "rating": "thumbs_up", "comment": "mine"}
    await shelf.good("POST", "/v1/feedback", rated, who="alice")
    assert [await status(shelf, query, who) for who in ("alice", "bob", "root")] == [200, 404, 200]
    assert await share(shelf, query, "bob") == 404
    assert await share(shelf, query, "alice") == 200
    own = await shelf.good("GET", f"/v1/queries/{query}", who="alice")
    read = await shelf.good("GET", f"/v1/queries/{query}", who="bob")
    hidden: dict[str, object] = {"conversation_id": None, "rating": None, "comment": None, "may_share": False}
    # What was chosen to be searched may name collections that the reader may not see.
    hidden |= {"filters": None, "settings": {}}
    assert read == {**own, **hidden}
    assert (own["shared"], own["comment"], own["conversation_id"]) == (True, "mine", "secret-talk")
    assert "alice" not in str(read)
    assert await status(shelf, query, None) == 200, "the operator on this machine"
    assert await status(shelf, query, None, headers=ELSEWHERE) == 401
    listed = await shelf.good("GET", "/v1/queries", who="bob")
    assert query not in {one["id"] for one in listed["queries"]}
    assert await share(shelf, query, "bob", shared=False) == 404, "only its asker ends that"
    assert await share(shelf, query, "alice", shared=False) == 200
    assert await status(shelf, query, "bob") == 404


async def test_a_shared_answer_is_for_those_who_may_see_its_documents(shelf: Library) -> None:
    query = (await asked(shelf, ABOUT_STAFF, "doors", "alice"))["query_id"]
    assert await share(shelf, query, "alice") == 200
    assert [await status(shelf, query, who) for who in ("carol", "bob")] == [200, 404]


async def test_a_turn_that_quotes_does_not_need_the_documents_of_the_turns_before(shelf: Library) -> None:
    """No model has read them."""
    await asked(shelf, ABOUT_STAFF, "doors", "alice", conversation_id="two turns")
    query = (await asked(shelf, ASKED, "rooms", "alice", conversation_id="two turns"))["query_id"]
    assert await share(shelf, query, "root") == 200, "the operator shares for others"
    assert [await status(shelf, query, who) for who in ("carol", "bob")] == [200, 200]


async def test_a_shared_answer_about_an_earlier_version_is_only_for_its_asker(shelf: Library) -> None:
    await shelf.collection("museum")
    for_alice = {"visibility": "restricted", "allowed_users": ["alice"]}
    await shelf.ingest("museum", text("The price of the museum is 9 million.", id="offer", permissions=for_alice))
    query = (await asked(shelf, "What is the price of the museum?", "museum", "alice"))["query_id"]
    assert await share(shelf, query, "alice") == 200
    redacted = text("The price of the museum is not public.", id="offer", permissions={"visibility": "public"})
    await shelf.ingest("museum", redacted)
    assert [await status(shelf, query, who) for who in ("alice", "root", "bob")] == [200, 200, 404]
    again = (await asked(shelf, "What is the price of the museum?", "museum", "alice"))["query_id"]
    assert await share(shelf, again, "alice") == 200
    assert await status(shelf, again, "bob") == 200


async def test_sentences_go_with_a_deleted_document(shelf: Library) -> None:
    await shelf.ingest("rooms", text("The garden opens in May.", title="Garden", id="garden"))
    answer = await asked(shelf, "When does the garden open?", "rooms", "bob", verify=True)
    await shelf.good("DELETE", "/v1/documents/Garden")
    logged = await shelf.good("GET", f"/v1/queries/{answer['query_id']}", who="bob")
    assert (logged["answer_withheld"], "sentences" in logged) == (True, False)


@pytest.mark.parametrize("body", [{}, {"shared": "yes"}, {"shared": None}, []])
async def test_an_odd_sharing_is_refused(shelf: Library, body: Any) -> None:
    reply = await shelf.call("POST", "/v1/queries/x/share", body, who="alice")
    assert (reply.status, reply.code) == (400, "VALIDATION_ERROR")


async def test_an_unknown_question_cannot_be_shared(shelf: Library) -> None:
    assert await share(shelf, "00000000-0000-7000-8000-000000000000", "alice") == 404
    assert await share(shelf, "nothing", "root") == 404
