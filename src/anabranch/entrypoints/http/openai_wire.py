"""OpenAI's wire format: requests, responses, the events of streams, and errors."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.types import Scope

from anabranch.domain.errors import AnabranchError, NotFound, Unauthorized
from anabranch.domain.model import MaxTokens, Temperature, Usage, Value
from anabranch.entrypoints.http.errors import DESCRIPTIONS, Dialect, InvalidField, NoSuchAddress
from anabranch.entrypoints.http.query_wire import QueryDone, SourceView

MAX_MESSAGES = 1_000
MAX_PARTS = 100
MAX_CONTENT = 100_000
MAX_STOPS = 4
MAX_STOP = 200
MAX_INPUTS = 2_048

ModelId = Annotated[
    str,
    Meta(min_length=1, max_length=500, description="What to ask: an id of `GET /v1/models`"),
]
# What is not read is not decoded, either: a large value would take long.
NOTHING = msgspec.Raw(b"null")
Content = Annotated[str, Meta(max_length=MAX_CONTENT)]
Kind = Annotated[str, Meta(max_length=100)]


class OpenAIError(Value):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIProblem(Value):
    """An error as OpenAI's clients read it."""

    error: OpenAIError


class RefusedParameter(InvalidField):
    """A request that cannot be answered as it asks."""

    def __init__(self, message: str, param: str, code: str | None = None) -> None:
        super().__init__(message, param)
        self.openai_code = code


class ModelNotFound(NotFound):
    def __init__(self, name: str, why: str = "") -> None:
        shown = name if len(name) <= 100 else f"{name[:99]}…"
        why = why or f"There is no model {shown!r}, or not for you"
        super().__init__(f"{why}; GET /v1/models lists those that you may use.")


# The status, the type and the code for each of our codes; every other error is a failed dependency.
ERRORS: Mapping[str, tuple[int, str, str | None]] = {
    "invalid_request": (400, "invalid_request_error", None),
    "unauthorized": (401, "invalid_request_error", "invalid_api_key"),
    "forbidden": (403, "invalid_request_error", "forbidden"),
    "not_found": (404, "invalid_request_error", "not_found"),
    "method_not_allowed": (405, "invalid_request_error", "method_not_allowed"),
    "conflict": (409, "invalid_request_error", "conflict"),
    "request_timeout": (408, "invalid_request_error", "request_timeout"),
    "request_too_large": (413, "invalid_request_error", "request_too_large"),
    "rate_limited": (429, "rate_limit_error", "rate_limit_exceeded"),
    "cancelled": (499, "server_error", "cancelled"),
    "internal_error": (500, "server_error", "internal_error"),
}


# What OpenAI's clients call: addresses of ours with something behind them, others that there are not here, and all of
# them without the /v1 that a base URL lacks.
PREFIXES = (
    *("chat/", "completions", "responses/", "embeddings/", "models/", "files", "images", "audio", "moderations"),
    *("batches", "assistants", "threads", "conversations", "vector_stores", "fine_tuning"),
)
BARE = ("/chat/completions", "/completions", "/responses", "/embeddings", "/models")


def problem(code: str, message: str) -> tuple[int, OpenAIProblem]:
    status, kind, name = ERRORS.get(code, (503, "server_error", code))
    return status, OpenAIProblem(error=OpenAIError(message=message, type=kind, param=None, code=name))


def _said(error: AnabranchError, scope: Scope) -> str:
    if isinstance(error, NoSuchAddress):
        path = scope["path"]
        if path.startswith(BARE):
            return f"{error.message} OpenAI's API is under /v1: let the base URL end with it."
        return f"{error.message} Questions go to /v1/chat/completions or /v1/responses."
    if isinstance(error, Unauthorized) and any(name == b"authorization" for name, _ in scope["headers"]):
        # Some clients, as litellm, know a wrong key by the beginning of OpenAI's message.
        return f"Incorrect API key provided. {error.message}"
    return error.message


