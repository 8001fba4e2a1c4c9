"""The query log in the records: counts that outlive questions, pages, and entries of earlier schema versions."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from anabranch.domain.sentences import SentenceView
from anabranch.knowledge.model import Caller, Erased
from anabranch.knowledge.records import collections, keys, logged_queries, queries
from anabranch.knowledge.records.database import Database, Session, new_id
from anabranch.knowledge.records.logged_queries import QueryFilter
from anabranch.knowledge.records.queries import DAY_S, FoundAt, QueryRecord
from anabranch.knowledge.records.schema import KEY_GROUPS, MIGRATIONS
from anabranch.knowledge.records.sqlite import NAME, SqliteDatabase, SqliteSession, connect, migrate
from support.knowledge_fixtures import ALICE, BOB, OPERATOR, query_record, workshop

MIDNIGHT = time.time() // DAY_S * DAY_S


@pytest.fixture
def database(tmp_path: Path) -> Iterator[SqliteDatabase]:
    with closing(SqliteDatabase.open(tmp_path)) as opened:
        yield opened


def asked(user: str, *keys: int) -> QueryRecord:
    return msgspec.structs.replace(query_record(new_id(), user), collections=keys)


def record(database: Database, *records: QueryRecord) -> None:
    for one in records:
        database.writing(lambda db, one=one: queries.record(db, one))  # type: ignore[misc]


def count(database: SqliteDatabase, collection: int, user: str | None = None) -> int:
    return database.reading(lambda db: queries.count(db, collection, 30, user))


def age(database: SqliteDatabase, days: int) -> None:
    """Make everything that is recorded so many days older."""

    def older(db: Session) -> None:
        for table in ("queries", "responses", "query_collections"):
            db.execute(f"UPDATE {table} SET created_at = created_at - ?", (days * DAY_S,))
        db.execute("UPDATE query_counts SET day = day - ?", (days,))

    database.writing(older)


# --- counts


def test_questions_are_counted_by_collection_and_user(database: SqliteDatabase) -> None:
    record(database, asked("alice", 1, 2), asked("alice", 1), asked("bob", 1), asked("bob"))
    assert [count(database, 1), count(database, 1, "alice"), count(database, 2), count(database, 2, "bob")] == [
        3,
        2,
        1,
        0,
    ]


@pytest.mark.parametrize(("days", "counted"), [(0, 1), (29, 1), (30, 0), (31, 0)])
def test_the_count_covers_today_and_the_29_days_before(database: SqliteDatabase, days: int, counted: int) -> None:
    record(database, asked("alice", 1))
    age(database, days)
    assert count(database, 1) == counted


@pytest.mark.parametrize("retention_days", [0, 7])
def test_the_count_does_not_depend_on_how_long_questions_are_kept(
    database: SqliteDatabase, retention_days: int
) -> None:
    record(database, asked("alice", 1), asked("bob", 1))
    age(database, 10)
    assert database.writing(lambda db: queries.forget(db, retention_days)) == 2
    assert count(database, 1) == 2
    age(database, 20)
    database.writing(lambda db: queries.forget(db, retention_days))
    with closing(sqlite3.connect(database.path)) as db:
        assert db.execute("SELECT * FROM query_counts").fetchall() == []


def test_a_question_that_is_not_kept_is_only_counted(database: SqliteDatabase) -> None:
    record(database, msgspec.structs.replace(asked("alice", 1), kept=False))
    assert count(database, 1) == 1
    assert database.reading(lambda db: logged_queries.listed(db, OPERATOR, QueryFilter())) == []


def test_a_failed_question_is_not_counted(database: SqliteDatabase) -> None:
    record(database, msgspec.structs.replace(asked("alice", 1), answer=None, outcome="generation_failed"))
    assert count(database, 1) == 0
    found = database.reading(lambda db: logged_queries.listed(db, OPERATOR, QueryFilter(collection=1)))
    assert [one.entry.outcome for one in found] == ["generation_failed"]


def test_deleting_the_questions_of_a_user_deletes_their_counts(database: SqliteDatabase) -> None:
    record(database, asked("alice", 1), asked("bob", 1))
    age(database, 5)
    record(database, asked("alice", 1))
    database.writing(lambda db: queries.forget(db, 2, "alice", counts=True))
    assert (count(database, 1, "alice"), count(database, 1, "bob")) == (1, 1)
    database.writing(lambda db: queries.forget(db, 0, "alice", counts=True))
    assert (count(database, 1, "alice"), count(database, 1, "bob")) == (0, 1)
    database.writing(lambda db: queries.forget(db, 0, counts=True))
    assert count(database, 1) == 0


def test_deleting_a_collection_deletes_its_counts(database: SqliteDatabase) -> None:
    record(database, asked("alice", 1, 2))
    database.writing(lambda db: collections.delete(db, 1))
    assert (count(database, 1), count(database, 2)) == (0, 1)


# --- pages


@pytest.mark.parametrize(
    ("caller", "rated", "index"),
    [
        (ALICE, False, "SEARCH queries USING INDEX queries_by_user (user=? AND rowid<?)"),
        (OPERATOR, False, "SEARCH queries USING INTEGER PRIMARY KEY (rowid<?)"),
        (OPERATOR, True, "SEARCH responses USING INDEX responses_by_rating (rated_us<?)"),
    ],
)
def test_a_page_is_read_in_the_order_of_an_index(
    database: SqliteDatabase, caller: Caller, rated: bool, index: str
) -> None:
    def plan(db: SqliteSession) -> list[str]:
        statements: list[str] = []
        db.set_trace_callback(statements.append)
        logged_queries.listed(db, caller, QueryFilter(), 10**16, rated=rated)
        db.set_trace_callback(None)
        return [row["detail"] for row in db.execute(f"EXPLAIN QUERY PLAN {statements[-1]}")]

    first, *more = database.reading(plan)
    assert first == index
    assert not any("TEMP B-TREE" in step for step in more)


def test_ratings_of_one_moment_have_different_positions(database: SqliteDatabase) -> None:
    one, two = asked("alice"), asked("alice")
    record(database, one, two)

    def both(db: Session) -> None:
        for query in (one, two):
            queries.rate(db, query.id, ALICE, "thumbs_up", None)
            db.execute("UPDATE responses SET rated_us = ? WHERE query = ?", (2**52, one.id))

    database.writing(both)
    found = database.reading(lambda db: logged_queries.listed(db, ALICE, QueryFilter(), rated=True))
    assert [(one.entry.id, one.rated_us) for one in found] == [(two.id, 2**52 + 1), (one.id, 2**52)]


# --- earlier versions


def old_records(folder: Path, version: int) -> SqliteSession:
    """Records as an earlier schema version wrote them: four questions to one collection, of four ages."""
    db = connect(folder / NAME)
    migrate(db, MIGRATIONS[:version])
    more = (None,) * (3 if version > 1 else 0)
    for name, days, refused, rating in (
        *(("new", 0, 0, "thumbs_up"), ("old", 10, 1, None)),
        *(("oldest", 29, 0, None), ("too old", 30, 0, "thumbs_down")),
    ):
        at = MIDNIGHT - days * DAY_S
        row = (name, "alice", None, "Before?", None, "[]", "null", 5, None, None, 1, 2, at, *more)
        db.execute(f"INSERT INTO queries VALUES ({', '.join('?' * len(row))})", row)
        db.execute("INSERT INTO query_collections VALUES (7, ?, ?)", (name, at))
        answer = (name, "That.", refused, "extractive", 0, 0, None, None, rating, None, at)
        db.execute(f"INSERT INTO responses VALUES ({', '.join('?' * len(answer))})", answer)
    db.execute("INSERT INTO query_collections VALUES (7, 'deleted', ?)", (MIDNIGHT,))
    return db


@pytest.mark.parametrize("version", [1, 2])
def test_questions_of_an_earlier_version_are_counted_and_listed(tmp_path: Path, version: int) -> None:
    old_records(tmp_path, version).close()
    with closing(SqliteDatabase.open(tmp_path)) as database:
        assert (count(database, 7), count(database, 7, "alice"), count(database, 7, "bob")) == (3, 3, 0)
        database.writing(lambda db: queries.forget(db, 7))
        assert count(database, 7) == 3
        (found,) = database.reading(lambda db: logged_queries.listed(db, ALICE, QueryFilter()))
    entry = found.entry
    assert (entry.id, entry.query, entry.outcome, entry.rating) == ("new", "Before?", "answered", "thumbs_up")
    assert (entry.surface, entry.settings, entry.filters, entry.variants) == (None, {"top_k": 5}, None, ())


def test_answers_of_the_version_before_verdicts_are_listed_without(tmp_path: Path) -> None:
    before = 4
    with closing(connect(tmp_path / NAME)) as db:
        migrate(db, MIGRATIONS[:before])
        values = (
            "old",
            "alice",
            None,
            "Before?",
            None,
            "[]",
            "null",
            5,
            None,
            None,
            1,
            2,
            MIDNIGHT,
            "cli",
            "{}",
            "answered",
        )
        db.execute(f"INSERT INTO queries VALUES ({', '.join('?' * len(values))})", values)
        answer = ("old", "That.", 0, "extractive", 0, 0, 1.0, None, None, None, MIDNIGHT, None)
        db.execute(f"INSERT INTO responses VALUES ({', '.join('?' * len(answer))})", answer)
    new = msgspec.structs.replace(
        query_record("new", "alice"), faithfulness=0.5, verdicts={"supported": 1, "partly": 2}
    )
    with closing(SqliteDatabase.open(tmp_path)) as database:
        database.writing(lambda db: queries.record(db, new))
        found = database.reading(lambda db: logged_queries.listed(db, ALICE, QueryFilter()))
    assert [(one.entry.id, one.entry.faithfulness, one.entry.verdicts) for one in found] == [
        ("new", 0.5, {"supported": 1, "partly": 2}),
        ("old", 1.0, None),
    ]


def test_entries_of_the_version_before_groups_are_for_keys_with_the_rights_of_all_keys_of_their_user(
    tmp_path: Path,
) -> None:
    """With which key they were asked is not known."""
    users: dict[str, list[tuple[str, ...]]] = {
        "plain": [()],
        "staff": [("staff",), ("staff", "board"), ()],
        "token": [],
        "chief": [()],
    }
    with closing(connect(tmp_path / NAME)) as db:
        migrate(db, MIGRATIONS[: MIGRATIONS.index(KEY_GROUPS)])
        for user, given in users.items():
            for groups in given:
                keys.create(db, user=user, groups=groups)
            asked_then = (user, user, "talk", "Before?", None, "[]", "null", 5, None, None, 1, 2, MIDNIGHT, "cli", "{}")
            columns = (*asked_then, "answered", 0, None, "{}")
            db.execute(f"INSERT INTO queries VALUES ({', '.join('?' * len(columns))})", columns)
        keys.create(db, user="chief", operator=True)
    readers = [
        *(Caller(user=user) for user in users),
        Caller(user="staff", groups=("staff",)),
        Caller(user="staff", groups=("board", "staff")),
        Caller(user="token", groups=("staff",)),
        Caller(user="chief", groups=("staff",)),
    ]
    with closing(SqliteDatabase.open(tmp_path)) as database:
        found = [
            bool(database.reading(lambda db, by=by: logged_queries.listed(db, by, QueryFilter())))  # type: ignore[misc]
            for by in readers
        ]
        every = database.reading(lambda db: logged_queries.listed(db, OPERATOR, QueryFilter()))
    assert found == [True, False, True, False, False, True, True, False]
    assert {one.entry.id for one in every} == set(users)


@pytest.mark.parametrize("version", [1, 2])
def test_feedback_and_outcomes_of_an_earlier_version_are_found(tmp_path: Path, version: int) -> None:
    old_records(tmp_path, version).close()
    with closing(SqliteDatabase.open(tmp_path)) as database:
        rated = database.reading(lambda db: logged_queries.listed(db, OPERATOR, QueryFilter(), rated=True))
        assert [(one.entry.id, one.rated_us) for one in rated] == [
            ("new", round(MIDNIGHT * 1_000_000)),
            ("too old", round((MIDNIGHT - 30 * DAY_S) * 1_000_000)),
        ]
        refused = database.reading(lambda db: logged_queries.listed(db, OPERATOR, QueryFilter(outcome="refused")))
        assert [one.entry.id for one in refused] == ["old"]
        found = database.reading(lambda db: logged_queries.detail(db, ALICE, "old"))
    assert found is not None
    assert (found.answer, found.withheld, found.passages) == ("That.", False, ())


def test_entries_of_the_version_before_sharing_are_read_and_can_be_shared(tmp_path: Path) -> None:
    before = 5
    with closing(connect(tmp_path / NAME)) as db:
        migrate(db, MIGRATIONS[:before])
        first = ("old", "alice", None, "Before?", None, "[]", "null", 5, None, None, 1, 2)
        asked_then = (*first, MIDNIGHT, "cli", "{}", None)
        db.execute(f"INSERT INTO queries VALUES ({', '.join('?' * len(asked_then))})", asked_then)
        answer = ("old", "That.", 0, "extractive", 0, 0, 1.0, None, None, None, MIDNIGHT, None, None)
        db.execute(f"INSERT INTO responses VALUES ({', '.join('?' * len(answer))})", answer)
        db.execute("INSERT INTO retrievals VALUES ('old', 1, 'c', 'd', 1, 1, 1, 1)")
        db.execute("INSERT INTO citations VALUES ('old', 0, 1, 'c', 'd', 'That.')")
    with closing(SqliteDatabase.open(tmp_path)) as database:
        found = database.reading(lambda db: logged_queries.detail(db, ALICE, "old"))
        assert found is not None
        assert (found.query.shared, found.sentences, found.withheld, found.own) == (False, None, True, True)
        assert database.writing(lambda db: queries.share(db, ALICE, "old", shared=True))
        found = database.reading(lambda db: logged_queries.detail(db, ALICE, "old"))
        assert found is not None
        assert found.query.shared
        assert database.reading(lambda db: logged_queries.detail(db, BOB, "old")) is None, "its document is gone"


def test_an_entry_of_the_version_before_recorded_turns_rests_on_all_turns_before_it(database: SqliteDatabase) -> None:
    first, second = (msgspec.structs.replace(asked("alice"), conversation="talk") for _ in range(2))
    record(database, first, second)

    def older(db: Session) -> None:
        db.execute("UPDATE queries SET earlier_passages = NULL")
        db.execute("INSERT INTO retrievals VALUES (?, 1, 'chunk', 'deleted', 1, 1, 1, 1)", (first.id,))

    database.writing(older)
    for one in (first, second):
        found = database.reading(lambda db, one=one: logged_queries.detail(db, ALICE, one.id))  # type: ignore[misc]
        assert found is not None
        assert (found.answer, found.withheld) == (None, True)
    assert database.reading(lambda db: logged_queries.turns(db, ALICE, "talk", 5)) == []


def test_an_answer_that_rests_on_an_erased_document_is_erased_also_if_the_turn_that_found_it_is_forgotten(
    database: SqliteDatabase,
) -> None:
    later = msgspec.structs.replace(asked("alice"), conversation="talk")
    record(database, later, asked("alice"))
    rests = "UPDATE queries SET earlier_passages = ? WHERE id = ?"  # as it was recorded while there was the document
    database.writing(lambda db: db.execute(rests, ('{"gone": ["chunk"]}', later.id)))
    assert database.writing(lambda db: queries.erase(db, Erased(documents=("gone",)))) == 1
    found = database.reading(lambda db: logged_queries.detail(db, ALICE, later.id))
    assert found is not None
    assert (found.query.entry.query, found.answer) == (None, None)


@pytest.mark.asyncio
async def test_the_turns_that_a_model_reads_rest_on_a_limited_number_of_passages(tmp_path: Path) -> None:
    most = logged_queries.MAX_EARLIER_PASSAGES
    async with workshop(tmp_path) as shop:
        await shop.collection()
        await shop.put("Herons nest in March.")
        [heron] = await shop.find("herons")
        assert heron.document_id is not None
        ids: list[str] = []
        for number, size in enumerate((1, most - 1, 1)):
            earlier = frozenset(FoundAt(heron.document_id, f"{number}.{chunk}") for chunk in range(size))
            one = msgspec.structs.replace(asked("alice"), conversation="talk", earlier=earlier)
            record(shop.database, one)
            ids.append(one.id)
        found = shop.database.reading(lambda db: logged_queries.turns(db, ALICE, "talk", 5))
        named = shop.database.reading(lambda db: logged_queries.turns_by_id(db, ALICE, [*ids, "unknown"]))
    assert [len(turn.passages) for turn in found] == [most - 1, 1]
    assert named == {ids[0]: None, ids[1]: found[0], ids[2]: found[1]}


@pytest.mark.parametrize(("length", "kept"), [(100, True), (queries.MAX_SENTENCES_BYTES, False)])
def test_very_long_lists_of_sentences_are_not_kept(database: SqliteDatabase, length: int, kept: bool) -> None:
    sentence = SentenceView(
        start=0, end=length, text="x" * length, verdict="supported", support=1.0, reason=None, citations=(), doubted=()
    )
    one = msgspec.structs.replace(asked("alice"), sentences=(sentence,))
    record(database, one)
    found = database.reading(lambda db: logged_queries.detail(db, ALICE, one.id))
    assert found is not None
    assert found.sentences == ((sentence,) if kept else None)


def test_guests_neither_share_nor_read_what_is_shared(database: SqliteDatabase) -> None:
    one, of_guest = asked("alice"), asked(queries.GUEST)
    record(database, one, of_guest)
    named_guest = Caller(user=queries.GUEST)

    def shared(db: Session) -> list[bool]:
        mine = queries.share(db, ALICE, one.id, shared=True)
        return [mine, *(queries.share(db, by, of_guest.id, shared=True) for by in (Caller(), named_guest))]

    assert database.writing(shared) == [True, False, False]
    read = database.reading(lambda db: [logged_queries.detail(db, by, one.id) for by in (BOB, Caller(), named_guest)])
    assert [found is not None for found in read] == [True, False, False]
