"""A proxy with TLS and logins before a server, as providers of OpenSearch have it."""

import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp
import trustme
from aiohttp import web


@asynccontextmanager
async def tls_proxy(server: str, accepted: Sequence[str]) -> AsyncIterator[tuple[str, trustme.CA]]:
    """Its address, and the authority of its certificate. Requests need one of these `Authorization` headers."""
    authority, context = trustme.CA(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)

    async def forward(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") not in accepted:
            return web.Response(status=401, text="Unauthorized")
        kind = {"Content-Type": request.headers["Content-Type"]} if request.can_read_body else {}
        async with inner.request(
            request.method, server + request.raw_path, data=await request.read(), headers=kind
        ) as reply:
            return web.Response(status=reply.status, body=await reply.read(), content_type=reply.content_type)

    app = web.Application(client_max_size=100_000_000)
    app.router.add_route("*", "/{path:.*}", forward)
    runner = web.AppRunner(app)
    async with aiohttp.ClientSession() as inner:
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
            await site.start()
            [(_, port)] = runner.addresses
            yield f"https://127.0.0.1:{port}", authority
        finally:
            await runner.cleanup()
