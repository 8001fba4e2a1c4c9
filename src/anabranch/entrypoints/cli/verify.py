"""`anabranch verify`: checks of the records, the index, the audit log, backups, and what confines the parsers."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from anabranch.app.records import folder_of, node_of, shared_records
from anabranch.configuration.settings import Settings
from anabranch.domain.errors import ConfigurationError
from anabranch.entrypoints.cli.options import (
    decryption_given,
    decryption_options,
    head_noted,
    json_option,
    noted_option,
    settings_option,
)
from anabranch.entrypoints.cli.resources import require_records
from anabranch.entrypoints.cli.terminal import flat, print_json, progress, write_text

if TYPE_CHECKING:
    from anabranch.knowledge.integrity import CheckResult


@click.command("verify")
@click.argument("backups", nargs=-1, type=click.Path(exists=True, path_type=Path))
@noted_option
@decryption_options
@json_option
@settings_option
def command(
    backups: tuple[Path, ...],
    noted: str | None,
    identity: tuple[Path, ...],
    passphrase_file: Path | None,
    as_json: bool,
    settings: Settings,
) -> None:
    """Verify the records, the index, the audit log and backups; nothing is changed.

    BACKUPS are files, or folders of them, besides those that were made of these records. It also works while a server
    runs. It says what of the confinement of parsers could not be applied. The exit status is 1 if there is a problem.
    """
    from anabranch.app.search_index import index_differences  # noqa: PLC0415
    from anabranch.knowledge.integrity import CHECKS, CheckRequest, run  # noqa: PLC0415  numpy loads only where it is needed

    require_records(settings)
    request = CheckRequest(
        folder=folder_of(settings),
        noted=head_noted(noted),
        backups=tuple(_files(backups)),
        decryption=decryption_given(settings, identity, passphrase_file),
        database=shared_records(settings),
        node=node_of(settings, create=False),
    )
    results = []
    with ExitStack() as leaving:
        if request.database is not None:
            leaving.callback(request.database.close)
        if settings.index_url is not None:
            differences = leaving.enter_context(index_differences(settings))
            request = request._replace(differences=differences)
        for check in CHECKS:
            with progress(f"Verifying the {check.name}") as advance:
                results.append(run(check, request, advance))
            if not as_json:
                _print(results[-1])
    has_problems = any(one.problems for one in results)
    if as_json:
        print_json({"ok": not has_problems, "checks": results})
    sys.exit(1 if has_problems else 0)


def _print(one: "CheckResult") -> None:
    state, checked = "problem" if one.problems else "ok", f" ({one.checked})" if one.checked else ""
    write_text(f"{one.name:<10} {state}{checked}")
    for problem in one.problems:
        write_text(f"  {flat(problem)}")


def _files(given: Sequence[Path]) -> Iterator[Path]:
    for path in given:
        if not path.is_dir():
            yield path
        elif found := sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith(".")):
            yield from found
        else:
            raise ConfigurationError(f"There are no files in {path}.")
