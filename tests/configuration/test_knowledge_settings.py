"""Settings of collections, embeddings, reranking, the query log and authentication, through the entrypoints."""

import asyncio
import io
import math
from collections.abc import AsyncIterator
from pathlib import Path

import docx
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from reportlab.pdfgen.canvas import Canvas
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from anabranch import Anabranch, AnabranchError, Question, Settings, Until
from anabranch.app.endpoint_resolver import COLLECTIONS
from anabranch.app.indexer import indexer
from anabranch.app.questions import Options, SearchScope
from anabranch.configuration.settings import load
from anabranch.domain.contracts import Embedder, Outbound, RunInThread
from anabranch.domain.model import QUERY
from anabranch.knowledge.model import Caller, Chunking, NewDocument
from anabranch.knowledge.records import keys, queries
from anabranch.knowledge.records.sqlite import SqliteDatabase
from anabranch.models.factory import embedder_for
from anabranch.pipeline.prompt import estimate
from anabranch.testing import ManualClock, Space
from support.embedding_server import PREFERRED, ModelServer, model_server
from support.environment import loaded, opened, served
from support.postgres_server import shared_postgres
from support.settings_collections import TEXTS, embedding, kept, notes, ready, text

__all__ = ["kept", "notes"]  # fixtures

pytestmark = [pytest.mark.xdist_group("knowledge-settings"), pytest.mark.usefixtures("isolated_home")]

OPERATOR = Caller(operator=True)


@pytest.fixture
async def server() -> AsyncIterator[ModelServer]:
    async with model_server() as started:
        yield started


async def found(anabranch: Anabranch, question: str) -> list[str]:
    """The passages, best first."""
    answer = await anabranch.ask(question, sources=["notes"], until=Until.MERGE)
    assert answer.replies[0].error is None
    return [passage.text for passage in answer.replies[0].passages]


# --- where things are


async def test_data_dir_is_where_collections_are_stored(tmp_path: Path, server: ModelServer) -> None:
    here, there = str(tmp_path / "here"), str(tmp_path / "there")
    async with ready(loaded(DATA_DIR=here, **embedding(server)), *map(text, TEXTS)):
        pass
    assert (tmp_path / "here" / "records.sqlite").is_file()
    async with opened(DATA_DIR=here, **embedding(server)) as anabranch:
        assert TEXTS[0] in await found(anabranch, "river sand")
    async with opened(DATA_DIR=there, **embedding(server)) as anabranch:
        with pytest.raises(AnabranchError, match="'notes' is neither"):
            await found(anabranch, "river sand")


async def test_database_url_is_where_nodes_share_their_records(tmp_path: Path, server: ModelServer) -> None:
    here, there, url = str(tmp_path / "here"), str(tmp_path / "there"), shared_postgres().create_database()
    async with (
        ready(loaded(DATA_DIR=here, DATABASE_URL=url, **embedding(server)), *map(text, TEXTS)),
        opened(DATA_DIR=there, DATABASE_URL=url, **embedding(server)) as anabranch,
    ):
        assert TEXTS[0] in await found(anabranch, "river sand")
    assert not (tmp_path / "here" / "records.sqlite").exists()


async def test_models_dir_is_where_the_embedding_model_is(tmp_path: Path, models_dir: Path) -> None:
    async with ready(loaded(MODELS_DIR=str(models_dir)), text(TEXTS[0])) as (anabranch, items):
        assert [item.status for item in items] == ["completed"]
        assert await found(anabranch, "Where does the sand go?") == [TEXTS[0]]
    async with opened(MODELS_DIR=str(tmp_path / "empty")) as anabranch:
        answer = await anabranch.ask("Where does the sand go?", until=Until.MERGE)
    assert f"is not installed in {tmp_path / 'empty'}. Run: anabranch models install" in (answer.replies[0].error or "")


# --- documents


def pdf(pages: int) -> NewDocument:
    file = io.BytesIO()
    canvas = Canvas(file)
    for page in range(pages):
        canvas.drawString(50, 800, f"This is page {page}.")
        canvas.showPage()
    canvas.save()
    return NewDocument(source="file", data=file.getvalue(), filename="pages.pdf")


def word() -> NewDocument:
    document = docx.Document()
    document.add_paragraph("A short letter.")
    file = io.BytesIO()
    document.save(file)
    return NewDocument(source="file", data=file.getvalue(), filename="letter.docx")


