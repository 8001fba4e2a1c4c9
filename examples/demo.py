"""`make demo`: three owners' documents and a model on this machine, one question across them, then the server."""

import asyncio
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml
from rich.console import Console
from rich.markup import escape

from anabranch.domain.errors import AnabranchError
from anabranch.entrypoints.cli import ask as asking
from anabranch.entrypoints.http.server import serve
from anabranch.runtime.settings import load
from anabranch.runtime.telemetry import configured_log
from anabranch.testing import Document, Space

QUESTION = "How long do customers have to return something, and who pays for it?"

LIBRARY = {
    "shop/policies": [
        Document(
            title="Returns",
            content="Customers may return any item within 30 days of delivery. Items must be unused. The refund is "
            "paid to the original means of payment within five working days.",
            score=0.91,
        ),
        Document(title="Gift cards", content="Gift cards cannot be exchanged for money.", score=0.58),
    ],
    "carrier/faq": [
        Document(
            title="Return labels",
            content="The shop pays for the return label. Print it at home or show the code at any parcel counter.",
            score=0.84,
        )
    ],
    "lawyer/notes": [
        Document(
            title="Consumer law",
            content="By law a distance purchase can be withdrawn from within 14 days. A shop may grant more.",
            score=0.77,
        )
    ],
}


@contextmanager
def running_space() -> Iterator[str]:
    """The data sources and the model, in a thread of their own; gives their address."""
    started, address, stop = threading.Event(), [""], asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def live() -> None:
        async with Space() as space:
            for path, documents in LIBRARY.items():
                space.source(path.partition("/")[2], documents=documents, delay_s=0.2)
            space.model("scribe", delay_s=0.3)
            address[0] = space.url
            loops.append(asyncio.get_running_loop())
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(live()), daemon=True)
    thread.start()
    started.wait()
    try:
        yield address[0]
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join(2)


def configuration(url: str) -> str:
    """An anabranch.yaml that gives the sources and the model names."""
    endpoints = {
        path: {"url": url, "owner": path.partition("/")[0], "slug": path.partition("/")[2]} for path in LIBRARY
    }
    return yaml.safe_dump(
        {
            "sources": {entry["slug"]: entry for entry in endpoints.values()},
            "models": {"scribe": {"url": url, "owner": "writer", "slug": "scribe"}},
        }
    )


def is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def main() -> None:
    console = Console(highlight=False)
    with running_space() as url, TemporaryDirectory() as folder:
        config = Path(folder) / "anabranch.yaml"
        config.write_text(configuration(url), encoding="utf-8")
        os.environ["AGGREGATOR_CONFIG"] = str(config)
        os.environ.setdefault("AGGREGATOR_HOST", "127.0.0.1")
        os.environ.setdefault("AGGREGATOR_DEBUG", "true")
        os.environ.setdefault("AGGREGATOR_LOG_FORMAT", "console")
        settings = load()
        if not is_free(settings.host, settings.port):
            sys.exit(f"demo: port {settings.port} is taken; choose another: AGGREGATOR_PORT=8005 make demo")

        console.print("Three owners' sources and a model now run on this machine. One question to all of them:\n")
        console.print(f"[cyan]?[/cyan] [bold]{escape(QUESTION)}[/bold]\n")
        inquiry = asking.Inquiry(question=QUESTION, sources=None, model=None, tokens={}, top_k=None, retrieve=False)
        asyncio.run(asking.ask(settings, inquiry, as_json=False))

        here = f"http://{settings.host}:{settings.port}"
        names = [{"slug": slug} for slug in settings.sources]
        body = {"prompt": QUESTION, "model": {"slug": "scribe"}, "data_sources": names}
        console.print(
            f"\nNow it serves at {here} (its interface: {here}/docs). In another terminal, follow the stream:\n"
        )
        console.print(f"curl -N {here}/api/v1/chat/stream -d '{json.dumps(body)}'\n", soft_wrap=True, markup=False)
        console.print("Ctrl-C ends it.\n", style="dim")
        serve(settings, 1, configured_log(settings))


if __name__ == "__main__":
    try:
        main()
    except AnabranchError as error:
        sys.exit(f"demo: {error.message}")
    except KeyboardInterrupt:
        sys.exit(130)
