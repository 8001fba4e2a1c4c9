"""The description of POST /rag/stream."""

from typing import Any

from anabranch.domain.messages import LANGUAGES
from anabranch.entrypoints.http import rag_wire as wire
from anabranch.entrypoints.http.openapi_streams import resumable
from anabranch.entrypoints.http.rag import LONGEST, MMR_LAMBDA, MOST, THRESHOLD, TOP_K

TYPES = [wire.RagRequest, wire.RagTokenFrame, wire.RagDoneFrame, wire.RagErrorFrame]
STREAM = (
    "Server-sent events without a name, each with one `data:` line of JSON: `token` as often as there are words, and "
    "at the end exactly one `done` or `error`. Nothing to answer from is a `done` with `guardrail` `no_context`. A "
    "comment line (`: keep-alive`) may come at any time."
)
ERRORS = {
    "400": "`validation_error`: the request cannot be understood or is over a limit; the message says which.",
    "401": "`unauthorized`: an API key is missing, or not known.",
    "403": "`forbidden`: `sources` are named, and the caller may not name what the operator has configured.",
    "404": "`not_found`: there is no such collection, or not for this caller.",
    "408": "`request_timeout`: the request took too long to arrive.",
    "413": "`request_too_large`.",
    "429": "`rate_limited`: the caller has asked too often; `Retry-After` says when to come back.",
    "500": "`internal_error`.",
    "503": "`overloaded` or `shutting_down`; `Retry-After` says when to come back.",
}


def paths() -> dict[str, Any]:
    return {"/rag/stream": {"post": resumable(_asked())}}


def _asked() -> dict[str, Any]:
    return {
        "operationId": "rag_stream",
        "summary": "Ask the collections, and follow the answer as it comes",
        "security": [{}, {"bearer": []}],
        "parameters": [
            {
                "name": "Accept-Language",
                "in": "header",
                "schema": {"type": "string"},
                "description": "The language of messages, unless `language` says: en, de, es, fr or zh.",
            }
        ],
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref("RagRequest")}}},
        "responses": {
            "200": {"description": STREAM, "content": {"text/event-stream": {"schema": _ref("RagEvent")}}},
            **{
                status: {"description": said, "content": {"application/json": {"schema": _ref("RagErrorFrame")}}}
                for status, said in ERRORS.items()
            },
        },
    }


def refine(schemas: dict[str, Any]) -> None:
    """What the types alone do not say."""
    properties = schemas["RagRequest"]["properties"]
    properties["query"].update(minLength=1, maxLength=LONGEST, pattern=r"\S")
    branches = [{"type": "integer", "minimum": 1, "maximum": MOST}, {"type": "null"}]
    properties["top_k"] = {"anyOf": branches, "default": TOP_K}
    tag = f"^({'|'.join(LANGUAGES)})([-_][A-Za-z0-9]{{1,8}})*$"
    properties["language"]["anyOf"][0]["pattern"] = tag
    for name, default in (("threshold", THRESHOLD), ("mmr_lambda", MMR_LAMBDA)):
        branches = [{"type": "number", "minimum": 0, "maximum": 1}, {"type": "null"}]
        properties[name] = {"anyOf": branches, "default": default}
    schemas["RagEvent"] = {"anyOf": [_ref(kind.__name__) for kind in TYPES[1:]]}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}
