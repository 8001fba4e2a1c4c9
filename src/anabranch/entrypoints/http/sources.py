"""Everything that a question can go to, under /v1/sources: listed with its health, added, tested and removed."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from msgspec import Meta

from anabranch.app.anabranch import Anabranch
from anabranch.app.source_check import SourceCheckResult
from anabranch.app.source_listing import ListedSource, Viewer
from anabranch.configuration.added_sources import FILE, ONLY_URLS, AddedBlocks, AddedSources, Block, checked
from anabranch.domain.errors import ConfigurationError, InvalidQuestion, NotFound
from anabranch.domain.model import Value
from anabranch.entrypoints.http.access import Access, is_signed_in_operator
from anabranch.entrypoints.http.operations import Call, Operation, is_deeper
from anabranch.entrypoints.http.v1_operations import operation
from anabranch.telemetry.endpoint_history import MINUTES, EndpointHistory

MAX_DEPTH = 20
MAX_REQUEST_BYTES = 64 * 1024
# A browser takes . and .. in an address for folders.
NAME = r"^(?!\.{1,2}$)[A-Za-z0-9_.-]{1,64}$"

Name = Annotated[str, Meta(pattern=NAME, description="1 to 64 letters, digits, _ . or -")]
Url = Annotated[str, Meta(min_length=1, max_length=4_096, description="A URL that begins with http:// or https://")]
Short = Annotated[str, Meta(min_length=1, max_length=500)]
Secret = Annotated[str, Meta(min_length=1, max_length=10_000, description="It is stored and never returned")]
TestQuestion = Annotated[str, Meta(min_length=1, max_length=1_000, description="What is asked")]


class NewSource(Value, forbid_unknown_fields=True):
    """A source to add. A `space` has a `slug`; a `model` has one, too: its name on its server, and `model_kind`. An
    `mcp` server has `headers`, or a `token` for `Authorization: Bearer`, and the fields of mcpServers in
    anabranch.yaml; what is left out is detected."""

    name: Name
    kind: Literal["space", "mcp", "model"]
    url: Url | None = None
    slug: Short | None = None
    owner: Short | None = None
    tenant: Short | None = None
    token: Secret | None = None
    model_kind: Literal["openai", "space"] | None = None
    headers: Annotated[dict[Short, Secret], Meta(max_length=50)] | None = None
    tool: Short | None = None
    query_argument: Short | None = None
    arguments: Annotated[dict[str, Any], Meta(max_length=100)] | None = None
    result_path: Short | None = None
    description: Annotated[str, Meta(max_length=1_000)] | None = None
    command: Annotated[Any, Meta(description="Refused: a command comes only from anabranch.yaml")] = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


class SourceToTest(NewSource):
    """A source to test before it is added: the fields are the same."""

    question: TestQuestion | None = None


class QuestionToTest(Value, forbid_unknown_fields=True):
    question: TestQuestion | None = None


class SourceList(Value):
    """What this caller's questions can go to. `can_change`: the request came with an operator's API key. `per_process`:
    there are several workers, and each has its own history and health. `note` says what is wrong with the sources that
    were added, if something is."""

    sources: list[ListedSource]
    can_change: bool
    per_process: bool
    window_minutes: int
    note: str | None


class SourceDeleted(Value):
    name: str
    deleted: bool


# Which fields go with which kind, and their names in anabranch.yaml.
OF_ENDPOINTS = {name: name for name in ("url", "slug", "owner", "tenant", "token")}
FIELDS = {
    "space": OF_ENDPOINTS,
    "model": {**OF_ENDPOINTS, "model_kind": "kind"},
    "mcp": {
        **{name: name for name in ("url", "headers", "tool", "arguments", "description")},
        "query_argument": "queryArgument",
        "result_path": "resultPath",
    },
}
BLOCKS: dict[str, Block] = {"space": "sources", "model": "models", "mcp": "mcpServers"}


@dataclass(frozen=True)
class SourcesSurface:
    """Callers see what they may use; an operator with an API key changes it."""

    anabranch: Anabranch
    access: Access
    history: EndpointHistory

    def operations(self) -> list[Operation[Any]]:
        identify, path = self.access.signed_in_operator, "/v1/sources"
        at = partial(operation, scope="admin", identify=identify, max_request_bytes=MAX_REQUEST_BYTES)
        return [
            at(
                *("GET", path, "list_sources", "List sources and models with their health", self._list, SourceList),
                scope="read",
                identify=self.access.caller,
            ),
            at(
                *("POST", path, "add_source", "Add a source, an MCP server or a model", self._add, ListedSource),
                request_type=NewSource,
                statuses={201: "The source that was added."},
                errors=(403, 409),
            ),
            at(
                *("POST", f"{path}/test", "test_source", "Test a source before it is added"),
                *(self._test, SourceCheckResult),
                request_type=SourceToTest,
                errors=(403,),
            ),
            at(
                *("POST", f"{path}/{{name}}/test", "test_named_source", "Test a source"),
                *(self._test_named, SourceCheckResult),
                request_type=QuestionToTest,
                errors=(403,),
            ),
            at(
                *("DELETE", f"{path}/{{name}}", "delete_source", "Remove a source that was added here"),
                *(self._delete, SourceDeleted),
                errors=(403, 409),
            ),
        ]

    async def _list(self, call: Call[None]) -> SourceList:
        operator = call.caller.operator
        return SourceList(
            sources=await self._listed(call),
            can_change=is_signed_in_operator(call.caller),
            per_process=self.anabranch.settings.workers > 1,
            window_minutes=MINUTES,
            note=self.anabranch.catalog.note if operator else None,
        )

    async def _listed(self, call: Call[Any]) -> list[ListedSource]:
        viewer = Viewer(caller=call.caller, grants=self.access.grants(call.scope, call.caller))
        return await self.anabranch.listing.sources(viewer, self.history)

    async def _add(self, call: Call[NewSource]) -> ListedSource:
        request, catalog = call.request, self.anabranch.catalog
        block, entry = BLOCKS[request.kind], _entry(request)
        _checked(block, request.name, entry)
        await catalog.add(block, request.name, entry)
        return next(one for one in await self._listed(call) if one.name == request.name and one.configured == "page")

    async def _test(self, call: Call[SourceToTest]) -> SourceCheckResult:
        request, test = call.request, self.anabranch.source_check
        found = _checked(BLOCKS[request.kind], request.name, _entry(request))
        match request.kind:
            case "space":
                return await test.source(found.sources[request.name], request.question)
            case "model":
                return await test.model(found.models[request.name], request.question)
            case "mcp":
                return await test.server(found.servers[request.name], request.question)

    async def _test_named(self, call: Call[QuestionToTest]) -> SourceCheckResult:
        name, question = call.params["name"], call.request.question
        anabranch, test = self.anabranch, self.anabranch.source_check
        if name in anabranch.catalog.sources:
            return await test.source(anabranch.catalog.sources[name], question)
        if name in anabranch.catalog.models:
            return await test.model(anabranch.catalog.models[name], question)
        if name in anabranch.catalog.servers:
            return await test.server(anabranch.catalog.servers[name], question)
        raise NotFound(f"There is no configured source {name!r} that can be tested.")

    async def _delete(self, call: Call[None]) -> SourceDeleted:
        await self.anabranch.catalog.remove(call.params["name"])
        return SourceDeleted(name=call.params["name"], deleted=True)


def _entry(request: NewSource) -> dict[str, Any]:
    """The entry as anabranch.yaml would have it."""
    if request.command is not None:
        raise InvalidQuestion(f"{ONLY_URLS[0].upper()}{ONLY_URLS[1:]}.")
    names = FIELDS[request.kind]
    token = request.token if request.kind == "mcp" else None
    given = {name: getattr(request, name) for name in NewSource.__struct_fields__ if name not in ("name", "kind")}
    for name, value in given.items():
        if value is not None and name not in names and not (name == "token" and token):
            raise InvalidQuestion(f"{name} does not go with the kind {request.kind}.")
    if request.arguments is not None and is_deeper(request.arguments, MAX_DEPTH):
        raise InvalidQuestion(f"arguments are nested more than {MAX_DEPTH} deep.")
    entry = {names[name]: value for name, value in given.items() if value is not None and name in names}
    if request.kind == "model":
        entry.setdefault("kind", "openai")
    if token is not None:
        headers = entry.setdefault("headers", {})
        if any(name.lower() == "authorization" for name in headers):
            raise InvalidQuestion("Send either token or the header Authorization, not both.")
        entry["headers"] = {**headers, "Authorization": f"Bearer {token}"}
    return entry


def _checked(block: Block, name: str, entry: dict[str, Any]) -> AddedSources:
    """The entry by anabranch.yaml's rules, or InvalidQuestion."""
    try:
        return checked(AddedBlocks().adding(block, name, entry))
    except ConfigurationError as error:
        raise InvalidQuestion(error.message.removeprefix(f"{FILE}: ")) from None
