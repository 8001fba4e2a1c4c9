"""The description of spec 5's surface, made from the very types that it decodes and encodes with."""

from typing import Any

import msgspec

from anabranch.app.embedders import LocalEmbedder
from anabranch.entrypoints.http import knowledge_wire as wire
from anabranch.entrypoints.http import query_wire
from anabranch.entrypoints.http.knowledge import MAX_OFFSET, MAX_PAGE
from anabranch.entrypoints.http.knowledge_errors import TABLE, UNAVAILABLE, KnowledgeError
from anabranch.entrypoints.http.openapi_streams import resumable
from anabranch.entrypoints.http.query import LONGEST
from anabranch.runtime.settings import Settings

TYPES = (
    wire.NewCollection,
    wire.CollectionView,
    wire.CollectionList,
    wire.CollectionStats,
    wire.CollectionDeleted,
    wire.IngestRequest,
    wire.IngestAccepted,
    wire.JobView,
    wire.DocumentView,
    wire.DocumentPage,
    wire.DocumentChanges,
    wire.DocumentDeleted,
    wire.Feedback,
    wire.FeedbackRecorded,
    query_wire.QueryRequest,
    query_wire.QueryResponse,
    *query_wire.EVENTS.values(),
)
STREAM = (
    "JSON, or with `Accept: text/event-stream` server-sent events: `token` as often as there are words, `sources` "
    "(unless `include_sources` is false), and at the end `done`; or, wherever something goes wrong, one `error`. "
    "Each has one `data:` line of JSON, in the form given here under its name. A comment line may come at any time."
)
SAID = {
    400: "The request cannot be understood or is over a limit; the message says which.",
    401: "No API key, or one that is not known.",
    403: "The caller sees it, but may not change it; or only the operator may name it.",
    404: "It is not there, or not for this caller.",
    408: "The request took too long to arrive.",
    409: "Something of that name is there already.",
    413: "The request is too large.",
    500: "Something went wrong on our side.",
    503: "Something that we depend on does not answer; `Retry-After` says when to come back.",
}
ALWAYS = (400, 401, 500, 503)
SENT = (408, 413)
SECURITY = {"bearer": {"type": "http", "scheme": "bearer", "description": "An API key, or a token of the hub"}}


def paths() -> dict[str, Any]:
    return {**_collections(), **_documents()}


def _collections() -> dict[str, Any]:
    return {
        "/v1/collections": {
            "get": _operation("list_collections", "The collections that the caller can see", wire.CollectionList),
            "post": _operation(
                "create_collection",
                "Create a collection",
                wire.CollectionView,
                takes=wire.NewCollection,
                well="201",
                errors=(403, 409),
            ),
        },
        "/v1/collections/{name}": {
            "get": _operation("get_collection", "A collection, by id or name", wire.CollectionView, errors=(404,)),
            "delete": _operation(
                "delete_collection", "Delete it with its documents", wire.CollectionDeleted, errors=(403, 404)
            ),
            "parameters": [_path("name")],
        },
        "/v1/collections/{name}/stats": {
            "get": _operation("collection_stats", "What is in it for the caller", wire.CollectionStats, errors=(404,)),
            "parameters": [_path("name")],
        },
    }


def _documents() -> dict[str, Any]:
    return {
        "/v1/ingest": {"post": _ingest()},
        "/v1/ingest/{job}": {
            "get": _operation("get_job", "What has become of documents", wire.JobView, errors=(404,)),
            "delete": _operation("cancel_job", "Take in no more of them", wire.JobView, errors=(404,)),
            "parameters": [_path("job")],
        },
        "/v1/documents": {
            "get": _operation(
                "list_documents", "The documents that the caller can see", wire.DocumentPage, errors=(404,)
            ),
            "parameters": [
                _asked("collection", {"type": "string"}, "A collection's id or name"),
                _asked("limit", {"type": "integer", "minimum": 1, "maximum": MAX_PAGE}, "How many at once"),
                _asked("after", {"type": "string"}, "What the page before had as `next`"),
            ],
        },
        "/v1/documents/{document}": {
            "get": {
                **_operation("get_document", "A document with its content", wire.DocumentView, errors=(404,)),
                "parameters": [
                    _asked(
                        "start",
                        {"type": "integer", "minimum": 0, "maximum": MAX_OFFSET},
                        "Content from this character on",
                    ),
                    _asked(
                        "end", {"type": "integer", "minimum": 0, "maximum": MAX_OFFSET}, "Content up to this character"
                    ),
                ],
            },
            "patch": _operation(
                "change_document",
                "Change what is said about it, or who may see it",
                wire.DocumentView,
                takes=wire.DocumentChanges,
                errors=(403, 404),
            ),
            "delete": _operation("delete_document", "Delete it", wire.DocumentDeleted, errors=(403, 404)),
            "parameters": [_path("document")],
        },
        "/v1/query": {"post": _query()},
        "/v1/feedback": {
            "post": _operation("feedback", "Rate an answer", wire.FeedbackRecorded, takes=wire.Feedback, errors=(404,))
        },
    }


