"""A surface that a setting switches off: 404 there, absent from the API description, and the start says so."""

from pathlib import Path

import aiohttp
import pytest

from anabranch.configuration.settings import SWITCHED_SURFACES
from conftest import Server
from support.environment import served
from support.server_process import serving

pytestmark = pytest.mark.usefixtures("isolated_home")

ADDRESSES = {
    "chat": {"/api/v1/chat", "/api/v1/chat/stream"},
    "query": {"/v1/query"},
    "rag": {"/rag/stream"},
    "openai": {"/v1/chat/completions", "/v1/responses", "/v1/models", "/v1/models/{model}", "/v1/embeddings"},
    "knowledge": {"/v1/collections", "/v1/documents", "/v1/ingest", "/v1/feedback"},
    "endpoints": {"/api/v1/endpoints/{slug}/query"},
    "planner": {"/planner/sessions/{session}/steps"},
    "mcp": {"/mcp"},
    "page": {"/", "/page/{file}"},
}
ALWAYS = [
    "/health",
    "/metrics",
    "/openapi.json",
    "/ready",
    "/v1/session",
    "/v1/streams/{stream}",
    "/web/connection.js",
    "/web/stream.js",
]


async def described(server: Server) -> list[str]:
    async with server.session.get(f"{server.url}/openapi.json") as response:
        assert response.status == 200
        return sorted((await response.json())["paths"])


@pytest.mark.parametrize("surface", SWITCHED_SURFACES)
async def test_a_surface_that_is_switched_off_is_404(surface: str) -> None:
    variable = f"{surface.upper()}_ENABLED"
    async with served() as server:
        everything = await described(server)
    async with served(**{variable: "false"}) as server:
        off = [one for one in server.service.operations if one.switched_off_by]
        addresses = {one.path for one in off}
        assert addresses >= ADDRESSES[surface]
        for one in off:
            path = one.path.replace("{", "").replace("}", "")
            for method in ("GET" if one.method == "WEBSOCKET" else one.method, "PUT"):
                async with server.session.request(method, server.url + path, json={"query": "?"}) as response:
                    assert response.status == 404, (method, path)
                    body = await response.json()
                    if surface == "openai":
                        body = {**body["error"], "error": body["error"]["code"]}
                    assert f"AGGREGATOR_{variable}=true" in body["message"]
                    assert body["error"] == "not_found"
            if one.method == "WEBSOCKET":
                with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
                    await server.session.ws_connect(server.url + path)
                assert caught.value.status == 404
        left = await described(server)
        for path in ("/health", "/ready", "/metrics"):
            async with server.session.get(server.url + path) as response:
                assert response.status == 200
    assert left == [path for path in everything if path not in addresses]


async def test_with_every_surface_switched_off_the_addresses_of_the_operator_remain() -> None:
    async with served(**{f"{surface.upper()}_ENABLED": "false" for surface in SWITCHED_SURFACES}) as server:
        assert await described(server) == ALWAYS


async def test_the_start_says_which_surfaces_are_switched_off(tmp_path: Path) -> None:
    (tmp_path / "anabranch.yaml").write_text("settings: {rag_enabled: false}", encoding="utf-8")
    async with serving(home=tmp_path, variables={"AGGREGATOR_MCP_ENABLED": "false"}) as program:
        assert [line["surfaces"] for line in program.log if line["event"] == "surfaces_off"] == [["rag", "mcp"]]
