"""`make demo`: three owners publish the documentation on a server of theirs, a second server asks all of them, on the
command line and on its page."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

HERE = Path(__file__).resolve().parent.parent
ANABRANCH = str(Path(sys.executable).with_name("anabranch"))
QUESTION = "What happens when one of the sources is slow or hangs?"
# A part of the documentation: embedding all of it would take half a minute longer.
GUIDE = ("asking", "chat", "evidence", "extractive", "federation", "knowledge", "search", "streams")
LIBRARY = {
    "writers/guide": ["README.md", *(f"docs/{name}.md" for name in GUIDE)],
    "architects/decisions": ["docs/adr"],
    "makers/workshop": ["CONTRIBUTING.md", "docs/architecture.md", "docs/operations.md"],
}
READY_S = 30.0


class Demo:
    """Runs the commands that a user would type, and prints them."""

    def __init__(self, folder: Path, host: str, port: int) -> None:
        self._console = Console(highlight=False)
        self._folder = folder
        self._url = f"http://{host}:{port}"
        self._owners_port = free_port(host)
        self._owners_url = f"http://{host}:{self._owners_port}"
        self._servers: list[subprocess.Popen[bytes]] = []
        self._environment = {
            **os.environ,
            "AGGREGATOR_DATA_DIR": str(folder / "own"),
            "AGGREGATOR_HOST": host,
            "AGGREGATOR_PORT": str(port),
            "AGGREGATOR_DEBUG": os.environ.get("AGGREGATOR_DEBUG", "true"),
            "AGGREGATOR_LOG_FORMAT": os.environ.get("AGGREGATOR_LOG_FORMAT", "console"),
            "AGGREGATOR_LOG_LEVEL": os.environ.get("AGGREGATOR_LOG_LEVEL", "WARNING"),
        }
        owners = {"AGGREGATOR_DATA_DIR": str(folder / "owners"), "AGGREGATOR_PORT": str(self._owners_port)}
        self._owners = {**self._environment, **owners}

    def run(self) -> None:
        self.say("Three owners ingest their documents. Each collection is parsed, chunked, embedded and indexed here.")
        for path, files in LIBRARY.items():
            collection = path.partition("/")[2]
            given = ("--collection", collection, "--visibility", "public")
            self.do("ingest", *files, *given, environment=self._owners)
            self.do("publish", collection, "--as", path, environment=self._owners)
        config = self._folder / "anabranch.yaml"
        config.write_text(self.sources())
        try:
            self.serve(self._owners_url, environment=self._owners)
            server = self.serve(self._url, "--config", str(config))
            self.say("The owners' server runs. A second server has the three as its sources, and asks all of them:")
            self.do("ask", QUESTION, "--config", str(config))
            question = urllib.parse.quote(QUESTION)
            self._console.rule()
            self._console.print(f"\n  Open the page: {self._url}/#/ask?q={question}\n", style="bold", soft_wrap=True)
            self.say("Drop documents of your own into its Library, too: the demo deletes them when it ends.")
            self._console.print("Another question, to the API, in another terminal:", style="dim")
            body = '{"query": "How is a chunk kept within the window of the embedder?", "sources": "all"}'
            self._console.print(f"curl {self._url}/v1/query -d '{body}'\n", soft_wrap=True, markup=False)
            self._console.print("Ctrl-C stops it.\n", style="dim")
            server.wait()
        finally:
            for one in self._servers:
                one.terminate()
            for one in self._servers:
                one.wait()

    def sources(self) -> str:
        """The anabranch.yaml of the server that asks."""
        lines = ["sources:"]
        for path in LIBRARY:
            owner, _, slug = path.partition("/")
            lines.append(f'  {slug}: {{url: "{self._owners_url}", slug: {slug}, owner: {owner}}}')
        return "\n".join(lines) + "\n"

    def say(self, text: str) -> None:
        self._console.print(f"\n{text}\n", markup=False)

    def do(self, *command: str, environment: dict[str, str] | None = None) -> None:
        shown = shlex.join(["anabranch", *command])
        self._console.print(f"$ {shown}", style="bold cyan", markup=False, soft_wrap=True)
        ran = subprocess.run([ANABRANCH, *command], cwd=HERE, env=environment or self._environment, check=False)
        if ran.returncode:
            sys.exit(f"demo: `{shown}` ended with {ran.returncode}.")

    def serve(self, url: str, *options: str, environment: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Starts a server and waits until it is ready."""
        command = [ANABRANCH, "serve", *options]
        server = subprocess.Popen(command, cwd=HERE, env=environment or self._environment, start_new_session=True)
        self._servers.append(server)
        until = time.monotonic() + READY_S
        while not is_ready(url):
            if server.poll() is not None or time.monotonic() > until:
                sys.exit("demo: the server did not start.")
            time.sleep(0.05)
        signal.signal(signal.SIGINT, lambda *_: server.send_signal(signal.SIGINT))
        signal.signal(signal.SIGTERM, lambda *_: server.terminate())
        return server


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=1) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


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
