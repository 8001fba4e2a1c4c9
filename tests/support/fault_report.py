"""Writes docs/reliability.md and benchmarks/results/reliability.json from the results of the fault scenarios."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from support.fault_scenarios import SCENARIOS

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "build" / "reliability"
KEPT = ROOT / "benchmarks" / "results" / "reliability.json"
PAGE = ROOT / "docs" / "reliability.md"

HEAD = """# Reliability

What is promised while something fails, and what was measured. Each scenario runs real servers with real clients,
sources, models and Redis, and breaks one of them. The clients write down every event that they receive; a checker
that knows nothing of the server decides from this history. This page is written by `make reliability`.

In every scenario, also: an accepted question ends in exactly one `done` or `error`; ids of a stream rise by one,
over all connections; all readers of a stream see the same events; the text is what the model said to that question,
or its beginning if it broke off; every document and quote is from the source that it names; no response is a 500;
and nothing in the log is an error.

"""
TAIL = """
**Measured** is, for each group of clients: answered of asked questions, the 50th and the 99th percentile of the
time from the question to the end of its answer, statuses and errors that were received, and how often clients
reconnected. `victims` ask meanwhile, without what is broken. The limits are in `tests/support/fault_scenarios.py`.

One scenario: `make soak SCENARIO=redis-frozen`. All, and this page: `make reliability`; the results as JSON are in
`benchmarks/results/reliability.json`. How it is made, in `tests/support`: promises and limits in
`fault_scenarios.py`, what happens in `fault_actions.py`, the servers in `fault_world.py`, the clients in
`fault_clients.py`, and the checker in `fault_checker.py`, which can be run on a history by itself.
"""


def page(results: Sequence[Mapping[str, Any]]) -> str:
    passed = sum(_verdict(one) == "kept" for one in results)
    measured = [one for one in results if "date" in one]
    days = sorted({one["date"] for one in measured})
    machines = sorted({f"{one['machine']}, Python {one['python']}" for one in measured})
    load = max((one["load"] for one in measured), default=0)
    summary = (
        f"{passed} of {len(results)} promises were kept. Measured {' and '.join(days) or 'never'} on "
        f"{' and '.join(machines)}; the load average of the machine was at most {load}."
    )
    lines = ["| scenario | promise | kept | measured |", "|---|---|---|---|"]
    lines += [f"| `{one['scenario']}` | {one['promise']} | {_verdict(one)} | {_measured(one)} |" for one in results]
    broken = "".join(_broken(one) for one in results)
    return (
        HEAD + summary + "\n\n" + "\n".join(lines) + "\n" + (f"\n## Broken promises\n{broken}" if broken else "") + TAIL
    )


def _verdict(result: Mapping[str, Any]) -> str:
    if "faults" not in result:
        return "not run"
    return "**broken**" if result["faults"] else "kept"


def _measured(result: Mapping[str, Any]) -> str:
    if "measured" not in result:
        return str(result.get("skipped", "there is no result"))
    return "; ".join(_parts(result["measured"])) or "nothing"


def _parts(measured: Mapping[str, Any]) -> Iterator[str]:
    for group, found in measured.items():
        if group == "facts":
            yield from (
                f"{name.replace('_', ' ')}: {value:g}" for name, value in found.items() if value or name[0] != "e"
            )
        elif group == "memory_mb":
            yield f"memory grew by {found} MB"
        elif group != "warm-up":
            yield ", ".join(_group(group, found))


def _group(name: str, found: Mapping[str, Any]) -> Iterator[str]:
    yield f"{name}: {found['answered']} of {found['asked']}"
    if "p99_s" in found:
        yield f"{found['p50_s']:.2f} s and {found['p99_s']:.2f} s"
    yield from (f"{count} times {status}" for status, count in found.get("refused", {}).items())
    yield from (f"{count} times `{code}`" for code, count in found.get("errors", {}).items())
    yield from (f"{found[what]} {what}" for what in ("left", "reconnections", "resets") if what in found)


def _broken(result: Mapping[str, Any]) -> str:
    found = result.get("faults", [])
    return "".join([f"\n`{result['scenario']}`:\n\n", *(f"- {fault}\n" for fault in found[:5])]) if found else ""


def main() -> int:
    results: list[dict[str, Any]] = []
    for scenario in SCENARIOS:
        file = RESULTS / f"{scenario.name}.json"
        missing = {"scenario": scenario.name, "promise": scenario.promise}
        results.append(json.loads(file.read_text(encoding="utf-8")) if file.exists() else missing)
    KEPT.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    PAGE.write_text(page(results), encoding="utf-8")
    broken = [one["scenario"] for one in results if _verdict(one) != "kept"]
    sys.stdout.write(f"{PAGE.relative_to(ROOT)}: {len(results) - len(broken)} of {len(results)} kept {broken}\n")
    return 1 if any(one.get("faults") for one in results) else 0


if __name__ == "__main__":
    sys.exit(main())
