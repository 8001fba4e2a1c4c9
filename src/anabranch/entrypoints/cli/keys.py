"""`anabranch keys`: creates, lists, rotates and revokes API keys."""

import re
import time
from datetime import timedelta
from typing import Any, cast

import click
import msgspec

from anabranch.configuration.settings import Settings
from anabranch.domain.rights import SCOPES, Scope
from anabranch.entrypoints.cli.options import ListsByDefault, json_option, settings_option
from anabranch.entrypoints.cli.resources import read, require_records, write
from anabranch.entrypoints.cli.terminal import fitting, flat, joined, notes, print_json, print_list, print_result
from anabranch.entrypoints.key_views import key_fields
from anabranch.entrypoints.logged_queries import seconds_of
from anabranch.knowledge import key_requests
from anabranch.knowledge.records import collections
from anabranch.knowledge.records import keys as api_keys
from anabranch.knowledge.records.database import Session
from anabranch.policies.limits import limits_of

DURATION = re.compile(r"([0-9]{1,6})([smhdw])")
UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


@click.group("keys", cls=ListsByDefault)
def keys() -> None:
    """Create, list, rotate and revoke API keys."""


def _duration(_: click.Context, __: click.Parameter, value: str) -> float:
    """A callback for options that take a duration, as seconds."""
    found = DURATION.fullmatch(value.strip())
    if found is None:
        raise click.BadParameter(f"{value!r} is not a duration such as 90s, 30m, 1h, 7d or 4w.")
    return timedelta(**{UNITS[found[2]]: int(found[1])}).total_seconds()


