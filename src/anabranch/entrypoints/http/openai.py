"""OpenAI's API: chat completions, responses, models and embeddings, from the same Runs as every other surface."""

import asyncio
import base64
import time
from array import array
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import msgspec

from anabranch.app.questions import Options
from anabranch.domain.errors import DeadlineExceeded, NotFound
from anabranch.domain.model import MAX_QUERY, Context, Embedding, Message
from anabranch.entrypoints.http.errors import rate_headers
from anabranch.entrypoints.http.openai_answers import (
    MESSAGE_ID,
    RESPONSE_ID,
    CompletionRenderer,
    OpenAIAnswer,
    ResponseRenderer,
)
from anabranch.entrypoints.http.openai_models import ModelCatalog
from anabranch.entrypoints.http.openai_wire import (
    DIALECT,
    NOTHING,
    AnnotationAdded,
    ChatCompletion,
    ChatCompletionChunk,
    CompletionRequest,
    ContentPart,
    ContentPartEvent,
    EmbeddingList,
    EmbeddingRequest,
    EmbeddingUsage,
    EmbeddingView,
    InputItem,
    ModelList,
    ModelNotFound,
    OpenAIModelView,
    OpenAIProblem,
    OutputItemEvent,
    OutputTextDelta,
    OutputTextDone,
    RefusedParameter,
    ResponseChanged,
    ResponseErrorEvent,
    ResponseRequest,
    ResponseView,
    WantedTool,
)
from anabranch.entrypoints.http.operations import Call, EventStream, Operation, Reply, while_connected
from anabranch.entrypoints.http.query import (
    NO_EARLIER_TURNS,
    EarlierTurns,
    QueryRenderer,
    earlier_turns,
    search_scope,
    wants_fresh,
    whole_or_failed,
)
from anabranch.entrypoints.http.streams import AnswerSurface
from anabranch.knowledge.records.logged_queries import LoggedAnswer, Turn
from anabranch.knowledge.records.queries import FoundAt, asker
from anabranch.pipeline.prompt import estimated_tokens
from anabranch.pipeline.run import Run

# Earlier messages that are read; those before them are left out.
MAX_HISTORY = 50
# Characters of all texts of a request for embeddings.
MAX_EMBEDDED = 1_000_000
EMBEDDED_AT_ONCE = 32
TEXT_PARTS = ("text", "input_text", "output_text")
# Parts of earlier answers that have nothing to read.
SILENT_PARTS = ("refusal", "summary_text", "reasoning_text")
# An item that names an earlier answer by its id.
REFERENCE = "item_reference"
# Items of a conversation that are not read: none of their tools are called here.
SILENT_ITEMS = ("reasoning", "_call", "_call_output")
COMPLETION_STREAM = EventStream(
    "ChatCompletionEvent",
    "With `stream`: server-sent events without a name, each a chunk as JSON: first the role, then the text in parts. "
    "The last chunk with a choice has its `finish_reason`, the `annotations` and `anabranch`; with "
    "`stream_options.include_usage` one more has the `usage`. The end is `[DONE]`; on any failure, an error comes "
    "before it. A comment line may come at any time.",
    (ChatCompletionChunk, OpenAIProblem),
)
RESPONSE_STREAM = EventStream(
    "ResponseStreamEvent",
    "With `stream`: server-sent events, each with its name and one `data:` line of JSON, in the order of OpenAI's API. "
    "The last is `response.completed`, `response.incomplete` or `response.failed`; `error` comes only at the end of an "
    "answer that is resumed and whose server has stopped. A comment line may come at any time.",
    {
        **dict.fromkeys(
            [f"response.{name}" for name in ("created", "in_progress", "completed", "incomplete", "failed")],
            ResponseChanged,
        ),
        **dict.fromkeys(("response.output_item.added", "response.output_item.done"), OutputItemEvent),
        **dict.fromkeys(("response.content_part.added", "response.content_part.done"), ContentPartEvent),
        "response.output_text.delta": OutputTextDelta,
        "response.output_text.annotation.added": AnnotationAdded,
        "response.output_text.done": OutputTextDone,
        "error": ResponseErrorEvent,
    },
)


