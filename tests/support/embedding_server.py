"""What the room's settings point at: embeddings, a reranker, and a hub that signs tokens, all on one port."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import jwt
import numpy as np
from aiohttp import web
from aiohttp.test_utils import TestServer
from cryptography.hazmat.primitives.asymmetric import rsa

from anabranch.testing import FakeEmbedder

PREFERRED = "oven"


class ModelServer:
    """Remembers what it was asked, by path."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[tuple[str, dict[str, Any], str | None]] = []
        self._embedder = FakeEmbedder()
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)

    def to(self, path: str) -> list[dict[str, Any]]:
        return [body for asked, body, _ in self.asked if asked == path]

    def keys(self, path: str) -> set[str | None]:
        return {key for asked, _, key in self.asked if asked == path}

    def token(self, audience: str) -> str:
        claims = {"aud": audience, "sub": "alice", "exp": int(time.time()) + 600}
        return jwt.encode(claims, self._key, algorithm="RS256", headers={"kid": "one"})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.method == "POST" else {}
        self.asked.append((request.path, body, request.headers.get("Authorization")))
        match request.path:
            case "/v1/embeddings":
                found = await self._embedder.embed(body["input"])
                vectors = [np.frombuffer(one.vector, np.float32).tolist() for one in found]
                return web.json_response({"data": [{"index": at, "embedding": v} for at, v in enumerate(vectors)]})
            case "/v1/rerank":
                scores = enumerate(body["documents"])
                return web.json_response(
                    {"results": [{"index": at, "relevance_score": float(PREFERRED in text)} for at, text in scores]}
                )
            case "/rerank":
                scores = enumerate(body["texts"])
                return web.json_response([{"index": at, "score": float(PREFERRED in text)} for at, text in scores])
            case "/.well-known/jwks.json":
                public = jwt.algorithms.RSAAlgorithm.to_jwk(self._key.public_key(), as_dict=True)
                return web.json_response({"keys": [{**public, "kid": "one", "alg": "RS256"}]})
            case _:
                return web.json_response({"error": "no such path"}, status=404)


@asynccontextmanager
async def model_server() -> AsyncIterator[ModelServer]:
    server = ModelServer()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    async with TestServer(app) as started:
        server.url = f"http://127.0.0.1:{started.port}"
        yield server