def _expiry(context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    """A callback for options that take a duration from now, or a time."""
    if value is None:
        return None
    if DURATION.fullmatch(value.strip()):
        return time.time() + _duration(context, parameter, value)
    return seconds_of("--expires", value, end=True)


def _limits(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[str, float]:
    """A callback for repeatable options of the form name=number."""
    found: dict[str, float] = {}
    for value in values:
        name, _equals, number = value.partition("=")
        try:
            found[name.strip()] = float(number)
        except ValueError:
            raise click.BadParameter(f"{value!r} is not of the form NAME=NUMBER.") from None
    return found


expires_option = click.option(
    "--expires",
    "expires_at",
    metavar="TIME",
    callback=_expiry,
    help="When it stops working: in 90s, 30m, 12h, 30d or 4w, or at a time such as 2027-01-31.",
)


@keys.command()
@click.option("--user", required=True, help="The user that requests with this key act as.")
@click.option("--group", "groups", multiple=True, help="A group of the user; repeatable.")
@click.option("--operator", is_flag=True, help="The key may see and change everything.")
@click.option("--note", default="", help="What the key is for.")
@expires_option
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    type=click.Choice(SCOPES),
    help="What it may do; repeatable [default: ask, read, ingest; with --operator also admin].",
)
@click.option(
    "--collection", "names", multiple=True, metavar="NAME", help="Only this collection, by name or id; repeatable."
)
@click.option(
    "--grant",
    "grants",
    multiple=True,
    metavar="GRANT",
    help="A configured endpoint that it may use: source:NAME, mcp:NAME, model:NAME, planner, or all; repeatable "
    "[default: none; with --operator all].",
)
@click.option("--source", "sources", multiple=True, metavar="NAME", help="The same as --grant source:NAME.")
@click.option(
    "--limit",
    "limits",
    multiple=True,
    metavar="NAME=NUMBER",
    callback=_limits,
    help="A limit of its own, such as questions=4 or requests=100 (in each AGGREGATOR_RATE_LIMIT_WINDOW); repeatable.",
)
@json_option
@settings_option
def create(
    user: str,
    names: tuple[str, ...],
    scopes: tuple[str, ...],
    grants: tuple[str, ...],
    sources: tuple[str, ...],
    as_json: bool,
    settings: Settings,
    **given: Any,
) -> None:
    """Create a key. Its secret is printed once and not stored."""
    if not user.strip():
        raise click.UsageError("--user is empty; give a user name.")
    granted = (*grants, *(f"source:{name}" for name in sources))
    request = key_requests.KeyRequest(
        user=user,
        scopes=cast("tuple[Scope, ...]", scopes) or None,
        collections=names or None,
        grants=granted or None,
        **given,
    )
    limits = limits_of(settings)
    made, secret = write(settings, lambda db: _viewed(db, key_requests.create(db, request, limits)))
    rights = " and may see and change everything" if made["operator"] and "admin" in made["scopes"] else ""
    _print_secret(made, secret, f"act as {flat(made['user'])}{rights}", as_json=as_json)


@keys.command("list")
@json_option
@settings_option
def list_keys(as_json: bool, settings: Settings) -> None:
    """List the keys, without their secrets."""
    print_list(
        read(settings, lambda db: [_view(db, key) for key in api_keys.listed(db)]),
        fitting(
            ("user", "id", "rights", "only", "expires", "used", "state"),
            user=lambda key: key["user"],
            id=lambda key: key["id"],
            groups=lambda key: ", ".join(key["groups"]),
            rights=lambda key: joined("operator" if key["operator"] else "", " ".join(key["scopes"])),
            only=_only,
            limits=lambda key: ", ".join(f"{name}={number:g}" for name, number in key["limits"].items()),
            created=lambda key: _day(key["created_at"]),
            expires=lambda key: _day(key["expires_at"]),
            used=lambda key: _day(key["last_used_at"]),
            state=_state,
            note=lambda key: key["note"],
        ),
        empty="There is no key yet. Create one with: anabranch keys create --user NAME",
        as_json=as_json,
    )


@keys.command()
@click.argument("name", metavar="KEY")
@click.option(
    "--overlap",
    "overlap_s",
    default="0s",
    metavar="DURATION",
    callback=_duration,
    help="How long the secret of before works, too: 30m, 1h, 7d… [default: not at all].",
)
@expires_option
@json_option
@settings_option
def rotate(name: str, overlap_s: float, expires_at: float | None, as_json: bool, settings: Settings) -> None:
    """Give a key a new secret. KEY is an id, or the user, if that has only one key.

    The secret before it works until the overlap ends; then its streams end as those of a revoked key do. Older ones
    stop at once.
    """
    require_records(settings)
    made, secret = write(settings, lambda db: _viewed(db, key_requests.rotate(db, name, overlap_s, expires_at)))
    until = f"; the last secret works until {made['previous_until']}" if made["previous_until"] else ""
    _print_secret(made, secret, f"act as {flat(made['user'])}, as before{until}", as_json=as_json)


@keys.command()
@click.argument("name", metavar="KEY")
@json_option
@settings_option
def revoke(name: str, as_json: bool, settings: Settings) -> None:
    """Revoke a key. The next request with it is refused, and its streams end within seconds.

    KEY is an id, or the user, if that has only one key.
    """
    require_records(settings)
    revoked = write(settings, lambda db: key_requests.revoke(db, name))
    print_result({"id": revoked.id, "revoked": True}, f"Revoked {revoked.id}.", as_json=as_json)


def _print_secret(key: dict[str, Any], secret: str, what: str, *, as_json: bool) -> None:
    if as_json:
        print_json({**key, "secret": secret})
        return
    click.echo(secret)
    notes().print(
        f"Key {key['id']}: requests that send it (Authorization: Bearer …) {what}. It is not shown again; revoke it "
        f"with: anabranch keys revoke {key['id']}",
    )


def _viewed(db: Session, made: tuple[api_keys.ApiKey, str]) -> tuple[dict[str, Any], str]:
    key, secret = made
    return _view(db, key), secret


def _view(db: Session, key: api_keys.ApiKey) -> dict[str, Any]:
    """A key as `--json` prints it."""
    return cast("dict[str, Any]", msgspec.to_builtins(key_fields(key, collections.listed(db))))


def _only(key: dict[str, Any]) -> str:
    """What it is restricted to."""
    within = key["collections"]
    named = "" if within is None else f"collections {', '.join(one['name'] for one in within) or '(deleted)'}"
    granted = "" if key["grants"] is None else f"grants {', '.join(key['grants']) or 'none'}"
    return joined(named, granted)


def _state(key: dict[str, Any]) -> str:
    if key["state"] == "valid":
        return f"rotated, last secret until {key['previous_until']}" if key["previous_until"] else ""
    return str(key["state"])


def _day(moment: str | None) -> str:
    return "" if moment is None else moment[:10]
