"""Answers that can be taken up again: every word once, in the dialect that they began in, for those who asked."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from anabranch.app.resumable_answers import PREFIX
from anabranch.domain.eventlog import EPOCH, Entry
from anabranch.entrypoints.http.streams import AnswerInfo, prefers_resumable
from conftest import Server
from support.collection_server import Library, library, text
from support.knowledge_fixtures import records_in
from support.scripted_subagent import END, LEASE_S, PATIENCE_S, Heard, Line, Log, Speaker, asking, recorded, resuming

pytestmark = pytest.mark.xdist_group("resumable")

Serve = Callable[..., AbstractAsyncContextManager[Server]]

CHAT = "/api/v1/chat/stream"
WORDS = ("One ", "two ", "three.")
REFUNDS = "How long do refunds for printed books take?"
HANDBOOK = "Refunds for printed books take 30 days. Parcels to Iceland leave on Tuesdays."


@pytest.fixture
async def speaker() -> AsyncIterator[Speaker]:
    async with Speaker() as started:
        yield started


@pytest.fixture
async def taped(serve: Serve) -> AsyncIterator[Server]:
    async with serve() as started:
        yield started


def question(speaker: Speaker) -> dict[str, Any]:
    return {"prompt": "Why?", "model": speaker.endpoint, "data_sources": []}


async def everything(server: Server, stream: str, **headers: str) -> list[Heard]:
    async with resuming(server, stream, **headers) as line:
        assert line.status == 200
        return await line.rest()


async def answered(server: Server, speaker: Speaker, **headers: str) -> tuple[str, list[Heard]]:
    """A whole answer, one word an event, as the first connection has it."""
    async with asking(server, CHAT, question(speaker), **headers) as line:
        heard = await line.hear(3)
        for word in WORDS:
            speaker.says(word)
            heard += await line.hear(1)
        speaker.says(END)
        return line.stream, heard + await line.rest()


async def test_a_stream_can_be_taken_up_after_every_event(taped: Server, speaker: Speaker) -> None:
    stream, uncut = await answered(taped, speaker)
    names = ["retrieval_start", "retrieval_complete", "generation_start", "token", "token", "token", "done"]
    assert [one.name for one in uncut] == names
    assert [one.id for one in uncut] == list(range(1, 8))
    assert "".join(one.data["content"] for one in uncut if one.name == "token") == "".join(WORDS)
    assert await everything(taped, stream) == uncut
    assert await everything(taped, stream) == uncut
    for had in range(1, len(uncut)):
        async with resuming(taped, stream, uncut[had - 1].id) as line:
            assert await line.rest() == uncut[had:]


@pytest.mark.parametrize("had", range(7))
async def test_one_who_was_cut_off_gets_the_rest_and_nothing_twice(taped: Server, speaker: Speaker, had: int) -> None:
    words = iter(WORDS)
    async with asking(taped, CHAT, question(speaker)) as line:
        heard: list[Heard] = []
        while len(heard) < had:
            if len(heard) >= 3:
                speaker.says(next(words))
            heard += await line.hear(1)
        stream = line.stream
        line.cut()
    async with resuming(taped, stream, heard[-1].id if heard else None) as line:
        speaker.says(*words, END)
        heard += await line.rest()
    assert "".join(one.data["content"] for one in heard if one.name == "token") == "".join(WORDS)
    assert heard == await everything(taped, stream)
    assert heard[-1].name == "done"


async def test_the_answer_goes_on_while_nobody_listens(taped: Server, speaker: Speaker) -> None:
    async with asking(taped, CHAT, question(speaker)) as line:
        stream = line.stream
        line.cut()
    async with resuming(taped, stream) as first, resuming(taped, stream) as second:
        await first.hear(3)
        first.cut()
        second.cut()
    speaker.says(*WORDS, END)
    heard = await everything(taped, stream)
    assert "".join(one.data["content"] for one in heard if one.name == "token") == "".join(WORDS)
    assert heard[-1].name == "done"
    assert speaker.left == 0


async def test_two_readers_of_a_resumable_answer_get_the_same_events(taped: Server, speaker: Speaker) -> None:
    async with asking(taped, CHAT, question(speaker)) as line, resuming(taped, line.stream) as other:
        assert await line.hear(3) == await other.hear(3)
        for word in WORDS:
            speaker.says(word)
            assert await line.hear(1) == await other.hear(1)
        line.cut()
        speaker.says(END)
        (end,) = await other.rest()
    assert end.name == "done"


async def test_a_cursor_at_the_end_of_a_resumable_answer_is_204(taped: Server, speaker: Speaker) -> None:
    stream, uncut = await answered(taped, speaker)
    async with resuming(taped, stream, uncut[-1].id) as line:
        assert line.status == 204
    async with resuming(taped, stream, uncut[-2].id) as line:
        assert line.status == 200
        assert await line.rest() == uncut[-1:]


@pytest.mark.parametrize("cursor", [8, EPOCH + 3, 2**60])
async def test_an_invalid_cursor_resets_a_resumable_answer(taped: Server, speaker: Speaker, cursor: int) -> None:
    stream, uncut = await answered(taped, speaker)
    async with resuming(taped, stream, cursor) as line:
        reset, *again = await line.rest()
    assert (reset.id, reset.name, reset.data) == (0, "reset", {"type": "reset", "sequence": 7, "epoch": 0})
    assert again == uncut


@pytest.mark.parametrize("cursor", ["one", "-1", "1.0", "٣", "1" * 21, "1,2"])
async def test_what_cannot_be_a_cursor_is_refused(taped: Server, speaker: Speaker, cursor: str) -> None:
    stream, _ = await answered(taped, speaker)
    async with taped.session.get(f"{taped.url}/v1/streams/{stream}", params={"last_event_id": cursor}) as response:
        assert response.status == 400
        assert (await response.json())["code"] == "VALIDATION_ERROR"


async def test_a_cursor_may_stand_in_the_address_and_the_header_is_newer(taped: Server, speaker: Speaker) -> None:
    stream, uncut = await answered(taped, speaker)
    async with resuming(taped, f"{stream}?last_event_id=5") as line:
        assert await line.rest() == uncut[5:]
    async with resuming(taped, f"{stream}?last_event_id=2", 6) as line:
        assert await line.rest() == uncut[6:]


async def test_without_the_preference_nothing_is_different(taped: Server, speaker: Speaker) -> None:
    speaker.says(*WORDS, END)
    async with taped.session.post(taped.url + CHAT, json=question(speaker)) as response:
        raw = await response.read()
    assert "Stream-Id" not in response.headers
    assert "Preference-Applied" not in response.headers
    assert not any(line.startswith((b"id:", b"retry:")) for line in raw.split(b"\n"))


@pytest.mark.parametrize(
    ("headers", "wanted"),
    [
        (["resumable"], True),
        (["Resumable"], True),
        (["respond-async, resumable; until=now , wait=10"], True),
        (["respond-async", "wait=10,resumable"], True),
        (['foo="a, resumable; b", resumable'], True),
        (['resumable=""'], True),
        ([" resumable "], True),
        ([], False),
        ([""], False),
        (["resumable=no"], False),
        (["resumable=no, resumable"], False),
        (["not-resumable, resumable-not"], False),
        (['foo="resumable, resumable"'], False),
        (["foo; resumable"], False),
        (['"resumable'], False),
        (['"\\"' * 400], False),
        (["x, " * 40_000 + "resumable"], False),
    ],
)
def test_the_preference_is_read_as_it_is_written(headers: list[str], wanted: bool) -> None:
    sent = [(b"host", b"here"), *((b"prefer", header.encode()) for header in headers), (b"accept", b"resumable")]
    assert prefers_resumable({"headers": sent}) is wanted


async def test_a_page_of_any_origin_can_take_up_its_answer(serve: Serve, speaker: Speaker) -> None:
    async with serve(cors_origins=("*",)) as server:
        origin = {"Origin": "https://page.example"}
        async with asking(server, CHAT, question(speaker), **origin) as line:
            exposed = line.headers["Access-Control-Expose-Headers"]
            assert {"Stream-Id", "Preference-Applied"} <= set(exposed.split(", "))
            assert line.headers["Preference-Applied"] == "resumable"
            assert line.headers["Content-Type"].startswith("text/event-stream")
            async with resuming(server, line.stream, **origin) as other:
                assert other.headers["Access-Control-Allow-Origin"] == "*"
                other.cut()
            await line.hear(3)
            speaker.says(END)
            await line.rest()


@pytest.mark.parametrize("log", [None, Log(memory_bytes=10)], ids=["no log", "no room"])
async def test_where_the_log_takes_no_stream_the_answer_is_an_ordinary_one(
    taped: Server, speaker: Speaker, log: Log | None
) -> None:
    recorded(taped, log)
    async with asking(taped, CHAT, question(speaker)) as line:
        assert "Stream-Id" not in line.headers
        assert "Preference-Applied" not in line.headers
        heard = await line.hear(3)
        speaker.says("Words.", END)
        heard += await line.rest()
    assert [one.id for one in heard] == [0] * 5
    assert [one.name for one in heard[3:]] == ["token", "done"]
    async with asking(taped, CHAT, question(speaker)) as line:
        await line.hear(3)
        line.cut()
    await _until(lambda: speaker.left == 1)


async def _until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110 (a condition may look at anything, so nothing can announce it)
            await asyncio.sleep(0.002)


async def test_its_deadline_ends_an_answer_that_nobody_hears(serve: Serve, speaker: Speaker) -> None:
    async with serve(total_timeout=0.3) as server:
        async with asking(server, CHAT, question(speaker)) as line:
            stream = line.stream
            line.cut()
        heard = await everything(server, stream)
        assert heard[-1].name == "error"
        assert heard[-1].data["error"] == "deadline_exceeded"
        await _until(lambda: speaker.left == 1)


async def test_silence_is_kept_alive_with_comments(serve: Serve, speaker: Speaker) -> None:
    async with serve(heartbeat_interval=0.02) as server, asking(server, CHAT, question(speaker)) as line:
        heard = await line.hear(3)
        assert await line.blocks(2) == [b": keep-alive\n\n"] * 2
        async with resuming(server, line.stream, heard[-1].id) as other:
            retry, *comments = await other.blocks(3)
            assert retry.startswith(b"retry: ")
            assert comments == [b": keep-alive\n\n"] * 2
            other.cut()
        speaker.says("Yes.", END)
        assert [one.name for one in await line.rest()] == ["token", "done"]


async def test_the_end_of_the_process_is_the_end_of_the_answer_and_is_told(taped: Server, speaker: Speaker) -> None:
    anabranch = taped.service._anabranch
    assert anabranch is not None
    async with asking(taped, CHAT, question(speaker)) as line:
        heard = await line.hear(3)
        async with resuming(taped, line.stream, heard[-1].id) as other:
            await anabranch.drain(0)
            assert anabranch.recordings is not None
            await anabranch.recordings.settled()
            assert await line.rest() == (told := await other.rest())
    assert [one.data["error"] for one in told] == ["shutting_down"]


async def refusal(server: Server, stream: str, **headers: str) -> tuple[int, dict[str, Any]]:
    async with server.session.get(f"{server.url}/v1/streams/{stream}", headers=headers) as response:
        return response.status, await response.json()


async def test_a_token_that_nobody_knows_still_says_whose_an_answer_is(taped: Server, speaker: Speaker) -> None:
    mine, theirs = {"Authorization": "Bearer mine"}, {"Authorization": "Bearer theirs"}
    stream, uncut = await answered(taped, speaker, **mine)
    assert await everything(taped, stream, **mine) == uncut
    status, body = missing = await refusal(taped, "x" * 32, **theirs)
    assert (status, body["code"]) == (404, "NOT_FOUND")
    assert await refusal(taped, stream, **theirs) == missing
    assert await refusal(taped, stream) == missing
    assert await refusal(taped, "short") == missing
    assert await refusal(taped, PREFIX + stream, **mine) == missing
    assert await refusal(taped, stream, Authorization="Basic mine") == missing


async def test_what_came_without_a_token_belongs_to_those_who_know_its_id(taped: Server, speaker: Speaker) -> None:
    stream, uncut = await answered(taped, speaker)
    for headers in ({}, {"Authorization": "Bearer nobody's"}, {"Authorization": "Bearer a.b.c"}):
        assert await everything(taped, stream, **headers) == uncut


async def test_resumable_answers_need_a_key_where_all_surfaces_do(serve: Serve) -> None:
    async with serve(auth="api_key") as server:
        log, stream = Log(), "s" * 32
        recorded(server, log)
        await log.open(PREFIX + stream, identity="user:alice")
        for headers in ({}, {"Authorization": "Bearer nobody's"}):
            refusals = [await refusal(server, each, **headers) for each in (stream, "x" * 32)]
            assert refusals[0] == refusals[1]
            assert (refusals[0][0], refusals[0][1]["code"]) == (401, "UNAUTHORIZED")


async def test_a_look_at_a_stream_costs_no_stream(taped: Server, speaker: Speaker) -> None:
    async with asking(taped, CHAT, question(speaker)) as line:
        async with taped.session.head(f"{taped.url}/v1/streams/{line.stream}") as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
        await line.hear(3)
        speaker.says(END)
        await line.rest()


ABOUT = {"correlation_id": "c-1", "language": "de", "prompt_version": "v1"}


@pytest.mark.parametrize("dialect", ["chat", "rag", "query"])
async def test_an_answer_whose_worker_is_gone_says_so_in_its_own_dialect(taped: Server, dialect: Any) -> None:
    log, stream = Log(), "s" * 32
    recorded(taped, log)
    about = msgspec.json.encode(AnswerInfo(dialect=dialect, **ABOUT))
    token = await log.open(PREFIX + stream, identity="", about=about)
    await log.append(PREFIX + stream, token, [Entry(key="1", revision=1, body=b"data: {}\n\n")])
    async with resuming(taped, stream) as line:
        await line.hear(1)
        log.time.advance(LEASE_S)
        line.cut()
    word, end = await everything(taped, stream)
    assert (word.id, word.block, end.id) == (1, b"data: {}\n\n", 2)
    match dialect:
        case "chat":
            assert (end.name, end.data["error"]) == ("error", "worker_lost")
        case "rag":
            assert end.data["type"] == "error"
            assert end.data["data"]["error_code"] == "worker_lost"
            assert end.data["data"]["prompt_version"] == "v1"
            assert end.data["data"]["message"].startswith("Der Server")
        case _:
            assert (end.name, end.data["code"]) == ("error", "SERVICE_UNAVAILABLE")
            assert end.data["details"]["cause"] == "worker_lost"
    async with resuming(taped, stream, 2) as line:
        assert line.status == 204


async def test_an_end_without_a_word_of_its_own_is_not_waited_for(taped: Server) -> None:
    """As after a search that failed: `/v1/query` has said so already."""
    log, stream, failed = Log(), "s" * 32, b"event: error\ndata: {}\n\n"
    recorded(taped, log)
    token = await log.open(PREFIX + stream, identity="")
    entries = [Entry(key="1", revision=1, body=failed), Entry(key="2", revision=1, body=b"", final=True)]
    await log.append(PREFIX + stream, token, entries)
    assert await everything(taped, stream) == [Heard(1, failed)]
    async with resuming(taped, stream, 1) as line:
        assert line.status == 204


class Shelf:
    """Collections with a model that waits for its words."""

    def __init__(self, opened: Library, speaker: Speaker) -> None:
        self.library = opened
        self.server = opened.server
        self.speaker = speaker

    def asking(self, path: str, who: str | None = None, **body: Any) -> AbstractAsyncContextManager[Line]:
        fresh = {"Cache-Control": "no-cache"}
        return asking(self.server, path, {"query": REFUNDS, **body}, **self.library.key(who), **fresh)

    def kept(self) -> int:
        """How many questions the query log has."""
        database = records_in(self.library.folder)
        try:
            return int(database.writing(lambda db: db.execute("SELECT count(*) FROM queries").fetchone()[0]))
        finally:
            database.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shelf(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> AsyncIterator[Shelf]:
    async with Speaker() as speaker:
        writer = {"model_url": speaker.url, "model_name": "speaker", "query_rewriting": False, "model_retries": 0}
        folder = tmp_path_factory.mktemp("shelf")
        async with library(folder, models_dir, rate_limit=0, guard_threshold=0.0, **writer) as opened:
            await opened.collection("shop")
            await opened.ingest("shop", text(HANDBOOK, title="Handbook"))
            yield Shelf(opened, speaker)


FORMS: dict[str, Callable[[Heard], str]] = {
    "/rag/stream": lambda one: str(one.data["type"]),
    "/v1/query": lambda one: one.name,
}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", FORMS)
async def test_answers_from_collections_are_resumed_in_their_own_form_and_kept_once(shelf: Shelf, path: str) -> None:
    before = shelf.kept()
    async with shelf.asking(path, "alice") as line:
        stream = line.stream
        shelf.speaker.says("Refunds ")
        heard = await line.hear(1)
        line.cut()
    shelf.speaker.says("take 30 days [1].", END)
    await _until(lambda: shelf.kept() > before)
    key = shelf.library.key("alice")
    async with resuming(shelf.server, stream, heard[-1].id, **key) as line:
        heard += await line.rest()
    assert await everything(shelf.server, stream, **key) == heard
    types = [FORMS[path](one) for one in heard]
    forms = {
        "/rag/stream": ["token", "token", "done"],
        "/v1/query": ["token", "token", "sentence", "sources", "done"],
    }
    assert types == forms[path]
    end = heard[-1].data if path == "/v1/query" else heard[-1].data["data"]
    (checked,) = end["sentences"]
    assert (checked["text"], checked["verdict"]) == ("Refunds take 30 days [1].", "supported")
    assert path == "/rag/stream" or heard[2].data == {"index": 0, "sentence": checked}
    assert [one.id for one in heard] == list(range(1, len(heard) + 1))
    assert shelf.kept() == before + 1


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", FORMS)
async def test_an_answer_from_collections_is_its_owners_alone(shelf: Shelf, path: str) -> None:
    async with shelf.asking(path, "alice") as line:
        shelf.speaker.says("No.", END)
        await line.rest()
        stream = line.stream
    missing = await refusal(shelf.server, "x" * 32)
    assert missing[0] == 404
    for who in ("bob", "root", None):
        assert await refusal(shelf.server, stream, **shelf.library.key(who)) == missing
    assert await refusal(shelf.server, stream, Authorization="Bearer nobody's") == missing


@pytest.mark.asyncio(loop_scope="module")
async def test_the_operators_answer_is_the_operators(shelf: Shelf) -> None:
    async with shelf.asking("/v1/query") as line:
        shelf.speaker.says("No.", END)
        heard, stream = await line.rest(), line.stream
    assert await everything(shelf.server, stream) == heard
    assert (await refusal(shelf.server, stream, **shelf.library.key("alice")))[0] == 404
    assert (await refusal(shelf.server, stream, **{"X-Forwarded-For": "203.0.113.7"}))[0] == 404


@pytest.mark.asyncio(loop_scope="module")
async def test_json_is_not_resumable(shelf: Shelf) -> None:
    shelf.speaker.says("No.", END)
    headers = {"Prefer": "resumable", "Cache-Control": "no-cache"}
    reply = await shelf.library.call("POST", "/v1/query", {"query": REFUNDS}, headers=headers)
    assert reply.body["answer"] == "No."
    assert "Stream-Id" not in reply.headers