@pytest.mark.parametrize(
    ("variable", "value", "document", "said"),
    [
        ("MAX_DOCUMENT_BYTES", "1000", text("x " * 501), "more than the limit of 1,000 bytes"),
        ("MAX_DOCUMENT_PAGES", "2", pdf(3), "more than the limit of 2"),
        ("MAX_DOCUMENT_EXPANSION", "20000", word(), "more than the limit of 20,000 bytes"),
        ("PARSE_TIMEOUT", "0.001", text("many words " * 50_000), "longer than 0.001 seconds"),
    ],
)
async def test_a_document_over_a_limit_fails_alone(
    server: ModelServer, variable: str, value: str, document: NewDocument, said: str
) -> None:
    small = [] if variable == "PARSE_TIMEOUT" else [text(TEXTS[0]), pdf(2)]
    async with ready(loaded(**{variable: value}, **embedding(server)), document, *small) as (_, items):
        pass
    assert said in (items[0].error or "")
    kept = [item.status for item in items[1:]]
    assert kept == (["completed", "failed"] if variable == "MAX_DOCUMENT_BYTES" else ["completed"] * len(small))


async def test_max_document_bytes_does_not_limit_embedding_replies(server: ModelServer) -> None:
    settings = loaded(MAX_DOCUMENT_BYTES="100", **embedding(server))
    async with ready(settings, *map(text, TEXTS)) as (_, items):
        assert [item.error for item in items] == [None, None, None]


# --- embeddings


async def test_embedding_url_model_and_api_key_are_used(server: ModelServer) -> None:
    settings = loaded(EMBEDDING_URL=server.url, EMBEDDING_MODEL="fake-128", EMBEDDING_API_KEY="sk-1")
    async with ready(settings, *map(text, TEXTS)) as (anabranch, _):
        assert (await found(anabranch, "sand river"))[0] == TEXTS[0]
    asked = server.to("/v1/embeddings")
    assert {body["model"] for body in asked} == {"fake-128"}
    assert [body["input"] for body in asked] == [list(TEXTS), ["sand river"]]
    assert server.keys("/v1/embeddings") == {"Bearer sk-1"}
    async with opened(EMBEDDING_URL=server.url, EMBEDDING_MODEL="another") as anabranch:
        with pytest.raises(AnabranchError, match="embedded with 'fake-128', and the settings say 'another'"):
            await anabranch.ask("sand river")


async def test_embedding_window_is_the_largest_chunk(server: ModelServer) -> None:
    async with opened(EMBEDDING_WINDOW="40", **embedding(server)) as anabranch:
        made = await (await anabranch.knowledge()).create_collection(OPERATOR, "notes")
    assert made.settings.chunking.size == 40
    assert made.settings.requested == Chunking()


async def test_embedding_topic_threshold_cuts_chunks(server: ModelServer) -> None:
    two_topics = "Cats chase mice in the barn. " * 40 + "Taxes are paid in spring by everyone. " * 40
    chunks: dict[str, int] = {}
    for threshold in ("0", "0.9"):
        folder = f"data-{threshold}"
        settings = loaded(DATA_DIR=folder, EMBEDDING_TOPIC_THRESHOLD=threshold, **embedding(server))
        async with Anabranch.open(settings=settings) as anabranch, indexer(settings) as indexing:
            room = await anabranch.knowledge()
            await room.create_collection(OPERATOR, "notes", chunking=Chunking(size=4_000))
            await room.ingest(OPERATOR, "notes", [text(two_topics)])
            await indexing.drain()
            chunks[threshold] = (await room.collection(OPERATOR, "notes")).chunks
    assert chunks == {"0": 1, "0.9": 2}


@pytest.mark.usefixtures("notes")
async def test_embedding_relevance_is_the_score(server: ModelServer) -> None:
    async def scores(**given: str) -> list[float]:
        async with opened(**given, **embedding(server)) as anabranch:
            answer = await anabranch.ask("sand river", sources=["notes"], until=Until.MERGE)
            return [passage.score for passage in answer.replies[0].passages]

    usual = await scores()
    assert await scores(EMBEDDING_RELEVANCE="5.4,2.0,-1.9") == usual
    lower = await scores(EMBEDDING_RELEVANCE="5.4,2.0,-3.9")
    logits = [[math.log(score / (1 - score)) for score in found] for found in (usual, lower)]
    assert [high - low for high, low in zip(*logits, strict=True)] == pytest.approx([2.0] * 3)
    assert await scores(EMBEDDING_RELEVANCE="[0, 0, 0]") == [0.5] * 3