def _render(error: AnabranchError, scope: Scope) -> tuple[int, bytes]:
    status, body = problem(error.code, _said(error, scope))
    if isinstance(error, InvalidField):
        code = error.openai_code if isinstance(error, RefusedParameter) else None
        body = OpenAIProblem(error=msgspec.structs.replace(body.error, param=error.field, code=code))
    elif isinstance(error, ModelNotFound):
        body = OpenAIProblem(error=msgspec.structs.replace(body.error, param="model", code="model_not_found"))
    return status, msgspec.json.encode(body)


DIALECT = Dialect(
    render=_render,
    error_type=OpenAIProblem,
    descriptions={
        **DESCRIPTIONS,
        400: f"`invalid_request_error`: {DESCRIPTIONS[422]}",
        401: f"`invalid_api_key`: {DESCRIPTIONS[401]}",
        404: "`model_not_found`: there is no such model, or not for this caller.",
    },
    always=(400, 401, 404, 429, 500, 503),
    separate_comments=False,
    prefixes=(*(f"/v1/{one}" for one in PREFIXES), *BARE),
)


class OpenAIModelView(Value):
    """Something that can be asked, or the model for embeddings."""

    id: str
    created: int = 0
    object: Literal["model"] = "model"
    owned_by: str = "anabranch"


class ModelList(Value):
    data: list[OpenAIModelView]
    object: Literal["list"] = "list"


class ContentPart(Value):
    """A part of a message; only text is read."""

    type: Kind
    text: Content | None = None


Parts = Annotated[list[ContentPart], Meta(max_length=MAX_PARTS)]


class CompletionMessage(Value):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | Parts | None = None


class StreamOptions(Value):
    include_usage: bool | None = None


class OutputFormat(Value):
    type: Kind


class WantedTool(Value):
    """Which tool to call; only `allowed_tools` can be ignored."""

    type: Kind | None = None
    mode: Kind | None = None


Stops = Annotated[str, Meta(min_length=1, max_length=MAX_STOP)]


