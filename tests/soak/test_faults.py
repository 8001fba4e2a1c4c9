"""The fault scenarios of docs/reliability.md, each on real servers. The result of each is a file for the report."""

import json
import os
import platform
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from support import fault_checker
from support.fault_report import RESULTS
from support.fault_scenarios import SCENARIOS, Scenario

pytestmark = [pytest.mark.soak, pytest.mark.timeout(240)]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
async def test_scenario(scenario: Scenario, tmp_path: Path) -> None:
    if (why := scenario.unavailable()) is not None:
        write(scenario, skipped=why)
        pytest.skip(why)
    began = time.monotonic()
    found: list[str] = ["it did not run to its end"]
    measured: dict[str, Any] = {}
    try:
        await scenario.run(tmp_path)
        history = fault_checker.read(tmp_path / "history.jsonl")
        found, measured = fault_checker.faults(history, scenario.all_limits), fault_checker.measured(history)
    except BaseException as error:
        found.append(repr(error)[:300])
        raise
    finally:
        write(scenario, measured=measured, faults=found[:20], seconds=round(time.monotonic() - began, 1))
    assert found == []


def write(scenario: Scenario, **result: Any) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    about = {
        "scenario": scenario.name,
        "promise": scenario.promise,
        "limits": scenario.all_limits,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 1),
    }
    (RESULTS / f"{scenario.name}.json").write_text(json.dumps({**about, **result}, indent=2) + "\n", encoding="utf-8")
