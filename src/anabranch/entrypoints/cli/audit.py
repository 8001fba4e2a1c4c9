"""`anabranch audit`: list, export and verify the audit log."""

import sys
from pathlib import Path
from typing import Any

import click

from anabranch.configuration.settings import Settings
from anabranch.domain.audit import AuditFilter, AuditRecord
from anabranch.entrypoints.cli.logs import export_options, exported, limit_option, note_more, write_export
from anabranch.entrypoints.cli.options import (
    ListsByDefault,
    audit_options,
    head_noted,
    json_option,
    noted_option,
    settings_option,
)
from anabranch.entrypoints.cli.resources import read, records, require_records
from anabranch.entrypoints.cli.terminal import (
    fitting,
    json_line,
    moment,
    print_json,
    print_list,
    write_text,
)
from anabranch.entrypoints.logged_queries import seconds_of
from anabranch.knowledge.records import audit
from anabranch.knowledge.records.database import Session

PAGE = 500
FORGOTTEN = "(forgotten)"


@click.group("audit", cls=ListsByDefault)
def group() -> None:
    """List, export and verify the audit log: who changed what."""


@group.command("list")
@audit_options
@limit_option
@json_option
@settings_option
def list_records(limit: int, as_json: bool, settings: Settings, **given: Any) -> None:
    """List records, newest first."""
    wanted = _wanted(**given)
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
    note_more(found, limit, "anabranch audit export", as_json=as_json)


@group.command()
@export_options
@audit_options
@settings_option
def export(file: Path | None, force: bool, settings: Settings, **given: Any) -> None:
    """Print every record as JSON, one per line, newest first."""
    wanted = _wanted(**given)

    def part(last: AuditRecord | None, db: Session) -> list[AuditRecord]:
        return audit.listed(db, wanted, None if last is None else last.seq, PAGE)

    write_export(map(json_line, exported(settings, "audit.exported", part)), file, force, "record")


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


def _wanted(since: str | None, until: str | None, **given: str | None) -> AuditFilter:
    """The filter that the options describe."""
    return AuditFilter(since=seconds_of("--since", since), until=seconds_of("--until", until, end=True), **given)


def _shown(name: str | None) -> str:
    return FORGOTTEN if name is None else name


def _details(details: object, granted: tuple[str | None, ...]) -> str:
    fields = details.items() if isinstance(details, dict) else ()
    return ", ".join([*(f"{name} {value}" for name, value in fields), *map(_shown, granted)])
