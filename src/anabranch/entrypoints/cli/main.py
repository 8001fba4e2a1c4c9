"""The command table, `serve`, and the formatting of errors."""

import importlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import click

from anabranch.domain.audit import acting, on_this_machine
from anabranch.domain.errors import AnabranchError, ConfigurationError, InvalidQuestion
from anabranch.entrypoints.cli.options import config_option

# The folder of the workers' metrics; it must be set before prometheus_client is loaded.
METRICS_DIR = "PROMETHEUS_MULTIPROC_DIR"
# Loaded only when it is run: the module and attribute of each command, and the first sentence of its help.
COMMANDS: dict[str, tuple[str, str]] = {
    "ask": ("ask:command", "Ask a QUESTION; the answer is streamed, with its sources below it."),
    "replay": ("replay:command", "Replay the run that is recorded in FILE, without a network."),
    "ingest": ("ingest:command", "Ingest files, folders and web pages into a collection."),
    "search": ("search:command", "Search the collections and print the best passages."),
    "collections": ("collections:collections", "List, create, show and delete collections."),
    "documents": ("collections:documents", "List, show, retry and delete documents, and change their permissions."),
    "publish": ("collections:publish", "Let others query a COLLECTION as owner/slug."),
    "unpublish": ("collections:unpublish", "Withdraw what is published as PATH (owner/slug)."),
    "published": ("collections:published", "List what is published."),
    "keys": ("keys:keys", "Create, list, rotate and revoke API keys."),
    "queries": ("queries:queries", "List, show, export and delete the questions of the query log."),
    "feedback": ("queries:feedback", "List the ratings of answers."),
    "erase": ("erase:command", "Erase a document or a user everywhere; without an option, list the erasures."),
    "index": ("index:group", "Show the state of the search index, or rebuild it."),
    "cluster": ("cluster:group", "List the nodes that share the records, and forget one that is gone for good."),
    "audit": ("audit:group", "List, export and verify the audit log: who changed what."),
    "verify": ("verify:command", "Verify the records, the index, the audit log and backups; nothing is changed."),
    "backup": ("records:backup", "Copy the records into FILE, also while a server runs."),
    "restore": ("records:restore", "Replace the records with FILE, a backup."),
    "migrate": ("migrate:command", "Move the records to PostgreSQL, or back to a folder."),
    "models": ("models:group", "Install and list the models that run on this machine."),
    "mcp": ("mcp:group", "Run as an MCP server over stdio; list the configured MCP servers."),
    "eval": ("evaluation:group", "Evaluate the search and the answers."),
}


class Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        return cast("click.Command", getattr(importlib.import_module(f"anabranch.entrypoints.cli.{module}"), attribute))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        texts = {name: text for name, (_, text) in COMMANDS.items()}
        texts |= {name: command.get_short_help_str(limit=100) for name, command in self.commands.items()}
        with formatter.section("Commands"):
            formatter.write_dl(list(texts.items()))


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="anabranch")
def commands() -> None:
    """Ask many sources at once; get one answer with citations."""


@commands.command()
@click.option("--host", help="The address to listen on [default: AGGREGATOR_HOST, 0.0.0.0].")
@click.option("--port", type=int, help="The port; 0 picks a free one [default: AGGREGATOR_PORT, 8001].")
@click.option(
    "--workers", type=click.IntRange(1, 1_000), help="Number of worker processes [default: AGGREGATOR_WORKERS, 1]."
)
@config_option
def serve(host: str | None, port: int | None, workers: int | None, config: Path | None) -> None:
    """Run the HTTP server."""
    from anabranch.app.startup import check  # noqa: PLC0415
    from anabranch.configuration import env_file  # noqa: PLC0415
    from anabranch.configuration.settings import PREFIX, add_missing, load, unknown  # noqa: PLC0415
    from anabranch.entrypoints.http.server import serve as run  # noqa: PLC0415  the server loads only where it runs
    from anabranch.telemetry.log import configured_log  # noqa: PLC0415

    # The workers read their settings from the environment, so that is where the options and `.env` go.
    given = {"HOST": host, "PORT": port, "WORKERS": workers, "CONFIG": config.resolve() if config else None}
    os.environ.update({PREFIX + name: str(value) for name, value in given.items() if value is not None})
    dotenv = env_file.read(Path())
    used = add_missing(dotenv.values)
    try:
        settings = load(file=config)
    except ConfigurationError as error:
        raise dotenv.located(error, used) from None
    log = configured_log(settings)
    if dotenv.ignored:
        log.warning("env_file_ignored", file=str(dotenv.path.absolute()), reason=dotenv.ignored)
    elif dotenv.values:
        log.info("env_file_read", file=str(dotenv.path.absolute()), variables=used)
    for name in dotenv.unprefixed:
        reason = f".env sets only names that begin with {PREFIX}; set it in the environment or in anabranch.yaml"
        log.warning("env_variable_ignored", file=str(dotenv.path.absolute()), variable=name, reason=reason)
    for name, meant in unknown().items():
        log.warning("unknown_setting", variable=name, hint=meant or "it is ignored")
    check(settings, log)
    with _shared_metrics(settings.workers):
        run(settings, log)


@contextmanager
def _shared_metrics(workers: int) -> Iterator[None]:
    """Workers share a port, so each must report the metrics of all: they are in a temporary folder. A folder inherited
    from an earlier run or another program would add its counts."""
    for name in (METRICS_DIR, METRICS_DIR.lower()):
        os.environ.pop(name, None)
    if workers == 1:
        yield
        return
    with TemporaryDirectory(prefix="anabranch-metrics-", ignore_cleanup_errors=True) as folder:
        os.environ[METRICS_DIR] = folder
        yield


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. A usage or configuration error is one sentence on standard error, not a traceback."""
    # The MCP library logs what `mcp servers` reports in its own words; without a handler, Python would print it.
    logging.getLogger("mcp").addHandler(logging.NullHandler())
    acting.set(lambda: on_this_machine("cli"))
    try:
        sys.exit(commands(arguments, prog_name="anabranch", standalone_mode=False))
    except AnabranchError as error:
        from anabranch.entrypoints.cli.terminal import printable  # noqa: PLC0415

        click.echo(f"anabranch: {printable(error.message)}", err=True)
        sys.exit(2 if isinstance(error, ConfigurationError | InvalidQuestion) else 1)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except UnicodeEncodeError as error:
        if error.reason != "surrogates not allowed":
            raise
        click.echo(f"anabranch: {error.object.encode(errors='surrogateescape')!r} is not valid UTF-8.", err=True)
        sys.exit(2)
    except click.Abort:
        sys.exit(130)
