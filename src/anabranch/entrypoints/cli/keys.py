"""`anabranch keys`: who may ask over HTTP, as which user."""

from pathlib import Path

import click

from anabranch.domain.errors import NotFound
from anabranch.domain.model import Value
from anabranch.entrypoints.cli.opening import exist, records, require_records
from anabranch.entrypoints.cli.options import ListsByDefault, config_option, configured, json_option
from anabranch.entrypoints.cli.terminal import flat, moment, notes, output, print_json, print_table
from anabranch.knowledge.records import keys
from anabranch.knowledge.records.keys import Key


class Shown(Value, omit_defaults=True):
    """A key as `--json` gives it; its secret only once."""

    id: str
    user: str
    groups: tuple[str, ...]
    operator: bool
    note: str
    created_at: str
    revoked_at: str | None
    secret: str | None = None


@click.group("keys", cls=ListsByDefault)
def group() -> None:
    """Make, list and revoke API keys."""


@group.command()
@click.option("--user", required=True, help="As whom its holder asks.")
@click.option("--group", "groups", multiple=True, help="A group the user is in; repeatable.")
@click.option("--operator", is_flag=True, help="The holder sees and changes everything.")
@click.option("--note", default="", help="What the key is for.")
@json_option
@config_option
def create(user: str, groups: tuple[str, ...], operator: bool, note: str, as_json: bool, config: Path | None) -> None:
    """Make a key. Its secret is printed once, and kept nowhere."""
    if not user.strip():
        raise click.UsageError("--user is empty: name somebody.")
    with records(configured(config)) as database:
        key, secret = database.writing(
            lambda db: keys.create(db, user=user.strip(), groups=groups, operator=operator, note=note)
        )
    if as_json:
        print_json(_shown(key, secret))
        return
    click.echo(secret)
    rights = " and may do everything" if operator else ""
    notes().print(
        f"Key {key.id}: whoever sends it (Authorization: Bearer …) asks as {flat(user)}{rights}. It is not shown "
        f"again; revoke it with: anabranch keys revoke {key.id}",
    )


@group.command("list")
@json_option
@config_option
def listed(as_json: bool, config: Path | None) -> None:
    """The keys, without their secrets."""
    settings = configured(config)
    found: list[Key] = []
    if exist(settings):
        with records(settings) as database:
            found = database.reading(keys.listed)
    if as_json:
        print_json([_shown(key) for key in found])
    elif found:
        rows = [
            (
                key.user,
                key.id,
                ", ".join(key.groups),
                "operator" if key.operator else "",
                moment(key.created_at)[:10],
                "revoked" if key.revoked_at else "",
                key.note,
            )
            for key in found
        ]
        print_table(("user", "id", "groups", "rights", "created", "state", "note"), rows)
    else:
        notes().print("There is no key yet. Make one with: anabranch keys create --user NAME")


@group.command()
@click.argument("identifier", metavar="ID")
@json_option
@config_option
def revoke(identifier: str, as_json: bool, config: Path | None) -> None:
    """Revoke a key. It is refused from the next request on, and its streams end within seconds."""
    settings = configured(config)
    require_records(settings)
    with records(settings) as database:
        if not database.writing(lambda db: keys.revoke(db, identifier)):
            raise NotFound(f"There is no key {identifier!r} that could be revoked.")
    if as_json:
        print_json({"id": identifier, "revoked": True})
    else:
        output().print(f"Revoked {identifier}.")


def _shown(key: Key, secret: str | None = None) -> Shown:
    return Shown(
        id=key.id,
        user=key.user,
        groups=key.groups,
        operator=key.operator,
        note=key.note,
        created_at=moment(key.created_at),
        revoked_at=moment(key.revoked_at) if key.revoked_at else None,
        secret=secret,
    )
