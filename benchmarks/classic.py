"""The same service as it is usually written, and written well: FastAPI, pydantic and one shared httpx client."""

import argparse
import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Annotated, Literal
from uuid import uuid4

import httpx
import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from pydantic import BaseModel, Field, ValidationError

from benchmarks.prompt import SYSTEM, user_message

logger = logging.getLogger("classic")

RETRIEVAL_TIMEOUT_S = 30.0
GENERATION_TIMEOUT_S = 120.0


class EndpointRef(BaseModel):
    url: str
    slug: str
    name: str = ""
    tenant_name: str | None = None
    owner_username: str | None = None

    @property
    def path(self) -> str:
        return f"{self.owner_username}/{self.slug}" if self.owner_username else self.slug


class ChatRequest(BaseModel):
    prompt: str = Field(min_length=1)
    model: EndpointRef
    data_sources: list[EndpointRef] = Field(default_factory=list, max_length=10)
    endpoint_tokens: dict[str, str] = Field(default_factory=dict)
    transaction_tokens: dict[str, str] = Field(default_factory=dict)
    top_k: int = Field(default=5, ge=1, le=20)
    max_tokens: int = Field(default=1024, ge=1)
    temperature: float = Field(default=0.7, ge=0, le=2)
    similarity_threshold: float = Field(default=0.5, ge=0, le=1)


class Document(BaseModel):
    document_id: str
    content: str
    metadata: dict[str, object] = Field(default_factory=dict)
    similarity_score: float = 0.0


class References(BaseModel):
    documents: list[Document] = Field(default_factory=list)


class SourceReply(BaseModel):
    references: References | None = None


class Message(BaseModel):
    role: str
    content: str


class Usage(BaseModel):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0


class Summary(BaseModel):
    message: Message
    usage: Usage | None = None


class ModelReply(BaseModel):
    summary: Summary


class RetrievalResult(BaseModel):
    endpoint_path: str
    documents: list[Document] = Field(default_factory=list)
    status: Literal["success", "error", "timeout"] = "success"
    error_message: str | None = None


class DocumentSource(BaseModel):
    slug: str
    content: str


class SourceInfo(BaseModel):
    path: str
    documents_retrieved: int
    status: Literal["success", "error", "timeout"]
    error_message: str | None = None


class ResponseMetadata(BaseModel):
    retrieval_time_ms: int
    generation_time_ms: int
    total_time_ms: int


class ChatResponse(BaseModel):
    response: str
    sources: dict[str, DocumentSource]
    retrieval_info: list[SourceInfo]
    metadata: ResponseMetadata
    usage: Usage | None = None


class Upstream:
    """Calls to sources and models on behalf of one request."""

    def __init__(self, client: httpx.AsyncClient, request: ChatRequest, correlation_id: str) -> None:
        self._client = client
        self._request = request
        self._correlation_id = correlation_id

    async def retrieve(self, source: EndpointRef) -> RetrievalResult:
        query = {
            "messages": self._request.prompt,
            "limit": self._request.top_k,
            "similarity_threshold": self._request.similarity_threshold,
            "include_metadata": True,
        }
        try:
            reply = SourceReply.model_validate_json(await self._post(source, query, RETRIEVAL_TIMEOUT_S))
        except httpx.TimeoutException:
            return RetrievalResult(endpoint_path=source.path, status="timeout", error_message="Request timed out")
        except (httpx.HTTPError, ValidationError) as error:
            return RetrievalResult(endpoint_path=source.path, status="error", error_message=str(error))
        documents = reply.references.documents if reply.references else []
        return RetrievalResult(endpoint_path=source.path, documents=documents)

    async def generate(self, messages: list[Message]) -> Summary:
        query = {
            "messages": [message.model_dump() for message in messages],
            "max_tokens": self._request.max_tokens,
            "temperature": self._request.temperature,
            "stream": False,
            "stop_sequences": [],
        }
        try:
            reply = await self._post(self._request.model, query, GENERATION_TIMEOUT_S)
            return ModelReply.model_validate_json(reply).summary
        except (httpx.HTTPError, ValidationError) as error:
            raise HTTPException(status_code=502, detail=f"Model generation failed: {error}") from error

    async def _post(self, endpoint: EndpointRef, body: dict[str, object], timeout_s: float) -> bytes:
        owner = endpoint.owner_username or ""
        headers = {"X-Correlation-ID": self._correlation_id}
        if endpoint.tenant_name:
            headers["X-Tenant-Name"] = endpoint.tenant_name
        if token := self._request.endpoint_tokens.get(owner):
            headers["Authorization"] = f"Bearer {token}"
        if transaction_token := self._request.transaction_tokens.get(owner):
            body["transaction_token"] = transaction_token
        url = f"{endpoint.url.rstrip('/')}/api/v1/endpoints/{endpoint.slug}/query"
        response = await self._client.post(url, json=body, headers=headers, timeout=timeout_s)
        response.raise_for_status()
        return response.content


