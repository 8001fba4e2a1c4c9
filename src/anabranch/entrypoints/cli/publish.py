"""`anabranch publish`, `unpublish` and `published`: under which names others may ask a collection."""

import asyncio
import re
from pathlib import Path

import click

from anabranch.domain.errors import Conflict, NotFound
from anabranch.domain.model import Value
from anabranch.entrypoints.cli.options import config_option, configured, json_option
from anabranch.entrypoints.cli.resources import OPERATOR, exist, knowledge, records, require_records
from anabranch.entrypoints.cli.terminal import flat, moment, notes, output, print_json, print_table
from anabranch.knowledge.records import collections, endpoints

OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
SLUG = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")


class PublishedView(Value):
    """Something published, as `--json` gives it."""

    path: str
    owner: str
    slug: str
    collection: str
    collection_id: str
    published_at: str


@click.command("publish")
@click.argument("collection")
@click.option("--as", "path", required=True, metavar="OWNER/SLUG", help="The name it is asked under.")
@json_option
@config_option
def publish(collection: str, path: str, as_json: bool, config: Path | None) -> None:
    """Let others ask a COLLECTION as owner/slug."""
    owner, slug = _split(path)
    settings = configured(config)
    if path in settings.published_models:
        raise Conflict(
            f"{path} is the model {settings.published_models[path]!r} of your configuration; choose another."
        )
    require_records(settings)

    async def run() -> str:
        async with knowledge(settings) as room:
            found = (await room.collection(OPERATOR, collection)).collection
            if not await room.database.write(lambda db: endpoints.publish(db, owner, slug, found.key)):
                raise Conflict(f"Another collection is published as {path}. Withdraw it: anabranch unpublish {path}")
            return found.name

    name = asyncio.run(run())
    if as_json:
        print_json({"path": path, "collection": name})
    else:
        output().print(f"{flat(name)} is published as {path}.")


@click.command("unpublish")
@click.argument("path", metavar="PATH")
@json_option
@config_option
def unpublish(path: str, as_json: bool, config: Path | None) -> None:
    """Withdraw what was published as PATH (owner/slug)."""
    owner, slug = _split(path)
    settings = configured(config)
    require_records(settings)
    with records(settings) as database:
        if not database.writing(lambda db: endpoints.withdraw(db, owner, slug)):
            raise NotFound(f"Nothing is published as {path}.")
    if as_json:
        print_json({"path": path, "withdrawn": True})
    else:
        output().print(f"{path} is published no more.")


@click.command("published")
@json_option
@config_option
def published(as_json: bool, config: Path | None) -> None:
    """List what is published."""
    settings = configured(config)
    found: list[PublishedView] = []
    if exist(settings):
        with records(settings) as database:
            names = {one.key: one for one in database.reading(collections.listed)}
            found = [
                PublishedView(
                    path=one.path,
                    owner=one.owner,
                    slug=one.slug,
                    collection=names[one.collection].name,
                    collection_id=names[one.collection].id,
                    published_at=moment(one.created_at),
                )
                for one in database.reading(endpoints.listed)
                if one.collection in names
            ]
    if as_json:
        print_json(found)
    elif found:
        print_table(("collection", "path", "since"), [(one.collection, one.path, one.published_at) for one in found])
    else:
        notes().print("Nothing is published. Publish a collection with: anabranch publish COLLECTION --as OWNER/SLUG")


def _split(path: str) -> tuple[str, str]:
    owner, _, slug = path.partition("/")
    if not (OWNER.fullmatch(owner) and SLUG.fullmatch(slug)):
        raise click.UsageError(
            f"{path!r} is not of the form owner/slug: the owner has letters, digits, dots, dashes and underscores, the "
            f"slug small letters, digits and dashes, each up to 63."
        )
    return owner, slug