def refine(schemas: dict[str, Any], settings: Settings) -> None:
    """What the types alone do not say."""
    schemas["QueryRequest"]["properties"]["query"] |= {"minLength": 1, "maxLength": LONGEST, "pattern": r"\S"}
    top_k = schemas["QuerySettings"]["properties"]["top_k"]
    next(branch for branch in top_k["anyOf"] if branch.get("type") == "integer")["maximum"] = settings.max_top_k
    named = schemas["NewCollection"]["properties"]["name"]
    named["allOf"] = [{"pattern": r"^[^\x00-\x1f\x7f]*$"}, {"pattern": r"\S"}]
    embedder = {"enum": [settings.embedding_model or LocalEmbedder.name, None]}
    schemas["NewCollectionSettings"]["properties"]["embedding_model"] = embedder
    schemas["QueryEvent"] = {
        "description": "The data of a stream's events, under their names.",
        "type": "object",
        "properties": {name: _ref(kind) for name, kind in query_wire.EVENTS.items()},
    }
    schemas["IngestForm"] = {
        "type": "object",
        "required": ["collection_id", "files"],
        "properties": {
            "collection_id": {"type": "string", "minLength": 1, "description": "A collection's id or name"},
            "files": {"type": "array", "minItems": 1, "items": {"type": "string", "format": "binary"}},
            "metadata": {"type": "string", "description": "A JSON object, for all files"},
            "permissions": {
                "type": "string",
                "description": "PermissionsForm as JSON, for all files; without it, they keep theirs",
            },
            "settings": {"type": "string", "description": "ChunkingForm as JSON"},
        },
    }


def _ingest() -> dict[str, Any]:
    described = _operation(
        "ingest",
        "Take documents in",
        wire.IngestAccepted,
        takes=wire.IngestRequest,
        errors=(403, 404),
    )
    described["requestBody"]["content"]["multipart/form-data"] = {"schema": {"$ref": "#/components/schemas/IngestForm"}}
    return described


def _query() -> dict[str, Any]:
    described = _operation(
        "query", "Ask the collections", query_wire.QueryResponse, takes=query_wire.QueryRequest, errors=(403, 404)
    )
    described["responses"]["200"]["description"] = STREAM
    events = {"schema": {"$ref": "#/components/schemas/QueryEvent"}}
    described["responses"]["200"]["content"]["text/event-stream"] = events
    return resumable(described)


def _operation(
    name: str,
    summary: str,
    gives: type[msgspec.Struct],
    *,
    takes: type[msgspec.Struct] | None = None,
    well: str = "200",
    errors: tuple[int, ...] = (),
) -> dict[str, Any]:
    statuses = sorted({*ALWAYS, *errors, *(SENT if takes is not None else ())})
    described: dict[str, Any] = {
        "operationId": name,
        "summary": summary,
        "security": [{}, {"bearer": []}],
        "responses": {
            well: {"description": summary, "content": {"application/json": {"schema": _ref(gives)}}},
            **{
                str(status): {
                    "description": f"{_codes(status)}: {SAID[status]}",
                    "content": {"application/json": {"schema": _ref(KnowledgeError)}},
                }
                for status in statuses
            },
        },
    }
    if takes is not None:
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(takes)}}}
    return described


def _codes(status: int) -> str:
    return ", ".join(f"`{code}`" for known, code in (*TABLE.values(), UNAVAILABLE) if known == status)


def _path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _asked(name: str, schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": schema, "description": description}


def _ref(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}
