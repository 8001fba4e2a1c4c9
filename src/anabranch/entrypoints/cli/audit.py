"""`anabranch audit`: list, export and verify the audit log."""

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import click

from anabranch.configuration.settings import Settings
from anabranch.domain.audit import AuditEntry, AuditFilter, AuditRecord
from anabranch.entrypoints.cli.options import (
    ListsByDefault,
    audit_options,
    head_noted,
    json_option,
    noted_option,
    settings_option,
)
from anabranch.entrypoints.cli.resources import exist, private_file, read, records, require_records, write
from anabranch.entrypoints.cli.terminal import (
    counted,
    fitting,
    json_line,
    moment,
    notes,
    print_json,
    print_list,
    size,
    write_text,
)
from anabranch.entrypoints.logged_queries import seconds_of
from anabranch.knowledge.records import audit
from anabranch.knowledge.records.database import Connection

PAGE = 500
FORGOTTEN = "(forgotten)"


@click.group("audit", cls=ListsByDefault)
def group() -> None:
    """List, export and verify the audit log: who changed what."""


@group.command("list")
@audit_options
@click.option(
    "--limit", type=click.IntRange(1, 100_000), default=50, show_default=True, help="Maximum number of lines."
)
@json_option
@settings_option
def list_records(
    since: str | None,
    until: str | None,
    actor: str | None,
    action: str | None,
    limit: int,
    as_json: bool,
    settings: Settings,
) -> None:
    """List records, newest first."""
    wanted = _wanted(since, until, actor, action)
    found = read(settings, lambda db: audit.listed(db, wanted, None, limit + 1))
    print_list(
        found[:limit],
        fitting(
            ("when", "who", "action", "what"),
            when=lambda one: moment(one.at.timestamp()),
            who=lambda one: _shown(one.actor),
            action=lambda one: one.action,
            what=lambda one: " ".join(filter(None, (one.object, _shown(one.name)))),
            outcome=lambda one: one.outcome,
            details=lambda one: _details(one.details, one.granted),
            address=lambda one: _shown(one.address),
            surface=lambda one: one.surface,
            number=lambda one: str(one.seq),
        ),
        empty="There is no such record.",
        flexible=4,
        as_json=as_json,
    )
    if len(found) > limit and not as_json:
        notes().print(f"There are more than {limit:,}; show more with --limit, or all with: anabranch audit export")


@group.command()
@click.option(
    "-o",
    "--output",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write into this file, which only you can read [default: standard output].",
)
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
@audit_options
@settings_option
def export(
    file: Path | None,
    force: bool,
    since: str | None,
    until: str | None,
    actor: str | None,
    action: str | None,
    settings: Settings,
) -> None:
    """Print every record as JSON, one per line, newest first."""
    wanted, count = _wanted(since, until, actor, action), 0
    if file is None:
        for line in _exported(settings, wanted):
            write_text(line)
        return
    with private_file(file, force) as target:
        for line in _exported(settings, wanted):
            target.write(line)
            count += 1
    notes().print(f"Wrote {counted(count, 'record')}: {file} ({size(file.stat().st_size)}).")


@group.command()
@noted_option
@json_option
@settings_option
def verify(noted: str | None, as_json: bool, settings: Settings) -> None:
    """Verify that no record was changed, deleted, inserted or moved.

    Whoever can write the records file can also replace the whole log. Note the newest record somewhere else, and check
    with --noted that it is still there. The exit status is 1 if something is wrong.
    """
    head = head_noted(noted)
    require_records(settings)
    with records(settings) as database:
        findings = database.reading(lambda db: audit.verify(db, head))
        newest = None if findings else database.reading(audit.head)
    if as_json:
        print_json({"findings": findings, "newest": newest})
    elif newest is None:
        for one in findings:
            write_text(f"Record {one.seq}: {one.problem}" if one.seq else one.problem)
    else:
        write_text(f"The audit log is whole. Its newest record is {newest.seq}:{newest.hash}")
    sys.exit(1 if findings else 0)


def _wanted(since: str | None, until: str | None, actor: str | None, action: str | None) -> AuditFilter:
    begin, end = seconds_of("--since", since), seconds_of("--until", until, end=True)
    return AuditFilter(since=begin, until=end, actor=actor, action=action)


def _shown(name: str | None) -> str:
    return FORGOTTEN if name is None else name


def _details(details: object, granted: tuple[str | None, ...]) -> str:
    fields = details.items() if isinstance(details, dict) else ()
    return ", ".join([*(f"{name} {value}" for name, value in fields), *map(_shown, granted)])


def _exported(settings: Settings, wanted: AuditFilter) -> Iterator[str]:
    """A line of JSON for each record. Each part is a transaction of its own: a long one would make the write-ahead log
    grow."""
    if not exist(settings):
        return
    write(settings, lambda db: audit.append(db, AuditEntry(action="audit.exported")))
    with records(settings) as database:
        before: int | None = None
        while found := database.reading(partial(_part, wanted=wanted, before=before)):
            for one in found:
                yield json_line(one)
            before = found[-1].seq


def _part(db: Connection, wanted: AuditFilter, before: int | None) -> list[AuditRecord]:
    return audit.listed(db, wanted, before, PAGE)