async def test_embedding_threads_are_for_the_indexer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []

    def recorded(settings: Settings, outbound: Outbound, *, threads: int, run: RunInThread) -> Embedder:
        given.append(threads)
        return embedder_for(settings, outbound, threads=threads, run=run)

    monkeypatch.setattr("anabranch.app.indexer.embedder_for", recorded)
    async with indexer(loaded(DATA_DIR=str(tmp_path), EMBEDDING_THREADS="3")):
        assert given == [3]


# --- rerankers


def cross_encoder(folder: Path) -> Path:
    """Its score is how often the passage has the word that it prefers."""
    words = ("[PAD]", "[UNK]", PREFERRED)
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    weights = [[float(word == PREFERRED)] for word in words]
    held = [
        numpy_helper.from_array(np.array(weights, np.float32), "weights"),
        numpy_helper.from_array(np.array([1]), "one"),
    ]
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["weights", "input_ids"], ["weighed"]),
            helper.make_node("ReduceSum", ["weighed", "one"], ["logits"], keepdims=0),
        ],
        "tiny",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["pairs", "length"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["pairs", 1])],
        held,
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "model.onnx"
    )
    return folder


async def test_reranker_path_decides_the_order(tmp_path: Path, server: ModelServer, notes: Path) -> None:
    async with opened(**embedding(server)) as anabranch:
        assert (await found(anabranch, "river delta"))[0] != TEXTS[1]
    folder = cross_encoder(tmp_path / "reranker")
    async with opened(RERANKER_PATH=str(folder), **embedding(server)) as anabranch:
        assert (await found(anabranch, "river delta"))[0] == TEXTS[1]
    async with opened(RERANKER_PATH=str(tmp_path / "none"), **embedding(server)) as anabranch:
        with pytest.raises(AnabranchError, match="There is no reranker in"):
            await found(anabranch, "river delta")


@pytest.mark.parametrize(("form", "path"), [("cohere", "/v1/rerank"), ("tei", "/rerank")])
async def test_reranker_url_decides_the_order(server: ModelServer, notes: Path, form: str, path: str) -> None:
    reranker = {"RERANKER_URL": server.url, "RERANKER_MODEL": "judge", "RERANKER_API_KEY": "sk-2"}
    async with opened(**reranker, RERANKER_FORM=form, **embedding(server)) as anabranch:
        assert (await found(anabranch, "river delta"))[0] == TEXTS[1]
    asked = server.to(path)
    assert [body["query"] for body in asked] == ["river delta"]
    assert form == "tei" or asked[0]["model"] == "judge"
    assert server.keys(path) == {"Bearer sk-2"}


# --- questions


@pytest.mark.parametrize(("tokens", "kept"), [("2000", 2), ("4000", 4)])
async def test_query_context_tokens_omits_passages(space: Space, server: ModelServer, tokens: str, kept: int) -> None:
    """1,500 of them are for the instructions and the answer."""
    model = {"MODEL_URL": space.url, "MODEL_NAME": "scribe", "QUERY_REWRITING": "false"}
    settings = loaded(QUERY_CONTEXT_TOKENS=tokens, **model, **embedding(server))
    shelf = [text(f"Number{number} is a river" + " that flows" * 100) for number in range(4)]
    async with ready(settings, *shelf) as (anabranch, _):
        question = Question(
            text="Which river flows?",
            sources=(COLLECTIONS,),
            model=anabranch.model,
            similarity_threshold=0.0,
            profile=QUERY,
        )
        answer = await anabranch.start(question, anabranch.context(operator=True)).value()
    prompt = space.requests[-1].body["messages"][-1]["content"]
    ranked = [passage.text for passage in answer.replies[0].passages]
    assert [text for text in ranked if text in prompt] == ranked[:kept]
    assert answer.omitted == 4 - kept


