"""The commands: which there are, where each is found, and what a mistake looks like."""

import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from anabranch.domain.errors import AnabranchError, ConfigurationError, InvalidQuestion
from anabranch.entrypoints.cli.options import config_option

HERE = __package__ or "anabranch.entrypoints.cli"
# Where several processes count together; it must be set before prometheus_client is loaded.
COUNTING = "PROMETHEUS_MULTIPROC_DIR"
# Each loads when it is run, and not to be listed: where it is, and the first sentence of its help.
ELSEWHERE: dict[str, tuple[str, str]] = {
    "ask": ("ask:command", "Ask a QUESTION; the answer streams in, with its sources below it."),
    "ingest": ("ingest:command", "Take files, folders and web pages into a collection."),
    "search": ("search:command", "Search the collections; passages, best first."),
    "collections": ("collections:group", "List, make, show and delete collections."),
    "documents": ("documents:group", "List, show and delete documents, and say who may see them."),
    "publish": ("publish:publish", "Let others ask a COLLECTION as owner/slug."),
    "unpublish": ("publish:unpublish", "Withdraw what was published as PATH (owner/slug)."),
    "published": ("publish:published", "List what is published."),
    "keys": ("keys:group", "Make, list and revoke API keys."),
    "queries": ("queries:group", "The log of questions."),
    "index": ("index:group", "Look at the search index, or make it anew."),
    "backup": ("backup:backup", "Copy the records into FILE, also while a server runs."),
    "restore": ("backup:restore", "Put the records from FILE, a backup, in place."),
    "models": ("models:group", "Install and list the models that run on this machine."),
    "mcp": ("mcp:group", "Be an MCP server for one client; list the MCP servers that are asked."),
    "eval": ("evaluation:group", "Measure how well things are found."),
}


class Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*ELSEWHERE, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in ELSEWHERE:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = ELSEWHERE[cmd_name][0].partition(":")
        found = getattr(importlib.import_module(f"{HERE}.{module}"), attribute)
        assert isinstance(found, click.Command)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        here = {name: command.get_short_help_str(limit=100) for name, command in self.commands.items()}
        with formatter.section("Commands"):
            formatter.write_dl([*((name, text) for name, (_, text) in ELSEWHERE.items()), *here.items()])


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="anabranch")
def commands() -> None:
    """One question to many sources at once, and one answer that shows its evidence."""


@commands.command()
@click.option("--host", help="The address to listen on [default: AGGREGATOR_HOST, 0.0.0.0].")
@click.option("--port", type=int, help="The port; 0 takes a free one [default: AGGREGATOR_PORT, 8001].")
@click.option("--workers", type=click.IntRange(1, 1_000), help="How many processes [default: AGGREGATOR_WORKERS, 1].")
@config_option
def serve(host: str | None, port: int | None, workers: int | None, config: Path | None) -> None:
    """Serve every surface over HTTP."""
    from anabranch.app.startup import check  # noqa: PLC0415
    from anabranch.configuration.settings import PREFIX, load, unknown  # noqa: PLC0415
    from anabranch.entrypoints.http.server import serve as run  # noqa: PLC0415  the server loads only where it runs
    from anabranch.telemetry.log import configured_log  # noqa: PLC0415

    # The workers read their settings from the environment, so that is where the options go.
    given = {"HOST": host, "PORT": port, "WORKERS": workers, "CONFIG": config.resolve() if config else None}
    os.environ.update({PREFIX + name: str(value) for name, value in given.items() if value is not None})
    settings = load(file=config)
    log = configured_log(settings)
    for name in unknown():
        log.warning("unknown_setting", variable=name)
    check(settings, log)
    with _counting_together(settings.workers):
        run(settings, log)


@contextmanager
def _counting_together(workers: int) -> Iterator[None]:
    """Workers share a port, so each must be able to say what all have counted: in a folder that is there as long as
    they are. One that an earlier run was given, or another program, would bring its counts along."""
    for name in (COUNTING, COUNTING.lower()):
        os.environ.pop(name, None)
    if workers == 1:
        yield
        return
    with TemporaryDirectory(prefix="anabranch-metrics-", ignore_cleanup_errors=True) as folder:
        os.environ[COUNTING] = folder
        yield


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. What a person did wrong is one sentence on standard error, not a traceback."""
    try:
        sys.exit(commands(arguments, prog_name="anabranch", standalone_mode=False))
    except AnabranchError as error:
        from anabranch.entrypoints.cli.terminal import printable  # noqa: PLC0415

        click.echo(f"anabranch: {printable(error.message)}", err=True)
        sys.exit(2 if isinstance(error, ConfigurationError | InvalidQuestion) else 1)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