class CompletionRequest(Value):
    """The last message of the user is the question, those before it are the conversation. Other fields of OpenAI's are
    taken and have no effect, unless the answer would not be what they ask for."""

    model: ModelId
    messages: Annotated[list[CompletionMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = None
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    stop: Stops | Annotated[list[Stops], Meta(max_length=MAX_STOPS)] | None = None
    n: int | None = None
    logprobs: bool | None = None
    modalities: Annotated[list[Kind], Meta(max_length=10)] | None = None
    response_format: OutputFormat | None = None
    tool_choice: Kind | WantedTool | None = None
    function_call: Kind | WantedTool | None = None


class UrlCitation(Value):
    """A citation: the place of its mark in the answer, and the document."""

    start_index: int
    end_index: int
    title: str
    url: str


class CompletionAnnotation(Value):
    url_citation: UrlCitation
    type: Literal["url_citation"] = "url_citation"


class AnswerDetails(QueryDone, kw_only=True):
    """What OpenAI's form has no place for, as in /v1/query: sources, citations, checked sentences, and more."""

    sources: list[SourceView]


class AssistantMessage(Value):
    content: str
    annotations: list[CompletionAnnotation]
    role: Literal["assistant"] = "assistant"
    refusal: None = None


FinishReason = Literal["stop", "length", "content_filter"]


class CompletionChoice(Value):
    message: AssistantMessage
    finish_reason: FinishReason
    index: int = 0
    logprobs: None = None


class ChatCompletion(Value):
    id: str
    created: int
    model: str
    choices: tuple[CompletionChoice, ...]
    usage: Usage
    anabranch: AnswerDetails
    object: Literal["chat.completion"] = "chat.completion"


class CompletionDelta(Value, omit_defaults=True):
    role: str = ""
    content: str | UnsetType = UNSET
    annotations: list[CompletionAnnotation] | UnsetType = UNSET


class ChunkChoice(Value):
    delta: CompletionDelta
    finish_reason: FinishReason | None = None
    index: int = 0
    logprobs: None = None


class ChatCompletionChunk(Value):
    id: str
    created: int
    model: str
    choices: tuple[ChunkChoice, ...]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET
    anabranch: AnswerDetails | UnsetType = UNSET


class EmbeddingRequest(Value):
    """Texts to embed; arrays of tokens are refused."""

    model: ModelId
    input: Annotated[str, Meta(min_length=1)] | Annotated[list[msgspec.Raw], Meta(min_length=1, max_length=MAX_INPUTS)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


class EmbeddingView(Value):
    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(Value):
    """An estimate."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Value):
    data: list[EmbeddingView]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class InputItem(Value):
    """A message of the conversation, or with `item_reference` the id of an earlier one."""

    type: Kind | None = None
    id: Annotated[str, Meta(max_length=200)] | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content | Parts | None = None


class TextOptions(Value):
    format: OutputFormat | None = None


class ResponseRequest(Value):
    """As CompletionRequest, in the form of /v1/responses. `previous_response_id` continues a conversation."""

    model: ModelId
    input: Content | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: Content | None = None
    max_output_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    stream: bool | None = None
    store: bool | None = None
    previous_response_id: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    text: TextOptions | None = None
    tool_choice: Kind | WantedTool | None = None
    background: bool | None = None
    conversation: msgspec.Raw = msgspec.field(default_factory=lambda: NOTHING)
    prompt: msgspec.Raw = msgspec.field(default_factory=lambda: NOTHING)
    metadata: Annotated[dict[str, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)] | None = None


class ResponseAnnotation(UrlCitation, kw_only=True):
    type: Literal["url_citation"] = "url_citation"


class OutputText(Value):
    text: str = ""
    annotations: list[ResponseAnnotation] = []
    type: Literal["output_text"] = "output_text"
    logprobs: list[Any] = []


ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputMessage(Value):
    id: str
    status: ResponseStatus
    content: tuple[OutputText, ...]
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class CachedTokens(Value):
    cached_tokens: int = 0
    cache_write_tokens: int = 0


class ReasoningTokens(Value):
    reasoning_tokens: int = 0


class ResponseUsage(Value):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: CachedTokens = CachedTokens()
    output_tokens_details: ReasoningTokens = ReasoningTokens()


class IncompleteDetails(Value):
    reason: Literal["max_output_tokens", "content_filter"]


class ResponseFailure(Value):
    code: str
    message: str


class ResponseText(Value):
    format: OutputFormat = OutputFormat(type="text")


class ResponseView(Value):
    """A response, whole or in progress."""

    id: str
    created_at: int
    model: str
    status: ResponseStatus
    output: tuple[OutputMessage, ...] = ()
    usage: ResponseUsage | None = None
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    metadata: dict[str, str] = {}
    object: Literal["response"] = "response"
    parallel_tool_calls: bool = False
    tool_choice: Literal["none"] = "none"
    tools: list[Any] = []
    text: ResponseText = ResponseText()
    truncation: Literal["disabled"] = "disabled"
    store: bool = True
    anabranch: AnswerDetails | UnsetType = UNSET


class ResponseEvent(Value):
    type: str
    sequence_number: int


class ResponseChanged(ResponseEvent, kw_only=True):
    response: ResponseView


class OutputItemEvent(ResponseEvent, kw_only=True):
    item: OutputMessage
    output_index: int = 0


class ContentPartEvent(ResponseEvent, kw_only=True):
    item_id: str
    part: OutputText
    output_index: int = 0
    content_index: int = 0


class OutputTextDelta(ResponseEvent, kw_only=True):
    item_id: str
    delta: str
    output_index: int = 0
    content_index: int = 0
    logprobs: list[Any] = []


class OutputTextDone(ResponseEvent, kw_only=True):
    item_id: str
    text: str
    output_index: int = 0
    content_index: int = 0
    logprobs: list[Any] = []


class AnnotationAdded(ResponseEvent, kw_only=True):
    item_id: str
    annotation: ResponseAnnotation
    annotation_index: int
    output_index: int = 0
    content_index: int = 0


class ResponseErrorEvent(ResponseEvent, kw_only=True):
    code: str | None
    message: str
    param: str | None = None