class Conversation(NamedTuple):
    """What a request says: the question, the turns before it, and the system prompt."""

    question: str
    history: tuple[Message, ...]
    system: str

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.system, *(turn.content for turn in self.history), self.question)


class Asked(NamedTuple):
    """A question that has begun, and what its renderer needs."""

    run: Run
    context: Context
    answer: OpenAIAnswer


class OpenAISurface(AnswerSurface):
    """Answers clients of OpenAI's API."""

    @cached_property
    def _catalog(self) -> ModelCatalog:
        return ModelCatalog(self.anabranch, self.access)

    def operations(self) -> list[Operation[Any]]:
        at = partial(Operation[Any], dialect=DIALECT, scope="ask", identify=self.access.caller, surface="openai")
        answer = partial(at, resumable=True, admission=True)
        return [
            answer(
                *("POST", "/v1/chat/completions", "openai_chat", "Ask, as OpenAI's chat completions", self._chat),
                request_type=CompletionRequest,
                response_types=(ChatCompletion,),
                stream=COMPLETION_STREAM,
            ),
            answer(
                *("POST", "/v1/responses", "openai_response", "Ask, as OpenAI's responses", self._respond),
                request_type=ResponseRequest,
                response_types=(ResponseView,),
                stream=RESPONSE_STREAM,
            ),
            at(
                *("POST", "/v1/embeddings", "openai_embeddings", "Embed texts", self._embed),
                request_type=EmbeddingRequest,
                response_types=(EmbeddingList,),
                admission=True,
            ),
            at(
                *("GET", "/v1/models", "openai_models", "List what can be asked", self._models),
                response_types=(ModelList,),
            ),
            at(
                *("GET", "/v1/models/{model}", "openai_model", "One of these models", self._model),
                response_types=(OpenAIModelView,),
            ),
        ]

    async def _models(self, call: Call[None]) -> ModelList:
        return ModelList(data=await self._catalog.listed(call))

    async def _model(self, call: Call[None]) -> OpenAIModelView:
        return await self._catalog.find(call, call.params["model"])

    async def _chat(self, call: Call[CompletionRequest]) -> Reply | None:
        request = call.request
        _check_completion(request)
        said = [(one.role, _content(one.content, f"messages[{at}]")) for at, one in enumerate(request.messages)]
        stop = request.stop or ()
        options = Options(
            max_tokens=request.max_completion_tokens or request.max_tokens,
            temperature=request.temperature,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            fresh=wants_fresh(call),
        )
        streaming = bool(request.stream)
        asked = await self._begin(call, _conversation(said, "messages"), request.model, options, streaming=streaming)
        wanted = request.stream_options is not None and bool(request.stream_options.include_usage)
        renderer = CompletionRenderer(request.model, asked.answer, include_usage=wanted)
        return await self._answer(call, asked, renderer, "completion", streaming=streaming)

    async def _respond(self, call: Call[ResponseRequest]) -> Reply | None:
        request = call.request
        _check_response(request)
        said, passages = await self._said(call)
        conversation = _conversation([("system", request.instructions or ""), *said], "input")
        earlier = NO_EARLIER_TURNS
        if request.previous_response_id is not None:
            earlier = await self._earlier(call, request.previous_response_id)
            conversation = conversation._replace(history=(*earlier.messages, *conversation.history)[-MAX_HISTORY:])
        earlier = msgspec.structs.replace(earlier, passages=earlier.passages | passages)
        options = Options(
            max_tokens=request.max_output_tokens, temperature=request.temperature, fresh=wants_fresh(call)
        )
        streaming = bool(request.stream)
        asked = await self._begin(call, conversation, request.model, options, earlier, streaming=streaming)
        begun = ResponseView(
            id=RESPONSE_ID + asked.answer.query.query_id,
            created_at=int(time.time()),
            model=request.model,
            status="in_progress",
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            previous_response_id=request.previous_response_id,
            temperature=request.temperature,
            metadata=request.metadata or {},
            store=request.store is not False,
        )
        renderer = ResponseRenderer(begun, asked.answer)
        return await self._answer(call, asked, renderer, "response", streaming=streaming)

    async def _answer(
        self,
        call: Call[Any],
        asked: Asked,
        renderer: CompletionRenderer | ResponseRenderer,
        dialect: str,
        *,
        streaming: bool,
    ) -> Reply | None:
        if streaming:
            await self.streams.send(call, asked.run, renderer.frame, asked.context, dialect=dialect)
            return None
        return Reply(renderer.response(await whole_or_failed(asked.run, call)))

    async def _begin(
        self,
        call: Call[Any],
        conversation: Conversation,
        model: str,
        options: Options,
        earlier: EarlierTurns = NO_EARLIER_TURNS,
        *,
        streaming: bool,
    ) -> Asked:
        """Starts the Run. `earlier` are the turns of the conversation that the question continues."""
        anabranch = self.anabranch
        target = await self._catalog.asked(call, model, conversation.question)
        search, entry = await search_scope(anabranch, self.access, call, target.question, earlier)
        options = msgspec.structs.replace(options, system_prompt=conversation.system or None)
        question = anabranch.questions.completion(
            conversation.question, search, conversation.history, options, target.writer
        )
        context = self.access.context(call, streaming=streaming)
        query = QueryRenderer(
            query_id=entry.query_id,
            conversation_id=entry.conversation or "",
            model=(target.writer or anabranch.model).path,
            with_status=True,
        )
        answer = OpenAIAnswer(query, conversation.texts, self.access.origin(call.scope))
        run = call.attach(*await anabranch.begin(question, context, entry=entry))
        return Asked(run, context, answer)

    async def _said(self, call: Call[ResponseRequest]) -> tuple[list[tuple[str, str]], frozenset[FoundAt]]:
        """The messages of a request, by role, and the passages on which those rest that it names by their ids."""
        given = call.request.input
        if isinstance(given, str):
            return [("user", given)], frozenset()
        referenced = await self._referenced(call, given)
        said: list[tuple[str, str]] = []
        for at, one in enumerate(given):
            if one.type == REFERENCE:
                turn = referenced.get(at)
                said.append(("assistant", "" if turn is None else turn.answer))
            elif (one.type or "").endswith(SILENT_ITEMS):
                continue
            elif one.type not in (None, "message") or one.role is None:
                raise RefusedParameter(
                    f"input[{at}] is {one.type or 'an item without a role'!r}; only messages are read.", "input"
                )
            else:
                said.append((one.role, _content(one.content, f"input[{at}]")))
        return said, frozenset[FoundAt]().union(*(turn.passages for turn in referenced.values()))

    async def _referenced(self, call: Call[Any], given: Sequence[InputItem]) -> dict[int, Turn]:
        """Earlier answers that a request names by their ids, without those that are withheld, by their positions."""
        named = {at: (one.id or "").removeprefix(MESSAGE_ID) for at, one in enumerate(given) if one.type == REFERENCE}
        named = dict([*named.items()][-MAX_HISTORY:])
        if not named:
            return {}
        await self.anabranch.query_log.settled(call.caller)
        knowledge = await self.anabranch.knowledge.existing()
        found = {} if knowledge is None else await knowledge.turns_by_id(call.caller, [*named.values()])
        for at, identifier in named.items():
            if identifier not in found:
                raise RefusedParameter(
                    f"input[{at}] is the id of an answer that the query log does not have, or not any more. Send the "
                    "message itself instead (in the AI SDK: providerOptions.openai.store = false).",
                    "input",
                )
        return {at: turn for at, identifier in named.items() if (turn := found[identifier]) is not None}

    async def _logged(self, call: Call[Any], identifier: str) -> LoggedAnswer:
        """A question of the caller's own."""
        await self.anabranch.query_log.settled(call.caller)
        knowledge = await self.anabranch.knowledge.existing()
        if knowledge is None:
            raise NotFound("Nothing is stored.")
        found = await knowledge.logged_query(call.caller, identifier)
        if found.query.entry.user != (asker(call.caller) or None):
            raise NotFound("It was asked by another caller.")
        return found

    async def _earlier(self, call: Call[Any], response: str) -> EarlierTurns:
        """The turns of the conversation of a response of the caller's own, up to that one."""
        identifier = response.removeprefix(RESPONSE_ID)
        try:
            conversation = (await self._logged(call, identifier)).query.entry.conversation_id
            if conversation is None:
                raise NotFound("It belongs to no conversation.")
        except NotFound:
            raise RefusedParameter(
                "There is no previous response of that id that you may continue; the query log may not have it any "
                "more (AGGREGATOR_QUERY_LOG_DAYS). Send the conversation in `input`.",
                "previous_response_id",
                "previous_response_not_found",
            ) from None
        return await earlier_turns(self.anabranch, call.caller, conversation, identifier)

    async def _vectors(self, call: Call[Any], texts: Sequence[str]) -> list[Embedding]:
        """A few at a time, so that it ends soon after its client has left, and one request of a caller at a time: a
        large one must not take all threads from questions."""
        found: list[Embedding] = []
        await call.hold("embeddings")
        for begin in range(0, len(texts), EMBEDDED_AT_ONCE):
            found += await self.anabranch.knowledge.embedder.embed(texts[begin : begin + EMBEDDED_AT_ONCE])
        return found

    async def _embed(self, call: Call[EmbeddingRequest]) -> Reply:
        request, embedder = call.request, self.anabranch.knowledge.embedder
        if request.model != embedder.name:
            raise ModelNotFound(request.model, f"The model for embeddings is {embedder.name!r}")
        texts = _embedded(request.input)
        if request.dimensions is not None and request.dimensions != embedder.dimensions:
            raise RefusedParameter(
                f"dimensions is {request.dimensions}; the vectors of {embedder.name} have {embedder.dimensions}.",
                "dimensions",
            )
        async with self.anabranch.runs.admitted(self.access.context(call)) as allowance:
            call.headers = rate_headers(allowance)
            try:
                async with asyncio.timeout(self.anabranch.settings.total_timeout):
                    found = await while_connected(call, self._vectors(call, texts))
            except TimeoutError:
                raise DeadlineExceeded("The texts could not be embedded in time; send fewer of them.") from None
        tokens = sum(max(1, one) for one in await estimated_tokens(texts))
        base64_wanted = request.encoding_format == "base64"
        return Reply(await asyncio.to_thread(_embeddings, embedder.name, found, tokens, as_base64=base64_wanted))


