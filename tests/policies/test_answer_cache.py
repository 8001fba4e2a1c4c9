"""The answer cache: what is cached, what concurrent questions share, and what neither."""

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from anabranch.domain.contracts import Emit
from anabranch.domain.errors import DeadlineExceeded, GenerationFailed
from anabranch.domain.events import (
    AnswerEvent,
    PromptComposed,
    RetrievalStarted,
    SentenceChecked,
    SourceReplied,
    Token,
    fold,
    unfold,
)
from anabranch.domain.model import (
    CHAT,
    DEFENDED_CHAT,
    RAG,
    Answer,
    CheckedSentence,
    Citation,
    Context,
    Endpoint,
    Filters,
    Ground,
    Message,
    Passage,
    Profile,
    Question,
    SourceReply,
    Status,
    SupportingQuote,
    Until,
    Usage,
)
from anabranch.domain.signals import AnswerShared, CacheLookup
from anabranch.policies.answer_cache import CachedAnswerer
from anabranch.testing import ManualClock, Recorder

MODEL = Endpoint(slug="writer", url="http://models.example", kind="openai", operator=True)
SHELF = Endpoint(slug="collections", kind="collection", operator=True)
QUESTION = Question(text="How long do refunds take?", sources=(SHELF,), model=MODEL, profile=RAG, refuse=True)
CONTEXT = Context(correlation_id="one", deadline=1e9, user_id="ada")


def quoting(passage: int, start: int, end: int) -> SupportingQuote:
    return SupportingQuote(passage=passage, start=start, end=end, support=0.9)


