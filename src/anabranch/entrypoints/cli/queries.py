"""`anabranch queries` and `feedback`: read the query log, copy it into other programs, and delete it."""

from pathlib import Path
from typing import Any

import click

from anabranch.app.query_log import OFF
from anabranch.configuration.settings import Settings
from anabranch.domain.errors import Conflict, NotFound
from anabranch.entrypoints.cli.logs import export_options, exported, limit_option, note_more, write_export
from anabranch.entrypoints.cli.options import (
    ListsByDefault,
    feedback_options,
    json_option,
    query_options,
    settings_option,
    yes_option,
)
from anabranch.entrypoints.cli.resources import OPERATOR, exist, read, write
from anabranch.entrypoints.cli.terminal import (
    confirm_deletion,
    counted,
    fitting,
    flat,
    joined,
    json_line,
    moment,
    notes,
    output,
    print_fields,
    print_json,
    print_list,
    print_result,
    print_table,
)
from anabranch.entrypoints.cli.verification import verdict_counts
from anabranch.entrypoints.logged_queries import (
    QueryDetail,
    feedback_entry,
    query_detail,
    query_entry,
    seconds_of,
)
from anabranch.knowledge.collection_names import only
from anabranch.knowledge.records import collections, logged_queries
from anabranch.knowledge.records import queries as query_log
from anabranch.knowledge.records.database import Session
from anabranch.knowledge.records.logged_queries import LoggedAnswer, LoggedQuery, QueryFilter

PAGE = 100
MAX_QUESTION = 200
# So many ids are shown for a prefix that several have.
MAX_CANDIDATES = 5


@click.group("queries", cls=ListsByDefault)
def queries() -> None:
    """List, show, export and delete the questions of the query log."""


@queries.command("list")
@query_options
@limit_option
@json_option
@settings_option
def list_queries(limit: int, as_json: bool, settings: Settings, **given: Any) -> None:
    """List questions, newest first."""
    found = _listed(settings, _wanted(settings, **given), limit)
    print_list(
        [query_entry(one, operator=True) for one in found[:limit]],
        fitting(
            ("question", "outcome", "id"),
            question=lambda one: _short(one.query),
            asked=lambda one: moment(one.created_at.timestamp()),
            surface=lambda one: one.surface or "",
            user=lambda one: one.user or "",
            outcome=lambda one: one.outcome or "",
            faithfulness=lambda one: "" if one.faithfulness is None else f"{one.faithfulness:.2f}",
            rating=lambda one: one.rating or "",
            id=lambda one: one.id,
        ),
        empty=_why_empty(settings, "No question matches." if any(given.values()) else "The query log is empty."),
        as_json=as_json,
    )
    note_more(found, limit, "anabranch queries export", as_json=as_json)


@queries.command()
@click.argument("identifier", metavar="ID")
@json_option
@settings_option
def show(identifier: str, as_json: bool, settings: Settings) -> None:
    """Show a question with its answer, citations and passages, by its ID or the beginning of it."""

    def work(db: Session) -> list[LoggedAnswer]:
        found = logged_queries.detail(db, OPERATOR, identifier) or _with_prefix(db, identifier)
        return [] if found is None else [found]

    found = read(settings, work) if settings.query_log_days else []
    if not found:
        raise NotFound(_why_empty(settings, f"There is no question {identifier!r} in the query log."))
    detail = query_detail(found[0], operator=True)
    if as_json:
        print_json(detail)
    else:
        _print_detail(detail)


def _with_prefix(db: Session, prefix: str) -> LoggedAnswer | None:
    """The only entry whose id begins with the prefix. Conflict if there are several."""
    found = logged_queries.ids_with_prefix(db, prefix, MAX_CANDIDATES + 1) if prefix else []
    if len(found) > 1:
        more = ", …" if len(found) > MAX_CANDIDATES else ""
        shown = ", ".join(found[:MAX_CANDIDATES])
        raise Conflict(f"Several questions have an id that begins with {prefix!r}; give more of it: {shown}{more}.")
    return logged_queries.detail(db, OPERATOR, found[0]) if found else None


def _print_detail(detail: QueryDetail) -> None:
    withheld = "(not shown: a document that it may quote was deleted)" if detail.answer_withheld else None
    fields = [
        ("question", detail.query or "(not kept)"),
        *((name, getattr(detail, name)) for name in ("rewritten_query", "id")),
        ("asked", moment(detail.created_at.timestamp())),
        *((name, getattr(detail, name)) for name in ("surface", "user", "outcome")),
        ("answer", detail.answer or withheld),
        *((f"[{one.citation_index}]", one.quoted_text) for one in detail.citations),
        ("faithfulness", _faithfulness(detail)),
        ("model", detail.model),
        ("tokens", f"{detail.input_tokens:,} in, {detail.output_tokens:,} out"),
        ("time", f"{detail.latency_ms:,} ms, retrieval {detail.retrieval_ms:,} ms"),
        ("settings", ", ".join(_setting(name, value) for name, value in detail.settings.items() if value is not None)),
        ("conversation", detail.conversation_id),
        ("rating", joined(detail.rating or "", detail.comment or "")),
    ]
    print_fields(detail, fields, as_json=False)
    if detail.passages:
        output().print()
        stages = ("dense", "sparse", "fused", "rerank")
        print_table(
            ("passage", "rank", *stages, "document"),
            [
                [one.title, one.rank, *(_score(getattr(one.scores, stage)) for stage in stages), one.document_id]
                for one in detail.passages
            ],
        )


