"""`make demo`: three owners publish the documentation, one question goes to all of them, the server keeps running."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

HERE = Path(__file__).resolve().parent.parent
ANABRANCH = str(Path(sys.executable).with_name("anabranch"))
QUESTION = "What happens when one of the sources is slow or hangs?"
LIBRARY = {
    "writers/guide": ["README.md", *sorted(f"docs/{path.name}" for path in (HERE / "docs").glob("*.md"))],
    "architects/decisions": ["docs/adr"],
    "makers/workshop": ["CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md"],
}
READY_S = 30.0


class Demo:
    """Runs the commands that a user would type, and prints them."""

    def __init__(self, folder: Path, host: str, port: int) -> None:
        self._console = Console(highlight=False)
        self._url = f"http://{host}:{port}"
        self._environment = {
            **os.environ,
            "AGGREGATOR_DATA_DIR": str(folder),
            "AGGREGATOR_HOST": host,
            "AGGREGATOR_PORT": str(port),
            "AGGREGATOR_DEBUG": os.environ.get("AGGREGATOR_DEBUG", "true"),
            "AGGREGATOR_LOG_FORMAT": os.environ.get("AGGREGATOR_LOG_FORMAT", "console"),
            "AGGREGATOR_LOG_LEVEL": os.environ.get("AGGREGATOR_LOG_LEVEL", "WARNING"),
        }

    def run(self) -> None:
        self.say("Three owners ingest their documents. Each collection is parsed, chunked, embedded and indexed here.")
        for path, files in LIBRARY.items():
            collection = path.partition("/")[2]
            self.do("ingest", *files, "--collection", collection)
            self.do("publish", collection, "--as", path)
        with self.serving() as server:
            self.say(f"The server runs at {self._url}. One question to all three over HTTP, each named with its owner:")
            sources = [f"--source={path.partition('/')[0]}@{self._url}/{path.partition('/')[2]}" for path in LIBRARY]
            self.do("ask", QUESTION, *sources)
            self.say(f"The server keeps running; its API is described at {self._url}/docs. In another terminal:")
            body = '{"query": "How is a chunk kept within the window of the embedder?"}'
            self._console.print(f"curl {self._url}/v1/query -d '{body}'\n", soft_wrap=True, markup=False)
            self._console.print("Ctrl-C stops it.\n", style="dim")
            server.wait()

    def say(self, text: str) -> None:
        self._console.print(f"\n{text}\n", markup=False)

    def do(self, *command: str) -> None:
        shown = shlex.join(["anabranch", *command])
        self._console.print(f"$ {shown}", style="bold cyan", markup=False, soft_wrap=True)
        ran = subprocess.run([ANABRANCH, *command], cwd=HERE, env=self._environment, check=False)
        if ran.returncode:
            sys.exit(f"demo: `{shown}` ended with {ran.returncode}.")

    def serving(self) -> subprocess.Popen[bytes]:
        """Starts the server and waits until it is ready."""
        server = subprocess.Popen([ANABRANCH, "serve"], cwd=HERE, env=self._environment, start_new_session=True)
        until = time.monotonic() + READY_S
        while not self._is_ready():
            if server.poll() is not None or time.monotonic() > until:
                server.terminate()
                sys.exit("demo: the server did not start.")
            time.sleep(0.05)
        signal.signal(signal.SIGINT, lambda *_: server.send_signal(signal.SIGINT))
        signal.signal(signal.SIGTERM, lambda *_: server.terminate())
        return server

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/ready", timeout=1) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def main() -> None:
    host, port = os.environ.get("AGGREGATOR_HOST", "127.0.0.1"), int(os.environ.get("AGGREGATOR_PORT", "8001"))
    if not is_free(host, port):
        sys.exit(f"demo: port {port} is in use; choose another: AGGREGATOR_PORT=8005 make demo")
    with TemporaryDirectory() as folder:
        Demo(Path(folder), host, port).run()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