def _embedded(given: str | list[msgspec.Raw]) -> list[str]:
    texts = [given] if isinstance(given, str) else [_text(one, at) for at, one in enumerate(given)]
    if (size := sum(map(len, texts))) > MAX_EMBEDDED:
        raise RefusedParameter(f"input has {size:,} characters; send at most {MAX_EMBEDDED:,} at once.", "input")
    return texts


def _text(given: msgspec.Raw, at: int) -> str:
    try:
        text = msgspec.json.decode(given, type=str)
    except msgspec.ValidationError:
        raise RefusedParameter(
            f"input[{at}] is not a text. Arrays of tokens are not taken: their tokenizer is another one. "
            "Send texts (in LangChain: check_embedding_ctx_length=False).",
            "input",
        ) from None
    if not text:
        raise RefusedParameter(f"input[{at}] is empty.", "input")
    return text


def _embeddings(model: str, found: Sequence[Embedding], tokens: int, *, as_base64: bool) -> bytes:
    """The response; a large one takes a moment to encode."""
    data = [
        EmbeddingView(
            index=index,
            embedding=base64.b64encode(one.vector).decode() if as_base64 else array("f", one.vector).tolist(),
        )
        for index, one in enumerate(found)
    ]
    usage = EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens)
    return msgspec.json.encode(EmbeddingList(data=data, model=model, usage=usage))


