"""`anabranch queries`: the log of questions, and forgetting them."""

from pathlib import Path

import click

from anabranch.entrypoints.cli.options import config_option, configured, json_option
from anabranch.entrypoints.cli.resources import exist, records
from anabranch.entrypoints.cli.terminal import counted, output, print_json
from anabranch.knowledge.records import queries


@click.group("queries")
def group() -> None:
    """The log of questions."""


@group.command()
@click.option("--older-than", type=click.FloatRange(0), metavar="DAYS", help="Those that are older than so many days.")
@click.option("--user", help="Those of one user; all of them unless --older-than says otherwise.")
@click.option("--all", "everything", is_flag=True, help="All of them, however new.")
@json_option
@config_option
def forget(older_than: float | None, user: str | None, everything: bool, as_json: bool, config: Path | None) -> None:
    """Delete questions with their answers, quotes and feedback.

    Without an option, those that are older than AGGREGATOR_QUERY_LOG_DAYS, as a server does by itself.
    """
    settings = configured(config)
    if everything and older_than is not None:
        raise click.UsageError("--all and --older-than exclude each other.")
    if older_than is not None:
        days = older_than
    else:
        days = 0.0 if everything or user is not None else float(settings.query_log_days)
    gone = 0
    if exist(settings):
        with records(settings) as database:
            gone = database.writing(lambda db: queries.forget(db, days, user))
    if as_json:
        print_json({"forgotten": gone})
    else:
        output().print(f"Forgot {counted(gone, 'question')}.")