def _faithfulness(detail: QueryDetail) -> str:
    if detail.faithfulness is None:
        return ""
    counts = verdict_counts(detail.verdicts or {})
    return f"{detail.faithfulness:.2f}" + (f" ({counts})" if counts else "")


def _setting(name: str, value: Any) -> str:
    match value:
        case bool():
            return name if value else f"no {name}"
        case list():
            return f"{name} {' '.join(map(str, value))}"
        case _:
            return f"{name} {value}"


def _score(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


@queries.command()
@export_options
@query_options
@settings_option
def export(file: Path | None, force: bool, settings: Settings, **given: Any) -> None:
    """Print every question with its answer, citations and passages as JSON, one per line.

    The newest question comes first. The log is read in parts, so it can be of any size.
    """
    wanted = _wanted(settings, **given)

    def part(last: LoggedAnswer | None, db: Session) -> list[LoggedAnswer]:
        entries = logged_queries.listed(db, OPERATOR, wanted, None if last is None else last.query.key, PAGE)
        details = (logged_queries.detail(db, OPERATOR, one.entry.id) for one in entries)
        return [one for one in details if one is not None]

    found = exported(settings, "queries.exported", part) if settings.query_log_days else ()
    count = write_export((json_line(query_detail(one, operator=True)) for one in found), file, force, "question")
    if not count and (reason := _why_empty(settings, "")):
        notes().print(reason)


@queries.command()
@click.option("--older-than", type=click.FloatRange(0), metavar="DAYS", help="Questions older than this many days.")
@click.option("--user", help="Questions of this user: all of them unless --older-than is given.")
@click.option("--all", "everything", is_flag=True, help="All questions.")
@yes_option
@json_option
@settings_option
def forget(
    older_than: float | None, user: str | None, everything: bool, yes: bool, as_json: bool, settings: Settings
) -> None:
    """Delete questions with their answers, citations and feedback.

    Without an option, those older than AGGREGATOR_QUERY_LOG_DAYS, which a server deletes by itself. --user and --all
    also delete the counts of the questions, which are otherwise kept for 30 days.
    """
    if everything and older_than is not None:
        raise click.UsageError("--all and --older-than exclude each other.")
    if everything and not yes:
        confirm_deletion("all questions of the query log" if user is None else f"all questions of {flat(user)!r}")
    counts = everything or user is not None
    days = (0.0 if counts else float(settings.query_log_days)) if older_than is None else older_than
    deleted = write(settings, lambda db: query_log.forget(db, days, user, counts=counts)) if exist(settings) else 0
    print_result({"forgotten": deleted}, f"Deleted {counted(deleted, 'question')}.", as_json=as_json)


@click.group("feedback", cls=ListsByDefault)
def feedback() -> None:
    """List the ratings of answers."""


@feedback.command("list")
@feedback_options
@limit_option
@json_option
@settings_option
def list_feedback(limit: int, as_json: bool, settings: Settings, **given: Any) -> None:
    """List ratings, the latest first."""
    found = _listed(settings, _wanted(settings, **given), limit, rated=True)
    print_list(
        [feedback_entry(one, operator=True) for one in found[:limit]],
        fitting(
            ("question", "rating", "id"),
            question=lambda one: _short(one.query),
            rating=lambda one: one.rating,
            comment=lambda one: one.comment or "",
            rated=lambda one: moment(one.rated_at.timestamp()),
            surface=lambda one: one.surface or "",
            user=lambda one: one.user or "",
            id=lambda one: one.query_id,
        ),
        empty=_why_empty(settings, "No rating matches." if any(given.values()) else "No answer has been rated."),
        as_json=as_json,
    )
    note_more(found, limit, as_json=as_json)


def _short(question: str | None) -> str:
    """The start of a question, for a list."""
    text = "(not kept)" if question is None else flat(question)
    return text if len(text) <= MAX_QUESTION else f"{text[: MAX_QUESTION - 1]}…"


def _why_empty(settings: Settings, otherwise: str) -> str:
    return otherwise if settings.query_log_days else f"{OFF}."


def _wanted(settings: Settings, **given: Any) -> QueryFilter:
    """The filter that the options describe."""
    since, until = seconds_of("--since", given.pop("since")), seconds_of("--until", given.pop("until"), end=True)
    name = given.pop("collection", None)
    key = None if name is None else _collection_key(settings, name)
    return QueryFilter(since=since, until=until, collection=key, **given)


def _collection_key(settings: Settings, name: str) -> int:
    """The collection with this id, address or name; Conflict if several have the name."""
    found = only(name, read(settings, collections.listed), OPERATOR)
    if found is None:
        raise NotFound(f"There is no collection {name!r}.")
    return found.key


def _listed(settings: Settings, wanted: QueryFilter, limit: int, *, rated: bool = False) -> list[LoggedQuery]:
    """At most one entry more than `limit`."""
    if not settings.query_log_days:
        return []
    return read(settings, lambda db: logged_queries.listed(db, OPERATOR, wanted, None, limit + 1, rated=rated))
