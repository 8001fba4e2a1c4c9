"""Options that several commands share, and the parsing of their values."""

from collections.abc import Callable, Sequence
from datetime import date
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args

import click

from anabranch.domain.errors import ConfigurationError
from anabranch.knowledge.model import Permissions, Rating, Strategy, Visibility

if TYPE_CHECKING:
    from anabranch.configuration.settings import Settings
    from anabranch.knowledge.records.audit import AuditHead
    from anabranch.knowledge.records.encryption import Decryption

Command = TypeVar("Command", bound=Callable[..., Any])

config_option = click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The configuration file [default: anabranch.yaml].",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
yes_option = click.option("-y", "--yes", is_flag=True, help="Delete without asking for confirmation.")


def configured(config: Path | None) -> "Settings":
    """The settings; unknown variables are reported on standard error."""
    from anabranch.configuration.settings import load, unknown  # noqa: PLC0415  a help text needs no settings

    settings = load(file=config)
    for name, meant in unknown().items():
        click.echo(f"anabranch: {name} is not a setting; it is ignored{f' ({meant})' if meant else ''}.", err=True)
    return settings


settings_option = click.option(
    "--config",
    "settings",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=lambda _, __, value: configured(value),
    help="The configuration file [default: anabranch.yaml].",
)


noted_option = click.option(
    "--noted", metavar="NUMBER:HASH", help="The newest record at an earlier time, as `audit verify` printed it."
)
passphrase_option = click.option(
    "--passphrase-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file with the passphrase of an encrypted backup [default: AGGREGATOR_BACKUP_PASSPHRASE].",
)
_identity_option = click.option(
    "--identity",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file with the secret key of an encrypted backup, as age-keygen writes it; repeatable.",
)


def decryption_options(command: Command) -> Command:
    return _identity_option(passphrase_option(command))


def decryption_given(settings: "Settings", identities: Sequence[Path], passphrase_file: Path | None) -> "Decryption":
    """What opens encrypted backups, from the options and the settings."""
    from anabranch.knowledge.records.encryption import Decryption  # noqa: PLC0415  a help text needs no records

    lines = [line.strip() for file in identities for line in _text(file).splitlines()]
    return Decryption(
        identities=tuple(line for line in lines if line and not line.startswith("#")),
        passphrase=passphrase_given(settings, passphrase_file),
    )


def passphrase_given(settings: "Settings", file: Path | None) -> str | None:
    return settings.backup_passphrase if file is None else _text(file).rstrip("\r\n")


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file} cannot be read ({getattr(error, 'strerror', error)}).") from None


def head_noted(noted: str | None) -> "AuditHead | None":
    """The record of the audit log that `--noted` names."""
    from anabranch.knowledge.records.audit import AuditHead  # noqa: PLC0415  a help text needs no records

    if noted is None:
        return None
    seq, _, found = noted.strip().partition(":")
    try:
        return AuditHead(seq=int(seq), hash=bytes.fromhex(found).hex())
    except ValueError:
        raise click.BadParameter(f"{noted!r} is not of the form NUMBER:HASH.", param_hint="--noted") from None


class ListsByDefault(click.Group):
    """A command group that runs `list` if no command is given."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = ["list", *args]
        return super().parse_args(ctx, args)


def day(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    """A callback for options that take a date."""
    try:
        return None if value is None else date.fromisoformat(value).isoformat()
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a date such as 2024-12-31.") from None


def pairs(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """A callback for repeatable options of the form key=value."""
    found: dict[str, str] = {}
    for value in values:
        key, equals, rest = value.partition("=")
        if not (key.strip() and equals):
            raise click.BadParameter(f"{value!r} is not of the form key=value.")
        found[key.strip()] = rest.strip()
    return found


def together(*options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """One decorator that adds several options, in this order."""
    return lambda command: reduce(lambda decorated, option: option(decorated), reversed(options), command)


chunking_options = together(
    click.option("--chunking", type=click.Choice(get_args(Strategy)), help="Chunking strategy [default: semantic]."),
    click.option(
        "--chunk-size", type=click.IntRange(1), help="Maximum tokens per chunk [default: 512, or the embedder's limit]."
    ),
    click.option("--overlap", type=click.IntRange(0), help="Tokens repeated from the previous chunk [default: 50]."),
)
permission_options = together(
    click.option(
        "--visibility",
        type=click.Choice(get_args(Visibility)),
        help="Who may see it: everyone, only its owner, or its owner and the named users and groups; a document also "
        "as its collection.",
    ),
    click.option("--user", "users", multiple=True, help="A user who may see a restricted document; repeatable."),
    click.option("--group", "groups", multiple=True, help="A group that may see a restricted document; repeatable."),
)
feedback_options = together(
    click.option("--user", help="Only of this user."),
    click.option("--rating", type=click.Choice(get_args(Rating)), help="Only answers with this rating."),
    click.option("--since", metavar="TIME", help="From this day (UTC) or time on."),
    click.option("--until", metavar="TIME", help="Up to and including this day (UTC), or before this time."),
)
audit_options = together(
    click.option("--since", metavar="TIME", help="From this day (UTC) or time on."),
    click.option("--until", metavar="TIME", help="Up to and including this day (UTC), or before this time."),
    click.option("--actor", metavar="NAME", help="Only of this user, or of operator, guest or server."),
    click.option("--action", help="Only this action, such as document.deleted, or all of document."),
)
query_options = together(
    feedback_options,
    click.option("-c", "--collection", metavar="NAME", help="Only questions to this collection."),
    click.option("--conversation", metavar="ID", help="Only this conversation."),
    click.option("--surface", help="Only of this surface: query, rag_stream, chat, openai, endpoints, mcp, cli…"),
    click.option("--outcome", help="answered, refused, the code of an error, or failed for every error."),
    click.option(
        "--slower-than", "slower_than_ms", type=click.IntRange(0), metavar="MS", help="Only those that took longer."
    ),
)


def chunking_given(strategy: str | None, size: int | None, overlap: int | None) -> dict[str, Any]:
    given = {"strategy": strategy, "size": size, "overlap": overlap}
    return {name: value for name, value in given.items() if value is not None}


def permissions_given(visibility: str | None, users: Sequence[str], groups: Sequence[str]) -> Permissions | None:
    """The permissions from the options; None without any. Naming users or groups means `restricted`."""
    if (users or groups) and visibility not in (None, "restricted"):
        raise click.UsageError("--user and --group go with --visibility restricted.")
    if visibility is None and not (users or groups):
        return None
    chosen = cast("Visibility", visibility or "restricted")
    if chosen == "restricted" and not (users or groups):
        click.echo("anabranch: Only the owner may see it: no user or group is named (--user, --group).", err=True)
    return Permissions(visibility=chosen, allowed_users=tuple(users), allowed_groups=tuple(groups))


def permissions_required(visibility: str | None, users: Sequence[str], groups: Sequence[str]) -> Permissions:
    chosen = permissions_given(visibility, users, groups)
    if chosen is None:
        raise click.UsageError("Give the permissions with --visibility, --user or --group.")
    return chosen