def ranked(results: list[RetrievalResult]) -> list[tuple[str, str, float, str]]:
    documents = [
        (result.endpoint_path, str(document.metadata.get("title", "Untitled")), document)
        for result in results
        for document in result.documents
    ]
    documents.sort(key=lambda entry: entry[2].similarity_score, reverse=True)
    return [(path, title, document.similarity_score, document.content) for path, title, document in documents]


async def answer(request: ChatRequest, upstream: Upstream) -> ChatResponse:
    started = perf_counter()
    results = await asyncio.gather(*(upstream.retrieve(source) for source in request.data_sources))
    documents = ranked(results)
    retrieved = perf_counter()
    summary = await upstream.generate(
        [
            Message(role="system", content=SYSTEM),
            Message(role="user", content=user_message(request.prompt, documents)),
        ]
    )
    generated = perf_counter()
    return ChatResponse(
        response=summary.message.content,
        sources={title: DocumentSource(slug=path, content=content) for path, title, _, content in documents},
        retrieval_info=[
            SourceInfo(
                path=result.endpoint_path,
                documents_retrieved=len(result.documents),
                status=result.status,
                error_message=result.error_message,
            )
            for result in results
        ],
        metadata=ResponseMetadata(
            retrieval_time_ms=round((retrieved - started) * 1000),
            generation_time_ms=round((generated - retrieved) * 1000),
            total_time_ms=round((generated - started) * 1000),
        ),
        usage=summary.usage,
    )


def shared_client(request: Request) -> httpx.AsyncClient:
    client: httpx.AsyncClient = request.app.state.client
    return client


def create_app() -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # httpx's default limits: more connections kept alive cost it up to four times the CPU at 16 requests at once
        async with httpx.AsyncClient() as client:
            app.state.client = client
            yield

    app = FastAPI(lifespan=lifespan)

    @app.middleware("http")
    async def correlate(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        request.state.correlation_id = request.headers.get("X-Correlation-ID") or str(uuid4())
        started = perf_counter()
        response = await call_next(request)
        response.headers["X-Correlation-ID"] = request.state.correlation_id
        logger.info(
            "%s %s %d %.1f ms correlation_id=%s",
            request.method,
            request.url.path,
            response.status_code,
            (perf_counter() - started) * 1000,
            request.state.correlation_id,
        )
        return response

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "healthy"}

    @app.post("/api/v1/chat", response_model=ChatResponse)
    async def chat(
        body: ChatRequest, request: Request, client: Annotated[httpx.AsyncClient, Depends(shared_client)]
    ) -> ChatResponse:
        return await answer(body, Upstream(client, body, request.state.correlation_id))

    return app


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    uvicorn.run(create_app(), port=parser.parse_args().port, access_log=False)


if __name__ == "__main__":
    main()
