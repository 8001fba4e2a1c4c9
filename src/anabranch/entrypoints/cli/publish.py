"""`anabranch publish`, `unpublish` and `published`: the paths under which others may query collections."""

import re

import click

from anabranch.configuration.settings import Settings
from anabranch.domain.errors import Conflict, NotFound
from anabranch.entrypoints.cli.options import json_option, settings_option
from anabranch.entrypoints.cli.resources import OPERATOR, read, require_records, run, write
from anabranch.entrypoints.cli.terminal import flat, moment, print_list, print_result
from anabranch.knowledge.records import collections

OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
SLUG = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")


@click.command("publish")
@click.argument("collection")
@click.option("--as", "path", required=True, metavar="OWNER/SLUG", help="The path under which it is queried.")
@json_option
@settings_option
def publish(collection: str, path: str, as_json: bool, settings: Settings) -> None:
    """Let others query a COLLECTION as owner/slug."""
    owner, slug = _split(path)
    if path in settings.published_models:
        raise Conflict(
            f"{path} is the model {settings.published_models[path]!r} of your configuration; choose another path."
        )
    name = run(settings, lambda knowledge: knowledge.publish(OPERATOR, collection, owner, slug)).name
    print_result({"path": path, "collection": name}, f"{flat(name)} is published as {path}.", as_json=as_json)


@click.command("unpublish")
@click.argument("path", metavar="PATH")
@json_option
@settings_option
def unpublish(path: str, as_json: bool, settings: Settings) -> None:
    """Withdraw what is published as PATH (owner/slug)."""
    owner, slug = _split(path)
    require_records(settings)
    if not write(settings, lambda db: collections.withdraw(db, owner, slug)):
        raise NotFound(f"Nothing is published as {path}.")
    print_result({"path": path, "withdrawn": True}, f"{path} is no longer published.", as_json=as_json)


@click.command("published")
@json_option
@settings_option
def published(as_json: bool, settings: Settings) -> None:
    """List what is published."""
    views = [
        {
            "path": endpoint.path,
            "owner": endpoint.owner,
            "slug": endpoint.slug,
            "collection": collection.name,
            "collection_id": collection.id,
            "published_at": moment(endpoint.created_at),
        }
        for endpoint, collection in read(settings, collections.published)
    ]
    print_list(
        views,
        {
            "collection": lambda one: one["collection"],
            "path": lambda one: one["path"],
            "since": lambda one: one["published_at"],
        },
        empty="Nothing is published. Publish a collection with: anabranch publish COLLECTION --as OWNER/SLUG",
        as_json=as_json,
    )


def _split(path: str) -> tuple[str, str]:
    owner, _, slug = path.partition("/")
    if not (OWNER.fullmatch(owner) and SLUG.fullmatch(slug)):
        raise click.UsageError(
            f"{path!r} is not of the form owner/slug: the owner has letters, digits, dots, dashes and underscores, the "
            f"slug lower-case letters, digits and dashes, each up to 63 characters."
        )
    return owner, slug
