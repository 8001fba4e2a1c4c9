"""`python -m anabranch.testing`: a Space for demonstrations and benchmarks."""

import argparse
import asyncio
import signal
import sys

import msgspec
import uvloop

from anabranch.testing.source import documents
from anabranch.testing.space import Space

SOURCES = ("docs", *(f"source-{number}" for number in range(1, 11)))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m anabranch.testing", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--delay-ms", type=float, default=0, help="delay of every source")
    parser.add_argument("--model-delay-ms", type=float, default=0)
    parser.add_argument("--documents", type=int, default=5, help="documents in every source")
    parser.add_argument("--document-bytes", type=int, default=2048)
    uvloop.run(serve(parser.parse_args()))


async def serve(options: argparse.Namespace) -> None:
    space = Space(host=options.host, port=options.port, everything=True, record=False)
    for name in SOURCES:
        sample = documents(name, count=options.documents, size_bytes=options.document_bytes)
        space.source(name, documents=sample, delay_s=options.delay_ms / 1000)
    space.model("scribe", delay_s=options.model_delay_ms / 1000)
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with space:
        sys.stdout.write(msgspec.json.encode({"url": space.url}).decode() + "\n")
        sys.stdout.flush()
        await stopped.wait()


if __name__ == "__main__":
    main()
