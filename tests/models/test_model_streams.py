"""What a model's stream says when its events are odd: lone surrogates, NaN, plain text and broken JSON."""

from collections.abc import AsyncIterator, Callable, Sequence

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from anabranch.domain.errors import FailureKind, GenerationFailed
from anabranch.domain.model import Context, Delta, Endpoint, Prompt
from anabranch.models.remote import OpenAIModel
from anabranch.network.addresses import AddressGuard
from anabranch.network.outbound import AiohttpOutbound
from support.model_servers import MAX_REPLY_BYTES

PROMPT = Prompt(question="", messages=(), max_tokens=10, temperature=0, passages=(), version="")
CONTEXT = Context(correlation_id="c-1", deadline=0)


def chunk(content: str) -> str:
    """An event of OpenAI's; `content` is JSON text without its quotation marks."""
    return f'{{"id": "x", "object": "chat.completion.chunk", "choices": [{{"delta": {{"content": "{content}"}}}}]}}'


async def deltas(url: str) -> AsyncIterator[Delta]:
    outbound = AiohttpOutbound(guard=AddressGuard(), max_reply_bytes=MAX_REPLY_BYTES)
    try:
        async for delta in OpenAIModel(Endpoint(slug="m", url=url, operator=True), outbound).generate(PROMPT, CONTEXT):
            yield delta
    finally:
        await outbound.close()


async def text_of(events: Sequence[str]) -> str:
    """The text of a model whose stream has these events."""
    body = "".join(f"data: {event}\n\n" for event in (*events, "[DONE]"))
    async with serving(lambda: web.Response(text=body, content_type="text/event-stream")) as server:
        return "".join([delta.text async for delta in deltas(str(server.make_url("")))])


def serving(reply: Callable[[], web.Response]) -> TestServer:
    async def answer(_: web.Request) -> web.Response:
        return reply()

    app = web.Application()
    app.router.add_post("/{rest:.*}", answer)
    return TestServer(app)


@pytest.mark.parametrize(
    ("events", "text"),
    [
        ([chunk(r"Party \ud83c!")], "Party \ufffd!"),
        ([chunk(r"Party \ud83c\udf89!")], "Party \U0001f389!"),
        ([chunk(r"Party \ud83c"), chunk(r"\udf89!")], "Party \ufffd\ufffd!"),
        ([chunk(r"C:\\ud83c \ud83c")], "C:\\ud83c \ufffd"),
        ([r'"Party \ud83c!"'], "Party \ufffd!"),
        (['{"content": "Hi", "logprob": NaN}', '{"text": " you", "logprob": -Infinity}'], "Hi you"),
        (["Plain text.", " {x} and ", '{"a": ', "NaN", "[1"], 'Plain text. {x} and {"a": NaN[1'),
    ],
    ids=["lone", "pair", "split", "backslash", "string", "nan", "plain"],
)
async def test_a_stream_with_odd_events_is_read_as_text(events: Sequence[str], text: str) -> None:
    assert await text_of(events) == text


@pytest.mark.parametrize(
    "events",
    [
        ['{"id": "x", "object": "chat.completion.chunk", "choices": [{"delta'],
        [chunk("Refunds take "), '{"id": "x", "choices": [}'],
        ["", '{"id": "x", "choices": [}'],
        ['{"id": ' * 100_000],
    ],
    ids=["cut", "in the middle", "after an empty one", "deep"],
)
async def test_broken_json_in_a_stream_is_a_failure_and_not_the_answer(events: Sequence[str]) -> None:
    with pytest.raises(GenerationFailed, match="should be JSON, but it cannot be decoded") as failed:
        await text_of(events)
    assert failed.value.failure_kind == FailureKind.UNUSABLE


async def test_a_whole_reply_with_a_lone_surrogate_is_read() -> None:
    body = r'{"choices": [{"message": {"content": "Party \ud83c!"}, "finish_reason": "stop"}]}'
    async with serving(lambda: web.Response(text=body, content_type="application/json")) as server:
        assert [delta.text async for delta in deltas(str(server.make_url("")))] == ["Party \ufffd!"]