def _check_completion(request: CompletionRequest) -> None:
    """Refuses what would make the answer another one than the client expects."""
    if request.n not in (None, 1):
        raise RefusedParameter(f"n is {request.n}; there is one answer to a question: leave it out.", "n")
    if request.logprobs:
        raise RefusedParameter("logprobs are not available; leave it out.", "logprobs")
    if any(one != "text" for one in request.modalities or ()):
        raise RefusedParameter('modalities must be ["text"]: answers are texts.', "modalities")
    if request.response_format is not None and request.response_format.type != "text":
        raise _no_format("response_format")
    _check_tools(request.tool_choice, "tool_choice")
    _check_tools(request.function_call, "function_call")


def _check_response(request: ResponseRequest) -> None:
    if request.text is not None and request.text.format is not None and request.text.format.type != "text":
        raise _no_format("text.format")
    _check_tools(request.tool_choice, "tool_choice")
    if request.background:
        raise RefusedParameter("background is not available: stream the answer, or wait for it.", "background")
    if request.conversation != NOTHING:
        raise RefusedParameter(
            "Conversations are not stored under an id; send previous_response_id, or all messages in input.",
            "conversation",
        )
    if request.prompt != NOTHING:
        raise RefusedParameter("Prompt templates are not stored here; send input and instructions.", "prompt")


