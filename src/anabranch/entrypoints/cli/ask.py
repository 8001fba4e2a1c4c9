"""`anabranch ask`: ask a question, stream the answer, and show its sources."""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from anabranch.app import Anabranch
from anabranch.configuration.settings import Settings
from anabranch.domain.errors import ConfigurationError
from anabranch.domain.model import Endpoint, Until, Value
from anabranch.entrypoints.cli.ask_output import AskScreen, JsonScreen
from anabranch.entrypoints.cli.options import json_option, settings_option
from anabranch.entrypoints.cli.resources import OPERATOR


class Inquiry(Value):
    question: str
    sources: Sequence[str] | None
    model: str | None
    tokens: Mapping[str, str]
    top_k: int | None
    retrieve: bool


@click.command("ask")
@click.argument("question")
@click.option(
    "-s",
    "--source",
    "sources",
    multiple=True,
    metavar="SOURCE",
    help="A collection, a configured source, an MCP server, URL/slug, or owner/slug on the hub; repeatable "
    "[default: every collection and every configured source].",
)
@click.option(
    "-m",
    "--model",
    metavar="MODEL",
    help="URL/slug, owner/slug on the hub, a configured name, or 'extractive', which quotes the documents without a "
    "model [default: the configured one, else extractive].",
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
@click.option("--retrieve", is_flag=True, help="Only retrieve passages; do not generate an answer.")
@json_option
@settings_option
def command(
    question: str,
    sources: tuple[str, ...],
    model: str | None,
    tokens: tuple[str, ...],
    top_k: int | None,
    retrieve: bool,
    as_json: bool,
    settings: Settings,
) -> None:
    """Ask a QUESTION; the answer is streamed, with its sources below it.

    The exit status is 0 for an answer, 1 for a failure, 3 if no source has anything to answer from.
    """
    inquiry = Inquiry(
        question=question,
        sources=sources or None,
        model=model,
        tokens=dict(_token(entry) for entry in tokens),
        top_k=top_k,
        retrieve=retrieve,
    )
    sys.exit(asyncio.run(ask(settings, inquiry, as_json=as_json)))


async def ask(settings: Settings, inquiry: Inquiry, *, as_json: bool) -> int:
    """Print the answer; returns the exit status."""
    async with (
        Anabranch.open(settings=settings, surface="cli", log_queries=True) as anabranch,
        anabranch.stream(
            inquiry.question,
            sources=await _sources(anabranch) if inquiry.sources is None else inquiry.sources,
            model=inquiry.model,
            tokens=inquiry.tokens,
            top_k=inquiry.top_k,
            until=Until.MERGE if inquiry.retrieve else Until.GENERATE,
        ) as events,
    ):
        screen: AskScreen | JsonScreen = JsonScreen() if as_json else AskScreen()
        with screen:
            async for event in events:
                screen.show(event)
    return screen.finish()


async def _sources(anabranch: Anabranch) -> Sequence[Endpoint] | None:
    """None for all sources, collections included."""
    if anabranch.knowledge.exists and await (await anabranch.knowledge()).collections(OPERATOR):
        return None
    if not anabranch.settings.sources:
        raise ConfigurationError(
            "No source is named, and there is no collection. Name a source with --source or in anabranch.yaml, or "
            "ingest documents with: anabranch ingest FOLDER --collection NAME"
        )
    return tuple(anabranch.settings.sources.values())


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
