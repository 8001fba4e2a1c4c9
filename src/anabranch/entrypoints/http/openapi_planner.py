"""The description of spec 2's surface, made from the very types that it decodes and encodes with."""

from typing import Any

import msgspec

from anabranch.domain.eventlog import LAST
from anabranch.entrypoints.http import planner_wire as views
from anabranch.entrypoints.http import planner_wire as wire
from anabranch.entrypoints.http.errors import ErrorBody
from anabranch.entrypoints.http.planner import MOST, USUAL

STEP = "/planner/sessions/{session}/steps/{step}"
TYPES = (
    wire.StepForm,
    wire.PushForm,
    wire.ProgressForm,
    wire.SafetyForm,
    views.StepAccepted,
    views.StepAnswer,
    views.PushReceiptView,
    views.TakenList,
    views.Judged,
    views.StepStands,
    views.EventPage,
    views.EventBatch,
    views.Heartbeat,
    views.ResetView,
)
SAID = {
    401: "An API key is missing, or not known.",
    404: "There is no such step, or not for this caller.",
    408: "The request took too long to arrive.",
    409: "The session has another step of that id.",
    413: "The request, or what the stream would hold with it, is too large.",
    422: "The request cannot be understood or is over a limit; the message says which.",
    500: "Something went wrong on our side.",
    503: "The log of streams is out of reach, or the server is overloaded or shutting down; `Retry-After` says when to "
    "come back.",
}
ALWAYS = (401, 404, 422, 500, 503)
SENT = (408, 413)
STREAM = (
    "Server-sent events. `planner_stream`: a batch of up to five events, with the last one's `sequence` as its `id`; "
    "`heartbeat`: nothing new, and the latest `sequence`; `reset`: the cursor means nothing any more, throw away what "
    "you have, all of it follows. It ends after `plan_step_completed`, unless that names a next step: then it goes on "
    "with that one's events, and `sequence` goes on counting."
)
SOCKET = (
    "The same comes as messages of JSON over a WebSocket at `/ws` instead of `/stream`, where a web page offers the "
    "subprotocols `anabranch.planner` and `bearer.KEY`; it is closed with 1000 after the end, and with 1012 or 1013 "
    "when the client should come back with its cursor."
)
ID = {
    "type": "string",
    "minLength": 1,
    "maxLength": wire.LONGEST_ID,
    "allOf": [{"pattern": r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*$"}, {"pattern": r"[^.]"}],
}
CURSOR = {"type": "integer", "minimum": 0, "maximum": LAST}


Forms = tuple[type[msgspec.Struct], ...]


def paths() -> dict[str, Any]:
    step = [_path("session"), _path("step")]
    return {
        "/planner/sessions/{session}/steps": {
            "post": _operation(
                "begin_step",
                "Hand over a step",
                {
                    "201": ("It runs.", (views.StepAccepted,)),
                    "200": (
                        "It ran already. Or, where streaming is off, its answer, at its end.",
                        (views.StepAccepted, views.StepAnswer),
                    ),
                },
                takes=wire.StepForm,
                errors=(409,),
            ),
            "parameters": [_path("session")],
        },
        STEP: {
            "delete": _operation("cancel_step", "Cancel a step", {"200": ("How it stands.", (views.StepStands,))}),
            "parameters": step,
        },
        f"{STEP}/subagents/{{key}}/events": {"post": _push(), "parameters": [*step, _path("key")]},
        f"{STEP}/progress": {
            "post": _operation(
                "push_progress", "The planner's own events", _taken(views.PushReceiptView), takes=wire.ProgressForm
            ),
            "parameters": step,
        },
        f"{STEP}/safety": {
            "post": _operation(
                "decide_safety",
                "Judge a step",
                {"200": ("The decision as it was applied.", (views.Judged,))},
                takes=wire.SafetyForm,
            ),
            "parameters": step,
        },
        f"{STEP}/events": {
            "get": _operation("step_events", "A step's events again", {"200": ("A page.", (views.EventPage,))}),
            "parameters": [
                *step,
                _asked("after", CURSOR, "The last sequence that was read"),
                _asked("limit", {"type": "integer", "minimum": 1, "maximum": MOST, "default": USUAL}, "How many"),
            ],
        },
        **_followed(step),
    }


def refine(schemas: dict[str, Any]) -> None:
    """What the types alone do not say."""
    step, subagent, push = (schemas[name]["properties"] for name in ("StepForm", "SubagentForm", "PushForm"))
    step["plan_step_id"] = subagent["key"] = ID
    step["expected_subagents"] |= {"minItems": 1, "maxItems": wire.SUBAGENTS}
    step["next_step_id"] = subagent["result_key"] = push["result_key"] = _or_null(ID)
    subagent["deadline_ms"] = _or_null({"type": "integer", "minimum": 1, "maximum": wire.DEADLINE_MS})
    url = {"type": "string", "pattern": "^https?://[!-~]+$", "maxLength": wire.LONGEST_URL}
    step["callback_url"] = subagent["url"] = _or_null(url)
    push["status"] = {"enum": [*wire.STATUSES, "completed"]}
    push["type"] = {"const": wire.RESULT, "default": wire.RESULT}
    push["revision"] = _or_null({"type": "integer", "minimum": 1, "maximum": wire.REVISIONS})
    push["attempt"] = {"type": "integer", "minimum": 1, "maximum": wire.ATTEMPTS, "default": 1}
    progress = schemas["ProgressForm"]["properties"]
    progress["next_step_id"] = progress["stage"] = progress["status"] = _or_null(ID)
    schemas["PlannerFrame"] = {
        "description": "The data of a stream's events, under their names.",
        "type": "object",
        "properties": {
            "planner_stream": _ref(views.EventBatch),
            "heartbeat": _ref(views.Heartbeat),
            "reset": _ref(views.ResetView),
        },
    }
    telemetry = schemas["TelemetryForm"]["properties"]
    telemetry["trace_id"] = _or_null({"type": "string", "pattern": "^[0-9a-fA-F]{32}$"})
    telemetry["span_id"] = _or_null({"type": "string", "pattern": "^[0-9a-fA-F]{16}$"})


def _push() -> dict[str, Any]:
    described = _operation(
        "push_events",
        "A subagent's results, or parts of them",
        _taken(views.PushReceiptView, views.TakenList),
        takes=wire.PushForm,
    )
    listed = {"type": "array", "items": _ref(wire.PushForm), "minItems": 1, "maxItems": wire.PUSHES}
    described["requestBody"]["content"] = _json({"anyOf": [_ref(wire.PushForm), listed]})
    return described


def _taken(*forms: type[msgspec.Struct]) -> dict[str, tuple[str, Forms]]:
    return {"202": ("It is in the stream.", forms), "200": ("It was ignored; `reason` says why.", forms)}


def _followed(step: list[dict[str, Any]]) -> dict[str, Any]:
    stream = _operation("follow_step", "Follow a step", {})
    events = {"text/event-stream": {"schema": {"$ref": "#/components/schemas/PlannerFrame"}}}
    stream["responses"] |= {
        "200": {"description": f"{STREAM} {SOCKET}", "content": events},
        "204": {"description": "The step has ended, and nothing comes behind this cursor any more."},
    }
    last_seen = {"name": "Last-Event-ID", "in": "header", "schema": CURSOR, "description": "The last `id` that came"}
    again = _asked("last_event_id", CURSOR, "The same, for those who cannot send headers")
    return {f"{STEP}/stream": {"get": stream, "parameters": [*step, last_seen, again]}}


def _operation(
    name: str,
    summary: str,
    gives: dict[str, tuple[str, Forms]],
    *,
    takes: type[msgspec.Struct] | None = None,
    errors: tuple[int, ...] = (),
) -> dict[str, Any]:
    statuses = sorted({*ALWAYS, *errors, *(SENT if takes is not None else ())})
    described: dict[str, Any] = {
        "operationId": name,
        "summary": summary,
        "security": [{}, {"bearer": []}],
        "responses": {
            **{
                status: {"description": said, "content": _json(_one_of(forms))}
                for status, (said, forms) in gives.items()
            },
            **{str(status): {"description": SAID[status], "content": _json(_ref(ErrorBody))} for status in statuses},
        },
    }
    if takes is not None:
        described["requestBody"] = {"required": True, "content": _json(_ref(takes))}
    return described


def _one_of(forms: Forms) -> dict[str, Any]:
    return _ref(forms[0]) if len(forms) == 1 else {"anyOf": [_ref(form) for form in forms]}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}], "default": None}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": ID}


def _asked(name: str, schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": schema, "description": description}


def _ref(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}
