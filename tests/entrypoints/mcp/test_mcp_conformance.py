"""The official conformance suite, run against a served Anabranch."""

import asyncio
import os
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import yaml

from conftest import Server

BIN = Path(sys.executable).parent
SUITE = BIN.parent / "node" / "node_modules" / ".bin" / "conformance"
BASELINE = Path(__file__).parent / "conformance.yaml"
APPLYING = {"server-initialize", "ping", "tools-list", "dns-rebinding-protection"}


Serve = Callable[..., AbstractAsyncContextManager[Server]]


async def suite(*arguments: str, folder: Path) -> tuple[int, str]:
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        SUITE, *arguments, stdout=pipe, stderr=asyncio.subprocess.STDOUT, cwd=folder, env=environment
    )
    said, _ = await process.communicate()
    return process.returncode or 0, said.decode()


async def test_mcp_conformance_scenarios_pass(serve: Serve, tmp_path: Path) -> None:
    async with serve() as server:
        url = ("--url", f"{server.url}/mcp", "--suite", "all", "--expected-failures", str(BASELINE))
        code, said = await suite("server", *url, folder=tmp_path)
    assert code == 0, said
    for scenario in APPLYING:
        assert f"✓ {scenario}: " in said, said


async def test_mcp_conformance_covers_or_explains_every_scenario(tmp_path: Path) -> None:
    _, listed = await suite("list", "--server", folder=tmp_path)
    known = {line.split()[1] for line in listed.splitlines() if line.startswith("  - ")}
    excused = set(yaml.safe_load(BASELINE.read_text(encoding="utf-8"))["server"])
    assert excused | APPLYING == known
    assert not excused & APPLYING
