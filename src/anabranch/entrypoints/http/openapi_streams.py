"""The description of answers that can be taken up again."""

from typing import Any

from anabranch.domain.eventlog import LAST
from anabranch.entrypoints.http.knowledge_errors import TABLE, UNAVAILABLE, KnowledgeError

PREFER = {
    "name": "Prefer",
    "in": "header",
    "schema": {"type": "string"},
    "description": (
        "`resumable` (RFC 7240): the answer goes on while nobody listens, its events have ids, and `GET "
        "/v1/streams/{stream}` has them again. Where that cannot be kept, the answer is an ordinary one."
    ),
}
HEADERS = {
    "Stream-Id": {
        "schema": {"type": "string"},
        "description": "Where the preference was applied: the id under which the answer can be read again.",
    },
    "Preference-Applied": {
        "schema": {"type": "string", "const": "resumable"},
        "description": "Where the preference was applied.",
    },
}
STREAM = (
    "The events behind the cursor, as they come, in the dialect that the question was asked in, each with its `id`. "
    "`event: reset` comes first if the cursor means nothing: then everything follows from the beginning. A comment "
    "line (`: keep-alive`) may come at any time."
)
ERRORS = {
    400: "The cursor is not one that was given.",
    401: "No API key, or one that is not known, where every caller needs one.",
    404: "There is no such stream, it has been forgotten, or it is not the caller's.",
    500: "Something went wrong on our side.",
    503: "The log that the workers share is out of reach; `Retry-After` says when to come back.",
}


def resumable(operation: dict[str, Any]) -> dict[str, Any]:
    """An operation that takes the preference."""
    answer = operation["responses"]["200"]
    responses = {**operation["responses"], "200": {**answer, "headers": HEADERS}}
    return {**operation, "parameters": [*operation.get("parameters", ()), PREFER], "responses": responses}


def paths() -> dict[str, Any]:
    cursor = {"type": "integer", "minimum": 0, "maximum": LAST}
    return {
        "/v1/streams/{stream}": {
            "get": {
                "operationId": "resume",
                "summary": "The rest of a resumable answer, or all of it again",
                "security": [{}, {"bearer": []}],
                "parameters": [
                    {
                        "name": "stream",
                        "in": "path",
                        "required": True,
                        "schema": {"type": "string", "minLength": 1},
                        "description": "What `Stream-Id` said",
                    },
                    {"name": "Last-Event-ID", "in": "header", "schema": cursor, "description": "The last id that came"},
                    {
                        "name": "last_event_id",
                        "in": "query",
                        "schema": cursor,
                        "description": "The same, for those who cannot send headers; the header counts before it",
                    },
                ],
                "responses": {
                    "200": {"description": STREAM, "content": {"text/event-stream": {"schema": {"type": "string"}}}},
                    "204": {"description": "The answer has ended, and the client has all of it."},
                    **{
                        str(status): {"description": f"{_codes(status)}: {said}", "content": _problem()}
                        for status, said in ERRORS.items()
                    },
                },
            }
        }
    }


def _codes(status: int) -> str:
    return ", ".join(f"`{code}`" for known, code in (*TABLE.values(), UNAVAILABLE) if known == status)


def _problem() -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{KnowledgeError.__name__}"}}}
