"""A slim install: configuration that needs a missing extra stops the start and names the install command."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from anabranch.configuration.extras import MODULES

ROOT = Path(__file__).parents[2]
HIDE = """import sys
sys.modules.update(dict.fromkeys({hidden!r}))
from anabranch.entrypoints.cli import main
main({arguments!r})
"""


def run(extra: str, folder: Path, arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process in which the modules of an extra are not installed."""
    hidden = [name for known, modules in MODULES.items() if known == extra for name in modules]
    return subprocess.run(
        [sys.executable, "-c", HIDE.format(hidden=hidden, arguments=arguments)],
        capture_output=True,
        text=True,
        cwd=folder,
        env={"AGGREGATOR_DATA_DIR": str(folder / "data"), "HOME": str(folder), **environment},
        check=False,
    )


@pytest.mark.parametrize(
    ("extra", "environment", "needed_by"),
    [
        ("otel", {"AGGREGATOR_OTLP_ENDPOINT": "http://127.0.0.1:4318"}, "AGGREGATOR_OTLP_ENDPOINT"),
        ("local-models", {"AGGREGATOR_RERANKER_PATH": "reranker"}, "AGGREGATOR_RERANKER_PATH"),
        ("local-models", {"AGGREGATOR_VERIFIER_PATH": "verifier"}, "AGGREGATOR_VERIFIER_PATH"),
        ("local-models", {"AGGREGATOR_EVIDENCE": "on"}, "AGGREGATOR_EVIDENCE=on"),
        ("mcp", {"AGGREGATOR_CONFIG": "servers.yaml"}, "servers.yaml: mcpServers"),
    ],
)
def test_a_missing_extra_stops_the_start_and_names_the_install_command(
    tmp_path: Path, extra: str, environment: dict[str, str], needed_by: str
) -> None:
    (tmp_path / "servers.yaml").write_text("mcpServers: {memory: {command: true}}\n")
    done = run(extra, tmp_path, ["serve", "--port", "0"], **environment)
    assert done.returncode == 2
    assert done.stderr.startswith(f"anabranch: {needed_by} needs ")
    assert done.stderr.endswith(f": pip install 'anabranch[{extra}]'\n")


@pytest.mark.parametrize(("extra", "arguments"), [("mcp", ["mcp"]), ("local-models", ["models", "install"])])
def test_a_command_that_needs_a_missing_extra_names_the_install_command(
    tmp_path: Path, extra: str, arguments: list[str]
) -> None:
    done = run(extra, tmp_path, arguments)
    assert done.returncode == 2
    assert done.stderr.endswith(f": pip install 'anabranch[{extra}]'\n")


@pytest.mark.parametrize("extra", MODULES)
def test_commands_that_need_no_extra_run_without_it(tmp_path: Path, extra: str) -> None:
    done = run(extra, tmp_path, ["collections", "--json"])
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")


def test_all_names_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras.pop("all") == [f"anabranch[{','.join(sorted(extras))}]"]
    assert set(extras) == set(MODULES)