@pytest.mark.parametrize(("tokens", "fewest", "most"), [("500", 300, 500), ("1500", 1_000, 1_500)])
async def test_context_compact_shows_excerpts_within_compact_tokens(
    space: Space, server: ModelServer, tokens: str, fewest: int, most: int
) -> None:
    model = {"MODEL_URL": space.url, "MODEL_NAME": "scribe"}
    settings = loaded(CONTEXT="compact", COMPACT_TOKENS=tokens, **model, **embedding(server))
    shelf = [
        text(f"Number{number} is a river. " + "It flows to the sea and nobody swims. " * 20) for number in range(9)
    ]
    async with ready(settings, *shelf) as (anabranch, _):
        answer = await anabranch.ask("Which river is number3?", sources=["notes"], top_k=9)
    messages = space.requests[-1].body["messages"]
    assert fewest <= sum(estimate(message["content"]) for message in messages) <= most
    assert "…" in messages[-1]["content"]
    assert answer.prompt_version == "chat-2-compact"


@pytest.mark.parametrize(
    ("given", "falls_back"),
    [
        ({}, {"ask", "query"}),
        ({"MODEL_FALLBACK": "on"}, {"ask", "query", "rag", "chat", "documentation"}),
        ({"MODEL_FALLBACK": "off"}, set()),
    ],
    ids=["auto", "on", "off"],
)
async def test_model_fallback_decides_where_quotes_replace_a_failed_model(
    given: dict[str, str], falls_back: set[str]
) -> None:
    async with opened(MODEL_URL="http://127.0.0.1:9", **given) as anabranch:
        questions, scope, none = anabranch.questions, SearchScope(), Options()
        asked = {
            "ask": await questions.library("x", [], None, (), None, None, Until.GENERATE),
            "query": questions.query("x", scope, (), none),
            "rag": questions.rag("x", scope, (), none),
            "chat": questions.chat("x", (), anabranch.model, (), none),
            "documentation": questions.documentation(),
        }
        assert {name for name, question in asked.items() if question.fallback is not None} == falls_back
        for wanted in (True, False):
            as_asked = questions.query("x", scope, (), Options(fallback=wanted))
            assert (as_asked.fallback is not None) is wanted


def test_on_and_off_in_the_file_are_not_booleans(tmp_path: Path) -> None:
    for written, read in {"on": "on", "off": "off", "auto": "auto", '"on"': "on"}.items():
        (tmp_path / "anabranch.yaml").write_text(f"settings:\n  model_fallback: {written}\n", encoding="utf-8")
        assert load({}, tmp_path / "anabranch.yaml").model_fallback == read


@pytest.mark.parametrize(("given", "texts"), [({"QUERY_REWRITING": "true"}, 1), ({}, 0)], ids=["on", "default"])
async def test_query_rewriting_asks_the_model_to_rephrase(
    space: Space, server: ModelServer, notes: Path, given: dict[str, str], texts: int
) -> None:
    space.model("writer", reply="1. Where is sand carried?")
    model = {"MODEL_URL": space.url, "MODEL_NAME": "writer"}
    async with opened(**given, **model, **embedding(server)) as anabranch:
        answer = await anabranch.ask("Where does it go?", sources=["notes"])
    assert answer.variants == ("Where is sand carried?",) * texts
    assert len([request for request in space.requests if request.slug == "writer"]) == (3 if texts else 1)
    searched = server.to("/v1/embeddings")[-1]["input"]
    assert searched == ["Where does it go?", *["Where is sand carried?", "1. Where is sand carried?"] * texts]


@pytest.mark.parametrize(("days", "status"), [("30", 200), ("0", 404)])
async def test_query_log_days(server: ModelServer, notes: Path, days: str, status: int) -> None:
    async with served(QUERY_LOG_DAYS=days, **embedding(server)) as started:
        _, answer, _ = await started.post("/v1/query", {"query": "Is this kept?"})
        rating = {"query_id": answer["query_id"], "rating": "thumbs_up"}
        assert (await started.post("/v1/feedback", rating))[0] == status


async def test_questions_older_than_query_log_days_are_deleted(tmp_path: Path, server: ModelServer) -> None:
    settings = loaded(DATA_DIR=str(tmp_path / "data"), QUERY_LOG_DAYS="7", **embedding(server))
    async with indexer(settings) as taking_in:
        database = SqliteDatabase.open(tmp_path / "data")
        try:
            for name, age_days in (("new", 6.9), ("old", 7.1)):
                _ask(database, name, age_days)
            running = asyncio.create_task(taking_in.run())
            async with asyncio.timeout(10):
                while _asked(database) != ["new"]:  # noqa: ASYNC110  the indexer tells nobody
                    await asyncio.sleep(0.01)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        finally:
            database.close()


