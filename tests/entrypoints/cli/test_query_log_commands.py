"""`anabranch queries` and `feedback`: the query log on the command line."""

import json
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec
import pytest

from anabranch.domain.model import Passage, Place, Scores
from anabranch.entrypoints.cli.queries import PAGE
from anabranch.knowledge.model import Caller, CollectionSettings
from anabranch.knowledge.records import collections, queries
from anabranch.knowledge.records.sqlite import SqliteDatabase
from support.cli_runner import PATIENCE_S, Run, environment, here, process
from support.knowledge_fixtures import query_record

ALICE = Caller(user="alice")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A log with a question of alice to the collection `rivers`, and one of the operator that failed."""
    with closing(SqliteDatabase.open(tmp_path / "data")) as database:
        settings = CollectionSettings(embedding_model="m")
        rivers = database.writing(
            lambda db: collections.create(db, owner="", name="rivers", description="", settings=settings)
        )
        assert rivers is not None
        first = msgspec.structs.replace(
            query_record("first", "alice"),
            original="What is\nan anabranch?",
            collections=(rivers.key,),
            surface="query",
            outcome="answered",
            conversation="talk",
            settings={"rerank": True, "streaming": False, "sources": ["a", "b"], "language": None},
            faithfulness=0.75,
            verdicts={"supported": 1, "partly": 1, "unchecked": 4},
        )
        second = msgspec.structs.replace(
            query_record("second", ""), original="Why\x1b[31m?", answer=None, surface="cli", outcome="generation_failed"
        )
        for one in (first, second):
            database.writing(partial(queries.record, query=one))
        database.writing(lambda db: queries.rate(db, "first", ALICE, "thumbs_down", "Too short."))
    return tmp_path / "data"


@pytest.fixture
def run(data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    yield from here(data, monkeypatch, capsys)


def test_queries_show_takes_a_prefix_that_only_one_id_has(run: Run, data: Path) -> None:
    fill(data, 7)
    ran = run("queries", "show", "0")
    assert (ran.code, ran.out) == (1, "")
    assert re.search(r"begins with '0'; give more of it: (\S+, ){5}…\.$", ran.err)
    assert run("queries", "show", "").code == 1


def test_queries_lists_questions_newest_first(run: Run) -> None:
    ran = run("queries")
    lines = ran.out.splitlines()
    assert lines[0].split() == ["question", "asked", "surface", "user", "outcome", "faithfulness", "rating", "id"]
    assert [line.split()[-1] for line in lines[1:]] == ["second", "first"]
    assert "What is an anabranch?" in lines[2]
    assert " 0.75 " in lines[2]
    assert "\x1b" not in ran.out
    shown = json.loads(run("queries", "list", "--json").out)
    assert [(one["id"], one["user"], one["query"]) for one in shown] == [
        ("second", None, "Why\x1b[31m?"),
        ("first", "alice", "What is\nan anabranch?"),
    ]


def test_queries_fit_on_a_narrow_terminal(data: Path) -> None:
    fill(data, 1)
    narrow = process(data, "queries", FORCE_COLOR="1", COLUMNS="80")
    lines = re.sub(r"\x1b\[[\d;]*m", "", narrow.out).splitlines()
    assert lines[0].split() == ["question", "outcome", "id"]
    assert lines[-1].split()[-1] == "first"
    assert max(len(line) for line in lines) <= 80
    assert len(lines) < 20, "a long question is cut off"
    assert max(len(line) for line in process(data, "queries").out.splitlines()) < 400


def test_queries_list_says_if_there_are_more(run: Run) -> None:
    ran = run("queries", "--limit", "1")
    assert "second" in ran.out
    assert "first" not in ran.out
    assert "There are more than 1; show more with --limit, or all with: anabranch queries export" in ran.err
    assert len(json.loads(run("queries", "--limit", "1", "--json").out)) == 1


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["--user", "alice"], ["first"]),
        (["-c", "rivers"], ["first"]),
        (["--surface", "cli"], ["second"]),
        (["--outcome", "generation_failed"], ["second"]),
        (["--conversation", "talk"], ["first"]),
        (["--rating", "thumbs_down"], ["first"]),
        (["--since", "2000-01-01"], ["second", "first"]),
        (["--until", "2000-01-01"], []),
        (["--slower-than", "0"], ["second", "first"]),
        (["--slower-than", "1"], []),
    ],
)
def test_queries_list_and_export_take_filters(run: Run, options: list[str], found: list[str]) -> None:
    assert [one["id"] for one in json.loads(run("queries", *options, "--json").out)] == found
    assert [json.loads(line)["id"] for line in run("queries", "export", *options).out.splitlines()] == found
    if not found:
        assert run("queries", *options).err == "No question matches.\n"


def test_wrong_filters_are_refused(run: Run) -> None:
    ran = run("queries", "--since", "yesterday")
    assert (ran.code, ran.out) == (2, "")
    assert "--since is 'yesterday'; it takes a day such as 2024-12-31" in ran.err
    assert run("queries", "--rating", "meh").code == 2
    missing = run("queries", "-c", "nowhere")
    assert (missing.code, missing.err) == (1, "anabranch: There is no collection 'nowhere'.\n")


def test_queries_show_prints_one_question(run: Run) -> None:
    ran = run("queries", "show", "first")
    for shown in ("What is an anabranch?", "That.", "thumbs_down · Too short.", "rerank, no streaming, sources a b"):
        assert shown in ran.out, ran.out
    assert re.search(r"^faithfulness +0\.75 \(1 supported, 1 in part\) *$", ran.out, re.MULTILINE)
    detail = json.loads(run("queries", "show", "first", "--json").out)
    assert (detail["faithfulness"], detail["verdicts"]["unchecked"]) == (0.75, 4)
    assert (detail["answer"], detail["answer_withheld"], detail["user"]) == ("That.", False, "alice")
    assert run("queries", "show", "fir").out == ran.out
    unknown = run("queries", "show", "third")
    assert (unknown.code, unknown.err) == (1, "anabranch: There is no question 'third' in the query log.\n")


def test_queries_show_says_that_a_deleted_document_may_be_quoted(run: Run, data: Path) -> None:
    place = Place(chunk_id="c", collection="rivers", start=0, end=1, tokens=1, scores=Scores(fused=0.5))
    passage = Passage(text="Gone.", source="rivers", title="Gone", score=1.0, document_id="gone", place=place)
    quoting = msgspec.structs.replace(query_record("third", ""), answer="Gone.", found=(passage,))
    with closing(SqliteDatabase.open(data)) as database:
        database.writing(lambda db: queries.record(db, quoting))
    ran = run("queries", "show", "third")
    assert "(not shown: a document that it may quote was deleted)" in ran.out
    assert "Gone." not in ran.out + run("queries", "export").out


def fill(data: Path, count: int) -> list[str]:
    """Add questions to the log; returns their ids, newest first."""
    ids = [f"{number:04}" for number in range(count)]
    with closing(SqliteDatabase.open(data)) as database:
        for one in ids:
            # A line separator of Unicode must not divide a line of JSON.
            asked = msgspec.structs.replace(query_record(one, "bob"), original="One\u2028question\u0085" + "?" * 1_000)
            database.writing(partial(queries.record, query=asked))
    return ids[::-1]


def test_queries_export_writes_a_log_of_many_parts_once_each(run: Run, data: Path, tmp_path: Path) -> None:
    ids = fill(data, PAGE * 2 + 50)
    lines = run("queries", "export").out.splitlines()
    assert [json.loads(line)["id"] for line in lines] == [*ids, "second", "first"]
    file = tmp_path / "log.jsonl"
    written = run("queries", "export", "-o", str(file))
    assert (written.out, f"Wrote {len(lines)} questions: {file}" in written.err) == ("", True)
    assert file.read_text().splitlines() == lines
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    again = run("queries", "export", "-o", str(file))
    assert (again.code, "--force replaces it" in again.err) == (2, True)
    file.chmod(0o644)
    assert run("queries", "export", "-o", str(file), "--force", "--surface", "cli").code == 0
    assert len(file.read_text().splitlines()) == 1
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert run("queries", "export", "-o", str(tmp_path / "no" / "folder")).code == 2


def test_an_export_into_a_pipe_that_closes_prints_no_error(data: Path) -> None:
    fill(data, PAGE)
    command = f"{sys.executable} -m anabranch queries export | head -n 1"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=PATIENCE_S, check=True, env=environment(data)
    )
    assert (json.loads(done.stdout)["id"], done.stderr) == (f"{PAGE - 1:04}", "")


def test_feedback_lists_ratings(run: Run) -> None:
    ran = run("feedback")
    assert ran.out.splitlines()[0].split() == ["question", "rating", "comment", "rated", "surface", "user", "id"]
    assert "thumbs_down" in ran.out
    assert "Too short." in ran.out
    (one,) = json.loads(run("feedback", "list", "--json").out)
    assert (one["query_id"], one["rating"], one["user"]) == ("first", "thumbs_down", "alice")
    assert run("feedback", "--rating", "thumbs_up").err == "No rating matches.\n"
    assert json.loads(run("feedback", "--user", "bob", "--json").out) == []


def test_without_a_data_folder_the_log_is_empty(run: Run, tmp_path: Path) -> None:
    nowhere = {"AGGREGATOR_DATA_DIR": str(tmp_path / "nowhere")}
    assert run("queries", **nowhere).err == "The query log is empty.\n"
    assert run("feedback", **nowhere).err == "No answer has been rated.\n"
    assert (run("queries", "export", **nowhere).out, run("queries", "show", "x", **nowhere).code) == ("", 1)
    assert not (tmp_path / "nowhere").exists()


def test_with_zero_days_the_commands_say_that_nothing_is_kept(run: Run) -> None:
    off = {"AGGREGATOR_QUERY_LOG_DAYS": "0"}
    reason = "Questions are not kept here (AGGREGATOR_QUERY_LOG_DAYS is 0).\n"
    for command in (["queries"], ["feedback"], ["queries", "export"]):
        ran = run(*command, **off)
        assert (ran.code, ran.out, ran.err) == (0, "", reason)
    assert run("queries", "show", "first", **off).err == f"anabranch: {reason}"
    assert json.loads(run("queries", "--json", **off).out) == []


@pytest.mark.parametrize(
    ("options", "left"), [([], 2), (["--older-than", "0"], 2), (["--user", "alice"], 1), (["--all", "--yes"], 0)]
)
def test_forget_deletes_counts_only_with_a_user_or_all(run: Run, data: Path, options: list[str], left: int) -> None:
    with closing(SqliteDatabase.open(data)) as database:
        for user in ("alice", "bob"):
            one = msgspec.structs.replace(query_record(user, user), collections=(9,))
            database.writing(partial(queries.record, query=one))
    assert run("queries", "forget", *options).code == 0
    with closing(SqliteDatabase.open(data)) as database:
        assert database.reading(lambda db: queries.count(db, 9, 30)) == left
