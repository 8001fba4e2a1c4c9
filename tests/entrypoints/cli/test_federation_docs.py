"""The commands of docs/federation.md run unchanged, on free ports."""

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[3] / "docs" / "federation.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def on_free_ports(text: str) -> str:
    with socket.socket() as one, socket.socket() as two, socket.socket() as three:
        for number, listening in enumerate((one, two, three), 1):
            listening.bind(("127.0.0.1", 0))
            text = text.replace(f"910{number}", str(listening.getsockname()[1]))
    return text


@pytest.mark.skipif(shutil.which("curl") is None, reason="the page uses curl")
@pytest.mark.timeout(130)  # it starts a dozen processes
def test_two_owners_and_a_third_server_run_as_documented(tmp_path: Path, models_dir: Path) -> None:
    (file,) = blocks("yaml")
    carol = f"cat > carol.yaml <<'END'\n{file}END\n"
    owners, curl, ask, server, chat, stop = blocks("sh")
    ends = "trap 'kill $(jobs -p) 2> /dev/null; wait' EXIT\nset -e\n"
    script = on_free_ports(ends + owners + curl + ask + carol + server + chat + stop)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AGGREGATOR_")}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "AGGREGATOR_MODELS_DIR": str(models_dir),
        "HOME": str(tmp_path),
    }
    ran = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "A healthy hive needs about 18 kg of honey to survive the winter. [1]" in ran.stdout
    # From the command line, and with /v1/query, which also has it as a sentence; then twice with chat, which names the
    # source.
    answer = "Two hives per hectare pollinate the orchard in late April."
    assert (ran.stdout.count(f"{answer} [1]"), ran.stdout.count(f"{answer} [ben/orchard]")) == (3, 2)
    assert "None of its documents is public" in ran.stderr