class Drawer:
    """A cache that keeps everything, or fails to."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.ttls: list[float] = []

    async def get(self, key: str) -> bytes | None:
        return self.kept.get(key)

    async def put(self, key: str, value: bytes, ttl_s: float) -> None:
        self.kept[key] = value
        self.ttls.append(ttl_s)


class Writer:
    """An Answerer that says how often it was asked, and can be held up in the middle of its answer."""

    def __init__(self, seen: str = "v1") -> None:
        self.asked = 0
        self.ended = 0
        self.seen = seen
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.change: Callable[[Answer], Answer] = lambda answer: answer

    async def answer(self, question: Question, context: Context, emit: Emit) -> Answer:
        self.asked += 1
        try:
            passage = Passage(source="shop", title="Handbook", text="Refunds take 30 days.", score=0.9)
            reply = SourceReply(path="collections", status=Status.SUCCESS, passages=(passage,), seen=self.seen)
            await emit(RetrievalStarted(sources=("collections",)))
            await emit(SourceReplied(index=0, reply=reply))
            await emit(Token(text="30 "))
            await self.go_on.wait()
            await emit(Token(text="days."))
            return self.change(
                Answer(
                    text="30 days.",
                    ground=Ground.DOCUMENTS,
                    replies=(reply,),
                    passages=(passage,),
                    usage=Usage(prompt_tokens=10, completion_tokens=2, total_tokens=12),
                    finish_reason="stop",
                    model="writer",
                )
            )
        finally:
            self.ended += 1


class Desk:
    """A CachedAnswerer with all it needs; `seen` is what each user may find."""

    def __init__(self) -> None:
        self.writer = Writer()
        self.cache = Drawer()
        self.telemetry = Recorder()
        self.clock = ManualClock()
        self.seen: dict[str | None, str | None] = {}
        self.cached_answerer = self.answerer()

    def answerer(self, *settings: str, withholds: bool = False) -> CachedAnswerer:
        return CachedAnswerer(
            self.writer,
            cache=self.cache,
            ttl_s=3600,
            look=self._look,
            settings=settings,
            clock=self.clock,
            telemetry=self.telemetry,
            withholds=withholds,
        )

    async def _look(self, question: Question, context: Context) -> str | None:
        return self.seen.get(context.user_id, "v1")

    async def ask(
        self,
        question: Question = QUESTION,
        user: str | None = "ada",
        deadline_s: float = 1e9,
        *,
        streaming: bool = False,
    ) -> tuple[Answer, list[AnswerEvent]]:
        events: list[AnswerEvent] = []

        async def emit(event: AnswerEvent) -> None:
            events.append(event)

        context = msgspec.structs.replace(CONTEXT, user_id=user, deadline=deadline_s, streaming=streaming)
        return await self.cached_answerer.answer(question, context, emit), events


@pytest.fixture
def desk() -> Desk:
    return Desk()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_cached_answer_has_the_same_events_and_text(desk: Desk) -> None:
    first, told = await desk.ask()
    again, told_again = await desk.ask()
    assert desk.writer.asked == 1
    assert (first.cached, again.cached) == (False, True)
    assert again.text == first.text
    assert again.replies == first.replies
    assert fold([*told_again, unfold(again)[-1]]) == again
    assert [type(event) for event in told if not isinstance(event, Token)] == [RetrievalStarted, SourceReplied]
    assert desk.telemetry.signals == [CacheLookup(cache="answer", hit=False), CacheLookup(cache="answer", hit=True)]
    assert desk.cache.ttls == [3600]


async def test_a_cached_answer_has_its_checked_sentences_again(desk: Desk) -> None:
    checked = CheckedSentence(start=0, end=8, verdict="supported", support=0.9, quotes=(quoting(0, 8, 20),))
    desk.writer.change = lambda answer: msgspec.structs.replace(answer, sentences=(checked,), faithfulness=1.0)
    question = msgspec.structs.replace(QUESTION, verify=True)
    first, _ = await desk.ask(question)
    again, told = await desk.ask(question)
    assert (again.cached, again.sentences, again.faithfulness) == (True, (checked,), 1.0)
    assert SentenceChecked(index=0, sentence=checked) in told
    assert PromptComposed(passages=first.passages) in told


async def test_an_answer_that_may_be_withheld_is_not_shared_with_streams(desk: Desk) -> None:
    question = msgspec.structs.replace(QUESTION, verify=True)
    desk.cached_answerer = desk.answerer(withholds=True)
    for streaming in (True, False, True, False):
        await desk.ask(question, streaming=streaming)
    assert desk.writer.asked == 2
    for streaming in (True, False):
        await desk.ask(streaming=streaming)
    assert desk.writer.asked == 3, "what is not verified is not withheld"
    desk.cached_answerer = desk.answerer()
    for streaming in (True, False):
        await desk.ask(question, streaming=streaming)
    assert desk.writer.asked == 4


async def test_the_answer_cache_key_is_as_documented(desk: Desk) -> None:
    await desk.ask()
    (key,) = desk.cache.kept
    kind, name, digest, version = key.split(":")
    assert (kind, name, version, len(digest)) == ("rag", "qa", "query-2", 40)


@pytest.mark.parametrize(
    "change",
    [
        {"text": "How long do returns take?"},
        {"history": (Message(role="user", content="Hello"),)},
        {"filters": Filters(collections=("shop",))},
        {"filters": Filters(metadata={"author": "Ada"})},
        {"top_k": 6},
        {"threshold": 0.5},
        {"diversity": 0.7},
        {"evidence": "rank"},
        {"verify": True},
        {"answer_policy": "strict"},
        {"language": "de"},
        {"answer_in": "de"},
        {"system_prompt": "Be brief."},
        {"max_tokens": 99},
        {"model": msgspec.structs.replace(MODEL, slug="other")},
        {"model": msgspec.structs.replace(MODEL, url="http://elsewhere.example")},
    ],
)
async def test_every_option_that_changes_the_answer_is_part_of_the_cache_key(
    desk: Desk, change: dict[str, object]
) -> None:
    await desk.ask()
    await desk.ask(msgspec.structs.replace(QUESTION, **change))
    assert desk.writer.asked == 2


async def test_white_space_and_unicode_normalization_do_not_change_the_cache_key(desk: Desk) -> None:
    await desk.ask(msgspec.structs.replace(QUESTION, text="Où est le café ?"))
    await desk.ask(msgspec.structs.replace(QUESTION, text="  Où   est\nle cafe\u0301 ? "))
    assert desk.writer.asked == 1


async def test_prompt_version_and_settings_are_part_of_the_cache_key(desk: Desk) -> None:
    await desk.ask()
    newer = msgspec.structs.replace(QUESTION, profile=msgspec.structs.replace(RAG, prompt_version="query-3"))
    await desk.ask(newer)
    desk.cached_answerer = desk.answerer("another embedder")
    await desk.ask(newer)
    assert desk.writer.asked == 3


async def test_changed_documents_invalidate_cached_answers(desk: Desk) -> None:
    await desk.ask()
    desk.seen["ada"] = desk.writer.seen = "v2"
    await desk.ask()
    assert desk.writer.asked == 2


async def test_callers_with_equal_permissions_share_cached_answers(desk: Desk) -> None:
    desk.seen["eve"] = "less"
    await desk.ask(user="ada")
    await desk.ask(user="bob")
    assert desk.writer.asked == 1
    desk.writer.seen = "less"
    answer, _ = await desk.ask(user="eve")
    assert desk.writer.asked == 2
    assert not answer.cached


async def test_an_answer_from_other_documents_than_the_key_is_not_cached(desk: Desk) -> None:
    desk.writer.seen = "v2"  # they changed between the look and the search
    await desk.ask()
    assert desk.cache.kept == {}


@pytest.mark.parametrize(
    "change",
    [
        {"refused": True},
        {"finish_reason": "length"},
        {"finish_reason": None},
        {"finish_reason": "content_filter"},
        {"replies": (SourceReply(path="collections", status=Status.ERROR, seen="v1"),)},
        {"text": ""},
    ],
)
async def test_partial_failed_and_refused_answers_are_not_cached(desk: Desk, change: dict[str, object]) -> None:
    desk.writer.change = lambda answer: msgspec.structs.replace(answer, **change)
    await desk.ask()
    assert desk.cache.kept == {}


@pytest.mark.parametrize(
    "question",
    [
        msgspec.structs.replace(QUESTION, sources=()),
        msgspec.structs.replace(QUESTION, sources=(Endpoint(slug="far", url="http://far.example"),)),
        msgspec.structs.replace(QUESTION, sources=(SHELF, Endpoint(slug="far", url="http://far.example"))),
        msgspec.structs.replace(QUESTION, model=msgspec.structs.replace(MODEL, operator=False)),
        msgspec.structs.replace(QUESTION, until=Until.MERGE),
        msgspec.structs.replace(QUESTION, text="half a pair: \ud800"),
    ],
)
async def test_answers_with_remote_sources_are_not_cached(desk: Desk, question: Question) -> None:
    await desk.ask(question)
    await desk.ask(question)
    assert desk.writer.asked == 2
    assert desk.cache.kept == {}


@pytest.mark.parametrize("profile", [CHAT, DEFENDED_CHAT])
async def test_chat_answers_are_not_cached(desk: Desk, profile: Profile) -> None:
    """The tokens of the caller are removed from them."""
    chat = msgspec.structs.replace(QUESTION, profile=profile)
    await desk.ask(chat)
    await desk.ask(chat)
    assert desk.writer.asked == 2
    assert desk.cache.kept == {}


async def test_a_fresh_answer_replaces_the_cached_one(desk: Desk) -> None:
    await desk.ask()
    answer, _ = await desk.ask(msgspec.structs.replace(QUESTION, fresh=True))
    assert (desk.writer.asked, answer.cached) == (2, False)
    assert len(desk.cache.kept) == 1


@pytest.mark.parametrize("rubbish", [b"", b"\xc1", b"\x80", b"\x93" * 2000])
async def test_an_undecodable_cached_answer_is_a_miss(desk: Desk, rubbish: bytes) -> None:
    await desk.ask()
    desk.cache.kept = dict.fromkeys(desk.cache.kept, rubbish)
    answer, _ = await desk.ask()
    assert (desk.writer.asked, answer.cached) == (2, False)


@pytest.mark.parametrize(
    "change",
    [
        {"refused": True},
        {"text": ""},
        {"replies": ()},
        {"ground": Ground.ALL_FAILED},
        {"replies": (SourceReply(path="collections", status=Status.SUCCESS, seen="somebody else's"),)},
        {"citations": (Citation(start=0, end=2, source="shop", passage=99, passage_start=0, passage_end=1),)},
        {"citations": (Citation(start=0, end=999, source="shop", passage=0, passage_start=0, passage_end=1),)},
        {"citations": (Citation(start=0, end=2, source="shop", passage=0, passage_start=-1, passage_end=999),)},
        {"sentences": (CheckedSentence(start=0, end=999, verdict="supported"),)},
        {"sentences": (CheckedSentence(start=3, end=2, verdict="supported"),)},
        {"sentences": (CheckedSentence(start=0, end=8, verdict="partly", doubted=((-1, 2),)),)},
        {"sentences": (CheckedSentence(start=0, end=8, verdict="supported", quotes=(quoting(1, 0, 5),)),)},
        {"sentences": (CheckedSentence(start=0, end=8, verdict="supported", quotes=(quoting(0, 0, 999),)),)},
    ],
)
async def test_an_invalid_cached_answer_is_a_miss(desk: Desk, change: dict[str, object]) -> None:
    await desk.ask()
    ((key, value),) = desk.cache.kept.items()
    poisoned = msgspec.structs.replace(msgspec.json.decode(value, type=Answer), **change)
    desk.cache.kept[key] = msgspec.json.encode(poisoned)
    answer, _ = await desk.ask()
    assert (desk.writer.asked, answer.cached) == (2, False)


async def test_a_question_does_not_join_an_answer_that_has_little_time(desk: Desk) -> None:
    desk.writer.go_on.clear()
    first = asyncio.create_task(desk.ask(deadline_s=10))
    await settle()
    desk.clock.advance(6)
    second = asyncio.create_task(desk.ask(deadline_s=16))
    await settle()
    assert desk.writer.asked == 2
    third = asyncio.create_task(desk.ask(deadline_s=17))
    await settle()
    assert desk.writer.asked == 2
    desk.writer.go_on.set()
    await asyncio.gather(first, second, third)


async def test_a_shared_answer_ends_at_the_deadline_of_its_first_caller(desk: Desk) -> None:
    desk.writer.go_on.clear()
    first = asyncio.create_task(desk.ask(deadline_s=0.05))
    second = asyncio.create_task(desk.ask(deadline_s=0.08))
    with pytest.raises(DeadlineExceeded):
        await second
    with pytest.raises(DeadlineExceeded):
        await first
    assert (desk.writer.asked, desk.writer.ended) == (1, 1)


async def test_equal_concurrent_questions_share_one_answer(desk: Desk) -> None:
    desk.writer.go_on.clear()
    asking = [asyncio.create_task(desk.ask()) for _ in range(10)]
    await settle()
    late = asyncio.create_task(desk.ask(user="bob"))
    await settle()
    desk.writer.go_on.set()
    answers = [await task for task in (*asking, late)]
    assert desk.writer.asked == 1
    assert [answer.cached for answer, _ in answers] == [False, *[True] * 10]
    for answer, events in answers:
        assert fold([*events, unfold(answer)[-1]]) == answer
    assert desk.telemetry.signals.count(AnswerShared()) == 10


async def test_a_shared_answer_continues_without_its_first_caller(desk: Desk) -> None:
    desk.writer.go_on.clear()
    first, second = (asyncio.create_task(desk.ask()) for _ in range(2))
    await settle()
    first.cancel()
    await settle()
    assert desk.writer.ended == 0
    desk.writer.go_on.set()
    answer, _ = await second
    assert (answer.text, desk.writer.asked) == ("30 days.", 1)
    assert len(desk.cache.kept) == 1


async def test_a_shared_answer_is_cancelled_with_its_last_caller(desk: Desk) -> None:
    desk.writer.go_on.clear()
    asking = [asyncio.create_task(desk.ask()) for _ in range(3)]
    await settle()
    for task in asking:
        task.cancel()
    await settle()
    assert desk.writer.ended == 1
    assert desk.cache.kept == {}


async def test_a_question_does_not_join_a_cancelled_answer(desk: Desk) -> None:
    desk.writer.go_on.clear()
    first = asyncio.create_task(desk.ask())
    await settle()
    first.cancel()
    second = asyncio.create_task(desk.ask())
    await asyncio.sleep(0)
    desk.writer.go_on.set()
    answer, _ = await second
    assert answer.text == "30 days."


async def test_a_failure_of_a_shared_answer_reaches_every_caller(desk: Desk) -> None:
    def fail(_: Answer) -> Answer:
        raise GenerationFailed("the model broke")

    desk.writer.change = fail
    desk.writer.go_on.clear()
    asking = [asyncio.create_task(desk.ask()) for _ in range(3)]
    await settle()
    desk.writer.go_on.set()
    ended = await asyncio.gather(*asking, return_exceptions=True)
    assert [str(error) for error in ended] == ["the model broke"] * 3
    assert len({id(error) for error in ended}) == 3
    assert desk.cache.kept == {}
    desk.writer.change = lambda answer: answer
    assert (await desk.ask())[0].text == "30 days."


async def test_a_shared_answer_is_not_given_to_callers_with_other_permissions(desk: Desk) -> None:
    """A document was shared with the first one only, after both were found to have the same rights."""
    desk.writer.go_on.clear()
    desk.writer.seen = "v1 and a secret"
    first = asyncio.create_task(desk.ask(user="ada"))
    second = asyncio.create_task(desk.ask(user="bob"))
    await settle()
    assert desk.writer.asked == 2
    desk.writer.go_on.set()
    await asyncio.gather(first, second)