def _ask(database: SqliteDatabase, name: str, age_days: float) -> None:
    asked = queries.QueryRecord(
        id=name,
        user="alice",
        original="?",
        answer="!",
        refused=False,
        model=None,
        found=(),
        quotes=(),
        collections=(),
        top_k=1,
        input_tokens=0,
        output_tokens=0,
        retrieval_ms=0,
        latency_ms=0,
    )
    database.writing(lambda db: queries.record(db, asked))
    age_s = age_days * queries.DAY_S
    database.writing(
        lambda db: db.execute("UPDATE queries SET created_at = created_at - ? WHERE id = ?", (age_s, name))
    )


def _asked(database: SqliteDatabase) -> list[str]:
    return database.reading(lambda db: [row["id"] for row in db.execute("SELECT id FROM queries ORDER BY id")])


# --- callers


@pytest.mark.parametrize(
    ("auth", "nobody", "key", "token"),
    [("auto", 200, 200, 200), ("none", 200, 200, 200), ("api_key", 401, 200, 200), ("jwt", 401, 401, 200)],
)
async def test_auth_decides_which_credentials_are_required(
    server: ModelServer, notes: Path, auth: str, nobody: int, key: int, token: int
) -> None:
    database = SqliteDatabase.open(notes)
    secret = database.writing(lambda db: keys.create(db, user="alice"))[1]
    database.close()
    variables = {"SYFTHUB_URL": server.url, "JWT_AUDIENCE": "library"}
    async with served(AUTH=auth, **variables, **embedding(server)) as started:
        for bearer, status in ((None, nobody), (secret, key), (server.token("library"), token)):
            headers = {"Authorization": f"Bearer {bearer}"} if bearer else {}
            async with started.session.get(f"{started.url}/v1/collections", headers=headers) as response:
                assert response.status == status
        open_chat = auth in ("auto", "none")
        chat, _, _ = await started.post("/api/v1/chat", {"prompt": "Why?", "retrieval_only": True})
        assert chat == (200 if open_chat else 401)


@pytest.mark.parametrize(("audience", "status"), [("library", 200), ("somebody-else", 401), ("", 401)])
async def test_jwt_audience_must_match_the_token(server: ModelServer, notes: Path, audience: str, status: int) -> None:
    variables = {"JWT_AUDIENCE": audience, "SYFTHUB_URL": server.url, **embedding(server)}
    headers = {"Authorization": f"Bearer {server.token('library')}"}
    async with (
        served(**variables) as started,
        started.session.get(f"{started.url}/v1/collections", headers=headers) as response,
    ):
        assert response.status == status


async def test_syfthub_jwks_cache_ttl_is_how_long_keys_are_cached(
    server: ModelServer, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock(1_000.0)
    monkeypatch.setattr("anabranch.app.wiring.SystemClock", lambda: clock)
    variables = {"JWT_AUDIENCE": "library", "SYFTHUB_URL": server.url, **embedding(server)}
    headers = {"Authorization": f"Bearer {server.token('library')}"}
    async with served(SYFTHUB_JWKS_CACHE_TTL="60", **variables) as started:
        for passed_s, fetched in ((0, 1), (59, 1), (2, 2), (59, 2), (2, 3)):
            clock.advance(passed_s)
            async with started.session.get(f"{started.url}/v1/collections", headers=headers) as response:
                assert response.status == 200
            assert len(server.to("/.well-known/jwks.json")) == fetched


# --- what is published


async def test_publish_makes_a_model_available_as_owner_slug(tmp_path: Path, space: Space) -> None:
    space.model("gpt", reply="From behind the name.")
    config = tmp_path / "conf.yaml"
    config.write_text(
        f"models:\n"
        f"  writer: {{url: '{space.url}', slug: gpt, kind: openai, publish: mia/writer}}\n"
        f"  private: {{url: '{space.url}', slug: gpt, kind: openai}}\n",
        encoding="utf-8",
    )
    asked = {"messages": [{"role": "user", "content": "Who are you?"}]}
    async with served(CONFIG=str(config)) as started:
        for path, expected in (("mia/writer", 200), ("writer", 200), ("bob/writer", 404), ("private", 404)):
            status, answer, _ = await started.post(f"/api/v1/endpoints/{path}/query", asked)
            assert (path, status) == (path, expected)
            if status == 200:
                assert answer["summary"]["message"]["content"] == "From behind the name."
