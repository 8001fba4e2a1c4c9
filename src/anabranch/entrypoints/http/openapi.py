"""The description of the HTTP surfaces, made from the very types that they decode and encode with."""

from importlib.metadata import version
from typing import Any

import msgspec

from anabranch.entrypoints.http import chat_wire as wire
from anabranch.entrypoints.http import openapi_knowledge as knowledge
from anabranch.entrypoints.http import openapi_planner as planner
from anabranch.entrypoints.http import openapi_rag as rag
from anabranch.entrypoints.http import openapi_streams as streams
from anabranch.entrypoints.http.errors import ErrorBody
from anabranch.runtime.settings import Settings

REF = "#/components/schemas/{name}"
ERRORS = {
    "408": "The request took too long to arrive.",
    "413": "The request is too large.",
    "422": "The request cannot be understood or is over a limit; the message says which.",
    "429": "The caller has asked too often, where that is limited; `Retry-After` says when to come back.",
    "500": "Something went wrong on our side.",
    "502": "The model failed; `details` has `model_path` and `latency_ms`.",
    "503": "The server is shutting down or overloaded; `Retry-After` says when to come back.",
    "504": "The model, or the whole question, took too long.",
}
# By the time a model fails, a stream has begun: it says so in an event.
LATE = ("502", "504")
CORRELATION = {
    "name": "X-Correlation-ID",
    "in": "header",
    "schema": {"type": "string"},
    "description": "Carried to every source and model, and sent back; made if absent.",
}
STREAM = (
    "Server-sent events, in this order: `retrieval_start`; a `source_complete` for each source as it is through; "
    "`retrieval_complete`; `generation_start`; `token` as often as the model speaks; and at the end exactly one `done` "
    "or `error`. Each event has one `data:` line of JSON, in the form given here under its name. A comment line "
    "(`: keep-alive`) may come at any time."
)


def describe(settings: Settings) -> dict[str, Any]:
    types = [
        wire.ChatRequest,
        wire.ChatResponse,
        ErrorBody,
        *wire.EVENTS.values(),
        *knowledge.TYPES,
        *rag.TYPES,
        *planner.TYPES,
    ]
    _, schemas = msgspec.json.schema_components(types, ref_template=REF)
    _limit(schemas["ChatRequest"], settings)
    knowledge.refine(schemas, settings)
    rag.refine(schemas)
    planner.refine(schemas)
    schemas["ChatEvent"] = {
        "description": "The data of a stream's events, under their names.",
        "type": "object",
        "properties": {name: {"$ref": REF.format(name=kind.__name__)} for name, kind in wire.EVENTS.items()},
    }
    status = {"type": "object", "required": ["status"], "properties": {"status": {"type": "string"}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Anabranch", "version": version("anabranch"), "license": {"name": "Apache-2.0"}},
        "paths": {
            "/api/v1/chat": {
                "post": _chat("chat", "Ask, and get the whole answer", "application/json", "ChatResponse")
            },
            "/api/v1/chat/stream": {
                "post": streams.resumable(
                    _chat(
                        "chat_stream",
                        "Ask, and follow the answer as it comes",
                        "text/event-stream",
                        "ChatEvent",
                        STREAM,
                    )
                )
            },
            **knowledge.paths(),
            **rag.paths(),
            **planner.paths(),
            **streams.paths(),
            "/metrics": {"get": _metrics()},
            "/health": {"get": _plain("health", "Whether the process is alive", {"200": status})},
            "/ready": {"get": _plain("ready", "Whether it takes questions", {"200": status, "503": status})},
        },
        "components": {"schemas": schemas, "securitySchemes": knowledge.SECURITY},
    }


def _limit(request: dict[str, Any], settings: Settings) -> None:
    """What the types alone do not say: the settings' limits, and that a question needs words and a model."""
    properties = request["properties"]
    _branch(properties["top_k"], "integer")["maximum"] = settings.max_top_k
    _branch(properties["data_sources"], "array")["maxItems"] = settings.max_data_sources
    properties["prompt"]["pattern"] = r"\S"
    filled = {"type": "string", "minLength": 1}
    named = {"type": "object", "required": ["url", "slug"], "properties": {"url": filled, "slug": filled}}
    request["anyOf"] = [
        {"required": ["model"], "properties": {"model": named}},
        {"required": ["retrieval_only"], "properties": {"retrieval_only": {"const": True}}},
    ]


def _chat(name: str, summary: str, media_type: str, schema: str, description: str = "The answer.") -> dict[str, Any]:
    return {
        "operationId": name,
        "summary": summary,
        "parameters": [CORRELATION],
        "requestBody": {"required": True, "content": _content("application/json", "ChatRequest")},
        "responses": {
            "200": {"description": description, "content": _content(media_type, schema)},
            **{
                code: {"description": text, "content": _content("application/json", "ErrorBody")}
                for code, text in ERRORS.items()
                if media_type == "application/json" or code not in LATE
            },
        },
    }


def _plain(name: str, summary: str, responses: dict[str, Any]) -> dict[str, Any]:
    described = {
        code: {"description": summary, "content": {"application/json": {"schema": schema}}}
        for code, schema in responses.items()
    }
    return {"operationId": name, "summary": summary, "responses": described}


def _metrics() -> dict[str, Any]:
    text = {"text/plain": {"schema": {"type": "string"}}}
    refusals = {"401": "An API key is missing, or not known.", "403": "The API key is not an operator's."}
    refused = {
        code: {"description": said, "content": _content("application/json", "ErrorBody")}
        for code, said in refusals.items()
    }
    return {
        "operationId": "metrics",
        "summary": "How the service is doing, for Prometheus",
        "security": [{}, {"bearer": []}],
        "responses": {"200": {"description": "Prometheus' text form", "content": text}, **refused},
    }


def _content(media_type: str, schema: str) -> dict[str, Any]:
    return {media_type: {"schema": {"$ref": REF.format(name=schema)}}}


def _branch(schema: dict[str, Any], kind: str) -> dict[str, Any]:
    """The branch of an optional field that holds its value."""
    return next(branch for branch in schema.get("anyOf", [schema]) if branch.get("type") == kind)
