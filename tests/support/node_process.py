"""One Node process that runs scenarios for many tests, since each start costs."""

import asyncio
import itertools
import json
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import anabranch.web

HERE = Path(__file__).parent
STREAM = Path(anabranch.web.__file__).parent / "stream.js"
PACKAGES = Path(sys.prefix) / "node"


class Refused(Exception):
    """What a scenario was rejected with."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(error["message"])
        self.name = error["name"]
        self.status = error["status"]
        self.code = error["code"]


class Node:
    def __init__(self) -> None:
        assert (PACKAGES / "node_modules").is_dir(), "npm's packages are missing: make test installs them"
        command = [str(Path(sys.prefix) / "bin" / "node"), str(HERE / "scenarios.mjs"), str(STREAM), str(PACKAGES)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._waiting: dict[int, Future[Any]] = {}
        self._ids = itertools.count(1)
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    async def run(self, kind: str, **options: Any) -> Any:
        future: Future[Any] = Future()
        number = next(self._ids)
        self._waiting[number] = future
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"id": number, "kind": kind, "options": options}) + "\n")
        self._process.stdin.flush()
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.terminate()
        self._process.wait(10)
        self._reading.join(10)
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            reply = json.loads(line)
            future = self._waiting.pop(reply["id"])
            if "error" in reply:
                future.set_exception(Refused(reply["error"]))
            else:
                future.set_result(reply["result"])
        for future in self._waiting.values():
            future.set_exception(RuntimeError("Node has gone"))
