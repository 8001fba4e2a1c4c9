"""The OpenAPI description, generated from the table of operations."""

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import msgspec

from anabranch.configuration.settings import Settings
from anabranch.domain.eventlog import LAST
from anabranch.models.factory import LocalEmbedder

if TYPE_CHECKING:
    from anabranch.entrypoints.http.operations import Operation

Schema = dict[str, Any]

REF = "#/components/schemas/{name}"
SECURITY = {"bearer": {"type": "http", "scheme": "bearer", "description": "An API key, or a token of the hub"}}
CORRELATION = {
    "name": "X-Correlation-ID",
    "in": "header",
    "schema": {"type": "string"},
    "description": "Sent to every source and model, and back to the caller; generated if absent.",
}
PREFER = {
    "name": "Prefer",
    "in": "header",
    "schema": {"type": "string"},
    "description": (
        "`resumable` (RFC 7240): the answer continues without a listener, its events have ids, and `GET "
        "/v1/streams/{stream}` sends them again. If that is not possible, the answer is an ordinary one."
    ),
}
RESUMABLE_HEADERS = {
    "Stream-Id": {
        "schema": {"type": "string"},
        "description": "If the preference was applied: the id under which the answer can be read again.",
    },
    "Preference-Applied": {
        "schema": {"type": "string", "const": "resumable"},
        "description": "If the preference was applied.",
    },
}


def describe(operations: Iterable["Operation[Any]"], settings: Settings) -> Schema:
    table = sorted((one for one in operations if not one.switched_off_by), key=lambda one: one.path)
    _, schemas = msgspec.json.schema_components(_types(table), ref_template=REF)
    _add_limits(schemas, settings)
    paths: dict[str, Schema] = {}
    for one in table:
        if one.stream is not None and one.stream.events:
            schemas[one.stream.name] = _events(one.stream.events)
        # OpenAPI has no WebSockets: the request that opens one is a GET.
        method = "get" if one.method == "WEBSOCKET" else one.method.lower()
        paths.setdefault(one.path, {})[method] = _operation(one)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Anabranch", "version": version("anabranch"), "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": SECURITY},
    }


def parameter(name: str, schema: Schema, description: str, where: str = "query") -> Schema:
    return {"name": name, "in": where, "schema": schema, "description": description}


def integer(least: int, most: int, **more: Any) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most, **more}


CURSORS = (
    parameter("Last-Event-ID", integer(0, LAST), "The last `id` that was received", "header"),
    parameter("last_event_id", integer(0, LAST), "The same, for clients that cannot send headers"),
)


def _types(table: Iterable["Operation[Any]"]) -> list[Any]:
    """Every type that occurs in a request, a response or an event, once."""
    found: dict[Any, None] = {}
    for one in table:
        events = one.stream.events if one.stream is not None else ()
        streamed = events.values() if isinstance(events, Mapping) else events
        found |= dict.fromkeys((one.dialect.error_type, *one.response_types, *streamed))
        found |= dict.fromkeys(kind for kind in (one.request_type, one.form_type) if kind not in (None, bytes))
    return list(found)


def _add_limits(schemas: dict[str, Schema], settings: Settings) -> None:
    """The limits that come from the settings, and that chat needs a model or `retrieval_only`."""
    if (chat := schemas.get("ChatRequest")) is not None:  # it is absent if its surface is switched off, as the others
        _branch(chat["properties"]["top_k"], "integer")["maximum"] = settings.max_top_k
        _branch(chat["properties"]["data_sources"], "array")["maxItems"] = settings.max_data_sources
        filled = {"type": "string", "minLength": 1}
        named = {"type": "object", "required": ["url", "slug"], "properties": {"url": filled, "slug": filled}}
        chat["anyOf"] = [
            {"required": ["model"], "properties": {"model": named}},
            {"required": ["retrieval_only"], "properties": {"retrieval_only": {"const": True}}},
        ]
    if (query := schemas.get("QuerySettings")) is not None:
        _branch(query["properties"]["top_k"], "integer")["maximum"] = settings.max_top_k
    if (collection := schemas.get("NewCollectionSettings")) is not None:
        collection["properties"]["embedding_model"] = {"enum": [settings.embedding_model or LocalEmbedder.name, None]}


def _branch(schema: Schema, kind: str) -> Schema:
    """The branch of an optional field that has its value."""
    return next(branch for branch in schema.get("anyOf", [schema]) if branch.get("type") == kind)


def _operation(one: "Operation[Any]") -> Schema:
    read = (408, 413) if one.request_type is not None else ()
    limited = (403, 429) if one.scope is not None else ()  # API keys have scopes, and may have limits
    statuses = sorted({*one.dialect.always, *one.errors, *read, *limited})
    error = {"application/json": {"schema": _schema((one.dialect.error_type,))}}
    described: Schema = {
        "operationId": one.name,
        "summary": one.summary,
        "parameters": [*_path_parameters(one), *one.parameters, CORRELATION, *([PREFER] if one.resumable else ())],
        "responses": {
            **{
                str(status): _response(one, status, text)
                for status, text in (one.statuses or {200: one.summary}).items()
            },
            **{str(status): {"description": one.dialect.descriptions[status], "content": error} for status in statuses},
        },
    }
    if 401 in statuses:
        described["security"] = [{}, {"bearer": [] if one.scope is None else [one.scope]}]
    if one.request_type is not None:
        content = {"application/json": {"schema": _schema((one.request_type,))}}
        if one.form_type is not None:
            content["multipart/form-data"] = {"schema": _schema((one.form_type,))}
        described["requestBody"] = {"required": True, "content": content}
    return described


def _response(one: "Operation[Any]", status: int, description: str) -> Schema:
    if status in (101, 204, 304):
        return {"description": description}
    content: Schema = {one.media_type: {"schema": _schema(one.response_types)}} if one.response_types else {}
    content |= {other: {"schema": {"type": "string"}} for other in one.other_media_types}
    response: Schema = {"description": description, "content": content}
    if one.stream is not None:
        response["description"] = f"{description} {one.stream.description}"
        schema = {"$ref": REF.format(name=one.stream.name)} if one.stream.events else {"type": "string"}
        content["text/event-stream"] = {"schema": schema}
    if one.resumable:
        response["headers"] = RESUMABLE_HEADERS
    return response


def _path_parameters(one: "Operation[Any]") -> list[Schema]:
    return [
        {"name": segment[1:-1], "in": "path", "required": True, "schema": one.dialect.path_schema}
        for segment in one.path.split("/")
        if segment.startswith("{")
    ]


def _events(events: Mapping[str, type] | Sequence[type]) -> Schema:
    if not isinstance(events, Mapping):
        return {"anyOf": [_schema((kind,)) for kind in events]}
    return {
        "description": "The data of a stream's events, by event name.",
        "type": "object",
        "properties": {name: _schema((kind,)) for name, kind in events.items()},
    }


def _schema(kinds: Sequence[Any]) -> Schema:
    found, _ = msgspec.json.schema_components([kind for kind in kinds if kind is not bytes], ref_template=REF)
    return (found[0] if len(found) == 1 else {"anyOf": list(found)}) if found else {}
