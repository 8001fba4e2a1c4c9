"""`anabranch queries`: delete questions from the query log."""

import click

from anabranch.configuration.settings import Settings
from anabranch.entrypoints.cli.options import json_option, settings_option
from anabranch.entrypoints.cli.resources import exist, write
from anabranch.entrypoints.cli.terminal import counted, print_result
from anabranch.knowledge.records import queries


@click.group("queries")
def group() -> None:
    """Manage the query log."""


@group.command()
@click.option("--older-than", type=click.FloatRange(0), metavar="DAYS", help="Questions older than this many days.")
@click.option("--user", help="Questions of this user: all of them unless --older-than is given.")
@click.option("--all", "everything", is_flag=True, help="All questions.")
@json_option
@settings_option
def forget(older_than: float | None, user: str | None, everything: bool, as_json: bool, settings: Settings) -> None:
    """Delete questions with their answers, citations and feedback.

    Without an option, those older than AGGREGATOR_QUERY_LOG_DAYS, which a server deletes by itself.
    """
    if everything and older_than is not None:
        raise click.UsageError("--all and --older-than exclude each other.")
    days = older_than
    if days is None:
        days = 0.0 if everything or user is not None else float(settings.query_log_days)
    deleted = write(settings, lambda db: queries.forget(db, days, user)) if exist(settings) else 0
    print_result({"forgotten": deleted}, f"Deleted {counted(deleted, 'question')}.", as_json=as_json)
