"""The commands and their options."""

import asyncio
import os
import sys
from pathlib import Path

import click

from anabranch.domain.errors import AnabranchError, ConfigurationError, InvalidQuestion
from anabranch.runtime.settings import PREFIX, load, unknown

config_option = click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The configuration file [default: anabranch.yaml].",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="anabranch")
def commands() -> None:
    """One question to many sources at once, and one answer that shows its evidence."""


@commands.command()
@click.option("--host", help="The address to listen on [default: AGGREGATOR_HOST, 0.0.0.0].")
@click.option("--port", type=int, help="The port; 0 takes a free one [default: AGGREGATOR_PORT, 8001].")
@click.option("--workers", type=click.IntRange(min=1), default=1, show_default=True, help="How many processes.")
@config_option
def serve(host: str | None, port: int | None, workers: int, config: Path | None) -> None:
    """Serve every surface over HTTP."""
    from anabranch.entrypoints.http.server import serve as run  # noqa: PLC0415  the server loads only where it runs
    from anabranch.runtime.telemetry import configured_log  # noqa: PLC0415

    # The workers read their settings from the environment, so that is where the options go.
    given = {"HOST": host, "PORT": port, "CONFIG": config.resolve() if config else None}
    os.environ.update({PREFIX + name: str(value) for name, value in given.items() if value is not None})
    settings = load(file=config)
    log = configured_log(settings)
    for name in unknown():
        log.warning("unknown_setting", variable=name)
    run(settings, workers, log)


@commands.command()
@click.argument("question")
@click.option(
    "-s",
    "--source",
    "sources",
    multiple=True,
    metavar="SOURCE",
    help="URL/slug, owner/slug on the hub, or a configured name. Repeat for more [default: every configured source].",
)
@click.option(
    "-m",
    "--model",
    metavar="MODEL",
    help="URL/slug, owner/slug on the hub, or a configured name [default: the configured one].",
)
@click.option(
    "-t",
    "--token",
    "tokens",
    multiple=True,
    metavar="OWNER=TOKEN",
    help="A token for an owner's endpoints; OWNER=@FILE reads it from a file. Give a URL's owner as OWNER@URL/slug.",
)
@click.option("-k", "--top-k", type=click.IntRange(min=1), help="Documents per source.")
@click.option("--retrieve", is_flag=True, help="Only find documents: no model, no answer.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
@config_option
def ask(
    question: str,
    sources: tuple[str, ...],
    model: str | None,
    tokens: tuple[str, ...],
    top_k: int | None,
    retrieve: bool,
    as_json: bool,
    config: Path | None,
) -> None:
    """Ask a QUESTION; the answer streams in, with its sources below it."""
    from anabranch.entrypoints.cli import ask as asking  # noqa: PLC0415

    settings = load(file=config)
    for name in unknown():
        click.echo(f"anabranch: {name} is not a setting; it is passed over.", err=True)
    if not sources and not settings.sources:
        raise ConfigurationError("No source is named. Name one with --source, or configure some in anabranch.yaml.")
    inquiry = asking.Inquiry(
        question=question,
        sources=sources or None,
        model=model,
        tokens=dict(_token(entry) for entry in tokens),
        top_k=top_k,
        retrieve=retrieve,
    )
    sys.exit(asyncio.run(asking.ask(settings, inquiry, as_json=as_json)))


def main() -> None:
    """Run a command. What a person did wrong is one sentence on standard error, not a traceback."""
    try:
        sys.exit(commands(prog_name="anabranch", standalone_mode=False))
    except AnabranchError as error:
        click.echo(f"anabranch: {error.message}", err=True)
        sys.exit(2 if isinstance(error, ConfigurationError | InvalidQuestion) else 1)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)


def _token(entry: str) -> tuple[str, str]:
    owner, equals, token = entry.partition("=")
    if not (owner and equals and token):
        raise ConfigurationError("--token takes OWNER=TOKEN.")
    if token.startswith("@"):
        try:
            token = Path(token[1:]).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigurationError(f"--token: {token[1:]} cannot be read ({error.strerror}).") from None
        except UnicodeDecodeError:
            raise ConfigurationError(f"--token: {token[1:]} is not a text file.") from None
    return owner, token