def _no_format(param: str) -> RefusedParameter:
    return RefusedParameter(
        "The answer is text with citations; it cannot be put into a JSON format. Leave it out; the field `anabranch` "
        "of the answer has its parts.",
        param,
    )


def _check_tools(choice: str | WantedTool | None, param: str) -> None:
    allowed = isinstance(choice, WantedTool) and choice.type == "allowed_tools" and choice.mode != "required"
    if choice not in (None, "none", "auto") and not allowed:
        raise RefusedParameter("Tools are not called here, so none can be required; leave it out.", param)


def _content(content: str | list[ContentPart] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for at, part in enumerate(content):
        if part.type in TEXT_PARTS:
            texts.append(part.text or "")
        elif part.type not in SILENT_PARTS:
            raise RefusedParameter(f"{where}.content[{at}] is {part.type!r}; only text is read.", where)
    return "\n".join(texts)


def _conversation(said: Sequence[tuple[str, str]], param: str) -> Conversation:
    """The last message of the user is the question. What tools have replied is not read: none are called here."""
    last = max((at for at, (role, _) in enumerate(said) if role == "user"), default=None)
    if last is None:
        raise RefusedParameter(f"{param} has no question of the user.", param)
    question = said[last][1]
    if not question.strip():
        raise RefusedParameter(f"The last message of the user in {param} has no text: it is the question.", param)
    if len(question) > MAX_QUERY:
        raise RefusedParameter(
            f"The question, the last message of the user, has {len(question):,} characters; the limit is "
            f"{MAX_QUERY:,}. Longer texts can be ingested as documents.",
            param,
            "string_above_max_length",
        )
    turns = [(role, text) for role, text in said[:last] if text.strip()]
    history = [_turn(role, text) for role, text in turns if role in ("user", "assistant")]
    system = "\n\n".join(text for role, text in said if role in ("system", "developer") and text.strip())
    return Conversation(question, tuple(history[-MAX_HISTORY:]), system)


def _turn(role: str, text: str) -> Message:
    return Message(role="user" if role == "user" else "assistant", content=text)
