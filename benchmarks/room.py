"""A served knowledge room, and a client that asks it on one connection."""

import http.client
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.servers import Server, serving

OVER = ("completed", "failed", "cancelled")


class Room:
    """The operator at the machine."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._connection = http.client.HTTPConnection(server.authority, timeout=120)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        encoded = None if body is None else json.dumps(body).encode()
        self._connection.request(method, path, encoded, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        answer = json.loads(response.read())
        if response.status not in (200, 201):
            raise RuntimeError(f"{method} {path}: {response.status} {answer}")
        return answer

    def ingest(self, collection: str, documents: Sequence[Any]) -> list[Any]:
        """Take documents in; what has become of each."""
        job = self.call("POST", "/v1/ingest", {"collection_id": collection, "documents": list(documents)})["job_id"]
        while (found := self.call("GET", f"/v1/ingest/{job}"))["status"] not in OVER:
            time.sleep(0.05)
        return list(found["documents"])

    def ask(self, query: str, **more: Any) -> Any:
        return self.call("POST", "/v1/query", {"query": query, **more})

    def cpu_s(self) -> float:
        """Of the server itself: its indexer is a process of its own."""
        times = self.server.process.cpu_times()
        return float(times.user + times.system)

    def memory_mb(self) -> float:
        """RSS of the server itself."""
        return float(self.server.process.memory_info().rss / 1e6)


@contextmanager
def room(folder: Path, models: Path, **more: str) -> Iterator[Room]:
    env = {"AGGREGATOR_DATA_DIR": str(folder), "AGGREGATOR_MODELS_DIR": str(models), **more}
    with serving("anabranch", env) as server:
        yield Room(server)
