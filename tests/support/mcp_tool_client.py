"""A running Anabranch with documents and MCP servers behind it, and MCP's own client to use its tools."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from anabranch.domain.mcp import McpServer
from support.collection_server import Library, library, text

ERAS: tuple[Literal["legacy", "auto"], ...] = ("legacy", "auto")
STUB = Path(__file__).parent / "mcp_stub_server.py"


def stub(name: str, seconds: float = 0.0, **more: Any) -> McpServer:
    return McpServer(name=name, command=sys.executable, args=("-I", "-S", str(STUB), name, str(seconds)), **more)


@asynccontextmanager
async def equipped(folder: Path, models_dir: Path, *servers: McpServer, **given: Any) -> AsyncIterator[Library]:
    """With a handbook that everybody may read, and a diary that only Alice may."""
    configured = {server.name: server for server in servers}
    async with library(folder, models_dir, mcp_servers=configured, **given) as opened:
        await opened.collection("handbook", who="alice")
        await opened.ingest(
            "handbook",
            text("Refunds are paid within 14 days of the return.", title="Refunds"),
            text(
                "Alice hides the spare key under the blue flowerpot.",
                title="Diary",
                permissions={"visibility": "private"},
            ),
            who="alice",
        )
        yield opened


@asynccontextmanager
async def client(
    shelf: Library, mode: Literal["legacy", "auto"] = "auto", *, who: str | None = None
) -> AsyncIterator[Client]:
    async with httpx2.AsyncClient(headers=shelf.key(who), timeout=30) as web:
        transport = streamable_http_client(f"{shelf.server.url}/mcp", http_client=web)
        async with Client(transport, mode=mode) as opened:
            yield opened
