"""`anabranch keys`: create, list and revoke API keys."""

from typing import Any

import click

from anabranch.configuration.settings import Settings
from anabranch.domain.errors import NotFound
from anabranch.entrypoints.cli.options import ListsByDefault, json_option, settings_option
from anabranch.entrypoints.cli.resources import read, require_records, write
from anabranch.entrypoints.cli.terminal import flat, moment, notes, print_json, print_list, print_result
from anabranch.knowledge.records import keys
from anabranch.knowledge.records.keys import ApiKey


@click.group("keys", cls=ListsByDefault)
def group() -> None:
    """Create, list and revoke API keys."""


@group.command()
@click.option("--user", required=True, help="The user that requests with this key act as.")
@click.option("--group", "groups", multiple=True, help="A group of the user; repeatable.")
@click.option("--operator", is_flag=True, help="The key may see and change everything.")
@click.option("--note", default="", help="What the key is for.")
@json_option
@settings_option
def create(user: str, groups: tuple[str, ...], operator: bool, note: str, as_json: bool, settings: Settings) -> None:
    """Create a key. Its secret is printed once and not stored."""
    name = user.strip()
    if not name:
        raise click.UsageError("--user is empty; give a user name.")
    key, secret = write(settings, lambda db: keys.create(db, user=name, groups=groups, operator=operator, note=note))
    if as_json:
        print_json({**_view(key), "secret": secret})
        return
    click.echo(secret)
    rights = " and may see and change everything" if operator else ""
    notes().print(
        f"Key {key.id}: requests that send it (Authorization: Bearer …) act as {flat(user)}{rights}. It is not shown "
        f"again; revoke it with: anabranch keys revoke {key.id}",
    )


@group.command("list")
@json_option
@settings_option
def listed(as_json: bool, settings: Settings) -> None:
    """List the keys, without their secrets."""
    print_list(
        [_view(key) for key in read(settings, keys.listed)],
        {
            "user": lambda key: key["user"],
            "id": lambda key: key["id"],
            "groups": lambda key: ", ".join(key["groups"]),
            "rights": lambda key: "operator" if key["operator"] else "",
            "created": lambda key: key["created_at"][:10],
            "state": lambda key: "revoked" if key["revoked_at"] else "",
            "note": lambda key: key["note"],
        },
        empty="There is no key yet. Create one with: anabranch keys create --user NAME",
        as_json=as_json,
    )


@group.command()
@click.argument("identifier", metavar="ID")
@json_option
@settings_option
def revoke(identifier: str, as_json: bool, settings: Settings) -> None:
    """Revoke a key. The next request with it is refused, and its streams end within seconds."""
    require_records(settings)
    if not write(settings, lambda db: keys.revoke(db, identifier)):
        raise NotFound(f"There is no key {identifier!r} that could be revoked.")
    print_result({"id": identifier, "revoked": True}, f"Revoked {identifier}.", as_json=as_json)


def _view(key: ApiKey) -> dict[str, Any]:
    """A key as `--json` prints it."""
    return {
        "id": key.id,
        "user": key.user,
        "groups": key.groups,
        "operator": key.operator,
        "note": key.note,
        "created_at": moment(key.created_at),
        "revoked_at": moment(key.revoked_at) if key.revoked_at else None,
    }
